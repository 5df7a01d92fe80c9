"""Pulls from a reader's process: rows land as the model has them, whatever their number, and however many pull."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import elasticps as eps
from elasticps.checkpoint.create import checkpoint_cluster
from elasticps.readers import remote as remote_module
from elasticps.readers.peers import PeerStream
from elasticps.readers.pull_server import PullServer
from elasticps.wire.frames import HEADER_BYTES, TABLES, Header, Kind, table_block, unpack_header
from elasticps.wire.headers import RowsHeader
from tests.waiting import eventually

ROWS = 3000
DIMS = {"odd": 3, "wide": 64, "one": 1}
Model = dict[str, NDArray[np.float32]]


@pytest.fixture
def trained(local_cluster: Callable[..., Any]) -> Any:
    """(cluster, client, tables by name, what they hold)."""
    cluster, rng = local_cluster(servers=2, replicas=1), np.random.default_rng(3)
    with eps.connect(cluster.url, worker="w0") as ps:
        tables = {name: ps.table(name, dim=dim, optimizer=eps.Accumulate()) for name, dim in DIMS.items()}
        model = {name: rng.random((ROWS, dim), np.float32) for name, dim in DIMS.items()}
        ps.push({tables[name]: (np.arange(ROWS), rows) for name, rows in model.items()}).result()
        yield cluster, ps, tables, model


def shows(reader: eps.Reader, model: Model) -> Callable[[], bool]:
    def looks() -> bool:
        if model.keys() - reader.tables.keys():
            return False
        found = reader.pull(dict.fromkeys(model, np.arange(ROWS)))
        return all((found[name] == rows).all() for name, rows in model.items())

    return looks


def keys_of(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Some of them have no row."""
    return rng.integers(0, ROWS + 100, count)


def expected(rows: NDArray[np.float32], keys: NDArray[np.int64]) -> NDArray[np.float32]:
    blank = np.zeros((100, rows.shape[1]), np.float32)
    return np.concatenate([rows, blank])[keys]


