"""Who is who: identities in certificates, TLS around every connection, and an authority of one's own."""

from __future__ import annotations
