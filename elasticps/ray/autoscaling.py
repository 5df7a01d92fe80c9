"""Scales a cluster on Ray by itself: looks at it, has `Autoscaler` decide, and has the change made."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from coordinator.core.autoscale import AutoscalePolicy, Autoscaler, ScaleDecision
from coordinator.core.errors import CoordinationError
from elasticps.errors import Error
from elasticps.local.operator_client import OperatorClient

log = logging.getLogger(__name__)

_DECISIONS_MAX = 1000


class AutoscaleThread:
    """Scales the cluster at `url` in a thread. count: how many servers were asked for; scale: makes so many, blocks.
    ValueError for a policy with fewer servers than replicas."""

    def __init__(
        self, url: str, policy: AutoscalePolicy, replicas: int, count: Callable[[], int], scale: Callable[[int], None]
    ) -> None:
        self.decisions: deque[ScaleDecision] = deque(maxlen=_DECISIONS_MAX)
        self._url = url
        self._scaler = Autoscaler(policy, replicas)
        self._count = count
        self._scale = scale
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._servers = 0  # that were asked for, at the last look

    def start(self, every_s: float) -> None:
        """Begins to look every so many seconds."""
        self._thread = threading.Thread(target=self._run, args=(every_s,), name="elasticps-autoscale", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends; a change that was begun comes to its end first."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            try:
                self._look()
            except (Error, CoordinationError) as error:  # it may pass: the next look tells
                self._note(ScaleDecision(self._servers, f"cannot scale: {error}"))
            except Exception as error:
                log.exception("cannot scale; the next look is in %g s", every_s)
                self._note(ScaleDecision(self._servers, f"cannot scale: {type(error).__name__}: {error}"))

    def _look(self) -> None:
        self._servers = servers = self._count()
        with OperatorClient(self._url) as operator:
            found = self._scaler.step(
                servers, operator.view, operator.members(), operator.statuses(), time.monotonic()
            )  # fmt: skip
        self._note(found)
        if found.servers != servers:
            log.info("%d servers instead of %d: %s", found.servers, servers, found.reason)
            self._scale(found.servers)

    def _note(self, found: ScaleDecision) -> None:
        if not self.decisions or self.decisions[-1] != found:
            self.decisions.append(found)
