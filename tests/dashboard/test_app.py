"""Answers of the dashboard's port: the page, streams and refusals."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from coordinator.core.keys import DRAINS, SERVERS
from coordinator.memory import MemoryStore
from elasticps.dashboard.actions import Actions
from elasticps.dashboard.app import make_app
from elasticps.dashboard.core.ring import draw
from elasticps.dashboard.fanout import WAITING_MAX, Fanout, Viewer, encode
from elasticps.dashboard.hot import FRESH_S, Answers, Ask, Looks
from elasticps.dashboard.preview import Previews
from elasticps.dashboard.serve import check_host, make_token
from elasticps.errors import ConfigError
from elasticps.security.authority import Authority
from tests.coordinator.support import until
from tests.dashboard.scene import Scene
from tests.security.conftest import authority, issued

__all__ = ["authority"]


class Client:
    """Asks the application without a port."""

    def __init__(self, app: Any) -> None:
        self._transport = httpx.ASGITransport(app)

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def requests() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://127.0.0.1:8321") as http:
                return await http.request(method, path, **more)

        return asyncio.run(requests())

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.ask("GET", path, **more)

    def post(self, path: str, **more: Any) -> httpx.Response:
        return self.ask("POST", path, **more)


def client(scene: Scene, actions: Actions | None = None, ask: Ask | None = None) -> Client:
    looks = Looks(ask or nobody, lambda: scene.now)
    return Client(make_app(scene.model, Fanout(), Previews(scene.model), looks, actions, {"ps.example"}))


async def nobody(seconds: float) -> Answers:
    return {}


def test_the_page_and_all_its_files_are_served_and_small() -> None:
    http = client(Scene())
    page = http.get("/")
    paths = [text.split('"')[0] for text in page.text.split('"/')[1:]]
    assert "static/main.js" in paths
    total = len(page.content)
    for path in [*paths, *(f"static/{n}.js" for n in ("ring", "charts", "events", "format", "colours", "table"))]:
        answer = http.get(f"/{path}")
        assert answer.status_code == 200, path
        total += len(answer.content)
        assert http.get(f"/{path}", headers={"if-none-match": answer.headers["etag"]}).status_code == 304
    assert total < 300_000
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "<script>" not in page.text
    assert " style=" not in page.text
    assert " on" not in [text[:3] for text in page.text.split("<button")]


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost:8321", True),
        ("[::1]:8321", True),
        ("10.0.0.7", True),
        ("ps.example", True),
        ("PS.example:80", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
    ],
)
def test_only_requests_for_a_name_of_ours_are_answered(host: str, known: bool) -> None:
    answer = client(Scene()).get("/api/snapshot", headers={"host": host})
    assert answer.status_code == (200 if known else 421)
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_no_path_leads_out_of_the_page() -> None:
    http = client(Scene())
    for path in ("/static/../model.py", "/static/%2e%2e/model.py", "/static//etc/passwd", "/static/", "/model.py"):
        assert http.get(path).status_code == 404


def test_histories_of_single_servers() -> None:
    scene = Scene()
    scene.tick(3)
    http = client(scene)
    assert len(http.get("/api/history?server=s1").json()["push_s"]) == 4
    assert http.get("/api/history?server=nobody").status_code == 404


def test_previews_list_moves_and_change_nothing() -> None:
    scene = Scene(servers=3)
    scene.tick()
    http = client(scene)
    before = http.get("/api/snapshot").json()["view"]
    found = http.get("/api/preview?servers=4").json()
    assert found["view"]["servers"] == ["s0", "s1", "s2", "s3"]
    assert found["copies"] == sum(move["copies"] for move in found["moves"]) > 0
    assert found["bytes"] > 0
    found = http.get("/api/preview?drain=s1").json()
    assert found["counts"].get("s1", {"held": 0})["held"] == 0
    assert http.get("/api/snapshot").json()["view"] == before
    assert scene.view is not None
    assert draw(scene.view).items() <= before.items()
    for query in (
        "",
        "?servers=0",
        "?servers=x",
        "?servers=%C2%B2",
        "?servers=99999999",
        "?drain=nobody",
        "?drain=s1&servers=2",
    ):
        assert http.get(f"/api/preview{query}").status_code == 400


def test_actions_need_permission_and_the_right_token() -> None:
    scene = Scene()
    body = {"act": "drain", "server": "s1"}
    assert client(scene).post("/api/act", json=body).status_code == 403
    store = MemoryStore("demo")
    asyncio.run(store.put(SERVERS + "s1", scene.infos["s1"].to_json()))
    http = client(scene, Actions("secret", lambda: store))
    for token in ("", "Bearer ", "Bearer wrong", "Bearer sécret"):
        headers = {"authorization": token.encode("latin-1")}
        assert http.post("/api/act", json=body, headers=headers).status_code == 401
    assert asyncio.run(store.get(DRAINS + "s1")) is None
    headers = {"authorization": b"Bearer secret"}
    assert http.post("/api/act", json=body, headers=headers).json() == {"done": "s1 drains"}
    assert asyncio.run(store.get(DRAINS + "s1")) is not None
    assert http.post("/api/act", json={"act": "drain", "server": "s7"}, headers=headers).status_code == 409
    for wrong in (b"{}", b"[]", b"x", b'{"act": "rm", "server": "s1"}', b" " * 5000, b"[" * 4000):
        assert http.post("/api/act", content=wrong, headers=headers).status_code == 400
    assert http.get("/api/act", headers=headers).status_code == 405
    answer = http.post("/api/act", json={"act": "scale", "servers": 4}, headers=headers)
    assert answer.status_code == 409
    assert "did not start" in answer.json()["error"]


def test_a_local_cluster_handles_one_scaling_request_at_a_time() -> None:
    scene, requests, ended = Scene(), list[int](), threading.Event()

    def scale(servers: int) -> str:
        requests.append(servers)
        assert ended.wait(20)
        return f"{servers} serve"

    actions = Actions("secret", lambda: None, scale)

    async def both() -> None:
        first = asyncio.create_task(actions.perform({"act": "scale", "servers": 4}))
        await until(lambda: bool(requests))
        with pytest.raises(ConfigError, match="already"):
            await actions.perform({"act": "scale", "servers": 2})
        first.cancel()  # whoever asked is gone: it goes on
        ended.set()
        await until(lambda: actions._scaling is not None and actions._scaling.done())
        assert await actions.perform({"act": "scale", "servers": 2}) == "2 serve"

    asyncio.run(both())
    assert requests == [4, 2]
    http, headers = client(scene, actions), {"authorization": "Bearer secret"}
    for wrong in ("4", None, True, 1.5, [4]):
        assert http.post("/api/act", json={"act": "scale", "servers": wrong}, headers=headers).status_code == 400


def test_hot_keys_are_sampled_once_for_all_viewers() -> None:
    scene, requests = Scene(servers=3), list[float]()
    evil = "ads/<img src=x>"

    def printed(name: str, **keys: int) -> dict[str, Any]:
        keys_, counts = [int(k[1:]) for k in keys], list(keys.values())
        table = {"name": name, "sampled": sum(counts), "keys": keys_, "counts": counts}
        return {"sampled": sum(counts), "ranges": [3], "range_counts": [sum(counts)], "tables": [table]}

    async def ask(seconds: float) -> Answers:
        requests.append(seconds)
        await asyncio.sleep(0)
        return {"s0": printed(evil, k1=6, k5=2), "s1": None, "s2": printed(evil, k1=1, k7=1)}

    http = client(scene, ask=ask)
    found = http.get("/api/hot").json()
    assert (found["sampled"], found["servers"], found["silent"]) == (10, 2, ["s1"])
    assert found["ranges"] == [["3", 1.0]]
    assert found["tables"] == [{"name": evil, "sampled": 10, "keys": [["1", 0.7], ["5", 0.2], ["7", 0.1]]}]
    assert http.get("/api/hot").json() == found
    assert len(requests) == 1
    scene.now += 2 * FRESH_S
    http.get("/api/hot")
    assert len(requests) == 2


def test_a_slow_viewer_loses_waiting_events_and_needs_a_snapshot() -> None:
    async def look() -> None:
        fanout, slow, fast = Fanout(), Viewer(), Viewer()
        fanout.viewers |= {slow: None, fast: None}
        for viewer in (slow, fast):
            assert await viewer.wait(1)
            viewer.take()
            viewer.stale = False
        for i in range(WAITING_MAX + 1):
            fanout.publish([("sample", i)])
            if i == 3:
                assert fast.take().count(b"event: sample") == 4
        assert slow.stale
        assert slow.take() == b""
        assert not fast.stale

    asyncio.run(look())


def test_no_text_can_forge_an_event() -> None:
    text = "\n\nevent: snapshot\ndata: {}\n\n\r\u2028</script>"
    message = encode("entry", {"title": text}).decode()
    assert message.count("\n") == 3
    assert json.loads(message.split("data: ", 1)[1]) == {"title": text}


def test_only_operators_certificates_allow_actions(authority: Authority) -> None:
    def url(who: str) -> str:
        files = issued(authority, who)
        return f"etcd://127.0.0.1:1/train?ca={files.ca}&cert={files.cert}&key={files.key}"

    assert len(make_token(url("operator/ann"))) >= 32
    assert make_token("etcd://127.0.0.1:1/train") != make_token("etcd://127.0.0.1:1/train")
    for who in ("worker/ads/w0", "server/s0"):
        with pytest.raises(ConfigError, match="takes an operator's certificate"):
            make_token(url(who))


def test_other_machines_reach_the_dashboard_only_with_insecure() -> None:
    check_host("127.0.0.1", insecure=False)
    check_host("0.0.0.0", insecure=True)
    with pytest.raises(ConfigError, match="--insecure"):
        check_host("0.0.0.0", insecure=False)
