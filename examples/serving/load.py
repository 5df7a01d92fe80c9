"""Asks the service for rankings as fast as it answers, and notes how old each answer was."""

from __future__ import annotations

import http.client
import json
import random
import time
from dataclasses import dataclass
from threading import Event

ITEMS, BASKET = 10_000, 5


@dataclass(frozen=True)
class Served:
    """An answer: when it came, how long it took, how old its rows were, and up to which step they went."""

    t: float
    latency_s: float
    age_s: float
    step: int


def ask(port: int, began: float, stop: Event, seed: int = 0) -> tuple[list[Served], int]:
    """Asks until `stop`: the answers, and how many requests failed."""
    chosen, found, failed = random.Random(seed), list[Served](), 0
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    while not stop.is_set():
        basket = ",".join(str(chosen.randrange(ITEMS)) for _ in range(BASKET))
        sent = time.monotonic()
        try:
            connection.request("GET", f"/rank?basket={basket}&n=3")
            answer = connection.getresponse()
            document = json.loads(answer.read())
            if answer.status != 200:
                failed += 1
                continue
            now = time.monotonic()
            found.append(Served(now - began, now - sent, document["age_s"], document["step"]))
        except (OSError, http.client.HTTPException):
            failed += 1
            connection.close()
        time.sleep(0.002)
    connection.close()
    return found, failed
