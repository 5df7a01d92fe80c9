"""What a server does when its copy may differ from the others."""

from __future__ import annotations

import os
import sys

from coordinator import fields

log = fields.logger(__name__)

EXIT_FATAL = 70


def end(who: object, error: Exception) -> None:
    """Ends the process at once because of an error: a replica never goes on differing."""
    log.critical("ends: it can no longer vouch for its copy", member=who, exc_info=error)
    sys.stderr.flush()
    os._exit(EXIT_FATAL)
