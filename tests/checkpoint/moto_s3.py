"""S3 as `moto` understands it, in this process, with `trouble` before each request: what our own twin takes for S3 is
held against what somebody else does."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from tests.checkpoint.fake_s3 import BUCKET, Trouble


class MotoS3:
    """The same interface as `FakeS3`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.trouble: Trouble = lambda method, path, headers: None
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self._ask("PUT", f"/{BUCKET}")
        self.requests.clear()

    def _ask(self, method: str, path: str) -> bytes:
        with urllib.request.urlopen(urllib.request.Request(self.url + path, method=method), timeout=20) as answer:
            found: bytes = answer.read()
        return found

    @property
    def objects(self) -> dict[str, bytes]:
        """By key."""
        trouble, self.trouble = self.trouble, lambda method, path, headers: None
        client = boto3.client(
            "s3", endpoint_url=self.url, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
        )
        try:
            keys = [one["Key"] for one in client.list_objects_v2(Bucket=BUCKET).get("Contents", [])]
            return {key: client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}
        finally:
            client.close()
            self.trouble = trouble

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("REQUEST_URI") or environ["PATH_INFO"]
        headers = {
            name.removeprefix("HTTP_").replace("_", "-").lower(): value
            for name, value in environ.items()
            if name.startswith("HTTP_")
        }
        self.requests.append((environ["REQUEST_METHOD"], path))
        wrong = self.trouble(environ["REQUEST_METHOD"], path, headers)
        if wrong is None:
            found: Iterable[bytes] = self._moto(environ, start)
            return found
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start(f"{wrong[0]} trouble", [("Content-Type", "application/xml")])
        return [f"<Error><Code>{wrong[1]}</Code><Message>{wrong[1]}</Message></Error>".encode()]

    def close(self) -> None:
        self.trouble = lambda method, path, headers: None
        self._ask("POST", "/moto-api/reset")
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: object) -> None:  # its name
        pass
