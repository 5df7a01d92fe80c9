"""The certificates of a cluster on this machine: an authority in its folder, thrown away with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from coordinator.core.url import TlsFiles, parse
from elasticps.security.authority import Authority
from elasticps.security.identity import ANY, OF_APPLICATIONS, Identity, Role
from elasticps.security.rights import protect
from elasticps.system import background

_FOLDER = "tls"


def begin(folder: Path, hosts: Iterable[str] = ("127.0.0.1", "localhost")) -> TlsFiles:
    """Makes the authority of the cluster in `folder`; returns the files of an etcd that is found under `hosts`."""
    return Authority.create(folder / _FOLDER).issue_etcd(hosts)


def adopt(source: Path, folder: Path) -> None:
    """Copies the authority in `source` into the folder of a cluster, which is thrown away later. ConfigError if there
    is none."""
    Authority(source)  # says what is wrong with it
    (folder / _FOLDER).mkdir(mode=0o700)
    for name in ("ca.crt", "ca.key"):
        (folder / _FOLDER / name).touch(mode=0o600)
        (folder / _FOLDER / name).write_bytes((source / name).read_bytes())


def etcd_files(folder: Path, hosts: Iterable[str]) -> TlsFiles:
    """Makes the files of an etcd that is found under `hosts`, by the authority of the cluster in `folder`."""
    return Authority(folder / _FOLDER).issue_etcd(hosts)


def protect_etcd(url: str, folder: Path, timeout_s: float) -> None:
    """Has a new etcd ask who may write what, and know each application that gets a certificate, now or later."""
    authority = Authority(folder / _FOLDER)
    found = replace(parse(url), tls=authority.issue_root())
    background.run(protect(str(found), timeout_s, authority.applications()))
    authority.follow(str(replace(found, tls=None)))


def worker_url(url: str, folder: Path) -> str:
    """The cluster's URL for a worker of any name, given one for somebody else: with the certificate that workers have
    already, since one made anew would replace its files while they are read."""
    found = parse(url)
    files = [folder / _FOLDER / name for name in ("ca.crt", "worker-any-any.crt", "worker-any-any.key")]
    if found.tls is None or not all(file.exists() for file in files):
        return url_of(url, folder, Role.WORKER)
    return str(replace(found, tls=TlsFiles(*map(str, files))))


def url_of(url: str, folder: Path, role: Role, name: str = ANY) -> str:
    """The cluster's URL for one of its processes; as it is where the cluster has no TLS. A worker's is for every name
    and application."""
    found = parse(url)
    if not (folder / _FOLDER).exists():
        return url
    identity = Identity(found.cluster, role, name, ANY if role in OF_APPLICATIONS else "")
    return str(replace(found, tls=Authority(folder / _FOLDER).issue(identity)))
