"""Room that Ray has set aside for servers: bundles of placement groups, one for each server."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util import placement_group, placement_group_table, remove_placement_group

from elasticps.errors import Timeout

_NODE = "ray.io/node-id"  # the label that Ray gives every node


@dataclass(frozen=True)
class Bundle:
    """Room for one server."""

    group: Any
    index: int


class Bundles:
    """The bundles of a cluster. cpus: of each; share_nodes: whether several may be on one node.

    A placement group never changes: servers that start together have one together, spread over nodes, away from nodes
    where room was set aside before, in use or not. A bundle that is given back goes to the next server; a group goes
    back to Ray when all its bundles are free. Where a node dies, Ray keeps bundles of one group apart, and no others.
    """

    def __init__(self, cpus: float, share_nodes: bool) -> None:
        self.cpus = cpus
        self._share_nodes = share_nodes
        self._groups: list[Any] = []
        self._free: list[Bundle] = []

    def reserve(self, count: int, timeout_s: float) -> None:
        """Sets room aside for `count` servers that are to start, on nodes where none was set aside unless nodes are
        shared. Timeout if Ray has none in time: then nothing more stays set aside."""
        missing = count - len(self._free)
        if missing <= 0:
            return
        used: set[str] = set() if self._share_nodes else self._nodes()
        group = placement_group(
            [{"CPU": self.cpus}] * missing,
            strategy="SPREAD" if self._share_nodes else "STRICT_SPREAD",
            bundle_label_selector=[{_NODE: f"!in({','.join(sorted(used))})"}] * missing if used else None,
        )
        try:
            self._wait(group, missing, timeout_s)
        except BaseException:
            remove_placement_group(group)
            raise
        self._groups.append(group)
        self._free += [Bundle(group, index) for index in range(missing)]

    def take(self) -> Bundle:
        """A bundle that was set aside."""
        return self._free.pop(0)

    def give_back(self, bundle: Bundle) -> None:
        """Takes back the bundle of a server that has ended."""
        self._free.append(bundle)
        rest = [each for each in self._free if each.group != bundle.group]
        if len(self._free) - len(rest) == bundle.group.bundle_count:
            self._free = rest
            self._groups.remove(bundle.group)
            remove_placement_group(bundle.group)

    def remove(self) -> None:
        """Gives all room back to Ray."""
        for group in self._groups:
            with suppress(Exception):  # Ray has ended; groups go with the driver in any case
                remove_placement_group(group)
        self._groups.clear()
        self._free.clear()

    def _nodes(self) -> set[str]:
        """Ids of the nodes where room is set aside, used or not, whether or not its server answers."""
        tables = [placement_group_table(group).get("bundles_to_node_id", {}) for group in self._groups]
        return {node for table in tables for node in table.values() if node}  # "": not placed

    def _wait(self, group: Any, count: int, timeout_s: float) -> None:
        try:
            ray.get(group.ready(), timeout=timeout_s)
        except GetTimeoutError:
            alive = [node for node in ray.nodes() if node["Alive"]]
            apart = "" if self._share_nodes else ", each on a node of its own (share_nodes=True lets them share one)"
            raise Timeout(
                f"Ray found no room for {count} servers with {self.cpus:g} CPUs{apart} within {timeout_s:g} s: there "
                f"are {len(alive)} nodes, with {sum(node['Resources'].get('CPU', 0) for node in alive):g} CPUs in all"
            ) from None
