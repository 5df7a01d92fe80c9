"""Rows in a worker's cache are those of the servers, within the allowed staleness."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from elasticps.errors import Closed, ConfigError, InputError, NotFinite, SpecError, UnknownTable
from elasticps.metrics import ClientMetrics
from elasticps.model.spec import Filter, ServerOptimizer
from tests.e2e.conftest import Connect

KEYS = np.arange(60)
DIM = 5
Eventually = Callable[[Callable[[], bool]], None]


def some(random: np.random.Generator, most: int = 30, *, repeats: bool = False) -> np.ndarray:
    return random.choice(KEYS, random.integers(1, most), replace=repeats)


def floats(random: np.random.Generator, n: int) -> np.ndarray:
    return random.normal(size=(n, DIM)).astype(np.float32)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "push"),
    [
        (eps.SGD(lr=0.1), "float32", []),
        (eps.SGD(lr=0.1, momentum=0.9), "float32", []),
        (eps.Adagrad(lr=0.1), "bfloat16", [eps.Int8()]),
        (eps.RowAdagrad(lr=0.1), "float32", [eps.KeysOnce()]),
        (eps.Adam(lr=0.01), "float32", [eps.TopK(0.5), eps.BFloat16()]),
        (eps.FTRL(lr=0.1, l1=0.01), "float16", []),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_a_worker_alone_sees_the_rows_of_the_servers(
    connect: Connect, eventually: Eventually, optimizer: ServerOptimizer, dtype: str, push: Sequence[Filter]
) -> None:
    """To the bit, whatever it pushes, and though its keys do not all fit."""
    ps, random = connect(), np.random.default_rng(1)
    init = eps.Normal(std=0.1, seed=3)
    table = ps.table(
        "t", dim=DIM, optimizer=optimizer, init=init, dtype=dtype, push=push, cache=eps.Cache(rows=40, staleness=3)
    )
    for step in range(60):
        keys = some(random, repeats=bool(step % 2))
        read = table.pull_async(keys)
        eventually(read.done)
        shown = read.result() if step % 3 else table.pull(keys, out=np.empty((len(keys), DIM), np.float32))
        assert shown.tobytes() == table.pull(keys, exact=True).tobytes()
        pushed = some(random, repeats=bool(step % 5 == 0))
        with ps.step() as part:
            for half in np.array_split(np.unique(pushed), 2) if step % 4 == 0 else [pushed]:
                part.push({table: (half, floats(random, len(half)))})
                open_now = table.pull(half)  # which parts of the open step are in it, nobody says
                assert open_now.shape == (len(half), DIM)
    use = table.cached
    assert use.rows == 40
    assert use.given_up
    assert use.hits
    assert use.unchanged
    assert use.oldest == 3
    assert 0 < use.hit_rate < 1
    assert ps.caches() == {"t": use}
    metrics = {family.name: family.samples for family in ClientMetrics(ps).collect()}
    pulls = {sample.labels["outcome"]: sample.value for sample in metrics["elasticps_worker_cache_pulls"]}
    assert pulls == {"hit": use.hits, "unchanged": use.unchanged, "pulled": use.asked - use.hits - use.unchanged}


def test_pushes_of_others_are_seen_within_the_staleness_and_own_ones_at_once(connect: Connect) -> None:
    one, other, random, staleness = connect("w0"), connect("w1"), np.random.default_rng(2), 3
    table = one.table("t", dim=DIM, optimizer=eps.Accumulate(), cache=eps.Cache(rows=1000, staleness=staleness))
    theirs = other.table("t", dim=DIM, optimizer=eps.Accumulate())
    mine, then = np.zeros((len(KEYS), DIM)), [np.zeros((len(KEYS), DIM))]  # and what the other had pushed, by my clock
    worst = 0
    for step in range(40):
        keys = some(random)
        other.push({theirs: (keys, np.ones((len(keys), DIM), np.float32))}).result()
        total = then[-1].copy()
        total[keys] += 1
        then[-1] = total
        requested = some(random)
        shown = table.pull(requested)
        of_other = shown - mine[requested]
        assert (of_other >= then[max(0, step - staleness)][requested]).all()
        assert (of_other <= total[requested]).all()
        worst = max(
            worst,
            *(
                sum((then[at][key] > row).any() for at in range(step + 1))
                for key, row in zip(requested, of_other, strict=True)
            ),
        )
        pushed = some(random)
        one.push({table: (pushed, np.full((len(pushed), DIM), 100, np.float32))})
        mine[pushed] += 100
        then.append(then[-1])
    assert 0 < worst <= staleness + 1
    assert table.cached.oldest == staleness
    one.flush()
    for _ in range(staleness + 1):
        one.push({})
    assert table.pull(KEYS).tobytes() == table.pull(KEYS, exact=True).tobytes()


def test_rows_that_others_train_come_back_with_their_optimizer_state(connect: Connect) -> None:
    one, other, random = connect("w0"), connect("w1"), np.random.default_rng(3)
    optimizer = eps.Adagrad(lr=0.1)
    table = one.table("t", dim=DIM, optimizer=optimizer, cache=eps.Cache(rows=1000, staleness=2))
    theirs = other.table("t", dim=DIM, optimizer=optimizer)
    for _ in range(6):
        other.push({theirs: (KEYS, floats(random, len(KEYS)))}).result()
        for _ in range(8):
            table.pull(KEYS)
            one.push({table: (KEYS, floats(random, len(KEYS)))}).result()
        assert table.pull(KEYS).tobytes() == table.pull(KEYS, exact=True).tobytes()
    assert table.cached.hits > 0.4 * table.cached.asked


def test_with_staleness_0_a_pull_transfers_only_changed_rows(connect: Connect) -> None:
    one, other, random = connect("w0"), connect("w1"), np.random.default_rng(4)
    table = one.table("t", dim=64, optimizer=eps.Accumulate(), cache=eps.Cache(rows=1000, staleness=0))
    theirs = other.table("t", dim=64, optimizer=eps.Accumulate())
    table.pull(KEYS)
    before = table.cached.nbytes
    for _ in range(10):
        keys = some(random, 4)
        other.push({theirs: (keys, np.ones((len(keys), 64), np.float32))}).result()
        one.push({table: (keys, np.ones((len(keys), 64), np.float32))}).result()
        assert table.pull(KEYS).tobytes() == table.pull(KEYS, exact=True).tobytes()
    use = table.cached
    assert (use.hits, use.oldest) == (0, 0)
    assert use.nbytes - before < 0.25 * 10 * KEYS.size * 256


def test_bounded_delay_holds(connect: Connect) -> None:
    """Of both, with rows kept for a part of it: a worker sees all steps of the other up to its own less the bound."""
    bound, steps = 4, 60
    failed: list[BaseException] = []
    above: dict[int, int] = {}  # by column: the clock that its worker has started above

    def train(worker: str, column: int) -> None:
        try:
            ps = connect(worker, consistency=eps.SSP(staleness=bound))
            table = ps.table("t", dim=2, optimizer=eps.Accumulate(), cache=eps.Cache(rows=100, staleness=3))
            ones = np.zeros((5, 2), np.float32)
            ones[:, column] = 1
            ready.wait(100)
            above[column] = ps.resume().clock
            for _ in range(steps):
                others = above.get(1 - column)
                rows = table.pull(np.arange(5))
                assert (rows[:, column] == ps.clock - above[column]).all()
                if others is not None:
                    least = min(ps.clock - bound - others, steps)  # who started lower may have gone
                    assert (rows[:, 1 - column] >= least).all(), (rows, ps.clock, above)
                ps.push({table: (np.arange(5), ones)})
            ps.flush()
            assert table.cached.hits
            ps.close()
        except BaseException as error:
            failed.append(error)

    ready = threading.Barrier(2)
    threads = [threading.Thread(target=train, args=(f"w{i}", i)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_worker_that_joins_starts_no_lower_than_the_rows_shown_to_others(connect: Connect) -> None:
    """A worker asks where to start, and takes part a moment later: what others pull in between knows nothing of it, and
    is shown later, when its steps count."""
    bound, keys = 4, np.arange(5)
    one, other = (connect(name, consistency=eps.SSP(staleness=bound)) for name in ("w0", "w1"))
    table = one.table("t", dim=1, optimizer=eps.Accumulate(), cache=eps.Cache(rows=100, staleness=3))
    theirs = other.table("t", dim=1, optimizer=eps.Accumulate())
    ones = np.ones((5, 1), np.float32)
    one.push({table: (keys, ones)})
    joining, joined = other._steps._joining, list[int]()
    take_part = joining._take_part

    def a_moment_later(base: int, begin: Callable[[], None] = lambda: None) -> None:
        if not joined:
            for _ in range(bound - 1):
                one.push({table: (keys, ones)})
            assert (table.pull(keys) == one.clock).all()  # kept for three steps
        joined.append(base)
        take_part(base, begin)

    joining._take_part = a_moment_later  # type: ignore[method-assign]
    above = other.resume().clock
    for _ in range(bound):
        other.push({theirs: (keys, 100 * ones)})
    other.flush()
    for _ in range(3):
        one.push({table: (keys, ones)})
    shown = table.pull(keys)
    assert table.cached.oldest == 3
    assert (shown // 100 >= one.clock - bound - above).all(), (shown, one.clock, above)


def test_rows_older_than_the_consistency_allows_are_refused(connect: Connect) -> None:
    cache = eps.Cache(rows=10, staleness=5)
    with pytest.raises(ConfigError, match=r"under BSP .*prefetch"):
        connect("b", consistency=eps.BSP()).table("t", dim=1, optimizer=eps.SGD(lr=0.1), cache=cache)
    with pytest.raises(ConfigError, match=r"Cache\(staleness=5\) .* SSP\(staleness=4\)"):
        connect("s", consistency=eps.SSP(staleness=4)).table("t", dim=1, optimizer=eps.SGD(lr=0.1), cache=cache)
    for rows, staleness in ((0, 1), (1, -1), (1 << 40, 1), (1.5, 1), (1, True)):
        with pytest.raises(SpecError, match="Cache"):
            eps.Cache(rows=rows, staleness=staleness)  # type: ignore[arg-type]
    table = connect().table("u", dim=1, optimizer=eps.SGD(lr=0.1), cache=cache)
    for early in (0, -1, 1.5, True, "x"):
        with pytest.raises(InputError, match="ahead"):
            table.fetch([1], early)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="keeps no rows"):
        connect().table("t", dim=1, optimizer=eps.SGD(lr=0.1)).fetch([1])


def test_loads_deletions_clears_and_drops_are_seen_at_once(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=DIM, optimizer=eps.Adagrad(lr=0.1), cache=eps.Cache(rows=100, staleness=1000))
    same = ps.open("t")
    assert same is table
    ones = np.ones((len(KEYS), DIM), np.float32)

    def agrees() -> None:
        assert table.pull(KEYS).tobytes() == table.pull(KEYS, exact=True).tobytes()

    ps.push({table: (KEYS, ones)})
    agrees()
    table.load(KEYS[:30], 7 * ones[:30])
    agrees()
    ps.push({table: (KEYS, ones)}).result()
    agrees()
    table.delete(KEYS[10:40])
    agrees()
    ps.push({table: (KEYS, ones)}).result()
    agrees()
    ps.clear_table("t")
    agrees()
    table.clear()
    agrees()
    ps.drop_table("t")
    with pytest.raises(UnknownTable):
        table.pull(KEYS)
    ps.close()
    with pytest.raises(Closed):
        table.pull(KEYS[:0])


def test_a_refused_push_is_not_shown(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=2, optimizer=eps.SGD(lr=0.1), finite=True, cache=eps.Cache(rows=100, staleness=1000))
    assert not table.pull([1, 2]).any()
    with pytest.raises(NotFinite):
        ps.push({table: ([1, 2], np.array([[1, np.nan], [1, 1]], np.float32))}).result()
    assert table.pull([1, 2]).tobytes() == table.pull([1, 2], exact=True).tobytes()


def test_rows_that_come_back_from_a_checkpoint_are_pulled_again(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=2, optimizer=eps.SGD(lr=0.1), cache=eps.Cache(rows=100, staleness=1000))
    table.pull([1, 2])
    with ps._dispatcher.lock:
        ps._dispatcher.on_restored([], 0)
    table.pull([1, 2])
    assert table.cached.hits == 0
    table.pull([1, 2])
    assert table.cached.hits == 2


def test_an_optimizer_that_is_not_known_here_has_its_rows_pulled_again(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=2, optimizer=eps.Accumulate(), cache=eps.Cache(rows=100, staleness=1000))
    cache = table._cache
    assert cache is not None
    cache.applies = False
    for step in range(1, 4):
        ps.push({table: ([1, 2], np.ones((2, 2), np.float32))})
        assert (table.pull([1, 2, 3]) == [[step, step], [step, step], [0, 0]]).all()


def test_rows_fetched_ahead_are_requested_once(connect: Connect, eventually: Eventually) -> None:
    ps, random = connect(), np.random.default_rng(5)
    table = ps.table("t", dim=DIM, optimizer=eps.Adagrad(lr=0.1), cache=eps.Cache(rows=1000, staleness=4))
    cache = table._cache
    assert cache is not None
    batches = [some(random) for _ in range(30)]
    for batch in batches:  # what was trained before
        ps.push({table: (batch, floats(random, len(batch)))})
    ps.flush()
    late: list[int] = []
    for at, batch in enumerate(batches):
        for early in (2, 3):
            if at + early < len(batches):
                table.fetch(batches[at + early], early)
        before = table.cached
        eventually(lambda: all(each.come for each in list(cache._batches.values())))
        table.fetch([])  # slots of what has come are asked for
        eventually(lambda: all(each.read.done() for each in list(cache._slots)))
        assert table.pull(batch).tobytes() == table.pull(batch, exact=True).tobytes()
        late.append(table.cached.asked - before.asked - (table.cached.hits - before.hits))
        ps.push({table: (batch, floats(random, len(batch)))})
    assert not any(late[3:]), late
    assert table.cached.oldest <= 4


def test_several_threads_share_a_cache(connect: Connect) -> None:
    """Rows only grow, by what somebody has pushed: all that was pushed when a pull began is in it."""
    ps = connect(window=8)
    failed: list[BaseException] = []
    table = ps.table("t", dim=1, optimizer=eps.Accumulate(), cache=eps.Cache(rows=25, staleness=2))
    pushed = np.zeros(len(KEYS))
    lock = threading.Lock()

    def train(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            for _ in range(60):
                keys = some(random)
                with lock:
                    ps.push({table: (keys, np.ones((len(keys), 1), np.float32))})
                    pushed[keys] += 1
                keys = some(random, repeats=True)
                least = pushed[keys].copy()
                rows = table.pull(keys)[:, 0]
                with lock:
                    assert (least <= rows).all(), (least, rows)
                    assert (rows <= pushed[keys]).all()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert (table.pull(KEYS)[:, 0] == pushed).all()
    assert (table.pull(KEYS, exact=True)[:, 0] == pushed).all()


def test_a_thread_does_not_take_slots_of_another_threads_unsent_request(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, ps, keys = connect("w0"), connect("w1"), KEYS[:20]
    made = [
        each.table("t", dim=DIM, optimizer=eps.Adagrad(lr=0.1), cache=eps.Cache(rows=40, staleness=9) if own else None)
        for each, own in ((other, False), (ps, True))
    ]
    other.push({made[0]: (keys, np.ones((20, DIM), np.float32))}).result()
    cache = made[1]._cache
    assert cache is not None
    start = cache._reads.start

    def late(*given: Any) -> Any:
        beside = threading.Thread(target=lambda: cache.settle(ask=False))
        beside.start()
        beside.join()
        return start(*given)

    monkeypatch.setattr(cache._reads, "start", late)
    made[1].fetch(keys, 5)
    for _ in range(3):
        made[1].pull(keys)
        ps.push({made[1]: (keys, np.ones((20, DIM), np.float32))}).result()
        assert made[1].pull(keys).tobytes() == made[1].pull(keys, exact=True).tobytes()
