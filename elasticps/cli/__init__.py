"""The `elasticps` command. Every option is an argument of some function elsewhere: no decision is taken here."""

from __future__ import annotations

from elasticps.cli.app import main

__all__ = ["main"]
