"""Who is at the other end of a connection with TLS."""

from __future__ import annotations

import ssl
from typing import Any

from elasticps.security.identity import Identity, identity_among


def identity_of(secured: ssl.SSLSocket) -> Identity:
    """Who has proved to be at the other end. Raises NotAuthorised."""
    names: Any = (secured.getpeercert() or {}).get("subjectAltName", ())
    return identity_among([value for kind, value in names if kind == "URI"])
