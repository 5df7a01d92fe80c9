"""A cluster whose etcd, coordinators and servers are Ray actors."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from coordinator.core.autoscale import AutoscalePolicy, ScaleDecision
from coordinator.core.names import check_name
from coordinator.core.url import parse
from coordinator.core.view import ClusterConfig
from elasticps.errors import ConfigError, Error, Timeout
from elasticps.local import operator_client, scaling
from elasticps.local.operator_client import OperatorClient
from elasticps.ray.autoscaling import AutoscaleThread
from elasticps.ray.host import HostedProcess, ProcessHost
from elasticps.ray.placement import Bundle, Bundles
from elasticps.system import background
from elasticps.system.memory import parse_size

COORDINATORS_MAX = 5
_ANSWER_S = 10.0  # for an actor that runs to answer
_STOP_S = 20.0  # for processes to end
_LOOK_S = 0.2
_SCALE_S = 120.0  # for autoscaling to wait for room, and for moves: they go on, and the next look waits for them


@dataclass(frozen=True)
class RayServer:
    """A server of a cluster on Ray.

    state  "running"; "restarting": Ray starts it again, maybe elsewhere; "leaves": Ray drains its node
    node   the id of its node, as Ray has it, "" while it restarts
    pid, worker_pid  of the server, and of the worker process that is its actor; 0 while it restarts
    """

    name: str
    state: str
    node: str = ""
    pid: int = 0
    worker_pid: int = 0
    address: str = ""
    incarnation: int = 0


class Cluster:
    """etcd, coordinators and servers as Ray actors: a process that dies is started again, with its node elsewhere.

        with elasticps.ray.Cluster(servers=3) as cluster, eps.connect(cluster.url, worker="w0") as ps:
            ...

    servers       how many, s0, s1, …, each in a bundle of a placement group; its zone is its node
    replicas      copies of each range
    coordinators  how many, c0, c1, …: one leads, the others stand by
    ranges        slices of the hash space, a power of two
    url           of a cluster on an etcd of yours, with {name} for each process's name; "": an etcd on this node
    cpus          that Ray sets aside for each server; an event loop uses one
    share_nodes   let several servers run on one node; otherwise each needs a node of its own
    insecure      let others reach the processes over the network without TLS, where nodes are several machines
    memory_limit  what each server may use, such as "4GiB"; "": what its control group or the machine has
    checkpoint_url  where checkpoints go that workers ask for; every node must reach it
    plugins       modules that every server imports
    timeout_s     for starting

    No two copies of a range are on one node while there are others. An etcd on the driver's node ends with it; one of
    yours outlives nodes. {name} in its URL is for paths of certificates that every node has.

    It ends with `close()`, the `with` block, or the driver, however that ends. Raises ConfigError for arguments that
    cannot work, Error when a process does not start, Timeout when Ray has no room for all.
    """

    def __init__(
        self,
        name: str = "ray",
        *,
        servers: int = 3,
        replicas: int = 2,
        coordinators: int = 1,
        ranges: int = 256,
        url: str = "",
        cpus: float = 1.0,
        share_nodes: bool = False,
        insecure: bool = False,
        memory_limit: str = "",
        checkpoint_url: str = "",
        plugins: Iterable[str] = (),
        log_level: str = "info",
        timeout_s: float = 600.0,
    ) -> None:
        if not 1 <= servers <= scaling.SERVERS_MAX:
            raise ConfigError(f"a cluster on Ray has 1 to {scaling.SERVERS_MAX} servers, not {servers}")
        if not 1 <= coordinators <= COORDINATORS_MAX:
            raise ConfigError(f"a cluster on Ray has 1 to {COORDINATORS_MAX} coordinators, not {coordinators}")
        try:
            given = parse(url.replace("{name}", "name")) if url else None
            self.name = check_name("cluster", name) if given is None else given.cluster
            self._config = ClusterConfig(ranges=ranges, replicas=replicas, min_servers=servers)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._template = url  # with {name}; "" until our etcd runs, if it is ours
        self._network = insecure or (given is not None and given.tls is not None)  # processes listen for other machines
        self._timeout_s = timeout_s  # for starting
        logs = ("--log-level", log_level)
        unprotected = ("--insecure",) if insecure else ()
        memory = ("--memory-limit", str(parse_size(memory_limit))) if memory_limit else ()
        plugged = (part for module in plugins for part in ("--plugin", module))
        checkpoints = ("--checkpoint-url", checkpoint_url) if checkpoint_url else ()
        self._options = {"server": (*logs, *memory, *plugged, *unprotected), "coordinator": (*logs, *checkpoints)}
        self._folder = f"{self.name}-{secrets.token_hex(4)}"  # for logs, on every node
        self._lock = threading.RLock()  # one change at a time
        self._others: dict[str, Any] = {}  # actors of etcd and coordinators, by name
        self._servers: dict[str, _Server] = {}  # by name
        self._bundles: Bundles | None = None  # None: not running
        self._autoscale: AutoscaleThread | None = None  # while it scales by itself
        self._start(servers, coordinators, Bundles(cpus, share_nodes))

    def __repr__(self) -> str:
        if self._bundles is None:
            return f"<elasticps.ray.Cluster {self.name!r}: not running>"
        return f"<elasticps.ray.Cluster {self.name!r}: servers {', '.join(self._servers) or 'none'}; {self.url}>"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The cluster's URL, for `eps.connect`; {name} of a given one stands in it still."""
        if self._bundles is None:
            raise ConfigError(f"the cluster {self.name!r} on Ray is not running")
        return self._template

    @property
    def servers(self) -> tuple[RayServer, ...]:
        """Lists the servers, running or not, by number; without those that were drained."""
        with self._lock:
            present = self._present()
            infos = [server.actor.info.remote() for server in present]
            ray.wait(infos, num_returns=len(infos), timeout=_ANSWER_S)  # for all together
            return tuple(server.describe(info) for server, info in zip(present, infos, strict=True))

    def log(self, name: str) -> str:
        """The end of what the process called `name` ("s0", "c0", "etcd") has logged on the node where it runs."""
        with self._lock:
            actors = {**self._others, **{each.name: each.actor for each in self._servers.values()}}
        if name not in actors:
            raise ConfigError(f"the cluster {self.name!r} has no process called {name!r}{scaling.existing(actors)}")
        return str(_ask(actors[name], "log", f"the actor of {name}"))

    @property
    def decisions(self) -> tuple[ScaleDecision, ...]:
        """What autoscaling has decided, the newest last: each time that its number or its reason changed."""
        return () if self._autoscale is None else tuple(self._autoscale.decisions)

    # --- changes ----------------------------------------------------------------------------------------------------

    def scale(self, servers: int, *, timeout_s: float = 600.0) -> scaling.ScaleResult:
        """Starts servers, or drains those with the highest numbers, until so many serve; returns when nothing moves any
        more. Timeout if that takes longer, or Ray has no room; what was begun goes on. ConfigError for more servers of
        a cluster that listens on loopback, once Ray has several machines."""
        deadline = time.monotonic() + timeout_s
        with self._lock, OperatorClient(self._url_of("operator")) as operator:
            names = [server.name for server in self._present()]
            planned = scaling.change(names, operator.draining(), servers, operator.leaving())
            if planned.start:
                self._check_network()
            self._bundles_there().reserve(len(planned.start), timeout_s)
            left_s = max(0.0, round(deadline - time.monotonic(), 1))

            def spawn(name: str, options: list[str]) -> _Server:
                return self._spawn(name)  # its actor knows its zone

            return scaling.scale(self._url_of("operator"), planned, spawn, self._wait_ended, timeout_s=left_s)

    def drain(self, name: str, *, timeout_s: float = 120.0) -> None:
        """Has everything that a server holds moved to others; returns when it has ended. Timeout if that takes longer;
        the drain goes on."""
        with self._lock, OperatorClient(self._url_of("operator")) as operator:
            operator.wait_drained(operator.request_drain(name), timeout_s)
            self._wait_ended(name)

    def autoscale(self, min_servers: int, max_servers: int, *, every_s: float = 10.0, **policy: float) -> None:
        """Scales by memory and load from now on, in a thread, until `close()` or the next call. policy: fields of
        `AutoscalePolicy`. ConfigError for numbers that do not go together."""
        try:
            chosen = AutoscalePolicy(min_servers, max_servers, **policy)
            loop = AutoscaleThread(self._url_of("operator"), chosen, self._config.replicas, self._count, self._scale_by)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"no policy to scale by: {error}") from None
        self._stop_autoscaling()
        self._autoscale = loop
        loop.start(every_s)

    def close(self) -> None:
        """Ends all processes and actors, and gives their room back. May be called again."""
        self._stop_autoscaling()
        with self._lock:
            if self._bundles is None:
                return
            coordinators = [actor for name, actor in self._others.items() if name != "etcd"]
            # Coordinators first: nobody need plan for servers that are ending. etcd last: all others ask it.
            in_order = (coordinators, [s.actor for s in self._servers.values()], [self._others.get("etcd")])
            try:
                if ray.is_initialized():  # otherwise all has ended, and calls would start another Ray
                    for some in in_order:
                        _end([actor for actor in some if actor is not None])
                    self._bundles.remove()
            finally:
                self._servers.clear()
                self._others.clear()
                self._bundles = None

    # --- plumbing ---------------------------------------------------------------------------------------------------

    def _start(self, servers: int, coordinators: int, bundles: Bundles) -> None:
        if not ray.is_initialized():
            ray.init()
        self._check_network()
        deadline = time.monotonic() + self._timeout_s
        self._bundles = bundles
        try:
            bundles.reserve(servers, self._timeout_s)
            if not self._template:
                here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
                self._others["etcd"] = etcd = self._host("etcd", "etcd", num_cpus=0, scheduling_strategy=here)
                endpoint = _ask(etcd, "info", "etcd", self._timeout_s)["endpoint"]
                self._template = f"etcd://{endpoint}/{self.name}"
            made = operator_client.create_cluster(self._url_of("operator"), self._config, deadline)
            background.run(made)
            for name in (f"c{i}" for i in range(coordinators)):
                self._others[name] = self._host(name, "coordinator", num_cpus=0, scheduling_strategy="SPREAD")
            names = [f"s{i}" for i in range(servers)]
            for server in [self._spawn(name) for name in names]:
                server.wait_ready(deadline)
            for name, actor in self._others.items():
                _ask(actor, "info", name, deadline - time.monotonic())
            ready = operator_client.wait_for_servers(self._url_of("operator"), names, self._config.replicas, deadline)
            background.run(ready)
        except BaseException:
            self.close()
            raise

    def _check_network(self) -> None:
        machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        if len(machines) > 1 and not self._network:
            raise ConfigError(
                f"Ray's nodes are {len(machines)} machines, whose servers find each other over the network: give `url` "
                "with certificates that every node has, or say insecure=True where a network of your own protects them "
                "(a cluster that was begun without, on one machine, listens on loopback and cannot grow: begin another)"
            )

    def _url_of(self, name: str) -> str:
        return self.url.replace("{name}", name)

    def _host(self, name: str, role: str, **where: Any) -> Any:
        """Starts an actor."""
        spec = HostedProcess(
            name, role, self._folder, "" if role == "etcd" else self._url_of(name),
            "" if self._network else _machine(ray.get_runtime_context().get_node_id()),
            self._options.get(role, ()), self._timeout_s,
        )  # fmt: skip
        return ray.remote(ProcessHost).options(max_restarts=-1, **where).remote(spec)

    def _spawn(self, name: str) -> _Server:
        bundle = self._bundles_there().take()
        there = PlacementGroupSchedulingStrategy(bundle.group, placement_group_bundle_index=bundle.index)
        actor = self._host(name, "server", num_cpus=self._bundles_there().cpus, scheduling_strategy=there)
        self._servers[name] = server = _Server(name, actor, bundle)
        return server

    def _bundles_there(self) -> Bundles:
        if self._bundles is None:
            raise ConfigError(f"the cluster {self.name!r} on Ray is not running")
        return self._bundles

    def _present(self) -> list[_Server]:
        """The servers by number, without those whose actors have ended for good."""
        for name in [server.name for server in self._servers.values() if not server.running]:
            self._bundles_there().give_back(self._servers.pop(name).bundle)
        return sorted(self._servers.values(), key=lambda server: scaling.by_number(server.name))

    def _wait_ended(self, name: str) -> None:
        deadline = time.monotonic() + _STOP_S
        while any(server.name == name for server in self._present()):
            if time.monotonic() > deadline:
                raise Error(f"server {name} has drained, and its actor still lives {_STOP_S:g} s later")
            time.sleep(_LOOK_S)

    def _count(self) -> int:
        """Servers that were asked for."""
        with self._lock:
            return len(self._present())

    def _scale_by(self, servers: int) -> None:
        self.scale(servers, timeout_s=_SCALE_S)

    def _stop_autoscaling(self) -> None:
        if self._autoscale is not None:
            self._autoscale.stop()


