"""Readers of applications and tables that there are not: what they log, and that tables which are made later come."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from elasticps.errors import ConfigError, UnknownTable
from elasticps.readers.pull_server import PullServer

KEYS = np.arange(50)
Wait = Callable[[Callable[[], bool]], None]


def test_a_reader_of_an_application_without_tables_says_which_have_some(
    local_cluster: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    eventually: Callable[[Callable[[], bool]], None],
) -> None:
    cluster = local_cluster(servers=1, replicas=1)
    with eps.connect(cluster.url, worker="w0", app="ads") as ps:
        users = ps.table("users", dim=4, optimizer=eps.SGD(lr=0.1))
        ps.table("items", dim=4, optimizer=eps.SGD(lr=0.1))
        ps.push({users: (KEYS, np.ones((50, 4), np.float32))}).result()
        with caplog.at_level(logging.WARNING), eps.reader(cluster.url, application="ads") as model:
            assert (model.pull({"users": KEYS})["users"] == users.pull(KEYS)).all()
            assert not caplog.records
            with PullServer(model, "127.0.0.1", 0) as relay:
                url = f"reader://{relay.address}"
                with pytest.raises(ConfigError, match=r"tables of application 'ads', and this .* those of 'default'"):
                    eps.reader(url)
                with pytest.raises(UnknownTable, match="'ads' has no table 'us'; it has items, users"):
                    eps.reader(url, ["us"], application="ads")
                eps.reader(url, application="ads").close()
        with pytest.raises(UnknownTable, match="'ads' has no table 'us'; it has items, users"):
            eps.reader(cluster.url, ["users", "us"], application="ads")
        with pytest.raises(UnknownTable, match="'typo' has no table 'users'; it has none; there are tables of: ads"):
            eps.reader(cluster.url, ["users"], application="typo")
        assert not caplog.records
        with eps.reader(cluster.url, application="later") as model:
            assert [record.getMessage() for record in caplog.records] == [
                "application 'later' has no tables yet, so there is nothing to read; there are tables of: ads. If that "
                "is its name, this reader shows its tables as soon as they are made"
            ]
            with eps.connect(cluster.url, worker="w1", app="later") as other:
                late = other.table("late", dim=4, optimizer=eps.SGD(lr=0.1))
                other.push({late: (KEYS, np.ones((50, 4), np.float32))}).result()
                eventually(lambda: "late" in model.tables and (model.pull({"late": KEYS})["late"] != 0).all())
                assert (model.pull({"late": KEYS})["late"] == late.pull(KEYS)).all()


def test_the_process_says_how_many_tables_it_begins_with(local_cluster: Callable[..., Any]) -> None:
    cluster = local_cluster(servers=1, replicas=1)
    command = [sys.executable, "-m", "elasticps", "reader", "--url", cluster.url, "--app", "typo"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert (ready["application"], ready["tables"]) == ("typo", 0)
        status = [sys.executable, "-m", "elasticps", "readers", "status", ready["grpc"]]
        assert "/typo: no tables yet" in subprocess.run(status, check=True, capture_output=True, text=True).stdout
        process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=60)[1]
        assert process.returncode == 0
        assert "level=warning" in errors
        assert "application 'typo' has no tables yet" in errors
        assert "no application has any" in errors
    finally:
        process.kill()
        process.communicate()
