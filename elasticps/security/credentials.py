"""The credentials of a process: its certificate, its key and the authority that it trusts, as files.

The files are looked at again from time to time, since whoever renews certificates replaces them: new connections use
the new ones, and `generation` tells those which were made with older ones. Files that cannot be used are not: what was
read before stays, the log says so, and they are tried again, since it may be this process that can open no more files.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from coordinator.core.url import TlsFiles
from elasticps.errors import ConfigError
from elasticps.security import openssl
from elasticps.security.identity import Expect, Identity, NotAuthorised, Role, identity_among

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between looks at the files


@dataclass(frozen=True)
class Pems:
    """The content of the files, for gRPC."""

    ca: bytes
    cert: bytes
    key: bytes


@dataclass(frozen=True)
class _Loaded:
    identity: Identity
    until_s: float  # Unix time at which the certificate ends
    server: ssl.SSLContext
    client: ssl.SSLContext
    native: openssl.TlsContext | None  # None where only Python's `ssl` can be had
    pems: Pems


class Credentials:
    """Of this process, in one cluster. Any thread may use them. ConfigError if the files cannot be used.

    generation: counts the times that the files were replaced
    """

    def __init__(self, files: TlsFiles, cluster: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.generation = 0
        self.cluster = cluster
        self._files = files
        self._clock = clock
        self._looked_s = clock()
        self._seen = self._failed = _signature(files)  # what is loaded, and what could not be
        self._loaded = _load(files, cluster)

    @property
    def identity(self) -> Identity:
        """The identity that the certificate proves."""
        return self._loaded.identity

    def require(self, role: Role, name: str, app: str = "") -> None:
        """Raises ConfigError unless the certificate is that process's."""
        try:
            self.identity.require(self.cluster, role, name, app)
        except NotAuthorised as error:
            if role is Role.WORKER and self.identity.role is Role.READER:
                raise ConfigError(
                    f"the certificate {self._files.cert} has the role reader, which may only read: {error}. Use "
                    "elasticps.reader(url) to read with it; to train, name a worker's certificate in the URL "
                    f"(`elasticps certificates AUTHORITY '{self.cluster}/worker/{app}/*'` makes one)"
                ) from None
            raise ConfigError(f"the certificate {self._files.cert} is somebody else's: {error}") from None

    def expect(self, name: str) -> Expect:
        """The check of whoever is dialled as `name`: it has to be the server of that name."""
        return lambda peer: peer.require(self.cluster, Role.SERVER, name)

    def refresh(self) -> None:
        """Reads the files again if they were replaced; looks at most once in LOOK_S."""
        now = self._clock()
        if now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        seen = _signature(self._files)
        if seen == self._seen:
            return
        try:
            loaded = _load(self._files, self.cluster)
            if str(loaded.identity) != str(self.identity):
                raise ConfigError(f"the new certificate is {loaded.identity}'s, not {self.identity}'s")
        except ConfigError as error:
            if seen != self._failed:  # said once
                log.warning("certificates are not renewed, the old ones stay: %s", error)
            self._failed = seen
        else:
            self._loaded, self._seen = loaded, seen
            self.generation += 1
            log.info("certificates were renewed; they end in %.1f hours", (loaded.until_s - time.time()) / 3600)

    def server_context(self) -> ssl.SSLContext:
        """The `ssl` context for accepted connections."""
        self.refresh()
        return self._loaded.server

    def client_context(self) -> ssl.SSLContext:
        """The `ssl` context for dialled connections. The caller has to check the peer's identity."""
        self.refresh()
        return self._loaded.client

    def native_context(self) -> openssl.TlsContext | None:
        """OpenSSL's context for either; None where only Python's `ssl` can be used."""
        self.refresh()
        return self._loaded.native

    def pems(self) -> Pems:
        """The files, as gRPC takes them."""
        self.refresh()
        return self._loaded.pems

    @property
    def until_s(self) -> float:
        """When the certificate ends, in Unix time."""
        return self._loaded.until_s


def _signature(files: TlsFiles) -> tuple[tuple[int, int, int], ...]:
    """A value that changes when a file was written or replaced."""
    found = []
    for path in (files.ca, files.cert, files.key):
        try:
            status = os.stat(path)
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)


def _load(files: TlsFiles, cluster: str) -> _Loaded:
    if not files.ca:
        raise ConfigError("TLS needs the authority that others' certificates are signed by: name its file with ?ca=")
    pems = Pems(_read("ca", files.ca), _read("cert", files.cert), _read("key", files.key))
    try:
        certificate = x509.load_pem_x509_certificate(pems.cert)
        server, client = _context(files, ssl.PROTOCOL_TLS_SERVER), _context(files, ssl.PROTOCOL_TLS_CLIENT)
        native = None if openssl.LIBRARY is None else openssl.TlsContext(files)
    except (ValueError, OSError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"the certificate {files.cert}, its key or its authority cannot be used: {error}") from None
    # What gRPC would negotiate an older TLS with, and slow to sign with.
    if not isinstance(certificate.public_key(), ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey):
        raise ConfigError(f"the key of {files.cert} is neither an elliptic curve's nor Ed25519")
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        identity = identity_among(names.get_values_for_type(x509.UniformResourceIdentifier))
    except (x509.ExtensionNotFound, NotAuthorised):
        raise ConfigError(f"{files.cert} names no identity; `elasticps certificates` makes one that does") from None
    if identity.cluster != cluster:
        raise ConfigError(f"{files.cert} is of cluster {identity.cluster!r}, not {cluster!r}")
    until_s = certificate.not_valid_after_utc.timestamp()
    if until_s <= time.time():
        raise ConfigError(f"{files.cert} ended on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    return _Loaded(identity, until_s, server, client, native, pems)


def _context(files: TlsFiles, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # whom an address belongs to is in the certificate's URI
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(files.ca)
    context.load_cert_chain(files.cert, files.key)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a session that is taken up again shows no certificate
    return context


def _read(what: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the {what} file {path}: {error.strerror}") from None