def test_rows_land_as_the_model_has_them(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, _, _, model = trained
    rng = np.random.default_rng(4)
    with eps.reader(cluster.url, every=0.005) as reader, PullServer(reader, "127.0.0.1", 0) as relay:
        eventually(shows(reader, model))
        with eps.remote_reader(relay.address) as remote:
            retained = []
            for at_once in (16 << 20, 5000):  # the second: in many answers
                monkeypatch.setattr(remote_module, "AT_ONCE_BYTES", at_once)
                for count in (0, 1, 2, 7, 341, 8191, 30_000):
                    keys = {name: keys_of(rng, count) for name in model}
                    found = remote.pull(keys)
                    retained += [(found[name], expected(model[name], keys[name])) for name in model]
            for rows, full in retained:  # later answers have not touched those before
                assert rows.flags.writeable
                np.testing.assert_array_equal(rows, full)


def test_many_pull_at_once_and_each_gets_its_rows(trained: Any) -> None:
    cluster, _, _, model = trained
    wrong: list[str] = []

    def pulls(address: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            with eps.remote_reader(address) as remote:
                for _ in range(40):
                    name, keys = list(model)[rng.integers(3)], keys_of(rng, int(rng.choice([3, 500, 9000])))
                    if not (remote.pull({name: keys})[name] == expected(model[name], keys)).all():
                        wrong.append(f"{len(keys)} rows of {name}")
        except Exception as error:
            wrong.append(repr(error))

    with eps.reader(cluster.url, every=0.005) as reader, PullServer(reader, "127.0.0.1", 0) as relay:
        eventually(shows(reader, model))
        threads = [threading.Thread(target=pulls, args=(relay.address, seed)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert reader.stats().pulls >= 240
    assert not wrong


def ask(raw: socket.socket, parts: list[tuple[int, NDArray[np.int64]]]) -> tuple[Header, bytes]:
    """Pulls several tables in one frame."""
    body = b"".join(table_block(number, len(keys)) + keys.tobytes() for number, keys in parts)
    raw.sendall(Header(Kind.PULL, TABLES, len(body), 7, items=len(parts)).pack() + body)
    data = raw.makefile("rb")
    header = unpack_header(data.read(HEADER_BYTES))
    return header, data.read(header.body)


def test_one_frame_may_name_several_tables(trained: Any, tmp_path: Path) -> None:
    cluster, ps, tables, model = trained
    rng = np.random.default_rng(5)
    place = f"file://{tmp_path}/checkpoints"
    checkpoint_cluster(cluster.operator_url, place)
    before = {name: rows.copy() for name, rows in model.items()}
    with eps.reader(cluster.url, every=0.005) as reader, PullServer(reader, "127.0.0.1", 0) as relay:
        host, _, port = relay.address.rpartition(":")
        ps.push({tables[name]: (np.arange(ROWS), np.ones_like(rows)) for name, rows in model.items()}).result()
        for rows in model.values():
            rows += 1
        eventually(shows(reader, model))
        with reader.lock:
            numbers = {table.spec.name: table.number for table in reader.table_rows.values()}
        with socket.create_connection((host, int(port)), timeout=30) as raw:

            def check(shown: Model, sizes: tuple[int, ...]) -> None:
                parts = [(name, keys_of(rng, size)) for name, size in zip(shown, sizes, strict=True)]
                header, body = ask(raw, [(numbers[name], keys) for name, keys in parts])
                assert (header.kind, header.items) == (Kind.ROWS, sum(sizes))
                full = b"".join(expected(shown[name], keys).tobytes() for name, keys in parts)
                assert body == full + bytes(-len(full) % 8)

            check(model, (5, 1000, 0))
            check(model, (1, 1, 1))
            check(model, (0, 0, 0))
            reader.pin(place)
            check(before, (9, 2000, 3))
            reader.follow()
            check(model, (1001, 2, 2))
            # Nothing of an answer that is refused has left.
            header, body = ask(raw, [(numbers["odd"], np.arange(9)), (999, np.arange(3))])
            assert header.kind == Kind.ERROR
            assert b"no table of id 999" in body
            ps.drop_table("odd")
            eventually(lambda: "odd" not in reader.tables)
            header, body = ask(raw, [(numbers["odd"], np.arange(9))])
            assert header.kind == Kind.ERROR
            assert b"unknown-table" in body
            del model["odd"]
            check(model, (77, 78))


@pytest.mark.parametrize("odd", ["shorter", "longer", "fewer"])
def test_an_answer_of_another_length_is_refused(trained: Any, monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    cluster, _, _, model = trained
    with eps.reader(cluster.url, every=0.005) as reader, PullServer(reader, "127.0.0.1", 0) as relay:
        eventually(shows(reader, model))
        with eps.remote_reader(relay.address) as remote:

            def answers(parts: Any, most_bytes: int, gather: Any) -> NDArray[np.uint8]:
                floats = {"shorter": 6, "longer": 10, "fewer": 8}[odd]
                header = RowsHeader(remote._requests, 0, 0, 8 - (odd == "fewer"), True).header(4 * floats)
                return np.frombuffer(header.pack() + bytes(4 * floats), np.uint8)

            with monkeypatch.context() as patch:
                patch.setattr(reader, "pull_numbered", answers)
                with pytest.raises(eps.ServerError, match="answers a pull with ROWS of"):
                    remote.pull({"one": np.arange(8)})
            assert (remote.pull({"one": np.arange(8)})["one"] == model["one"][:8]).all()


def test_a_message_leaves_whole_though_the_other_end_reads_slowly() -> None:
    one, other = socket.socketpair()
    data = np.random.default_rng(6).integers(0, 256, 4 << 20, np.uint8)
    with one, other:
        stream, read = PeerStream(one, 30.0), bytearray()

        def slowly() -> None:
            while len(read) < len(data) + 8:
                read.extend(other.recv(50_000))

        thread = threading.Thread(target=slowly)
        thread.start()
        stream.send([data.data])
        stream.send([b"1234", np.frombuffer(b"5678", np.uint8).data])
        thread.join()
        assert bytes(read) == data.tobytes() + b"12345678"
        other.sendall(b"end")
        buffer = memoryview(bytearray(10))
        assert bytes(buffer[: stream.recv_into(buffer)]) == b"end"
        stream.timeout_s = 0.01
        with pytest.raises(TimeoutError, match="nothing has moved"):
            stream.recv_into(buffer)
        with pytest.raises(TimeoutError, match="nothing has moved"):
            stream.send([data.data])
        other.close()
        with pytest.raises(OSError, match=r"pipe|reset"):
            stream.send([data.data])
        stream.close()


def test_what_no_reader_answers_is_named_with_what_to_do() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(eps.ClusterUnreachable, match="Does an `elasticps reader --listen` run there"),
    ):
        eps.remote_reader(f"127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)


def test_keys_without_a_table_are_refused(trained: Any) -> None:
    cluster, _, _, model = trained
    with (
        eps.reader(cluster.url, every=0.005) as reader,
        PullServer(reader, "127.0.0.1", 0) as relay,
        eps.remote_reader(relay.address) as remote,
    ):
        eventually(shows(reader, model))
        with pytest.raises(eps.InputError, match="a mapping from names of tables to keys, got ndarray"):
            remote.pull(np.arange(3))  # type: ignore[arg-type]
        np.testing.assert_array_equal(remote.pull({"odd": np.arange(3)})["odd"], model["odd"][:3])
