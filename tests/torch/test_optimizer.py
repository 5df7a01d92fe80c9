from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from elasticps.errors import ConfigError, InputError, SpecError
from elasticps.model.spec import SGD, Adam, BFloat16, Int8
from elasticps.torch import Embedding, EmbeddingBag, Optimizer
from tests.torch.fake_ps import FakeClient
from tests.torch.perceptron import agree, batch, loss_of, perceptron


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_training_agrees_with_torchs_adam(
    ps: Any, overlap: bool, pipeline: bool, bucket_bytes: int, device: str
) -> None:
    model, reference = perceptron().to(device), perceptron().to(device)
    reference.load_state_dict(model.state_dict())
    ours = Optimizer(ps, model, optimizer=Adam(lr=0.01), overlap=overlap, pipeline=pipeline, bucket_bytes=bucket_bytes)
    theirs = torch.optim.Adam(reference.parameters(), lr=0.01)
    for _ in range(5):
        x, y = batch(device)
        for net, optimizer in ((model, ours), (reference, theirs)):
            optimizer.zero_grad()
            loss_of(net, x, y).backward()
            optimizer.step()
    ours.refresh()
    agree(ps, model)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert ps.clock == 5


def test_gradients_leave_while_the_backward_pass_runs(ps: Any) -> None:
    """What the first layer's gradient sees when it is computed: the last layer's has left already."""
    model = perceptron()
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=0.1), bucket_bytes=1)
    seen: list[list[str]] = []
    x, y = batch()
    out = model[0](x)
    out.register_hook(lambda _: seen.extend(ps.parts))
    nn.functional.mse_loss(model[1:](out), y).backward()
    assert {name for part in seen for name in part} == {
        "model.2.weight",
        "model.2.bias",
        "model.4.weight",
        "model.4.bias",
    }
    optimizer.step()
    assert len(ps.parts) == 6


def test_layers_and_the_optimizer_pass_filters_to_tables(ps: Any) -> None:
    mine: Any = {"push": [Int8()], "pull": [BFloat16()]}
    model = nn.Sequential(Embedding(ps, "rows", 2, optimizer=SGD(0.1), **mine), nn.Linear(2, 1))
    EmbeddingBag(ps, "bags", 2, optimizer=SGD(0.1), **mine)
    Optimizer(ps, model, SGD(0.1), **mine)
    assert ps.filters == dict.fromkeys(("rows", "bags", "model.1.weight", "model.1.bias"), mine)


def test_small_gradients_travel_together(ps: Any) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))  # 1 KiB each
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=0.1), bucket_bytes=3 * 1024)
    model(torch.ones(1, 16)).sum().backward()
    assert [len(part) for part in ps.parts] == [3, 3]
    optimizer.step()
    assert [len(part) for part in ps.parts] == [3, 3, 2]
    assert ps.log[-1] == 1


def test_a_second_worker_starts_from_the_servers_values(ps: Any) -> None:
    first = perceptron()
    optimizer = Optimizer(ps, first, optimizer=SGD(lr=0.1))
    loss_of(first, *batch()).backward()
    optimizer.step()
    second = perceptron()
    other: Any = FakeClient(targets=ps.targets)
    Optimizer(other, second, optimizer=SGD(lr=0.1))
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_tied_frozen_and_unused_parameters_train_as_in_torch(ps: Any) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode, self.unused, self.frozen = (nn.Linear(3, 3, bias=False) for _ in range(4))
            self.decode.weight = self.encode.weight
            self.frozen.requires_grad_(False)
            self.empty = nn.Parameter(torch.empty(0))
            self.scalar = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.frozen(self.decode(self.encode(x))) * self.scalar
            return out

    model = Odd()
    frozen, unused = model.frozen.weight.clone(), model.unused.weight.clone()
    optimizer = Optimizer(ps, model, optimizer=Adam(lr=0.1), bucket_bytes=1)
    assert sorted(ps.targets) == ["model.encode.weight", "model.frozen.weight", "model.scalar", "model.unused.weight"]
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert {name for part in ps.parts for name in part} == {"model.encode.weight", "model.scalar"}
    assert model.decode.weight is model.encode.weight
    assert torch.equal(model.frozen.weight, frozen)
    assert torch.equal(model.unused.weight, unused)
    assert model.scalar.shape == ()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_parameter_frozen_later_is_not_trained_by_an_old_gradient(ps: Any, overlap: bool) -> None:
    model = perceptron()
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=0.1), overlap=overlap)
    loss_of(model, *batch()).backward()
    optimizer.step()
    model[0].requires_grad_(False)
    weight: Any = model[0].weight
    before = weight.detach().clone()
    loss_of(model, *batch()).backward()
    optimizer.step()
    assert torch.equal(weight, before)
    agree(ps, model)


