from __future__ import annotations

import copy
import io
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elasticps.errors import ConfigError, InputError
from elasticps.model.spec import SGD, Adagrad, Constant, Normal, Zeros
from elasticps.torch import Embedding, EmbeddingBag, Optimizer
from tests.torch.fake_ps import FakeClient


def rows(table: Any, ids: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array([table.row(i) for i in ids]))


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 1, 4), (0,), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_embedding_adds_a_dimension_to_the_shape_of_the_ids(
    ps: Any, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    embedding = Embedding(ps, "users", 4, optimizer=SGD(lr=1.0))
    ids = torch.randint(-5, 5, shape, dtype=dtype, device=device)
    out = embedding(ids)
    assert out.shape == (*shape, 4)
    assert out.device == ids.device
    assert torch.equal(out.cpu().reshape(-1, 4), rows(embedding.table, ids.flatten().tolist()).reshape(-1, 4))


def test_ids_are_any_int64(ps: Any) -> None:
    embedding = Embedding(ps, "users", 2, optimizer=SGD(lr=1.0), init=Zeros())
    ids = torch.tensor([-(2**63), -1, 0, 2**63 - 1])
    optimizer = Optimizer(ps, embedding)
    embedding(ids).sum().backward()
    optimizer.step()
    assert torch.equal(embedding(ids), torch.full((4, 2), -1.0))


def test_each_id_is_pulled_once_and_its_gradients_are_summed(ps: Any) -> None:
    embedding = Embedding(ps, "users", 2, optimizer=SGD(lr=1.0), init=Zeros())
    optimizer = Optimizer(ps, embedding)
    embedding(torch.tensor([[3, 3], [9, 3]])).sum().backward()
    optimizer.step()
    assert ps.tables["users"].pulls == [[3, 9]]
    assert rows(embedding.table, [3, 9]).tolist() == [[-3, -3], [-1, -1]]


def test_without_init_rows_start_normal_and_differ_between_tables(ps: Any) -> None:
    one, two = (Embedding(ps, name, 8, optimizer=SGD(lr=1.0)) for name in ("one", "two"))
    assert isinstance(ps.tables["one"].init, Normal)
    assert ps.tables["one"].init.std == 1.0
    assert not torch.equal(one(torch.tensor([1])), two(torch.tensor([1])))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 2, 99])
@pytest.mark.parametrize("form", ["2d", "offsets", "last_offset"])
def test_a_bag_agrees_with_torchs(ps: Any, mode: str, padding_idx: int | None, form: str) -> None:
    """Forward, and the rows after one SGD step."""
    bag = EmbeddingBag(
        ps, "words", 3, mode, optimizer=SGD(lr=0.5), padding_idx=padding_idx, include_last_offset=form == "last_offset"
    )
    reference = nn.EmbeddingBag(
        100, 3, mode=mode, padding_idx=padding_idx, include_last_offset=form == "last_offset"
    )  # padding_idx's row is zero there
    ids = torch.tensor([[1, 2, 2], [7, 2, 1], [2, 2, 2], [5, 0, 99]])
    known = [i for i in range(100) if i != padding_idx]
    with torch.no_grad():
        reference.weight[known] = rows(bag.table, known)
    arguments = {
        "2d": (ids,),
        "offsets": (ids.flatten(), torch.tensor([0, 4, 4, 11])),
        "last_offset": (ids.flatten(), torch.tensor([0, 4, 4, 12])),
    }[form]
    optimizer = Optimizer(ps, bag)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.5)
    got, want = bag(*arguments), reference(*arguments)
    torch.testing.assert_close(got, want)
    factor = torch.arange(1.0, 1.0 + got.numel()).reshape(got.shape)
    (got * factor).sum().backward()
    (want * factor).sum().backward()
    optimizer.step()
    theirs.step()
    torch.testing.assert_close(rows(bag.table, known), reference.weight[known])
    assert padding_idx not in ps.tables["words"].target.weights


def test_a_bag_weighs_its_samples(ps: Any) -> None:
    bag = EmbeddingBag(ps, "words", 3, "sum", optimizer=SGD(lr=1.0), init=Constant(2.0))
    optimizer = Optimizer(ps, bag)
    weights = torch.tensor([[0.5, 3.0]], requires_grad=True)
    out = bag(torch.tensor([[1, 4]]), per_sample_weights=weights)
    assert out.tolist() == [[7.0, 7.0, 7.0]]
    out.sum().backward()
    optimizer.step()
    assert weights.grad is not None
    assert weights.grad.tolist() == [[6.0, 6.0]]
    assert rows(bag.table, [1, 4])[:, 0].tolist() == [1.5, -1.0]


