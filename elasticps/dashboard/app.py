"""What a browser may ask for. Everything but the page itself is JSON, or a stream of it.

Only requests for a host that this is known under are answered, so that no other page may read through a name of its
own that points here (DNS rebinding); the page may load nothing from elsewhere, and runs no script within its HTML.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import time
from collections.abc import Callable, Collection
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.core.errors import CoordinationError
from elasticps.dashboard.actions import Actions
from elasticps.dashboard.core.model import Model
from elasticps.dashboard.fanout import Fanout, Viewer, encode
from elasticps.dashboard.hot import Looks
from elasticps.dashboard.preview import Previews
from elasticps.errors import Error

VIEWERS_MAX = 200
KEEP_ALIVE_S = 15.0
BODY_MAX = 4096
_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = (
    (b"content-security-policy", b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
     b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)  # fmt: skip
_LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})


def make_app(
    model: Model, fanout: Fanout, previews: Previews, looks: Looks, actions: Actions | None, hosts: Collection[str]
) -> ASGIApp:
    """hosts: names that this is reached under, besides addresses. actions: None where nothing may be changed."""

    def whole() -> dict[str, Any]:
        return {**model.snapshot(time.time()), "actions": actions is not None}

    async def stream(request: Request) -> Response:
        if len(fanout.viewers) >= VIEWERS_MAX:
            fanout.drop_oldest()
        return _Stream(whole, fanout)

    async def snapshot(request: Request) -> Response:
        return JSONResponse(whole())

    async def history(request: Request) -> Response:
        found = model.server_history(request.query_params.get("server", ""))
        return (
            _refusal(404, "no server of that name has a history") if found is None else JSONResponse(found.document())
        )

    async def preview(request: Request) -> Response:
        try:
            return JSONResponse(await previews.ask(dict(request.query_params)))
        except (ValueError, Error) as error:
            return _refusal(400, str(error))

    async def act(request: Request) -> Response:
        if actions is None:
            return _refusal(403, "nothing may be changed from here: see --allow-actions")
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(token.encode(), actions.token.encode()):
            return _refusal(401, "this takes the token that the dashboard has printed")
        try:
            return JSONResponse({"done": await actions.perform(json.loads(await _body(request)))})
        except (CoordinationError, Error) as error:
            return _refusal(409, str(error))
        except (ValueError, KeyError, TypeError, RecursionError):
            return _refusal(400, 'a body such as {"act": "drain", "server": "s1"} is expected')

    async def hot(request: Request) -> Response:
        return JSONResponse(await looks.look())

    async def healthz(request: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    routes = [
        *_pages(),
        Route("/api/stream", stream),
        Route("/api/snapshot", snapshot),
        Route("/api/history", history),
        Route("/api/preview", preview),
        Route("/api/hot", hot),
        Route("/api/act", act, methods=["POST"]),
        Route("/healthz", healthz),
    ]
    return _guarded(Starlette(routes=routes), frozenset(hosts) | _LOCAL)


def _pages() -> list[Route]:
    """The files, read once: no path from outside ever reaches the file system."""
    folder = files("elasticps.dashboard") / "static"
    found = {f"/static/{p.name}": p for p in (*folder.iterdir(), *(folder / "uplot").iterdir()) if p.is_file()}
    return [_page(path, name.name, name.read_bytes()) for path, name in [*found.items(), ("/", folder / "index.html")]]


def _page(path: str, name: str, content: bytes) -> Route:
    tag = f'"{hashlib.blake2b(content, digest_size=8).hexdigest()}"'
    headers = {"etag": tag, "cache-control": "no-cache"}
    kind = _TYPES.get(name.rpartition(".")[2], "text/plain; charset=utf-8")

    async def page(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    return Route(path, page)


def _refusal(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status)


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > BODY_MAX:
            raise ValueError("too long")
    return body


class _Stream(Response):
    """Events until the viewer goes: a snapshot, then updates."""

    def __init__(self, whole: Callable[[], dict[str, Any]], fanout: Fanout) -> None:
        self.background = None
        self._whole = whole
        self._fanout = fanout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        viewer = Viewer()
        self._fanout.viewers[viewer] = None
        telling = asyncio.create_task(self._tell(viewer, send))
        leaving = asyncio.create_task(_left(receive))  # `send` says nothing of a viewer that is gone
        try:
            await asyncio.wait((telling, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._fanout.viewers.pop(viewer, None)
            for task in (telling, leaving):
                task.cancel()
            await asyncio.gather(telling, leaving, return_exceptions=True)

    async def _tell(self, viewer: Viewer, send: Send) -> None:
        while True:
            updates = await viewer.wait(KEEP_ALIVE_S)
            if viewer.dropped:
                return
            if viewer.stale:
                viewer.take()
                viewer.stale = False  # before the snapshot is made: what comes later is updates to it
                body = encode("snapshot", self._whole())
            else:
                body = viewer.take() if updates else b": still there\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _guarded(app: ASGIApp, hosts: Collection[str]) -> ASGIApp:
    """The same, for requests for one of these hosts, with the headers that every answer has."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        named = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(named) == 1 and _is_ours(named[0], hosts):
            await app(scope, receive, send_more)
        else:
            await _refusal(421, "this is not known under that name: see --allow-host")(scope, receive, send_more)

    return guarded


def _is_ours(named: str, hosts: Collection[str]) -> bool:
    """An address, which no other page can have as its name, or one of our names."""
    host, colon, port = named.rpartition(":")
    if not colon or "]" in port:
        host = named
    if host.lower() in hosts:
        return True
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
