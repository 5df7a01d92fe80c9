"""Who is who: identities in certificates, TLS around every connection, and an authority of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.core.url import ClusterUrl, parse
from elasticps.errors import ConfigError

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials


def credentials_of(url: str | ClusterUrl) -> Credentials | None:
    """What the URL of a cluster names for a process to prove who it is; None where it names no certificate: nothing is
    encrypted then. ConfigError for files or a URL that cannot be used."""
    try:
        found = url if isinstance(url, ClusterUrl) else parse(url)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if found.tls is None or not found.tls.cert:
        return None
    from elasticps.security.credentials import Credentials  # a tenth of a second, which most do without

    return Credentials(found.tls, found.cluster)