def test_padding_gives_zeros_and_is_neither_pulled_nor_trained(ps: Any) -> None:
    embedding = Embedding(ps, "users", 2, optimizer=SGD(lr=1.0), init=Constant(3.0), padding_idx=-1)
    optimizer = Optimizer(ps, embedding)
    out = embedding(torch.tensor([-1, 4, -1, -7]))
    assert out.tolist() == [[0, 0], [3, 3], [0, 0], [3, 3]]
    out.sum().backward()
    optimizer.step()
    assert ps.tables["users"].pulls == [[4, -7]]
    assert sorted(ps.tables["users"].target.weights) == [-7, 4]
    assert embedding(torch.full((2, 3), -1)).tolist() == torch.zeros(2, 3, 2).tolist()


@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_evaluation_only_pulls(ps: Any, how: str) -> None:
    embedding = Embedding(ps, "users", 2, optimizer=SGD(lr=1.0))
    if how == "eval":
        embedding.eval()
        assert not embedding(torch.tensor([1, 2])).requires_grad
    else:
        with torch.no_grad():
            assert not embedding(torch.tensor([1, 2])).requires_grad
    assert ps.log == []


def test_prefetched_rows_are_taken_once_by_the_same_ids(ps: Any) -> None:
    embedding = Embedding(ps, "users", 2, optimizer=SGD(lr=1.0))
    ids = torch.tensor([4, 1, 4])
    embedding.prefetch(ids)
    assert ps.tables["users"].pulls == [[4, 1]]
    first = embedding(ids)
    assert ps.tables["users"].pulls == [[4, 1]]
    assert torch.equal(first, embedding(ids))
    assert ps.tables["users"].pulls == [[4, 1], [4, 1]]


def test_ids_changed_after_the_prefetch_are_other_ids(ps: Any) -> None:
    embedding = Embedding(ps, "users", 2, optimizer=SGD(lr=1.0))
    ids = torch.tensor([4, 1])
    embedding.prefetch(ids)
    ids[0] = 8
    assert torch.equal(embedding(ids), rows(embedding.table, [8, 1]))


@pytest.mark.parametrize("what", ["layer", "model"])
def test_frozen_layers_are_not_trained(ps: Any, what: str) -> None:
    embedding = Embedding(ps, "users", 2, optimizer=SGD(lr=1.0), init=Zeros())
    model = nn.Sequential(embedding, nn.Linear(2, 1))
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=1.0))
    (embedding if what == "layer" else model).requires_grad_(False)
    assert not embedding(torch.tensor([1])).requires_grad
    model.requires_grad_(True)
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert rows(embedding.table, [1]).abs().sum() > 0


