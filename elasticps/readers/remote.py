"""Pulls from the process of a reader, which holds the rows: `eps.remote_reader`."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.client.inputs import checked_keys
from elasticps.errors import Closed, ClusterUnreachable, ConfigError, InputError, OtherShare, ServerError, UnknownTable
from elasticps.model.key_share import MOST_SHARES, KeyShare
from elasticps.model.spec import TableSpec
from elasticps.readers.peers import PeerStream, RelayCredentials, check_reader, identity_of
from elasticps.readers.values import check_names_keys
from elasticps.security import credentials_of
from elasticps.security.credentials import Credentials
from elasticps.security.identity import NotAuthorised
from elasticps.wire.frames import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    TABLES,
    Buffer,
    FrameError,
    Header,
    Kind,
    json_body,
    json_frame,
    padded_size,
    table_block,
    unpack_header,
    whole,
)

Rows = NDArray[np.float32]
AT_ONCE_BYTES = 16 << 20  # of rows in one answer
RETRY_S = 0.1
_NO_ROWS = np.empty(0, np.uint8)


class RemoteReader:
    """A connection to a reader's process. Threads may share it; it is a context manager. It connects again by itself:
    a pull that is lost on the way is sent once more."""

    def __init__(
        self, address: str, url: str | None = None, *, timeout: float = 30.0, credentials: Credentials | None = None
    ) -> None:
        """url: the cluster's, where there is TLS: for its certificates; or the credentials themselves. Raises
        ConfigError, ClusterUnreachable."""
        host, _, port = address.removeprefix("reader://").rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"a reader listens at host:port, got {address!r}")
        self._where = host.strip("[]"), int(port)
        self._credentials = credentials if url is None else credentials_of(url)
        self.timeout = timeout  # seconds that a call may take
        self._lock = threading.Lock()  # of the connection
        self._stream: PeerStream | None = None
        self._requests = 0
        self._closed = False
        self._welcome: dict[str, Any] = {}
        self._specs: dict[str, tuple[int, TableSpec]] = {}  # by name
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise

    @property
    def tables(self) -> dict[str, TableSpec]:
        """The tables that the reader had when it was asked last, by name."""
        return {name: spec for name, (_, spec) in self._specs.items()}

    @property
    def age(self) -> float:
        """Seconds, as `Reader.age`: asks."""
        self.refresh()
        return float(self._welcome["age_s"])

    @property
    def steps(self) -> dict[int, int]:
        """By worker, the newest step that is in some range: asks."""
        self.refresh()
        return {int(worker): int(step) for worker, step in self._welcome["as_of"]["steps"].items()}

    @property
    def share(self) -> tuple[int, int]:
        """Which share of all keys the process has: (1, 1) for everything."""
        share = KeyShare.parse(str(self._welcome.get("share", "")))
        return share.number, share.of

    @property
    def welcome(self) -> dict[str, Any]:
        """What the process said of itself last."""
        return self._welcome

    def refresh(self) -> None:
        """Asks which tables there are, and how old."""
        try:
            header, body = self._ask(lambda request: [json_frame(Kind.HELLO, {"pulls": True}, request=request)])
        except ServerError as error:
            raise ServerError(f"{self._name} is no reader: it answers that {error}") from None
        if header.kind != Kind.WELCOME:
            raise ServerError(f"{self._name} is no reader: it answers {Kind(header.kind).name}")
        self._welcome = json_body(body.data, MAX_BODY_BYTES)
        specs = [(int(number), TableSpec.from_json(text)) for number, text in self._welcome["tables"]]
        self._specs = {spec.name: (number, spec) for number, spec in specs}

    def pull(self, keys: Mapping[str, object]) -> dict[str, Rows]:
        """As `Reader.pull`: rows of several tables, {table: keys int64 [n]}, of a tensor None. Raises `UnknownTable`,
        `OtherShare`, `ClusterUnreachable`."""
        check_names_keys(keys)
        return {name: self._pull_table(name, named) for name, named in keys.items()}

    def _pull_table(self, name: str, named: object) -> Rows:
        number, _ = self._find(name)
        try:
            return self._pull_all(name, named)
        except UnknownTable:  # it was dropped, and perhaps made again
            self.refresh()
            if self._find(name)[0] == number:
                raise
            return self._pull_all(name, named)

    def _pull_all(self, name: str, named: object) -> Rows:
        number, spec = self._find(name)
        if named is None and spec.shape is None:
            raise InputError(f"{name!r} is a table: pull keys of it, int64 [n]")
        checked = np.arange(spec.blocks, dtype=np.int64) if named is None else checked_keys(name, named)
        rows = np.empty((len(checked), spec.dim), np.float32)
        most = max(1, AT_ONCE_BYTES // (4 * spec.dim))
        for start in range(0, len(checked), most):
            self._pull(number, checked[start : start + most], rows[start : start + most])
        if named is None and spec.shape is not None:
            return rows.reshape(-1)[: int(np.prod(spec.shape))].reshape(spec.shape)
        return rows

    def _find(self, name: str) -> tuple[int, TableSpec]:
        if name not in self._specs:
            self.refresh()
        if name not in self._specs:
            raise UnknownTable(f"{self._name} has no table {name!r}; it has {', '.join(sorted(self._specs)) or 'none'}")
        return self._specs[name]

    def _pull(self, number: int, keys: NDArray[np.int64], rows: Rows) -> None:
        """Receives the rows of keys [n] into rows [n, dim]."""

        def frame(request: int) -> list[Buffer]:
            block = table_block(number, len(keys))
            header = Header(Kind.PULL, TABLES, len(block) + keys.nbytes, request, items=1)
            return [header.pack(), block, keys.data.cast("B")]

        header, _ = self._ask(frame, rows.reshape(-1).view(np.uint8))
        if header.kind != Kind.ROWS or header.items != len(keys) or header.body != padded_size(rows.nbytes):
            raise ServerError(f"{self._name} answers a pull with {Kind(header.kind).name} of {header.items} rows")

    @property
    def _name(self) -> str:
        return f"the reader at {self._where[0]}:{self._where[1]}"

    def _ask(self, frame: Any, rows: NDArray[np.uint8] = _NO_ROWS) -> tuple[Header, NDArray[np.uint8]]:
        """Sends a request and returns its answer; again on a new connection if that is lost. rows: takes the body of
        ROWS of its length."""
        until_s = time.monotonic() + self.timeout
        with self._lock:
            while True:
                if self._closed:
                    raise Closed(f"the connection to {self._name} is closed")
                try:
                    return self._once(frame, rows, max(0.001, until_s - time.monotonic()))
                except (OSError, FrameError) as error:
                    self._drop()
                    if time.monotonic() + RETRY_S > until_s:
                        hint = "" if self._welcome else ". Does an `elasticps reader --listen` run there?"
                        raise ClusterUnreachable(f"{self._name} does not answer: {error}{hint}") from error
                    time.sleep(RETRY_S)

    def _once(self, frame: Any, rows: NDArray[np.uint8], timeout_s: float) -> tuple[Header, NDArray[np.uint8]]:
        if self._stream is None:
            self._stream = PeerStream(self._connect(timeout_s), timeout_s)
        self._stream.timeout_s = timeout_s
        self._requests += 1
        self._stream.send(frame(self._requests))
        header = unpack_header(self._receive(np.empty(HEADER_BYTES, np.uint8)).data)
        if header.kind == Kind.ROWS and header.body == padded_size(len(rows)):
            body = self._receive(rows)
            self._receive(np.empty(header.body - len(rows), np.uint8))
        else:
            body = self._receive(np.empty(header.body, np.uint8))
        if header.kind == Kind.ERROR:
            document = json_body(body.data)
            text = str(document.get("message"))
            if document.get("code") == "other-share":
                raise OtherShare(text, whole(document.get("share"), MOST_SHARES))
            raise UnknownTable(text) if document.get("code") == "unknown-table" else ServerError(text)
        if header.request != self._requests:
            raise FrameError(f"{self._name} answers request {header.request} instead of {self._requests}")
        return header, body

    def _receive(self, body: NDArray[np.uint8]) -> NDArray[np.uint8]:
        assert self._stream is not None
        at = 0
        while at < len(body):
            n = self._stream.recv_into(body.data[at:])
            if not n:
                raise ConnectionResetError(f"{self._name} closed the connection")
            at += n
        return body

    def _connect(self, timeout_s: float) -> socket.socket:
        raw = socket.create_connection(self._where, timeout=timeout_s)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._credentials is None:
            return raw
        secured = self._credentials.client_context().wrap_socket(raw)
        try:
            app = self._credentials.app if isinstance(self._credentials, RelayCredentials) else None
            check_reader(identity_of(secured), self._credentials.cluster, app)
        except NotAuthorised as error:
            secured.close()
            raise ConfigError(f"{self._name} proves to be somebody else: {error}") from None
        return secured

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def close(self) -> None:
        """Ends it."""
        with self._lock:
            self._closed = True
            self._drop()

    def __enter__(self) -> RemoteReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def remote_reader(address: str, url: str | None = None, *, timeout: float = 30.0) -> RemoteReader:
    """Connects to a process of `elasticps reader --listen`, at host:port. `url`: the cluster's, where there is TLS, for
    its certificates. Raises `ConfigError`, `ClusterUnreachable`."""
    return RemoteReader(address, url, timeout=timeout)
