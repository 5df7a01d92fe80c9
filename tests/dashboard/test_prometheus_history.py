"""The hour before the dashboard began, read from Prometheus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticps.dashboard import prometheus as past_module
from elasticps.dashboard.core.history import History
from elasticps.dashboard.core.past import PastSamples, add_answer, questions
from elasticps.dashboard.core.samples import CLUSTER_COLUMNS, SERVER_COLUMNS
from elasticps.dashboard.fanout import Fanout, Viewer
from elasticps.dashboard.poller import ClusterPoller
from elasticps.dashboard.prometheus import check_prometheus, read_past
from elasticps.errors import ConfigError, Error
from tests.dashboard.scene import Scene


def matrix(*series: tuple[str, Mapping[float, str]]) -> dict[str, Any]:
    found = [
        {"metric": {"server": name} if name else {}, "values": list(map(list, values.items()))}
        for name, values in series
    ]
    return {"status": "success", "data": {"resultType": "matrix", "result": found}}


class Prometheus:
    """Answers what it was told to, by question; empty matrices otherwise."""

    def __init__(self) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        self.raw: bytes | None = None
        self.status = 200
        self.requests: list[dict[str, list[str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                requests = parse_qs(self.rfile.read(int(self.headers["content-length"])).decode())
                outer.requests.append(requests)
                body = outer.raw or json.dumps(outer.answers.get(requests["query"][0], matrix())).encode()
                self.send_response(outer.status if self.path == "/api/v1/query_range" else 404)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"


@pytest.fixture
def prometheus() -> Iterator[Prometheus]:
    made = Prometheus()
    thread = Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def test_every_column_has_a_query_except_those_only_seen_live() -> None:
    requests = questions("prod")
    assert {column for column, each in requests if each} == set(SERVER_COLUMNS)
    assert {column for column, each in requests if not each} == set(CLUSTER_COLUMNS) - {"steps_s", "outstanding"}
    assert all('elasticps_server_info{cluster="prod"}' in query for query in requests.values())


def test_the_last_hour_is_shown_before_the_live_samples(prometheus: Prometheus) -> None:
    scene = Scene(servers=2)
    scene.tick(3)
    live = scene.model.snapshot(scene.now)["history"]
    now, requests = live["time"][0], questions(scene.model.name)
    prometheus.answers[requests["push_s", False]] = matrix(("", {now - 30: "10", now - 15: "20.5", now + 1: "99"}))
    prometheus.answers[requests["rows", False]] = matrix(("", {now - 15: "NaN", now - 30: "7"}))
    prometheus.answers[requests["push_p99", True]] = matrix(("s0", {now - 15: "0.25"}), ("gone", {now - 15: "+Inf"}))
    scene.model.remember(read_past(prometheus.url, scene.model.name, now))
    shown = scene.model.snapshot(scene.now)["history"]
    assert shown["time"] == [now - 30, now - 15, *live["time"]]
    assert shown["push_s"] == [10, 20.5, *live["push_s"]]
    assert shown["rows"] == [7, None, *live["rows"]]
    history = scene.model.server_history("s0")
    assert history is not None
    assert history.document()["push_p99"][0] == 0.25
    assert history.document()["time"][0] == now - 15
    assert {each["end"][0] for each in prometheus.requests} == {f"{now:.3f}"}
    assert len(prometheus.requests) == len(requests)


def test_a_server_that_answers_later_gets_its_history_then(prometheus: Prometheus) -> None:
    scene = Scene(servers=2)
    scene.model.remember(
        PastSamples(servers={"s2": {scene.now - 20: {"rows": 5.0}}, "s9": {scene.now - 20: {"rows": 1.0}}})
    )
    assert scene.model.server_history("s2") is None
    scene.register("s2")
    scene.tick(2)
    history = scene.model.server_history("s2")
    assert history is not None
    assert history.document()["rows"][0] == 5
    assert scene.model.server_history("s9") is None


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>", b"[]", b'{"status": "error"}', b"[" * 5000,
        json.dumps(matrix(("", {1.0: "x"}))).encode(),
        b'{"status": "success", "data": {"resultType": "vector", "result": []}}',
        b'{"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {}, "values": [1]}]}}',
    ],
)  # fmt: skip
def test_an_answer_that_is_not_prometheus_is_an_error(prometheus: Prometheus, answer: bytes) -> None:
    prometheus.raw = answer
    with pytest.raises(Error, match="is no Prometheus"):
        read_past(prometheus.url, "c", 1e9)


def test_refusals_silence_and_endless_answers_are_errors(
    prometheus: Prometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_module, "MOST_BYTES", 10)
    with pytest.raises(Error, match="more than 10 bytes"):
        read_past(prometheus.url, "c", 1e9)
    prometheus.status = 401
    with pytest.raises(Error, match="refused a question: 401"):
        read_past(prometheus.url, "c", 1e9)
    with pytest.raises(Error, match="cannot be asked"):
        read_past("http://127.0.0.1:1", "c", 1e9)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "prometheus:9090", "http://", "ftp://a/b"])
def test_only_urls_of_the_web_are_taken(url: str) -> None:
    with pytest.raises(ConfigError, match="is no URL of Prometheus"):
        check_prometheus(url)


def test_early_viewers_get_the_history_too(prometheus: Prometheus) -> None:
    scene, fanout, viewer = Scene(servers=1), Fanout(), Viewer()
    viewer.stale = False
    viewer.take()
    fanout.viewers[viewer] = None
    poller = ClusterPoller("etcd://127.0.0.1:1/c", scene.model, fanout, prometheus=prometheus.url)
    asyncio.run(poller._look_back(prometheus.url))
    assert viewer.stale
    assert viewer.take() == b""


def test_a_series_of_one_server_is_not_taken_for_the_sum() -> None:
    past = PastSamples()
    add_answer(past, "rows", True, matrix(("s0", {1.0: "2"}), ("s1", {1.0: "3"})))
    add_answer(past, "rows", False, matrix(("", {1.0: "5"})))
    add_answer(past, "lag", False, matrix())
    assert past.cluster == {1.0: {"rows": 5.0}}
    assert past.servers == {"s0": {1.0: {"rows": 2.0}}, "s1": {1.0: {"rows": 3.0}}}


@given(
    st.integers(1, 12),
    st.lists(st.integers(0, 40), unique=True, max_size=15),
    st.lists(st.integers(20, 60), unique=True, max_size=15),
)
def test_older_samples_are_added_as_far_as_there_is_room(samples: int, past: list[int], live: list[int]) -> None:
    history = History(("x",), samples)
    for t in sorted(live):
        history.add(t, {"x": 2.0 * t})
    left = sorted(live)[-samples:]
    history.add_before({float(t): {"x": float(t)} for t in past})
    older = [t for t in sorted(past) if not left or t < left[0]]
    older = older[max(0, len(older) - (samples - len(left))) :]
    document = history.document()
    assert document["time"] == [*older, *left]
    assert document["x"] == [*map(float, older), *(2.0 * t for t in left)]
    history.add(100, {"x": 1.0})
    assert history.document()["time"] == [*older, *left, 100][-samples:]
    np.testing.assert_equal(len(history), min(samples, len(older) + len(left) + 1))