def test_attributes_that_torch_users_expect_exist_or_are_explained(ps: Any) -> None:
    embedding = Embedding(ps, "users", 2, optimizer=SGD(lr=1.0))
    assert (embedding.embedding_dim, embedding.num_embeddings) == (2, None)
    assert not hasattr(embedding, "weight")
    with pytest.raises(AttributeError, match=r"table 'users' are at the servers: layer.table.pull\(ids\)"):
        _ = embedding.weight
    for copying in (copy.deepcopy, torch.optim.swa_utils.AveragedModel, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(ConfigError, match=r"cannot be copied or pickled.* elasticps.torch.save\(model, file\)"):
            copying(nn.Sequential(embedding))
    with pytest.warns(UserWarning, match=r"has not the rows of tables.*\.full_state_dict\(model\)"):
        assert list(nn.ModuleDict({"a": embedding, "b": nn.Linear(1, 1)}).state_dict()) == ["b.weight", "b.bias"]
    with pytest.raises(RuntimeError, match="load_full_state_dict"):
        embedding.load_state_dict({"keys": torch.tensor([1]), "weight": torch.zeros(1, 2)})


def test_ids_changed_without_torchs_notice_are_other_ids(ps: Any) -> None:
    embedding = Embedding(ps, "users", 2, optimizer=SGD(lr=1.0))
    array = np.array([4, 1])
    ids = torch.from_numpy(array)
    embedding.prefetch(ids)
    array[0] = 8
    assert torch.equal(embedding(ids), rows(embedding.table, [8, 1]))
    ids = torch.tensor([4, 1])
    embedding.prefetch(ids)
    ids.data[0] = 8
    assert torch.equal(embedding(ids), rows(embedding.table, [8, 1]))


def test_ids_made_in_inference_mode_are_pulled_afresh(ps: Any) -> None:
    embedding = Embedding(ps, "users", 2, optimizer=SGD(lr=1.0))
    with torch.inference_mode():
        ids = torch.tensor([4, 1])
        embedding.prefetch(ids)
        ids[0] = 8
        assert torch.equal(embedding(ids), rows(embedding.table, [8, 1]))


def test_forgotten_prefetches_are_bounded(ps: Any) -> None:
    embedding = Embedding(ps, "users", 2, optimizer=SGD(lr=1.0))
    batches = [torch.tensor([i]) for i in range(50)]
    for batch in batches:
        embedding.prefetch(batch)
    assert len(embedding._prefetched) <= 8
    assert torch.equal(embedding(batches[0]), rows(embedding.table, [0]))


def test_a_table_used_twice_in_one_forward_is_sent_once(ps: Any) -> None:
    """Once through one module called twice, once through a second module of the same table."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = Embedding(ps, "users", 2, optimizer=SGD(lr=1.0), init=Zeros())
            self.two = EmbeddingBag(ps, "users", 2, "sum", optimizer=SGD(lr=1.0), init=Zeros())

        def forward(self) -> torch.Tensor:
            total = self.one(torch.tensor([1, 2])).sum() + 10 * self.one(torch.tensor([2, 3])).sum()
            out: torch.Tensor = total + 100 * self.two(torch.tensor([[3, 4]])).sum()
            return out

    model = Twice()
    optimizer = Optimizer(ps, model, bucket_bytes=1)
    model().backward()
    assert ps.parts == [["users"]]  # left with the last of the three gradients
    optimizer.step()
    assert ps.parts == [["users"]]
    assert rows(ps.tables["users"], [1, 2, 3, 4])[:, 0].tolist() == [-1, -11, -110, -100]


def test_an_output_that_the_loss_does_not_use_delays_the_table_to_the_step(ps: Any) -> None:
    embedding = Embedding(ps, "users", 2, optimizer=SGD(lr=1.0), init=Zeros())
    optimizer = Optimizer(ps, embedding, bucket_bytes=1)
    unused = embedding(torch.tensor([5]))
    embedding(torch.tensor([6])).sum().backward()
    assert ps.parts == []
    optimizer.step()
    assert ps.parts == [["users"]]
    assert list(ps.targets["users"].weights) == [6]
    del unused
    embedding(torch.tensor([6])).sum().backward()
    assert ps.parts == [["users"], ["users"]]


def test_the_graph_of_a_batch_can_be_freed_before_its_backward_pass(ps: Any) -> None:
    embedding = Embedding(ps, "users", 2, optimizer=SGD(lr=1.0))
    out = embedding(torch.tensor([5]))
    assert len(embedding.passes) == 1
    del out
    assert len(embedding.passes) == 0


def test_training_agrees_with_torchs_embedding(ps: Any) -> None:
    embedding, linear = Embedding(ps, "users", 4, optimizer=Adagrad(lr=0.3)), nn.Linear(4, 1)
    known, like_linear = nn.Embedding(20, 4), nn.Linear(4, 1)
    with torch.no_grad():
        known.weight.copy_(rows(embedding.table, list(range(20))))
    like_linear.load_state_dict(linear.state_dict())
    model, reference = nn.Sequential(embedding, linear), nn.Sequential(known, like_linear)
    optimizers = [
        Optimizer(ps, model, optimizer=Adagrad(lr=0.1)),
        torch.optim.Adagrad(known.parameters(), lr=0.3),
        torch.optim.Adagrad(like_linear.parameters(), lr=0.1),
    ]
    for _ in range(10):
        ids = torch.randint(0, 20, (16,))
        for optimizer in optimizers:
            optimizer.zero_grad()
        for net in (model, reference):
            (net(ids) - ids[:, None]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(rows(embedding.table, list(range(20))), known.weight.detach())
    torch.testing.assert_close(linear.weight, like_linear.weight)


@pytest.mark.parametrize("ids", [torch.tensor([1.0]), torch.tensor([True]), torch.tensor([float("nan")])])
def test_ids_that_are_no_integers_are_refused(ps: Any, ids: torch.Tensor) -> None:
    embedding = Embedding(ps, "users", 2, optimizer=SGD(lr=1.0))
    with pytest.raises(InputError, match="ids of table 'users' must be int64"):
        embedding(ids)


def test_an_unknown_mode_is_refused() -> None:
    ps: Any = FakeClient()
    with pytest.raises(ConfigError, match="'median'"):
        EmbeddingBag(ps, "words", 2, "median", optimizer=SGD(lr=1.0))
    assert ps.tables == {}


def test_gradients_of_an_embedding_without_optimizer_wait(ps: Any) -> None:
    embedding = Embedding(ps, "users", 2, optimizer=SGD(lr=1.0), init=Zeros())
    embedding(torch.tensor([5])).sum().backward()
    assert ps.log == []
    optimizer = Optimizer(ps, embedding)
    optimizer.step()
    assert rows(embedding.table, [5]).tolist() == [[-1, -1]]


def test_an_incomplete_state_is_warned_of_once(ps: Any) -> None:
    model = nn.ModuleList([Embedding(ps, name, 1, optimizer=SGD(lr=1.0)) for name in ("users", "items")])
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        model.state_dict()
        model.state_dict()
    assert len(shown) == 1


@pytest.mark.parametrize("layer", [Embedding, EmbeddingBag])
def test_with_num_embeddings_ids_are_checked_as_in_torch(ps: Any, layer: Any) -> None:
    users = layer(ps, "users", 2, optimizer=SGD(lr=1.0), num_embeddings=10, padding_idx=-1)
    assert (users.num_embeddings, users.padding_idx, users.max_norm) == (10, 9, None)
    assert repr(users) == f"{layer.__name__}('users', dim=2, num_embeddings=10, padding_idx=9)"
    assert users(torch.tensor([[0, 9]])).shape[-1] == 2
    for strange in (-1, 10):
        with pytest.raises(InputError, match="table 'users' must be from 0 to 9"):
            users(torch.tensor([[strange]]))
    with pytest.raises(ConfigError, match="one of num_embeddings=10 ids"):
        layer(ps, "users", 2, optimizer=SGD(lr=1.0), num_embeddings=10, padding_idx=-11)


def test_unsupported_options_of_torch_are_refused_in_one_line(ps: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_norm is not to be had"):
        Embedding(ps, "users", 2, optimizer=SGD(lr=1.0), max_norm=1.0)
    for given, instead in (
        (torch.optim.Adam, r"torch's Adam: take elasticps.Adam\(lr=…\)"),
        (partial(torch.optim.SGD, lr=0.1), r"torch's SGD: take elasticps.SGD\(lr=…\)"),
        (torch.optim.RMSprop, r"torch's RMSprop: take one of elasticps' own"),
        (torch.optim.Adam([torch.zeros(1)]), "torch's Adam"),
        (Adagrad, r"is a class: make it one, elasticps.Adagrad\(lr=…\)"),
    ):
        optimizer: Any = given
        with pytest.raises(ConfigError, match=instead):
            Embedding(ps, "users", 2, optimizer=optimizer)
        with pytest.raises(ConfigError, match=instead):
            Optimizer(ps, nn.Linear(1, 1), optimizer)
        with pytest.raises(ConfigError, match=instead):
            Optimizer(ps, nn.Linear(1, 1), lambda name, parameter: optimizer)  # noqa: B023  # called at once
    assert ps.targets == {}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_model_drops_gradients_of_rows(ps: Any, set_to_none: bool) -> None:
    embedding = Embedding(ps, "users", 1, optimizer=SGD(lr=1.0), init=Zeros())
    model = nn.Sequential(embedding, nn.Linear(1, 1))
    optimizer = Optimizer(ps, model, SGD(lr=1.0), overlap=False)
    model(torch.tensor([5])).sum().backward()
    model.zero_grad(set_to_none)
    model(torch.tensor([6])).sum().backward()
    optimizer.step()
    assert list(ps.targets["users"].weights) == [6]
    model(torch.tensor([7])).sum().backward()
    model.zero_grad(set_to_none)
    optimizer.step()
    assert list(ps.targets["users"].weights) == [6]


def test_an_optimizer_of_torch_beside_does_not_leave_rows_out(ps: Any) -> None:
    model = nn.Sequential(Embedding(ps, "users", 1, optimizer=SGD(lr=1.0)), nn.Linear(1, 1))
    for kind in (torch.optim.SGD, torch.optim.Adam):
        optimizer = kind(model.parameters(), lr=0.1)
        model(torch.tensor([5])).sum().backward()
        with pytest.raises(ConfigError, match=r"train them with elasticps.torch.Optimizer"):
            optimizer.step()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch hides its own, not errors
def test_a_compiled_model_trains_alike(ps: Any) -> None:
    """The layers are one break of the graph each, and nothing of them is compiled."""
    users = Embedding(ps, "users", 4, optimizer=SGD(lr=0.1), init=Constant(0.5))
    words = EmbeddingBag(ps, "words", 4, optimizer=SGD(lr=0.1), init=Constant(0.5), padding_idx=-1)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.words, self.out = users, words, nn.Linear(8, 1)

        def forward(self, users: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.out(torch.cat([self.users(users), self.words(words)], dim=1).relu())
            return out

    plain = Both()
    model: Any = torch.compile(plain, backend="eager")
    optimizer = Optimizer(ps, model, SGD(lr=0.1))
    assert sorted(ps.targets) == ["model.out.bias", "model.out.weight", "users", "words"]
    torch._dynamo.utils.counters.clear()
    for size in (3, 4, 5):
        batch = torch.arange(size), torch.arange(-1, 2 * size - 1).view(size, 2)
        torch.testing.assert_close(model(*batch), plain(*batch))
        optimizer.zero_grad()
        model(*batch).square().sum().backward()
        optimizer.step()
    assert len(ps.targets["users"].weights) == 5
    assert len(ps.targets["words"].weights) == 9
    reasons = torch._dynamo.utils.counters["graph_break"]
    assert len(reasons) == 2  # of each layer one
    assert all("torch.compiler.disable" in reason for reason in reasons)


@pytest.mark.parametrize("layer", [Embedding, EmbeddingBag])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_come_in_the_type_of_the_model(ps: Any, layer: Any, dtype: torch.dtype) -> None:
    users = layer(ps, "users", 2, optimizer=SGD(lr=1.0), init=Constant(1.0))
    out = users.to(dtype)(torch.tensor([[5]]))
    assert out.dtype == dtype
    optimizer = Optimizer(ps, users, overlap=False)
    (1e-4 * out.sum()).backward()
    assert float(optimizer.clip_grad_norm_(1.0)) == pytest.approx(1e-4 * 2**0.5, rel=1e-2)
    optimizer.step()
    np.testing.assert_allclose(ps.tables["users"].row(5), 1 - 1e-4, rtol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch would rather have no traces at all
def test_a_trace_that_would_keep_rows_is_refused(ps: Any) -> None:
    users = Embedding(ps, "users", 2, optimizer=SGD(lr=1.0))
    with pytest.raises(ConfigError, match="a trace would keep the rows of table 'users'"):
        torch.jit.trace(users, torch.tensor([1]))


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_are_computed_again_are_trained_once(ps: Any, reentrant: bool) -> None:
    users = Embedding(ps, "users", 2, optimizer=SGD(lr=1.0), init=Zeros())
    optimizer = Optimizer(ps, users, bucket_bytes=1)

    def block(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = users(torch.tensor([1, 2])) * x
        return out

    for step in (1, 2):
        checkpoint(block, torch.ones((), requires_grad=True), use_reentrant=reentrant).sum().backward()
        optimizer.step()
        assert rows(users.table, [1, 2]).tolist() == [[-step, -step]] * 2
    assert ps.parts == [["users"]] * 2


@pytest.mark.parametrize("layer", [Embedding, EmbeddingBag])
def test_ids_may_be_a_column_of_others(ps: Any, layer: Any) -> None:
    rows = layer(ps, "users", 2, optimizer=SGD(lr=1.0))
    ids = torch.tensor([[1, 7], [2, 7], [1, 7]])
    column = ids[:, :1] if layer is EmbeddingBag else ids[:, 0]
    torch.testing.assert_close(rows(column), rows(column.clone()))


@pytest.mark.parametrize("ids", [[0, 0], []])
@pytest.mark.parametrize("bag", [False, True])
def test_a_backward_pass_goes_through_a_batch_without_any_row(ps: Any, bag: bool, ids: list[int]) -> None:
    """As through torch's layers, and collections; in a model whose rows are all that it trains."""
    kind: Any = EmbeddingBag if bag else Embedding
    embedding = kind(ps, "users", 2, optimizer=SGD(lr=1.0), init=Zeros(), padding_idx=0)
    optimizer = Optimizer(ps, embedding)
    offsets = (torch.tensor([0, 0]),) if bag else ()
    embedding(torch.tensor(ids, dtype=torch.int64), *offsets).sum().backward()
    optimizer.step()
    embedding(torch.tensor([3, 0]), *offsets).sum().backward()
    optimizer.step()
    assert {key: row.tolist() for key, row in ps.targets["users"].weights.items()} == {3: [-1.0, -1.0]}
