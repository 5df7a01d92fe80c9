"""`elasticps status --hot` on real servers lists the most requested keys first."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy as np
from typer.testing import CliRunner

import elasticps as eps
from elasticps.cli.app import app
from tests.e2e.conftest import Connect

FREQUENT_KEY = -7


def test_the_most_requested_key_is_listed_first(cluster: eps.LocalCluster, connect: Connect) -> None:
    ps, ended = connect(), threading.Event()
    table = ps.table("t", dim=4, optimizer=eps.SGD(lr=0.1))

    def train() -> None:
        random = np.random.default_rng(1)
        while not ended.is_set():
            keys = np.append(random.integers(0, 10_000, 30), FREQUENT_KEY)
            ps.push({table: (keys, table.pull(keys))})

    worker = threading.Thread(target=train)
    worker.start()

    def tables() -> list[dict[str, Any]]:
        here = [each for server in json.loads(found.output)["servers"] for each in server["tables"]]
        return [each for each in here if each["name"] == f"{ps.app}/t"]

    try:
        deadline = time.monotonic() + 60
        while True:  # too few may be sampled of a machine that is busy
            found = CliRunner().invoke(app, ["status", "--hot", "--sample", "1", "--url", cluster.url, "--json"])
            if any(each["keys"][0][0] == FREQUENT_KEY for each in tables()) or time.monotonic() > deadline:
                break
        shown = CliRunner().invoke(app, ["status", "--hot", "--sample", "0.1", "--url", cluster.url])
    finally:
        ended.set()
        worker.join()
    assert found.exit_code == shown.exit_code == 0, found.output + shown.output
    assert "heaviest keys" in shown.output
    servers = json.loads(found.output)["servers"]
    assert [server["id"] for server in servers] == ["s0", "s1", "s2"]
    assert any(each["keys"][0][0] == FREQUENT_KEY for each in tables())
    for server in servers:
        assert not server["error"]
        assert sum(each["sampled"] for each in server["tables"]) == server["sampled"]
        assert sum(count for _, count in server["ranges"]) <= server["sampled"]
