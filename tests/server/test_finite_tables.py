"""Tables that take finite gradients only."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from elasticps.client.connections import server_error
from elasticps.errors import NotFinite, SpecError
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import TableSpec
from elasticps.server.core.validation import not_finite
from elasticps.server.fast.layout import H_ENABLED
from elasticps.store import Table
from elasticps.wire.frames import (
    HEADER_BYTES,
    Block,
    Header,
    Kind,
    grads_padding,
    json_body,
    json_frame,
)
from elasticps.wire.headers import PushHeader
from replication.progress import before_part
from tests.server.conftest import DIM, RANGES, TABLE, Group, Run


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("finite", [True, False])
def test_gradients_that_are_not_finite_are_refused_at_the_edge(run: Run, finite: bool, compiled: bool) -> None:
    spec = TableSpec("t", DIM, Accumulate(), finite=finite)

    async def story(group: Group) -> None:
        for name in "ab":
            (await group.start(name)).fast.h[H_ENABLED] = compiled
        view = group.make_view(lambda r: ["a", "b"])
        group.adopt(view)
        worker = await group.connect("a", create=False)
        body = json_frame(Kind.CREATE, {"id": TABLE, "spec": spec.to_json()})[HEADER_BYTES:]
        header, _ = await asyncio.wait_for(worker.ask(Header(Kind.CREATE, epoch=view.epoch), body), 10)
        assert header.kind == Kind.OK
        for clock, value in enumerate([1.0, np.nan, np.inf, 2.0], 1):
            header, body = await asyncio.wait_for(worker.push(view, "a", clock, range(50), value), 10)
            assert header.kind == (Kind.OK if np.isfinite(value) or not finite else Kind.ERROR)
            if header.kind == Kind.ERROR:
                error = server_error(json_body(body), "a")
                assert isinstance(error, NotFinite)
                assert error.table == "t"
                assert 0 <= error.key < 50
                assert sorted(json_body(body)["rows"][str(TABLE)]) == list(range(50))
        if finite:  # only gradients that are not finite are refused
            parts = worker._block(view, "a", range(60), 0.0)
            keys = np.frombuffer(parts, np.int64, 60, offset=24)
            grads = np.full((60, DIM), 7.0, np.float32)
            grads[np.isin(keys, [3, 20])] = np.nan
            grads[keys < 50] -= 7.0
            header = PushHeader(0, view.epoch, 5, before_part(5, 0), 1).header(0)
            body = parts[: 24 + 8 * 60] + grads.tobytes()
            header, body = await asyncio.wait_for(worker.ask(header, body + b"\0" * grads_padding(60, DIM)), 10)
            assert sorted(json_body(body)["rows"][str(TABLE)]) == [3, 20]
            assert server_error(json_body(body), "a").key in (3, 20)  # type: ignore[attr-defined]
            assert all(server.store.rows == 60 for server in group.servers.values())
        tables = [server.store.tables[TABLE] for server in group.servers.values()]
        for r in range(RANGES):
            assert len({table.digest_range(r) for table in tables}) == 1
        out = np.empty((50, DIM), np.float32)
        tables[0].gather(np.arange(50), out)
        assert (out == 3.0).all() if finite else np.isnan(out).all()

    run(story)


def test_finite_is_part_of_the_spec() -> None:
    spec = TableSpec("t", 4, Accumulate(), finite=True)
    assert TableSpec.from_json(spec.to_json()) == spec
    assert "finite is True, not False" in spec.difference(TableSpec("t", 4, Accumulate()))
    with pytest.raises(SpecError, match="finite"):
        TableSpec("t", 4, Accumulate(), finite=1)  # type: ignore[arg-type]


def test_scores_that_are_none_are_refused_though_gradients_may_be_anything() -> None:
    """No client sends them: with a score below 0 a sweep would choose other rows of older files than of the table."""
    table = Table(TableSpec("t", DIM, Accumulate(), usage="score"), TABLE, RANGES)
    grads = np.ones((5, DIM + 1), np.float32)
    grads[:, -1] = 0.0, -1.0, np.nan, np.inf, 2.0
    grads[4, 0] = np.nan
    block = Block(TABLE, np.arange(5), grads, np.empty(0, np.float32))
    assert not_finite(table, block).tolist() == [False, True, True, True, False]
