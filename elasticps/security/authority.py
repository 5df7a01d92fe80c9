"""A certificate authority in a folder, for your own machines and for clusters on one machine.

    ca.crt, ca.key                          the authority
    server-s0.crt, server-s0.key, …         whom it has signed for
    etcd.crt, etcd.key                      etcd's own, by host name and address
    etcd-root.crt, etcd-root.key            who sets up etcd's rights
    etcd.url                                of an etcd that learns at once of the applications that are signed for

Keys are readable by their owner alone.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator.core.errors import CoordinationError
from coordinator.core.names import DEFAULT_APP
from coordinator.core.url import TlsFiles, parse
from coordinator.etcd_rights import ROOT
from elasticps.errors import ConfigError
from elasticps.security.identity import ANY, OF_APPLICATIONS, Identity, Role, host_name
from elasticps.security.rights import protect
from elasticps.system import background, temporary

CA_DAYS = 3650.0
LEAF_DAYS = 90.0
_ETCD_URL = "etcd.url"
_ADMIT_S = 10.0  # for etcd to answer
_EARLIER = datetime.timedelta(minutes=5)  # clocks differ

_Key: TypeAlias = ec.EllipticCurvePrivateKey


class Authority:
    """Opens the authority in `folder`. Raises ConfigError if there is none, or it cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._certificate = x509.load_pem_x509_certificate(self.ca.read_bytes())
            key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder} holds no authority that can be used: {error}") from None
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key

    @classmethod
    def create(cls, folder: Path, *, days: float = CA_DAYS) -> Authority:
        """Makes a new authority. Raises ConfigError if there is one: all that it has signed would become invalid."""
        if (folder / "ca.key").exists():
            raise ConfigError(f"{folder} has an authority already; remove it, and what it has signed, for a new one")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("elasticps authority")
        usage = _usage(key_cert_sign=True, crl_sign=True)
        certificate = (
            _builder(name, name, key, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        _write(folder, "ca", key, certificate)
        return cls(folder)

    @property
    def ca(self) -> Path:
        """The authority's own certificate, which processes trust."""
        return self.folder / "ca.crt"

    def check(self, identities: Iterable[Identity]) -> None:
        """ConfigError where to issue to one of them would replace the files of another, be it another one of them."""
        whose: dict[Path, str] = {}
        for identity in identities:
            file = self.folder / f"{_stem(identity)}.crt"
            there = whose.setdefault(file, _holder(file) or str(identity))
            if there != str(identity):
                raise ConfigError(
                    f"{file} is {there}'s, and {identity} would get a file of the same name: move the former, and its "
                    "key, to another folder first"
                )

    def issue(self, identity: Identity, *, days: float = LEAF_DAYS) -> TlsFiles:
        """A new key and certificate; replaces those that were made before, be it for another identity: see `check`."""
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(str(identity))]
        serves = identity.role in (Role.SERVER, Role.READER)
        if serves:
            names.append(x509.DNSName(host_name(identity.cluster, identity.role)))
        files = self._sign(_stem(identity), identity.common_name, names, days, serves=serves)
        if identity.role in OF_APPLICATIONS and identity.app not in (DEFAULT_APP, ANY):
            self._admit(identity)
        return files

    def follow(self, url: str) -> None:
        """Notes the etcd, by its cluster's URL without certificates, that is to learn at once of each application whose
        workers or readers get a certificate; without one `elasticps cluster protect` says it."""
        (self.folder / _ETCD_URL).write_text(url)

    def applications(self) -> set[str]:
        """The applications whose workers or readers have certificates here."""
        found = set()
        for role in OF_APPLICATIONS:
            for file in self.folder.glob(f"{role}-*.crt"):
                with suppress(ValueError):  # somebody else's
                    found.add(Identity.parse(_holder(file)).app)
        return found - {ANY}

    def _admit(self, identity: Identity) -> None:
        """Lets the etcd that follows this authority know the application of a worker or reader."""
        try:
            url = parse((self.folder / _ETCD_URL).read_text())
        except FileNotFoundError:
            return
        if url.cluster != identity.cluster:
            return
        try:
            root = replace(url, tls=self.issue_root())
            background.run(protect(str(root), _ADMIT_S, self.applications()))
        except CoordinationError as error:
            raise ConfigError(
                f"the certificate of {identity} is made, but etcd does not know application {identity.app!r}: {error}. "
                f"When it answers: `elasticps cluster protect --app {identity.app}`"
            ) from None

    def issue_etcd(self, hosts: Iterable[str], *, days: float = LEAF_DAYS) -> TlsFiles:
        """The same for an etcd that is found under `hosts`, names or addresses."""
        return self._sign("etcd", "etcd", [_host(host) for host in hosts], days, serves=True)

    def issue_root(self, *, days: float = LEAF_DAYS) -> TlsFiles:
        """The same for who sets up etcd's rights, and does nothing else: no process of a cluster takes it."""
        return self._sign("etcd-root", ROOT, [x509.DNSName("etcd-root")], days, serves=False)

    def _sign(self, stem: str, cn: str, names: Sequence[x509.GeneralName], days: float, *, serves: bool) -> TlsFiles:
        key = ec.generate_private_key(ec.SECP256R1())
        # etcd is a client too: of itself.
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if serves else [])]
        issuer = self._certificate
        certificate = (
            _builder(_name(cn), issuer.subject, key, days, issuer.not_valid_after_utc)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        _write(self.folder, stem, key, certificate)
        return TlsFiles(*(str(self.folder / name) for name in ("ca.crt", f"{stem}.crt", f"{stem}.key")))


def _stem(identity: Identity) -> str:
    """The common part of the names of an identity's files."""
    parts = (identity.role, identity.app, identity.name)
    return "-".join(part.replace("*", "any") for part in parts if part)


def _holder(file: Path) -> str:
    """The identity in a certificate file; "" if there is none."""
    try:
        found = x509.load_pem_x509_certificate(file.read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"{file} is no certificate that elasticps has made: {error}; remove it first") from None
    return ", ".join(names.get_values_for_type(x509.UniformResourceIdentifier)) or "nobody"


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: _Key, days: float, latest: datetime.datetime | None = None
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - _EARLIER)
        .not_valid_after(end if latest is None else min(end, latest))
    )


def _usage(**allowed: bool) -> x509.KeyUsage:
    names = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**dict.fromkeys(names, False) | allowed)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(folder: Path, stem: str, key: _Key, certificate: x509.Certificate) -> None:
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    # The key comes last: a folder with ca.key has an authority, and whoever died before that can make it again.
    for suffix, content in (("crt", certificate.public_bytes(pem)), ("key", private)):
        temporary.replace_file(folder / f"{stem}.{suffix}", content, 0o600)
