"""What S3 answers, as far as checkpoints ask: one bucket, in this process. `trouble` is asked before each request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

BUCKET = "models"
Trouble = Callable[[str, str, dict[str, str]], tuple[int, str] | None]


class FakeS3:
    """objects: by key; requests: method and path of each; trouble(method, path, headers): the status and code of an
    error to answer with."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests: list[tuple[str, str]] = []
        self.trouble: Trouble = lambda method, path, headers: None
        self.lock = threading.Lock()
        fake = self

        class Handler(_Handler):
            s3 = fake

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    s3: FakeS3
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # its name
        pass

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        _, bucket, *rest = unquote(parts.path).split("/", 2)
        self.key = rest[0] if rest else ""
        self.body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.s3.requests.append((self.command, self.path))
        if wrong := self.s3.trouble(self.command, self.path, dict(self.headers)):
            self._fail(*wrong)
        elif bucket != BUCKET:
            self._fail(404, "NoSuchBucket")
        else:
            with self.s3.lock:
                getattr(self, f"_{self.command.lower()}")()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815  # their names

    def _put(self) -> None:
        if "uploadId" in self.query:
            self.s3.uploads[self.query["uploadId"]][int(self.query["partNumber"])] = self.body
        elif self.headers.get("if-none-match") == "*" and self.key in self.s3.objects:
            self._fail(412, "PreconditionFailed")
            return
        else:
            self.s3.objects[self.key] = self.body
        self._answer(200, b"", {"ETag": '"1"'})

    def _get(self) -> None:
        if "list-type" in self.query:
            self._list()
            return
        if self.key not in self.s3.objects:
            self._fail(404, "NoSuchKey")
            return
        data, headers, status = self.s3.objects[self.key], {"ETag": '"1"', "Last-Modified": _MOMENT}, 200
        if span := self.headers.get("range"):
            start, end = (int(number) for number in span.removeprefix("bytes=").split("-"))
            if start >= len(data):
                self._fail(416, "InvalidRange")
                return
            headers["Content-Range"] = f"bytes {start}-{min(end, len(data) - 1)}/{len(data)}"
            data, status = data[start : end + 1], 206
        self._answer(status, data, headers)

    _head = _get

    def _list(self) -> None:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter")
        keys = [key for key in sorted(self.s3.objects) if key.startswith(prefix)]
        folders = set()
        if delimiter:
            folders = {prefix + key[len(prefix) :].split("/")[0] + "/" for key in keys if "/" in key[len(prefix) :]}
            keys = [key for key in keys if "/" not in key[len(prefix) :]]
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>1</ETag>"
            f"<Size>{len(self.s3.objects[key])}</Size></Contents>"
            for key in keys
        )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders))
        self._answer(200, f"<ListBucketResult>{contents}{common}</ListBucketResult>".encode())

    def _post(self) -> None:
        if "delete" in self.query:
            keys = [node.text or "" for node in ElementTree.fromstring(self.body).iter() if node.tag.endswith("Key")]
            for key in keys:
                self.s3.objects.pop(key, None)
            deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())
        elif "uploads" in self.query:
            number = str(len(self.s3.uploads))
            self.s3.uploads[number] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
            self._answer(200, text.encode())
        else:
            parts = self.s3.uploads.pop(self.query["uploadId"])
            self.s3.objects[self.key] = b"".join(parts[number] for number in sorted(parts))
            result = "<CompleteMultipartUploadResult><ETag>1</ETag></CompleteMultipartUploadResult>"
            self._answer(200, result.encode())

    def _delete(self) -> None:
        self.s3.objects.pop(self.key, None)
        self._answer(204, b"")

    def _fail(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


_MOMENT = "Thu, 01 Jan 2026 00:00:00 GMT"