def test_a_parameter_unfrozen_later_is_trained(ps: Any) -> None:
    model = nn.Linear(3, 1)
    model.weight.requires_grad_(False)
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=1.0))
    model.weight.requires_grad_(True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    agree(ps, model)
    assert ps.targets["model.weight"].weights[0].sum() != 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_a_view_of_float32_at_the_servers(ps: Any, dtype: torch.dtype) -> None:
    model = nn.Linear(3, 1).to(dtype)
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=1e-4))
    for _ in range(100):  # each step is too small for the local type
        optimizer.zero_grad()
        model(torch.ones(1, 3, dtype=dtype)).sum().backward()
        optimizer.step()
    assert model.weight.dtype == dtype
    torch.manual_seed(7)
    start = nn.Linear(3, 1).to(dtype)
    torch.testing.assert_close(torch.from_numpy(ps.weight("model.weight")), start.weight.detach().float() - 0.01)


def test_channels_last_parameters_keep_their_layout(ps: Any) -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=0.1))
    model(torch.ones(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    agree(ps, model)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_double_precision_is_refused(ps: Any) -> None:
    with pytest.raises(SpecError, match=r"'weight' is torch.float64.*model.float\(\)"):
        Optimizer(ps, nn.Linear(3, 1).double(), optimizer=SGD(lr=0.1))


def test_lazy_parameters_are_refused(ps: Any) -> None:
    with pytest.raises(ConfigError, match="run one batch"):
        Optimizer(ps, nn.LazyLinear(3), optimizer=SGD(lr=0.1))


def test_sparse_gradients_of_local_embeddings_are_refused(ps: Any) -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=0.1))
    with pytest.raises(InputError, match=r"elasticps\.torch\.Embedding"):
        model(torch.tensor([1])).sum().backward()
    optimizer.zero_grad()


def test_a_model_with_nothing_to_train_is_refused(ps: Any) -> None:
    with pytest.raises(ConfigError, match="no parameter"):
        Optimizer(ps, nn.ReLU())
    parameters: Any = nn.Linear(1, 1).parameters()
    with pytest.raises(ConfigError, match=r"a whole model, an nn\.Module, not a generator"):
        Optimizer(ps, parameters, optimizer=SGD(lr=0.1))
    with pytest.raises(ConfigError, match="needs optimizer="):
        Optimizer(ps, nn.Linear(1, 1))


def test_two_optimizers_on_one_client_need_overlap_off(ps: Any) -> None:
    one, two = nn.Linear(3, 1), nn.Linear(3, 1)
    first = Optimizer(ps, one, optimizer=SGD(lr=0.1), prefix="one")
    with pytest.raises(ConfigError, match="overlap=False"):
        Optimizer(ps, two, optimizer=SGD(lr=0.1), prefix="two", overlap=False)
    first.close()
    first = Optimizer(ps, one, optimizer=SGD(lr=0.1), prefix="one", overlap=False)
    second = Optimizer(ps, two, optimizer=SGD(lr=0.1), prefix="two", overlap=False)
    (one(torch.ones(1, 3)) + two(torch.ones(1, 3))).sum().backward()
    first.step()
    assert ps.parts == [["one.weight", "one.bias"]]
    second.step()
    agree(ps, one, "one")
    agree(ps, two, "two")


def test_a_second_model_on_a_client_does_not_take_the_tensors_of_the_first(ps: Any) -> None:
    """Both were called model.weight: the second model got the first one's weights, and they trained as one."""
    one, two = nn.Linear(3, 1), nn.Linear(3, 1)
    before = two.weight.detach().clone()
    first = Optimizer(ps, one, optimizer=SGD(lr=0.1), overlap=False)
    with pytest.raises(ConfigError, match=r"trains the tensor 'model\.weight'.* prefix='model2'"):
        Optimizer(ps, two, optimizer=SGD(lr=0.1), overlap=False)
    assert torch.equal(two.weight, before)
    shared = nn.Linear(3, 1, bias=False)
    shared.weight = one.weight  # of both models, on purpose
    Optimizer(ps, shared, optimizer=SGD(lr=0.1), overlap=False)
    first.close()
    Optimizer(ps, two, optimizer=SGD(lr=0.1), overlap=False)


