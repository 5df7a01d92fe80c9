"""The scrape endpoint against what comes over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from elasticps.metrics.exposition import MAX_HEAD_BYTES, MAX_SCRAPES_AT_ONCE, Scrape


class One(Collector):
    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("one", "Just 1.", value=1)


class Broken(Collector):
    def collect(self) -> Iterator[Metric]:
        raise RuntimeError("no")


def ask(head: bytes, collector: Collector) -> bytes:
    async def run() -> bytes:
        scrape = await Scrape.start("127.0.0.1", 0, [collector])
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", scrape.port)
            writer.write(head)
            answer = await reader.read()
            writer.close()
            return answer
        finally:
            await scrape.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("request_line", "status", "text"),
    [
        (b"GET /metrics HTTP/1.1", b"200", b"\none 1.0\n"),
        (b"GET /metrics?name=x HTTP/1.0", b"200", b"\none 1.0\n"),
        (b"GET /healthz HTTP/1.1", b"200", b"ok"),
        (b"GET / HTTP/1.1", b"404", b"/metrics"),
        (b"POST /metrics HTTP/1.1", b"405", b"GET"),
        (b"nonsense", b"405", b"GET"),
    ],
)
def test_requests_are_answered(request_line: bytes, status: bytes, text: bytes) -> None:
    head, _, body = ask(request_line + b"\r\nHost: x\r\n\r\n", One()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert text in body
    assert f"Content-Length: {len(body)}".encode() in head


def test_head_has_no_body() -> None:
    assert ask(b"HEAD /metrics HTTP/1.1\r\n\r\n", One()).endswith(b"\r\n\r\n")


def test_openmetrics_is_sent_to_clients_that_accept_it() -> None:
    answer = ask(b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text; version=1.0.0\r\n\r\n", One())
    assert answer.endswith(b"# EOF\n")


def test_a_request_head_without_end_is_cut_off() -> None:
    try:
        answer = ask(b"x" * (MAX_HEAD_BYTES + 1000), One())
    except ConnectionResetError:
        answer = b""
    assert answer == b""


def test_a_collector_that_fails_harms_only_the_scrape() -> None:
    assert ask(b"GET /metrics HTTP/1.1\r\n\r\n", Broken()).startswith(b"HTTP/1.1 500")


def test_silent_connections_do_not_delay_probes() -> None:
    """However many: those that have been there for longest go. A slow head is waited for as before."""

    async def run() -> None:
        scrape = await Scrape.start("127.0.0.1", 0, [One()])
        idle = []
        try:
            many = range(3 * MAX_SCRAPES_AT_ONCE)
            idle += [await asyncio.open_connection("127.0.0.1", scrape.port) for _ in many]
            slow = await asyncio.open_connection("127.0.0.1", scrape.port)
            idle.append(slow)
            slow[1].write(b"GET /healthz HTTP/1.1\r\n")
            for _ in range(MAX_SCRAPES_AT_ONCE - 1):
                reader, writer = await asyncio.open_connection("127.0.0.1", scrape.port)
                writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
                assert (await reader.read()).endswith(b"ok\n")
                writer.close()
            slow[1].write(b"\r\n")
            assert (await slow[0].read()).endswith(b"ok\n")
            assert await idle[0][0].read() == b""  # it was closed
        finally:
            for _, writer in idle:
                writer.close()
            await scrape.close()

    asyncio.run(run())
