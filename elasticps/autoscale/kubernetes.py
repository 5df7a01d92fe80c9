"""The number of replicas of a StatefulSet, read and changed by plain HTTPS with the pod's own account."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticps.errors import ClusterUnreachable, ConfigError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_ANSWER_S = 10.0
_MOST_BYTES = 1 << 20
_CONFLICT = 409


@dataclass(frozen=True)
class Replicas:
    """How many replicas were asked for. version: of what was read, so that nobody else's change is overwritten."""

    count: int
    version: str


class KubernetesScale:
    """The scale of a StatefulSet of this pod's namespace.

    account: the folder of the pod's token, which is read again for each call: it is renewed every hour. ConfigError
    where this process is no pod, or the pod has no token.
    """

    def __init__(self, stateful_set: str, account: Path = ACCOUNT, environment: Mapping[str, str] = os.environ) -> None:
        try:
            self._host, self._port = environment["KUBERNETES_SERVICE_HOST"], int(environment["KUBERNETES_SERVICE_PORT"])
            namespace = (account / "namespace").read_text(encoding="ascii").strip()
            self._tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
            (account / "token").read_text(encoding="ascii")
        except (KeyError, ValueError, OSError) as error:
            raise ConfigError(
                f"--autoscale asks Kubernetes as a pod does, and this is none that may: {error} is missing. Apply "
                "deploy/kubernetes/autoscaler, which gives coordinators a token and the right to scale their servers"
            ) from None
        self._account = account
        self._name = f"StatefulSet {namespace}/{stateful_set}"
        self._path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{stateful_set}/scale"

    def __str__(self) -> str:
        return self._name

    def read(self) -> Replicas:
        """How many replicas were asked for. Blocks. ClusterUnreachable if Kubernetes does not say."""
        status, answer = self._ask("GET", None)
        try:
            if status == http.HTTPStatus.OK:
                return Replicas(int(answer["spec"].get("replicas", 0)), str(answer["metadata"]["resourceVersion"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            pass
        raise self._failed("read", status, answer)

    def write(self, count: int, seen: Replicas) -> bool:
        """Asks for so many replicas; False if somebody has changed the StatefulSet since it was `seen`. Blocks.
        ClusterUnreachable if Kubernetes does not do it."""
        patch = {"metadata": {"resourceVersion": seen.version}, "spec": {"replicas": count}}
        status, answer = self._ask("PATCH", patch)
        if status not in (http.HTTPStatus.OK, _CONFLICT):
            raise self._failed("change", status, answer)
        return status != _CONFLICT

    def _ask(self, method: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        connection = http.client.HTTPSConnection(self._host, self._port, timeout=_ANSWER_S, context=self._tls)
        try:
            token = (self._account / "token").read_text(encoding="ascii").strip()
            headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
            if body is not None:
                headers["Content-Type"] = "application/merge-patch+json"
            connection.request(method, self._path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read(_MOST_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise ClusterUnreachable(f"Kubernetes at {self._host}:{self._port} does not answer: {error}") from None
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text[:200].decode(errors="replace")

    def _failed(self, verb: str, status: int, answer: Any) -> ClusterUnreachable:
        why = str(answer.get("message", answer) if isinstance(answer, dict) else answer)
        return ClusterUnreachable(
            f"Kubernetes does not let this pod {verb} the scale of {self._name}: {status} {why:.300}"
        )