def test_a_new_optimizer_for_the_same_model_replaces_the_old(ps: Any) -> None:
    model = nn.Linear(3, 1)
    old = Optimizer(ps, model, optimizer=SGD(lr=0.1), bucket_bytes=1)
    new = Optimizer(ps, model, optimizer=SGD(lr=0.1), bucket_bytes=1)
    model(torch.ones(1, 3)).sum().backward()
    new.step()
    assert sorted(name for part in ps.parts for name in part) == ["model.bias", "model.weight"]
    old.close()  # twice is harmless


def test_an_optimizer_without_references_does_not_stay(ps: Any) -> None:
    Optimizer(ps, nn.Linear(3, 1), optimizer=SGD(lr=0.1), prefix="one")
    Optimizer(ps, nn.Linear(3, 1), optimizer=SGD(lr=0.1), prefix="two")


def test_with_pipeline_new_weights_arrive_with_the_next_use(ps: Any) -> None:
    model = perceptron()
    first = next(model.parameters())
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=0.1), pipeline=True)

    def train() -> torch.Tensor:
        old = first.detach().clone()
        optimizer.zero_grad()
        loss_of(model, *batch()).backward()
        optimizer.step()
        assert torch.equal(first, old)
        return old

    for use in (lambda: model(batch()[0]), lambda: model[0](batch()[0]), model.state_dict, optimizer.refresh):
        old = train()
        use()
        assert not torch.equal(first, old)
        agree(ps, model)


def test_refresh_shows_other_workers_updates(ps: Any) -> None:
    model = nn.Linear(3, 1)
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=0.1))
    ps.targets["model.weight"].weights[0] += 1
    optimizer.refresh()
    agree(ps, model)


def test_step_runs_a_closure_and_returns_its_loss(ps: Any) -> None:
    model = nn.Linear(3, 1)
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=0.1), bucket_bytes=1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, *batch())
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) > 0
    assert len(ps.parts) == 2
    assert optimizer.last_step is not None


def test_weights_edited_in_place_are_not_silently_undone(ps: Any) -> None:
    model = perceptron()
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=0.1))
    saved = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(saved)
    loss_of(model, *batch()).backward()
    with pytest.raises(ConfigError, match=r"parameter '0.weight' was changed in place"):
        optimizer.step()
    optimizer.refresh()
    optimizer.zero_grad()
    loss_of(model, *batch()).backward()
    optimizer.step()
    agree(ps, model)


@pytest.mark.parametrize("pipeline", [True, False])
def test_weights_edited_without_torchs_notice_are_not_silently_undone(ps: Any, pipeline: bool) -> None:
    model = perceptron()
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=0.1), pipeline=pipeline)

    def train() -> None:
        loss_of(model, *batch()).backward()
        optimizer.step()

    train()
    next(model.parameters()).data.neg_()
    with pytest.raises(ConfigError, match=r"parameter '0.weight' was changed in place"):
        train()
    optimizer.upload()
    train()
    optimizer.refresh()
    agree(ps, model)
    with torch.no_grad():
        model.load_state_dict(model.state_dict())  # the same values are no change
        next(model.parameters()).fill_(float("nan"))
    optimizer.upload()
    train()  # what is not a number equals itself


def test_weights_may_change_their_type_and_layout(ps: Any) -> None:
    model = perceptron()
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=0.1))
    for change in (model.half, model.bfloat16, model.float):
        change()
        x, y = batch()
        dtype = next(model.parameters()).dtype
        optimizer.zero_grad()
        loss_of(model, x.to(dtype), y.to(dtype)).backward()
        optimizer.step()
    assert ps.clock == 3


def test_an_optimizer_is_not_copied(ps: Any) -> None:
    optimizer = Optimizer(ps, nn.Linear(3, 1), optimizer=SGD(lr=0.1))
    for copying in (copy.deepcopy, lambda it: torch.save(it, io.BytesIO())):
        with pytest.raises(ConfigError, match=r"save its state_dict\(\)"):
            copying(optimizer)


def test_models_that_average_gradients_themselves_are_refused(ps: Any) -> None:
    with pytest.raises(ConfigError, match="train the module inside"):
        Optimizer(ps, nn.DataParallel(nn.Linear(3, 1)), optimizer=SGD(lr=0.1))


def test_buffers_stay_local(ps: Any) -> None:
    Optimizer(ps, nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), optimizer=SGD(lr=0.1))
    assert sorted(ps.targets) == ["model.0.bias", "model.0.weight", "model.1.bias", "model.1.weight"]
