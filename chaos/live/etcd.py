"""The etcd of a chaos run: where its members listen, and the faults of etcd beyond signals."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from chaos.live.network import ProcessNetwork
from coordinator.core.url import TlsFiles
from elasticps.local.etcd import ask, etcd_binary, free_ports, healthy, tls_options

_ALARM_OF = 1  # the member that the alarm is said to come from; any number will do, the same for its end


@dataclass(frozen=True)
class Member:
    """Where one member listens."""

    name: str
    host: str
    client: int
    peer: int
    public: str  # "host:port" of its client port as others dial it


class Etcd:
    """The members of etcd. tls: their certificate, None for none; to be set before the first command."""

    def __init__(self, count: int, network: ProcessNetwork, folder: Path) -> None:
        self.members = [_place(f"e{i}", network) for i in range(count)]
        self.tls: TlsFiles | None = None
        self._folder = folder

    @property
    def hosts(self) -> list[str]:
        """Returns all host names under which members are dialled."""
        return sorted({host for each in self.members for host in (each.host, each.public.rpartition(":")[0])})

    def url(self, cluster: str, *, public: bool) -> str:
        """Returns the cluster's URL; with `public` the one by which the processes of the network reach etcd."""
        endpoints = (each.public if public else f"{each.host}:{each.client}" for each in self.members)
        return f"etcd://{','.join(endpoints)}/{cluster}"

    def command(self, member: Member) -> list[str]:
        scheme = "http" if self.tls is None else "https"
        client, peer = f"{scheme}://{member.host}:{member.client}", f"http://{member.host}:{member.peer}"
        return [
            *(str(etcd_binary()), "--name", member.name, "--data-dir", str(self._data(member.name))),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", ",".join(f"{each.name}=http://{each.host}:{each.peer}" for each in self.members)),
            *([] if self.tls is None else tls_options(self.tls)),
        ]

    def healthy(self, member: Member) -> bool:
        """Whether a member serves."""
        return healthy(member.host, member.client, self.tls)

    def forget(self) -> None:
        """Deletes the data of all members, none of which may run."""
        for member in self.members:
            shutil.rmtree(self._data(member.name))

    def set_full(self, full: bool) -> bool:
        """Raises, or ends, the alarm with which etcd refuses every write once its quota of space is used up; False if
        no member answers. (With a file system that is full it ends, as if it were killed.)

        A frozen member does what it was asked when it goes on, though nobody waits for it any more. So it is not told
        to raise an alarm, and whoever was told may have raised it, answer or not.
        """
        for member in self.members:
            if not full and self._alarm(member, "DEACTIVATE"):
                return True
            if full and self._alarm(member, "GET"):
                self._alarm(member, "ACTIVATE")
                return True
        return False

    def _alarm(self, member: Member, action: str) -> bool:
        """Changes the alarm at a member; returns whether it answers."""
        body = json.dumps({"action": action, "alarm": "NOSPACE", "memberID": _ALARM_OF})
        return ask(member.host, member.client, self.tls, "/v3/maintenance/alarm", body)[0] == 200

    def _data(self, name: str) -> Path:
        return self._folder / f"{name}.etcd"


def _place(name: str, network: ProcessNetwork) -> Member:
    host = network.join(name)
    client, peer = free_ports(2)
    return Member(name, host, client, peer, network.publish(name, host, client))
