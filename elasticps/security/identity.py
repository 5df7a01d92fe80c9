"""Identities and what each may do. Pure.

An identity is the one URI in a certificate's subject alternative names:

    spiffe://elasticps/<cluster>/server/<name>
    spiffe://elasticps/<cluster>/coordinator/<name>
    spiffe://elasticps/<cluster>/worker/<app>/<name>
    spiffe://elasticps/<cluster>/reader/<app>/<name>
    spiffe://elasticps/<cluster>/operator/<name>

`*` in place of a name, or of an application, stands for each of them: for one certificate that several processes share,
such as the pods of a Deployment.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from coordinator.core.names import DEFAULT_APP, check_name

ANY = "*"
_PREFIX = "spiffe://elasticps/"
_CN_MAX = 64  # characters of a common name (RFC 5280, ub-common-name)
_DIGITS = 16  # of a digest in one


class Role(enum.StrEnum):
    """The role of a process in a cluster."""

    SERVER = "server"
    COORDINATOR = "coordinator"
    WORKER = "worker"
    READER = "reader"
    OPERATOR = "operator"


OF_APPLICATIONS = (Role.WORKER, Role.READER)
"""Roles that belong to an application."""


class Act(enum.Enum):
    """Kinds of requests to a server."""

    LOOK = enum.auto()  # status, health
    CHANGE = enum.auto()  # whatever writes, be it an audit's mark in the logs
    CUT = enum.auto()  # take a checkpoint, or bring one back
    TRAIN = enum.auto()
    READ = enum.auto()  # follow rows
    REPLICATE = enum.auto()
    LEAD = enum.auto()


_MAY = {
    Role.SERVER: {Act.LOOK, Act.REPLICATE},
    Role.COORDINATOR: {Act.LOOK, Act.LEAD, Act.CUT},
    Role.WORKER: {Act.LOOK, Act.TRAIN, Act.READ},
    Role.READER: {Act.LOOK, Act.READ},
    Role.OPERATOR: {Act.LOOK, Act.CHANGE, Act.CUT},
}


class NotAuthorised(Exception):
    """The peer is not the one required; the text names both."""


@dataclass(frozen=True)
class Identity:
    """The identity of a certificate's holder; `app` for workers and readers only. ValueError for impossible names."""

    cluster: str
    role: Role
    name: str
    app: str = ""

    def __post_init__(self) -> None:
        check_name("cluster", self.cluster)
        for what, name in (
            (self.role, self.name),
            *([("application", self.app)] if self.role in OF_APPLICATIONS else []),
        ):
            if name != ANY:
                check_name(what, name)
        if self.app and self.role not in OF_APPLICATIONS:
            raise ValueError(f"a {self.role} belongs to no application")

    def __str__(self) -> str:
        return _uri(self.cluster, self.role, self.name, self.app)

    @classmethod
    def parse(cls, uri: str) -> Identity:
        """The inverse of `str`. Raises ValueError with what is wrong."""
        cluster, _, rest = uri.removeprefix(_PREFIX).partition("/")
        role, _, names = rest.partition("/")
        app, _, name = names.rpartition("/")
        if not uri.startswith(_PREFIX) or role not in set(Role) or bool(app) != (role in OF_APPLICATIONS):
            raise ValueError(f"{uri!r} is no identity of elasticps, such as {_PREFIX}train/server/s0")
        return cls(cluster, Role(role), name, app)

    @property
    def common_name(self) -> str:
        """Of a certificate: etcd takes it for the user. Role and cluster, and an application if it is not the default
        one, whatever the name is; where that is too long, its beginning and a digest, as clusters whose names
        begin alike are not to be one user."""
        app = f":{self.app}" if self.app not in ("", DEFAULT_APP) else ""
        whole = f"{self.role}.{self.cluster}{app}"
        if len(whole) <= _CN_MAX:
            return whole
        digest = hashlib.sha256(whole.encode()).hexdigest()[:_DIGITS]
        return f"{whole[: _CN_MAX - 1 - _DIGITS]}-{digest}"

    def may(self, act: Act) -> bool:
        """Whether the role may make such requests."""
        return act in _MAY[self.role]

    def covers(self, role: Role, name: str, app: str = "") -> bool:
        """Whether the holder is that server, coordinator, worker, reader or operator."""
        ours = role not in OF_APPLICATIONS or self.app in (ANY, app)
        return self.role is role and self.name in (ANY, name) and ours

    def require(self, cluster: str, role: Role, name: str, app: str = "") -> None:
        """NotAuthorised unless the holder is that one, whatever it calls itself. Certificates name a cluster, and not
        which one of that name: the hello does."""
        cluster = cluster.partition("@")[0]
        if self.cluster != cluster or not self.covers(role, name, app):
            raise NotAuthorised(f"this is {self}, not {_uri(cluster, role, name, app)}")


Expect: TypeAlias = Callable[[Identity], None]
"""Raises NotAuthorised unless the peer is the expected one."""


def _uri(cluster: str, role: Role, name: str, app: str) -> str:
    return f"{_PREFIX}{cluster}/{role}/{f'{app}/' if role in OF_APPLICATIONS else ''}{name}"


def host_name(cluster: str, role: Role = Role.SERVER) -> str:
    """The DNS name of every server, or every reader, of a cluster: gRPC looks for one in a certificate, never for a
    URI."""
    return f"{role}.{cluster}.elasticps"


def identity_among(uris: Sequence[str]) -> Identity:
    """The identity in a certificate with these URIs. Raises NotAuthorised unless there is exactly one."""
    if len(uris) != 1:
        raise NotAuthorised(f"its certificate has {len(uris)} URIs instead of one identity")
    try:
        return Identity.parse(uris[0])
    except ValueError as error:
        raise NotAuthorised(f"its certificate: {error}") from None
