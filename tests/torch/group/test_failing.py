"""Errors at a rank of a group reach all ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from torch import nn

import elasticps as eps
from elasticps.torch import (
    GroupClient,
    Optimizer,
)
from elasticps.torch.group import rendezvous
from elasticps.torch.group.links import Links
from tests.torch.fake_ps import FakeClient
from tests.torch.group.ranks import clients, linked, together


def failing(does: Callable[[GroupClient], object], error: type[Exception], match: str, **options: Any) -> None:
    """Checks that all ranks get this error."""

    def run(ps: GroupClient) -> None:
        with pytest.raises(error, match=match):
            does(ps)

    with clients(FakeClient(), 3, **options) as group:
        together(run, group)


def test_ranks_that_call_different_methods_are_told_which() -> None:
    def differ(ps: GroupClient) -> None:
        table = ps.table("rows" if ps.rank < 2 else "others", dim=2, optimizer=eps.SGD(lr=1.0))
        table.pull([1])

    failing(differ, eps.GroupLost, "rank 0 does \"table 'rows'.*while rank 2 does \"table 'others'")


def test_an_error_of_rank_0_is_raised_at_every_rank() -> None:
    def refuse(ps: GroupClient) -> None:
        def full() -> None:
            raise eps.ServerError("no room")

        with pytest.raises(eps.ServerError, match="no room"):
            ps.together("something", full)
        tensor = ps.tensor("w", init=np.zeros(2, np.float32), optimizer=eps.SGD(lr=1.0))
        ps.push({tensor: np.ones(2, np.float32)})
        np.testing.assert_array_equal(tensor.pull(), [-3, -3])
        ps.together("something", lambda: [][1])

    failing(refuse, (eps.GroupLost, IndexError), "index")  # type: ignore[arg-type]


@pytest.mark.parametrize("dead", [0, 2])
def test_a_rank_that_ends_ends_the_group(dead: int) -> None:
    def end(ps: GroupClient) -> None:
        tensor = ps.tensor("w", init=np.zeros(2, np.float32), optimizer=eps.SGD(lr=1.0))
        if ps.rank == dead:
            ps.close()
        for _ in range(2):  # whoever goes on is told again
            with pytest.raises(eps.GroupLost, match=f"rank {dead} of the group has ended|closed at this rank"):
                ps.push({tensor: np.ones(2, np.float32)})

    with clients(FakeClient(), 3) as group:
        together(end, group)


def test_a_missing_rank_is_named() -> None:
    with linked(3, timeout_s=0.05) as links:
        requested = threading.Event()  # rank 2 has, before rank 0 begins to wait

        def take_part(each: Links) -> None:
            if each.rank == 0:
                assert requested.wait(60)
            number, _ = each.ask("sum")
            requested.set()
            each.answer(number)

        def ask(each: Links) -> None:
            if each.rank != 1:
                with pytest.raises(
                    eps.GroupLost, match=r"rank 1 of the group did not come to 'sum' within|silent|answer"
                ):
                    take_part(each)

        together(ask, links)


def test_a_forked_child_leaves_the_group() -> None:
    with linked(2) as links:
        child = os.fork()
        if child == 0:
            ended = all(each.fileno() < 0 for link in links for each in link._sockets.values())
            os._exit(0 if ended else 1)
        assert os.waitpid(child, 0)[1] == 0

        def ask(each: Links) -> None:
            each.answer(each.ask("sum")[0])

        together(ask, links)


def test_errors_reach_other_ranks_with_all_their_details() -> None:
    def refuse(ps: GroupClient) -> None:
        def full() -> None:
            error = eps.ServerFull("there is no room", "s1", "rows", 96)
            error.refused = {"rows": np.array([3, 1 << 60]), "others": np.array([0])}
            later = eps.NotFinite("row 9 is not finite", "rows", 9)
            later.refused = {"rows": np.array([9])}
            error.others = [later]
            raise error

        with pytest.raises(eps.ServerFull, match="no room") as caught:
            ps.together("something", full)
        assert (caught.value.server, caught.value.table, caught.value.nbytes) == ("s1", "rows", 96)
        assert {name: keys.tolist() for name, keys in caught.value.refused.items()} == {
            "rows": [3, 1 << 60],
            "others": [0],
        }
        (later,) = caught.value.others
        assert isinstance(later, eps.NotFinite)
        assert (later.key, later.refused["rows"].tolist()) == (9, [9])

    with clients(FakeClient(), 2) as group:
        together(refuse, group)


def test_errors_with_local_details_reach_other_ranks_as_their_base_class() -> None:
    def refuse(ps: GroupClient) -> None:
        def lost() -> None:
            raise eps.DataLost("2 ranges were lost", object())

        with pytest.raises(eps.Definite, match="2 ranges") as caught:
            ps.together("something", lost)
        assert isinstance(caught.value, eps.DataLost) == (ps.rank == 0)

    with clients(FakeClient(), 2) as group:
        together(refuse, group)


def test_bad_input_is_refused_before_other_ranks_are_contacted() -> None:
    def wrong(ps: GroupClient) -> None:
        table = ps.table("rows", dim=2, optimizer=eps.SGD(lr=1.0))
        tensor = ps.tensor("w", init=np.zeros(2, np.float32), optimizer=eps.SGD(lr=1.0))
        ones = np.ones(2, np.float32)
        values: list[Any] = [
            {tensor: np.ones(2)}, {tensor: np.ones(3, np.float32)}, {table: ones}, {"w": ones},
            {table: ([1, 2], np.ones((1, 2), np.float32))}, {table: ([0.5], np.ones((1, 2), np.float32))},
        ]  # fmt: skip
        for each in values:
            with pytest.raises(eps.InputError):
                ps.push(each)
        with pytest.raises(eps.InputError):
            table.pull([0.5])
        with pytest.raises(eps.InputError, match="3 ranks"):
            ps.shards(10, 9)
        model = nn.Linear(2, 1)
        optimizer = Optimizer(ps, model, eps.SGD(lr=1.0), overlap=False)
        with pytest.raises(eps.ConfigError, match="group"):
            optimizer.clip_grad_norm_(1.0)
        ps.push({tensor: ones})
        np.testing.assert_array_equal(tensor.pull(), [-3, -3])

    with clients(FakeClient(), 3) as group:
        together(wrong, group)


def test_a_push_that_fails_leaves_all_ranks_with_as_much_room() -> None:
    """A rank that has more than its room gets more with the answer of the push, which rank 0's error takes the place
    of. Rank 0 would look for the next gradients where nobody puts them."""

    class Failing(FakeClient):
        def push(self, grads: Mapping[Any, Any], lr: Mapping[Any, float] | None = None) -> Any:
            if any(len(value[0]) > 50 for value in grads.values()):
                raise eps.Timeout("the servers do not answer")
            return super().push(grads, lr)

    def rows(first: int, n: int) -> tuple[Any, Any]:
        return np.arange(first, first + n), np.full((n, 2), first + 1.0, np.float32)

    def push_and_settle(group: GroupClient, values: Any) -> None:
        group.push(values)
        group.settle()

    def train(group: GroupClient) -> None:
        table = group.table("t", dim=2, optimizer=eps.SGD(lr=1.0), init=eps.Zeros())
        push_and_settle(group, {table: rows(10 * group.rank, 5)})
        with pytest.raises(eps.Timeout):
            push_and_settle(group, {table: rows(1_000, 1 + 500 * group.rank)})
        for _ in range(2):
            push_and_settle(group, {table: rows(10 * group.rank, 5)})

    ps: Any = Failing()
    with clients(ps, 3) as group:
        together(train, group)
    expected = {10 * rank + i: -3 * (10.0 * rank + 1) for rank in range(3) for i in range(5)}
    assert {key: row[0] for key, row in ps.targets["t"].weights.items()} == expected


def test_failed_pulls_of_rank_0_return_their_memory() -> None:
    class Failing(FakeClient):
        def pull_async(self, keys: Mapping[Any, Any], out: Mapping[Any, Any], **_: Any) -> Any:
            raise eps.Timeout("the servers do not answer")

    def pull(group: GroupClient) -> None:
        table = group.table("t", dim=2, optimizer=eps.SGD(lr=1.0))
        for _ in range(5):
            with pytest.raises(eps.Timeout):
                group.pull({table: np.arange(3)})
        if not group.rank:
            assert group.slots._made == 1

    ps: Any = Failing()
    with clients(ps, 2) as group:
        together(pull, group)


def test_a_process_of_another_user_does_not_delay_the_group() -> None:
    """Any user may call an abstract address, and say nothing."""

    class Silent:
        def getsockopt(self, *_: int) -> bytes:
            return rendezvous._PEER.pack(1, os.getuid() + 1, 1)

        def settimeout(self, seconds: float) -> None: ...

        def recv(self, *_: int) -> bytes:
            raise AssertionError("it waits for what a stranger says")

    peer: Any = Silent()
    assert rendezvous._caller(peer, b"t" * 16) is None
