"""The same faults on a cluster that runs in Kubernetes: its pods, by the official client.

Names are those of elasticps, which are those of the pods: server `elasticps-server-0` is the pod of that name. The
workers of the audit load are processes beside the runner, which is a pod of its own when it runs as the chaos Job.

    kill       delete the pod with a grace period of 0; its StatefulSet starts it again
    terminate  delete the pod with its own grace period: SIGTERM, and the server drains
    pause      SIGSTOP to the process in the pod, by exec; SIGCONT afterwards
    grow       one replica more in the StatefulSet; `shrink` takes the last one away
    cordon     the node of a pod takes no new ones for a while, so that what is killed there comes back elsewhere; one
               that somebody else has cordoned stays as it is
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import tenacity

from chaos.live.network import Loopback
from chaos.live.plan import ClusterPlan
from chaos.live.stage import Processes
from elasticps.errors import ConfigError, Error

# A process that is number 1 of its pod gets no SIGSTOP from inside; so whatever our process is, it must not be that.
_SIGNAL = (
    "for p in /proc/[0-9]*; do n=${p#/proc/}; "
    'if [ "$n" != 1 ] && [ "$n" != $$ ] && tr "\\0" " " < $p/cmdline 2>/dev/null | grep -q "elasticps.* %s"; '
    "then kill -%s $n && exit 0; "
    "fi; done; echo 'no process of elasticps but number 1 of the pod, which cannot be stopped from inside' >&2; exit 1"
)
_ROLES = {"server": "server_labels", "coordinator": "coordinator_labels", "etcd": "etcd_labels"}
LOOK_S = 1.0  # between two looks at what Kubernetes has started again
PATIENCE_S = 20.0  # with an API that does not answer: an upgrade of it is not to end a run of hours
REACH_S = 5.0  # until the API server accepts a connection
ANSWER_S = 10.0  # until it has answered; it may accept, and be too ill for more
_LATER = {0, 429, 500, 502, 503, 504}  # answers that say nothing of what was asked; 0: of a stream that did not open
_END = 3  # the channel of a stream on which Kubernetes tells how a command has ended
_GONE = {404, 409}  # of a pod that was to be deleted: there is none of the name, or it has another uid
_COMMANDS = {"server": "server", "coordinator": "coordinator", "etcd": ""}


class Api(Protocol):
    """The part of the API of Kubernetes that is used. Pods are objects of its client."""

    def pods(self, labels: str) -> list[Any]: ...
    def delete_pod(self, name: str, uid: str, grace_s: int | None) -> None: ...
    def execute(self, name: str, command: list[str]) -> str: ...
    def cordoned(self, node: str) -> bool: ...
    def cordon(self, node: str, on: bool) -> None: ...
    def replicas(self, stateful_set: str) -> int: ...
    def scale(self, stateful_set: str, replicas: int) -> None: ...


class _Unanswered(Error):
    """The API gave no answer; a later request may get one."""


class NotSignalled(Error):
    """A process in a pod was not signalled."""


class OfficialApi:
    """`Api` by the package `kubernetes`, with the pod's own service account or the user's context. Whatever is asked
    may be asked twice, and is asked again for a while if there is no answer; Error if none comes."""

    def __init__(self, namespace: str) -> None:
        try:
            from kubernetes import client, config, stream
            from urllib3.exceptions import HTTPError  # the client lets it through
        except ImportError:
            raise ConfigError(
                "chaos on Kubernetes needs its official client: pip install 'elasticps[chaos,kubernetes]'"
            ) from None
        try:
            config.load_incluster_config()
        except config.ConfigException:
            try:
                config.load_kube_config()
            except config.ConfigException as error:
                raise ConfigError(f"no Kubernetes cluster is configured here: {error}") from None
        settings = client.Configuration.get_default_copy()
        settings.retries = False  # `_call` asks again, in the time that is left; urllib3 would wait four times as long
        here = client.ApiClient(settings)
        self._namespace = namespace
        self._core, self._apps = client.CoreV1Api(here), client.AppsV1Api(here)
        # A client of its own for each: all that one is asked while it opens a stream is taken for the stream's.
        self._streams: Callable[[], Any] = lambda: client.CoreV1Api(client.ApiClient(settings))
        self._stream = stream.stream
        self._failure, self._unreachable = client.ApiException, (HTTPError, OSError)
        self._answers = self._failure, *self._unreachable

    def pods(self, labels: str) -> list[Any]:
        call = self._core.list_namespaced_pod
        return list(self._call(f"list pods of {labels}", call, self._namespace, label_selector=labels).items)

    def delete_pod(self, name: str, uid: str, grace_s: int | None) -> None:
        """Deletes the pod with this uid, and none that has come in its place. Does nothing if the pod is gone."""
        options: dict[str, Any] = {"preconditions": {"uid": uid}}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        call = self._core.delete_namespaced_pod
        self._call(f"delete pod {name}", call, name, self._namespace, body=options, fine=_GONE)

    def execute(self, name: str, command: list[str]) -> str:
        return str(self._call(f"execute in pod {name}", self._executed, name, command))

    def cordoned(self, node: str) -> bool:
        return bool(self._call(f"read node {node}", self._core.read_node, node).spec.unschedulable)

    def cordon(self, node: str, on: bool) -> None:
        self._call(f"change node {node}", self._core.patch_node, node, {"spec": {"unschedulable": on}})

    def replicas(self, stateful_set: str) -> int:
        call = self._apps.read_namespaced_stateful_set_scale
        return int(self._call(f"read the scale of {stateful_set}", call, stateful_set, self._namespace).spec.replicas)

    def scale(self, stateful_set: str, replicas: int) -> None:
        body, call = {"spec": {"replicas": replicas}}, self._apps.patch_namespaced_stateful_set_scale
        self._call(f"scale {stateful_set} to {replicas}", call, stateful_set, self._namespace, body)

    def _executed(self, name: str, command: list[str], _request_timeout: tuple[float, float]) -> str:
        """Returns what the command wrote, or why it failed if it wrote nothing. Runs in a thread, because no option of
        the client bounds how long a stream may take to open. Raises TimeoutError for a stream that does not end in
        time, without its output, which would look complete."""
        reported, failed = list[str](), list[Exception]()

        def run() -> None:
            try:
                opened = self._stream(
                    self._streams().connect_get_namespaced_pod_exec, name, self._namespace, command=command,
                    stdout=True, stderr=True, stdin=False, tty=False, _preload_content=False,
                )  # fmt: skip
                opened.run_forever(timeout=_request_timeout[1])
                if not opened.is_open():
                    end = json.loads(opened.read_channel(_END) or "{}")  # a pod without a shell says so only there
                    why = f"{end.get('status')}: {end.get('message')}" if end.get("status") == "Failure" else ""
                    reported.append(opened.read_all() or why)
                opened.sock.shutdown()  # the socket, which the client leaves open
            except self._answers as error:  # raised again in the caller's thread
                failed.append(error)
            # Any: the client documents no error for a stream that breaks, and lets those of its websocket library, of
            # ssl and of a half-read channel through.
            except Exception as error:
                failed.append(OSError(f"{type(error).__name__}: {error}"))

        thread = threading.Thread(target=run, name=f"exec-{name}", daemon=True)
        thread.start()
        thread.join(sum(_request_timeout))
        if failed:
            raise failed[0]
        if not reported:
            raise TimeoutError(f"no end within {sum(_request_timeout):g} s")
        return reported[0]

    def _call(
        self, what: str, call: Callable[..., Any], *arguments: Any, fine: Container[int] = (), **options: Any
    ) -> Any:
        """Makes a call, again while the API gives no answer. what: the call in words, for errors; fine: statuses of
        refusals that mean that nothing was left to do."""
        again = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_Unanswered),
            stop=tenacity.stop_after_delay(PATIENCE_S),
            wait=tenacity.wait_exponential(multiplier=0.2, max=3.0),
            reraise=True,
        )
        return again(self._ask, what, call, arguments, fine, options)

    def _ask(
        self, what: str, call: Callable[..., Any], arguments: Any, fine: Container[int], options: Mapping[str, Any]
    ) -> Any:
        try:
            return call(*arguments, **options, _request_timeout=(REACH_S, ANSWER_S))
        except self._failure as error:
            if error.status in fine:
                return None
            kind = _Unanswered if error.status in _LATER else Error
            raise kind(f"Kubernetes refused to {what}: {error.status} {error.reason}") from None
        except self._unreachable as error:
            raise _Unanswered(f"Kubernetes was asked to {what}, and did not answer: {error}") from None


class KubernetesStage(Processes):
    """A stage whose servers, coordinators and etcd members are pods, and whose workers are processes here."""

    def __init__(self, plan: ClusterPlan, api: Api | None = None) -> None:
        self._api = OfficialApi(plan.namespace) if api is None else api
        super().__init__(Loopback())
        self.plan = plan
        self.url = self.follower_url = self.own_url = self.reader_url = plan.url
        self._paused: set[str] = set()
        self._cordoned: Counter[str] = Counter()  # by how many faults; nodes that others have cordoned are not in it
        self._restarts: dict[str, int] = {}  # by uid, of pods that have been ready: how often they were started again
        self._looked = 0.0
        self._uids: dict[str, str] = {}  # of pods that are to end: a pod of the same name with another uid is new

    def start_all(self) -> None:
        """The cluster is there already; Error if it is not."""
        if not self.names("server"):
            where = f"namespace {self.plan.namespace} with {self.plan.server_labels}"
            raise Error(f"no server runs in {where}: deploy the cluster first, or name its labels in the plan")

    def names(self, role: str, *, paused: bool = True) -> list[str]:
        if role not in _ROLES:
            return super().names(role, paused=paused)
        names = (pod.metadata.name for pod in self._pods(role) if _runs(pod) and not self._ending(pod))
        return sorted(name for name in names if paused or name not in self._paused)

    def running(self, name: str) -> bool:
        return super().running(name) if name in self._jobs else self._find(name) is not None

    def ready(self, name: str) -> bool:
        if name in self._jobs:
            return super().ready(name)
        pod = self._find(name)
        return pod is not None and _ready(pod)

    def ended(self) -> list[tuple[str, str]]:
        """Returns what `Processes.ended` returns, and the pods that had been ready and were restarted by Kubernetes."""
        return super().ended() + self._restarted()

    def start(self, name: str) -> None:
        """A pod is started again by whatever owns it; a worker here."""
        if name in self._jobs:
            super().start(name)

    def kill(self, name: str) -> None:
        if name in self._jobs:
            super().kill(name)
        else:
            self._delete(name, 0)

    def terminate(self, name: str) -> None:
        if name in self._jobs:
            super().terminate(name)
        else:
            self._delete(name, None)

    def pause(self, name: str) -> None:
        self._paused.add(name)  # first, since what gets no answer may have been done
        try:
            self._signal_pod(name, "STOP", super().pause)
        except NotSignalled:
            self._paused.discard(name)
            raise

    def resume(self, name: str) -> None:
        self._signal_pod(name, "CONT", super().resume)
        self._paused.discard(name)

    def grow(self) -> str:
        count = self._api.replicas(self.plan.server_set)
        self._api.scale(self.plan.server_set, count + 1)
        return f"{self.plan.server_set}-{count}"

    def shrink(self, name: str) -> str:
        """Takes the StatefulSet's last server away, whichever was asked for; its name."""
        count = self._api.replicas(self.plan.server_set)
        if count <= 1:
            raise Error(f"{self.plan.server_set} has {count} replicas: none can be taken away")
        self._api.scale(self.plan.server_set, count - 1)
        return f"{self.plan.server_set}-{count - 1}"

    def cordon(self, name: str) -> str:
        """The node of this pod takes no new ones until `uncordon`, or longer if it was found so; the node's name."""
        pod = self._find(name)
        if pod is None:
            raise Error(f"no pod is called {name}")
        node = str(pod.spec.node_name)
        if node in self._cordoned or not self._api.cordoned(node):
            self._cordoned[node] += 1  # first, since what gets no answer may have been done
            self._api.cordon(node, True)
        return node

    def uncordon(self, node: str) -> None:
        """The end of one `cordon` of that node: it takes new pods again once all are over, if it was found so."""
        if node not in self._cordoned:
            return
        if self._cordoned[node] == 1:
            self._api.cordon(node, False)
            del self._cordoned[node]
        else:
            self._cordoned[node] -= 1

    def close(self, logs_to: Path | None = None) -> list[str]:
        """Ends the workers, and undoes what was done to pods and nodes. It tries all of it, and returns what could not
        be undone together with what is left here."""
        left = []
        for node in sorted(self._cordoned):
            try:
                self._api.cordon(node, False)
            except Error as error:
                left.append(f"node {node} may take no new pods still, `kubectl uncordon {node}` ends that: {error}")
        for name in sorted(self._paused):
            try:
                if self.running(name):
                    self.resume(name)
            except Error as error:
                left.append(f"pod {name} may be frozen still, `kubectl delete pod {name}` ends that: {error}")
        return left + super().close(logs_to)

    def _restarted(self) -> list[tuple[str, str]]:
        if time.monotonic() - self._looked < LOOK_S:
            return []
        self._looked, reported = time.monotonic(), list[tuple[str, str]]()
        with suppress(Error):  # the next look sees what this one has missed
            for role in _ROLES:
                reported += [(pod.metadata.name, _words(role, pod)) for pod in self._pods(role) if self._came_back(pod)]
        return reported

    def _came_back(self, pod: Any) -> bool:
        """Whether Kubernetes has started it again since this was asked before, though it had been ready, and was not
        frozen: then its probe may end it."""
        uid, count = pod.metadata.uid, _restarts(pod)
        before = self._restarts.get(uid)
        if before is not None or _ready(pod):
            self._restarts[uid] = count
        return before is not None and count > before and pod.metadata.name not in self._paused

    def _signal_pod(self, name: str, signal: str, here: Callable[[str], None]) -> None:
        if name in self._jobs:
            here(name)
            return
        role = next((role for role in _ROLES if name in self.names(role)), "")
        if not role:
            raise NotSignalled(f"no pod is called {name}")
        script = _SIGNAL % (_COMMANDS[role], signal)
        if answer := self._api.execute(name, ["sh", "-c", script]).strip():
            raise NotSignalled(f"SIG{signal} did not reach {name}: {answer}")

    def _delete(self, name: str, grace_s: int | None) -> None:
        if (pod := self._find(name)) is not None:
            self._uids[name] = pod.metadata.uid
            self._api.delete_pod(name, pod.metadata.uid, grace_s)

    def _ending(self, pod: Any) -> bool:
        return bool(pod.metadata.deletion_timestamp) or self._uids.get(pod.metadata.name) == pod.metadata.uid

    def _pods(self, role: str) -> list[Any]:
        return self._api.pods(getattr(self.plan, _ROLES[role]))

    def _find(self, name: str) -> Any:
        """The pod of that name that is not on its way out, None if there is none."""
        with suppress(StopIteration):
            return next(
                pod for role in _ROLES for pod in self._pods(role)
                if pod.metadata.name == name and _runs(pod) and not self._ending(pod)
            )  # fmt: skip
        return None


def _ready(pod: Any) -> bool:
    return any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions or ())


def _restarts(pod: Any) -> int:
    return sum(container.restart_count for container in pod.status.container_statuses or ())


def _words(role: str, pod: Any) -> str:
    ends = [each.last_state.terminated for each in pod.status.container_statuses or () if each.last_state]
    why = "; ".join(f"{end.reason}, exit code {end.exit_code}" for end in ends if end is not None)
    return f"{role} {pod.metadata.name} was started again by Kubernetes: {why or 'it does not say why'}"


def _runs(pod: Any) -> bool:
    return str(pod.status.phase) == "Running"
