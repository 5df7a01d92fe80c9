"""Room that Ray has set aside for servers: bundles of placement groups, one for each server."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util import placement_group, remove_placement_group

from elasticps.errors import Timeout

_NODE = "ray.io/node-id"  # the label that Ray gives every node


@dataclass(frozen=True)
class Bundle:
    """Room for one server. single: the group has no other bundle, and goes with it."""

    group: Any
    index: int
    single: bool = False


class Bundles:
    """The bundles of a cluster. cpus: of each; share_nodes: whether several may be on one node.

    A placement group never changes: the first servers have one together, spread over nodes, each later one has its own,
    away from nodes in use. A bundle of the first group that is given back goes to the next server.
    """

    def __init__(self, cpus: float, share_nodes: bool) -> None:
        self.cpus = cpus
        self._share_nodes = share_nodes
        self._groups: list[Any] = []
        self._free: list[Bundle] = []

    def begin(self, count: int, timeout_s: float) -> None:
        """Sets room aside for the first servers. Timeout if Ray has none in time."""
        group = placement_group(
            [{"CPU": self.cpus}] * count, strategy="SPREAD" if self._share_nodes else "STRICT_SPREAD"
        )
        self._groups.append(group)
        self._free = [Bundle(group, index) for index in range(count)]
        self._wait([group], count, timeout_s)

    def reserve(self, count: int, nodes_used: Collection[str], timeout_s: float) -> None:
        """Sets room aside for `count` more servers, on other nodes than these unless nodes are shared. Timeout if Ray
        has none in time: then nothing stays set aside."""
        missing = count - len(self._free)
        if missing <= 0:
            return
        elsewhere = {} if self._share_nodes else {_NODE: f"!in({','.join(sorted(nodes_used))})"}
        new: list[Any] = []
        try:
            for _ in range(missing):
                bundle = [{"CPU": self.cpus}]
                new.append(placement_group(bundle, bundle_label_selector=[elsewhere] if elsewhere else None))
                self._wait(new[-1:], missing, timeout_s)
                if elsewhere:
                    found = ray.util.placement_group_table(new[-1])["bundles_to_node_id"]
                    nodes_used = {*nodes_used, *found.values()}
                    elsewhere = {_NODE: f"!in({','.join(sorted(nodes_used))})"}
        except BaseException:
            for group in new:
                remove_placement_group(group)
            raise
        self._groups += new
        self._free += [Bundle(group, 0, single=True) for group in new]

    def take(self) -> Bundle:
        """A bundle that was set aside."""
        return self._free.pop(0)

    def give_back(self, bundle: Bundle) -> None:
        """Takes back the bundle of a server that has ended."""
        if bundle.single:
            self._groups.remove(bundle.group)
            remove_placement_group(bundle.group)
        else:
            self._free.append(bundle)

    def remove(self) -> None:
        """Gives all room back to Ray."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()
        self._free.clear()

    def _wait(self, groups: list[Any], count: int, timeout_s: float) -> None:
        try:
            ray.get([group.ready() for group in groups], timeout=timeout_s)
        except GetTimeoutError:
            alive = [node for node in ray.nodes() if node["Alive"]]
            apart = "" if self._share_nodes else ", each on a node of its own (share_nodes=True lets them share one)"
            raise Timeout(
                f"Ray found no room for {count} servers with {self.cpus:g} CPUs{apart} within {timeout_s:g} s: there "
                f"are {len(alive)} nodes, with {sum(node['Resources'].get('CPU', 0) for node in alive):g} CPUs in all"
            ) from None
