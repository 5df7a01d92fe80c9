"""`python -m elasticps` is the `elasticps` command."""

from __future__ import annotations

from elasticps.cli import main

if __name__ == "__main__":
    main()