class _Server:
    """A server's actor, and where it is."""

    def __init__(self, name: str, actor: Any, bundle: Bundle) -> None:
        self.name = name
        self.actor = actor
        self.bundle = bundle

    def describe(self, info: Any) -> RayServer:
        """The server by its actor's answer, a reference; an answer that is not there yet is not waited for."""
        try:
            found = ray.get(info, timeout=0)
        except (RayActorError, GetTimeoutError):
            return RayServer(self.name, "restarting")
        ready = found["ready"]
        return RayServer(
            self.name, "leaves" if found["leaves"] else "running", found["node"], found["pid"], found["worker_pid"],
            ready.get("address", ""), ready.get("incarnation", 0),
        )  # fmt: skip

    @property
    def running(self) -> bool:
        """Whether it runs, or Ray is about to start it again."""
        return not _has_ended(self.actor)

    def wait_ready(self, deadline: float) -> None:
        _ask(self.actor, "info", f"server {self.name}", deadline - time.monotonic())

    def how_it_ended(self) -> str:
        return "has ended, and Ray does not start it again"

    def last_words(self) -> str:
        return "`ray logs` and its log on the node say why"


def _ask(actor: Any, method: str, whose: str, timeout_s: float = _ANSWER_S) -> Any:
    """Calls an actor, if need be after Ray has started it again. Error if it has ended for good, as when it could not
    start its process; Timeout after so many seconds."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            return ray.get(getattr(actor, method).remote(), timeout=max(0.1, until - time.monotonic()))
        except GetTimeoutError:
            break
        except RayActorError as error:
            if _has_ended(actor):
                raise Error(f"{whose} cannot run as a Ray actor: {_last_line(str(error))}") from None
            if time.monotonic() > until:
                break
            time.sleep(_LOOK_S)
    raise Timeout(f"{whose} did not answer within {timeout_s:.0f} s; `ray status` shows what Ray has room for")


def _has_ended(actor: Any) -> bool:
    """Whether an actor has ended for good.

    A call to an actor that is about to be started again may fail as one to an actor that has ended, so Ray's control
    store is asked. The public call for it needs Ray's dashboard.
    """
    found = ray._private.state.actors(actor_id=actor._actor_id.hex())
    return bool(found) and found["State"] == "DEAD"


def _machine(node: str) -> str:
    """The address of a node's machine."""
    return next(str(each["NodeManagerAddress"]) for each in ray.nodes() if each["NodeID"] == node)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1].removeprefix("RuntimeError: ")


def _end(actors: list[Any]) -> None:
    """Ends the processes of actors, then the actors; returns when it was done or has taken too long."""
    stopping = []
    for actor in actors:
        with suppress(Exception):  # of a Ray that has ended
            stopping.append(actor.stop.remote())
    with suppress(Exception):  # it dies with its actor in any case
        ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_S)
    for actor in actors:
        with suppress(Exception):  # it has died
            ray.kill(actor)
