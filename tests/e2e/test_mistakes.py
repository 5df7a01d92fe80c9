"""What users get wrong in calls of the public API, and what the errors say: what happened, to what, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from elasticps.wire import frames
from tests.e2e.conftest import Connect

SGD = eps.SGD(lr=0.1)
KEYS, GRADS = np.arange(3), np.ones((3, 4), np.float32)

Call = Callable[[Any, Any, Any], object]
MISTAKES: list[tuple[str, Call, str]] = [
    (
        "keys with fractions",
        lambda ps, t, d: ps.push({t: (KEYS + 0.5, GRADS)}),
        "table 't': keys must be int64, got float64: keys are integers; NaN and fractions have no row",
    ),
    (
        "keys that are NaN",
        lambda ps, t, d: t.pull(np.array([np.nan])),
        "table 't': keys must be int64, got float64: keys are integers; NaN and fractions have no row",
    ),
    (
        "strings as keys",
        lambda ps, t, d: t.pull(["a", "b"]),
        "table 't': keys must be int64, got <U1: a key is an integer: number what it stands for, or hash it to int64",
    ),
    ("no keys", lambda ps, t, d: t.pull(None), "table 't': keys must be int64, got NoneType: a key is an integer"),
    (
        "keys without a sign",
        lambda ps, t, d: t.pull(KEYS.astype(np.uint64)),
        "table 't': keys must be int64, got uint64: convert with .astype(np.int64); keys may be negative",
    ),
    (
        "a mask as keys",
        lambda ps, t, d: t.pull(np.array([True, False])),
        "table 't': keys must be int64, got bool: take the positions that a mask selects with np.flatnonzero(mask)",
    ),
    (
        "gradients of another shape",
        lambda ps, t, d: ps.push({t: (KEYS, GRADS[:2])}),
        "table 't': grads must have shape (3, 4), got (2, 4): a row for each key",
    ),
    (
        "gradients of another dtype",
        lambda ps, t, d: ps.push({t: (KEYS, GRADS.astype(np.float64))}),
        "table 't': grads must be float32, got float64; convert with .astype(np.float32)",
    ),
    (
        "no gradients",
        lambda ps, t, d: ps.push({t: (KEYS, None)}),
        "table 't': grads must be float32 of shape (3, 4), got None",
    ),
    (
        "gradients of different lengths",
        lambda ps, t, d: ps.push({t: (KEYS, [[1.0, 2.0], [3.0]])}),
        "table 't': grads must be float32 of shape (3, 4), and this list is no such array: it holds what is no number, "
        "or lists of different lengths",
    ),
    (
        "three instead of a pair",
        lambda ps, t, d: ps.push({t: (KEYS, GRADS, GRADS)}),
        "table 't' keeps no scores: push a pair (keys, grads), or make it with usage=\"score\"",
    ),
    (
        "four instead of a pair",
        lambda ps, t, d: ps.push({t: (KEYS, GRADS, GRADS, GRADS)}),
        "table 't': push a pair (keys, grads), got a tuple of 4",
    ),
    (
        "no mapping",
        lambda ps, t, d: ps.push([(t, KEYS, GRADS)]),
        "push takes a mapping from tables and tensors, as {table: (keys, grads), tensor: grad}, got list",
    ),
    (
        "a name instead of a table",
        lambda ps, t, d: ps.push({"t": (KEYS, GRADS)}),
        "push takes tables and tensors as keys, as ps.table(…) returns them, got 't'",
    ),
    (
        "a name instead of a tensor",
        lambda ps, t, d: ps.pull_many(["d"]),
        "pull_many takes tensors, as ps.tensor(…) returns them, got 'd'",
    ),
    (
        "a gradient of another shape than its tensor",
        lambda ps, t, d: ps.push({d: np.zeros((3, 2), np.float32)}),
        "tensor 'd' must have shape (2, 3), got (3, 2)",
    ),
    (
        "no gradient for a tensor",
        lambda ps, t, d: ps.push({d: None}),
        "tensor 'd' must be float32 of shape (2, 3), got None",
    ),
    (
        "a tensor without values",
        lambda ps, t, d: ps.tensor("e", init=None, optimizer=SGD),
        "a tensor needs init=, float32 values of its shape, got None",
    ),
    (
        "a tensor opened as a table",
        lambda ps, t, d: ps.table("d", dim=3, optimizer=SGD),
        "'d' exists, as a dense tensor of shape (2, 3). Open it with ps.tensor, or use another name",
    ),
    (
        "a table opened as a tensor",
        lambda ps, t, d: ps.tensor("t", init=np.zeros(4, np.float32), optimizer=SGD),
        "'t' exists, as a table of dim 4. Open it with ps.table, or use another name",
    ),
    (
        "an optimizer's class",
        lambda ps, t, d: ps.table("e", dim=4, optimizer=eps.SGD),
        "table 'e': optimizer must be one of elasticps' optimizers, such as SGD(lr=0.1), got the class SGD",
    ),
]


@pytest.mark.parametrize(("call", "text"), [each[1:] for each in MISTAKES], ids=[each[0] for each in MISTAKES])
def test_a_mistake_is_answered_with_what_to_do(connect: Connect, call: Call, text: str) -> None:
    ps = connect()
    table = ps.table("t", dim=4, optimizer=SGD)
    tensor = ps.tensor("d", init=np.zeros((2, 3), np.float32), optimizer=SGD)
    with pytest.raises((eps.InputError, eps.SpecError)) as caught:
        call(ps, table, tensor)
    assert str(caught.value).startswith(text)
    ps.push({table: (KEYS, GRADS), tensor: np.ones((2, 3), np.float32)}).result()  # nothing was broken
    assert (tensor.pull() == np.float32(-0.1)).all()


def test_a_table_that_was_dropped_is_named(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=4, optimizer=SGD)
    ps.drop_table("t")
    with pytest.raises(eps.UnknownTable, match=r"table 't': server s\d has no table with id \d+: it was dropped; open"):
        table.pull(KEYS)
    with pytest.raises(eps.InputError, match="push: 't' is not open on this client: it was dropped"):
        ps.push({table: (KEYS, GRADS)})


def test_a_worker_of_another_protocol_is_told_both_versions(
    cluster: eps.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = frames.VERSION
    monkeypatch.setattr(frames, "VERSION", ours + 1)
    with pytest.raises(eps.VersionMismatch, match=rf"wire version {ours}, this side speaks {ours + 1}"):
        eps.connect(cluster.url, worker="from-another-release", timeout=60.0).close()
