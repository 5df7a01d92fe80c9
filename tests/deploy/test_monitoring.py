"""The dashboard, the alarms and the autoscaler's metric against the metrics that the code makes."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import promql_parser
import pytest
import yaml

from coordinator.core.keys import NEWEST_CHECKPOINT, VIEW
from coordinator.core.store import Entry, Put
from coordinator.core.view import ServerInfo, View, WorkerInfo
from coordinator.memory import MemoryStore
from coordinator.sessions import ServerSession
from elasticps.checkpoint.create import newest
from elasticps.client.cache_batches import CacheUse
from elasticps.dashboard.core.past import questions
from elasticps.metrics.client import ClientMetrics
from elasticps.metrics.cluster import STATES, ClusterMetrics
from elasticps.metrics.reader import ReaderMetrics
from elasticps.metrics.server import ServerMetrics
from elasticps.readers.values import AsOf, ReaderSpec, ReaderStats
from elasticps.server.options import ServerOptions
from tests.client.views import view as a_view
from tests.deploy.manifests import DEPLOY, ROOT, named
from tests.test_pages import metric_names

FOREIGN = {  # of the process itself, of kubelets, and of kube-state-metrics
    "process_resident_memory_bytes",
}
SCRAPED = {"namespace", "pod", "container", "resource", "le", "instance"}  # labels that Prometheus, or those, add
VALUES = {"state": set(STATES), "role": {"head", "held", "joining"}, "kind": {"push", "pull", "forward"},
          "cluster": {"prod"}, "replicas": {str(n) for n in range(17)}}  # fmt: skip


class Session:
    deadline = 0.0

    def __init__(self, info: ServerInfo) -> None:
        self.info = info


class MeasuredReader:
    cluster, pinned, spec = "c", "", ReaderSpec()
    as_of = AsOf(1.0, 1, np.zeros(2, np.int64), {})

    def stats(self) -> ReaderStats:
        return ReaderStats(1, 2, 3, 4, 5, 6, 7, 70, 8, 9, 0.5, (0.1, 0.2))


class Client:
    app, cluster, clock, committed = "a", "c", 2, 1
    worker = WorkerInfo(1, "w0", 1, "a")

    def __init__(self, view: View) -> None:
        self.view = view

    def caches(self) -> dict[str, CacheUse]:
        return {"t": CacheUse(3, 0, 10, 4, 2, 1, 100, 200)}


async def families() -> list[Any]:
    view = a_view([[0, 1], [1, 0]])
    server, cluster = ServerMetrics(), ClusterMetrics(MemoryStore(), "c0")
    session = cast(ServerSession, Session(view.servers[0]))
    server.build(session, "c", view.ranges, asyncio.get_running_loop(), ServerOptions())
    cluster._note(Put(Entry(VIEW, view.encode(), 1, 1)))
    cluster._note(Put(Entry(NEWEST_CHECKPOINT, newest(1, 1.0), 1, 1)))
    collectors = server, cluster, ClientMetrics(Client(view)), ReaderMetrics(MeasuredReader(), "r0")
    return [family for c in collectors for family in c.collect()]


@pytest.fixture(scope="module")
def metrics() -> dict[str, set[str]]:
    """Every name that can be scraped -> its labels."""
    found: dict[str, set[str]] = {}
    for family in asyncio.run(families()):
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}.get(family.type, [""])
        for suffix in suffixes:
            found[family.name + suffix] = set(family._labelnames)
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "monitoring/alerts.yaml").read_text())["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((DEPLOY / "monitoring/dashboard.json").read_text()))


def adapter() -> dict[str, Any]:
    (rule,) = yaml.safe_load((DEPLOY / "monitoring/prometheus-adapter.yaml").read_text())["rules"]["custom"]
    return cast(dict[str, Any], rule)


def queries() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield f"{panel['title']} {target['refId']}", target["expr"].replace("$namespace", "elasticps")
    for (column, each), query in questions("prod").items():
        yield f"the page's {column}{' of a server' * each}", query
    yield "adapter, series", adapter()["seriesQuery"]
    query = adapter()["metricsQuery"].replace("<<.Series>>", adapter()["seriesQuery"].partition("{")[0])
    yield "adapter, value", query.replace("<<.LabelMatchers>>", 'pod="x"').replace("<<.GroupBy>>", "pod")


def selectors(query: str) -> list[tuple[str, dict[str, str]]]:
    """The metrics that a query reads, with what it asks of their labels. ValueError if it is no PromQL."""
    found: list[tuple[str, dict[str, str]]] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append((str(node.name), {matcher.name: matcher.value for matcher in node.matchers.matchers}))

    promql_parser.walk(promql_parser.parse(query), visit)
    return found


@pytest.mark.parametrize(("where", "query"), [pytest.param(w, q, id=w) for w, q in queries()])
def test_queries_are_valid_promql_over_existing_metrics_and_labels(
    where: str, query: str, metrics: dict[str, set[str]]
) -> None:
    found = selectors(query)
    assert found
    for name, labels in found:
        assert name in metrics.keys() | FOREIGN
        assert labels.keys() <= metrics.get(name, SCRAPED) | SCRAPED
        for label in labels.keys() & VALUES.keys():
            assert set(labels[label].split("|")) <= VALUES[label]


def test_a_query_with_a_mistake_would_be_found() -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # in words that are the parser's
        selectors("sum by (x (rate(a[5m]))")
    assert selectors('rate(a{b="c"}[5m]) > d') == [("a", {"b": "c"}), ("d", {})]


def test_each_alarm_is_explained() -> None:
    text = (ROOT / "docs/reference/monitoring.md").read_text(encoding="utf-8")
    alarms = [rule["alert"] for rule in rules()]
    assert len(set(alarms)) == len(alarms)
    assert set(re.findall(r"^\| `(Elasticps\w+)`", text, re.M)) == set(alarms)


def test_the_metrics_read_off_the_code_are_those_that_processes_serve(metrics: dict[str, set[str]]) -> None:
    """`tests/test_pages.py` reads them so, and checks that each is described: it starts nothing and is fast."""
    assert metric_names() == {re.sub(r"_(bucket|count|sum)$", "", name) for name in metrics}


def test_alarms_have_a_severity_and_a_summary() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]


def test_the_rules_without_the_operator_are_the_same(tmp_path: Path) -> None:
    page = (ROOT / "docs/guides/machines.md").read_text()
    command = next(line for line in page.splitlines() if line.startswith("sed "))
    subprocess.run(command.replace(" > ", f" > {tmp_path}/"), shell=True, cwd=ROOT, check=True)
    (written,) = tmp_path.iterdir()
    settings = next(block for block in re.findall(r"```yaml\n(.*?)```", page, re.S) if "scrape_configs" in block)
    assert yaml.safe_load(settings)["rule_files"] == [written.name]
    groups = yaml.safe_load(written.read_text())["groups"]
    assert [rule for group in groups for rule in group["rules"]] == rules()


def test_the_autoscaler_uses_the_metric_of_the_adapter() -> None:
    scaler = named("overlays/production", "HorizontalPodAutoscaler", "elasticps-server")
    assert scaler["spec"]["metrics"][0]["pods"]["metric"]["name"] == adapter()["name"]["as"]


def test_the_dashboard_is_well_formed() -> None:
    found = dashboard()
    ids = [panel["id"] for panel in found["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells
    (text,) = named("overlays/production", "ConfigMap", "elasticps-dashboard")["data"].values()
    assert json.loads(text) == found
