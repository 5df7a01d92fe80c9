"""Backward passes: several, failed ones, clipped and scaled gradients."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elasticps.errors import ConfigError
from elasticps.model.spec import SGD, Zeros
from elasticps.torch import Embedding, Optimizer
from tests.torch.perceptron import agree, batch, loss_of, perceptron


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_of_several_backward_passes_add_up(ps: Any, overlap: bool) -> None:
    embedding = Embedding(ps, "users", 3, optimizer=SGD(lr=1.0), init=Zeros())
    linear = nn.Linear(3, 1)
    model = nn.Sequential(embedding, linear)
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=1.0), overlap=overlap, bucket_bytes=1)
    weight = linear.weight.detach().clone()[0]
    with optimizer.accumulate():
        model(torch.tensor([1])).sum().backward()
        model(torch.tensor([1, 2])).sum().backward()
    assert ps.parts == []
    model(torch.tensor([2])).sum().backward()
    assert len(ps.parts) == (3 if overlap else 0)
    optimizer.step()
    torch.testing.assert_close(torch.from_numpy(ps.tables["users"].row(1)), -2 * weight)
    torch.testing.assert_close(torch.from_numpy(ps.tables["users"].row(2)), -2 * weight)
    assert ps.clock == 1


def test_accumulated_only_gradients_leave_with_the_step(ps: Any) -> None:
    model = perceptron()
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=1.0), bucket_bytes=1)
    with optimizer.accumulate():
        loss_of(model, *batch()).backward()
    optimizer.step()
    assert sum(len(part) for part in ps.parts) == 6


@pytest.mark.parametrize("what", ["dense", "table"])
def test_a_second_backward_pass_after_gradients_have_left_is_refused(ps: Any, what: str) -> None:
    model: nn.Module
    if what == "dense":
        model, x = nn.Linear(3, 1), torch.ones(1, 3)
    else:
        model, x = Embedding(ps, "users", 3, optimizer=SGD(lr=1.0)), torch.tensor([1])
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=1.0))
    model(x).sum().backward()
    with pytest.raises(ConfigError, match=r"accumulate\(\)"):
        model(x).sum().backward()
    with optimizer.accumulate(), pytest.raises(ConfigError, match=r"accumulate\(\)"):
        model(x).sum().backward()


class _FailsHalfWay(torch.autograd.Function):
    fail = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if FailsHalfWay.fail:
            raise ZeroDivisionError("half-way")
        return gradient


FailsHalfWay: Any = _FailsHalfWay


def test_after_a_backward_pass_that_raised_the_next_step_is_clean(ps: Any) -> None:
    first, last = nn.Linear(3, 3), nn.Linear(3, 1)
    embedding = Embedding(ps, "users", 3, optimizer=SGD(lr=1.0), init=Zeros())
    model = nn.ModuleList([embedding, first, last])
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=1.0), bucket_bytes=1)

    def forward() -> torch.Tensor:
        out: torch.Tensor = last(FailsHalfWay.apply(first(embedding(torch.tensor([1])))))
        return out.sum()

    FailsHalfWay.fail = True
    with pytest.raises(ZeroDivisionError):
        forward().backward()
    assert sorted(name for part in ps.parts for name in part) == ["model.2.bias", "model.2.weight"]
    with pytest.raises(ConfigError, match=r"call optimizer.zero_grad\(\) first"):
        forward().backward()
    with pytest.warns(RuntimeWarning, match=r"trained already: 2.weight, 2.bias"):
        optimizer.zero_grad()
    assert ps.log[-1] == 1  # the clock has ticked: the servers wait for nothing
    agree(ps, model)

    FailsHalfWay.fail = False
    ps.log.clear()
    forward().backward()
    optimizer.step()
    assert len({name for part in ps.parts for name in part}) == 5
    assert ps.log[-1] == 2
    agree(ps, model)


def test_nothing_of_a_failed_pass_that_had_not_left_is_sent_later(ps: Any) -> None:
    embedding = Embedding(ps, "users", 1, optimizer=SGD(lr=1.0), init=Zeros())
    last = nn.Linear(1, 1)
    model = nn.ModuleList([embedding, last])
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=1.0))  # all of it fits one bucket: nothing leaves
    FailsHalfWay.fail = True
    with pytest.raises(ZeroDivisionError):
        last(FailsHalfWay.apply(embedding(torch.tensor([1])))).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.zero_grad()
    assert ps.log == []
    optimizer.step()
    assert ps.log == [1]  # an empty step is a tick


def test_zero_grad_may_be_called_between_forward_and_backward(ps: Any) -> None:
    model = perceptron()
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=0.1), bucket_bytes=1)
    for _ in range(3):
        loss = loss_of(model, *batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert ps.clock == 3
    assert len(ps.parts) == 18


def test_clipping_after_gradients_have_left_is_found(ps: Any) -> None:
    model = perceptron()
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=0.1))
    loss_of(model, *batch()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(ConfigError, match="overlap=False"):
        optimizer.step()
    agree(ps, model)
    loss_of(model, *batch()).backward()  # and training can go on
    optimizer.step()


def test_clipping_works_without_overlap(ps: Any) -> None:
    model = perceptron()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=1.0), overlap=False)
    loss_of(model, *batch()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]).norm()
    assert float(moved) == pytest.approx(1e-3, rel=1e-2)


def halves(ps: Any, **options: Any) -> tuple[nn.Module, nn.Module, list[Any]]:
    """One model with rows at the servers, one without, and their optimizers. Tables are read by two layers each."""
    tables = [Embedding(ps, "users", 3, optimizer=SGD(lr=1.0), init=Zeros()) for _ in range(2)]
    model = nn.Sequential(*tables, nn.Linear(3, 1))
    table = nn.Embedding(10, 3)
    plain = nn.Sequential(table, table, nn.Linear(3, 1))
    with torch.no_grad():
        table.weight.zero_()
        plain[2].load_state_dict(model[2].state_dict())
    return model, plain, [Optimizer(ps, model, SGD(lr=1.0), **options), torch.optim.SGD(plain.parameters(), lr=1.0)]


def twice(model: nn.Module) -> torch.Tensor:
    one, other, last = model.children() if len(list(model.children())) == 3 else (*[model[0]] * 2, model[2])  # type: ignore[index]
    out: torch.Tensor = last(one(torch.tensor([1, 2, 1])) + 2 * other(torch.tensor([2, 3, 2]))).sum()
    return 10 * out


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_includes_gradients_of_rows(ps: Any, norm_type: float) -> None:
    model, plain, (ours, theirs) = halves(ps, overlap=False)
    for _ in range(3):
        for net, optimizer in ((model, ours), (plain, theirs)):
            optimizer.zero_grad()
            twice(net).backward()
        norm = ours.clip_grad_norm_(1.0, norm_type)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 1.0, norm_type))
        ours.step()
        theirs.step()
        rows = torch.from_numpy(np.array([ps.tables["users"].row(key) for key in range(10)]))
        torch.testing.assert_close(rows, plain[0].weight.detach())  # type: ignore[index]


def test_clipping_rows_needs_local_gradients(ps: Any) -> None:
    _, _, (ours, _) = halves(ps)
    with pytest.raises(ConfigError, match="overlap=False"):
        ours.clip_grad_norm_(1.0)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_torchs_clipping_does_not_leave_rows_out(ps: Any, clip: Any, foreach: bool | None, overlap: bool) -> None:
    model, _, (ours, _) = halves(ps, overlap=overlap)
    twice(model).backward()
    with pytest.raises(ConfigError, match=r"knows no gradients of rows.* clip_grad_norm_\(…\)"):
        clip(model.parameters(), 1.0, foreach=foreach)
    ours.step()
    clip(model.parameters(), 1.0, foreach=foreach)  # nothing of rows waits
    twice(model).backward()
    ours.step()


def test_a_rate_changed_after_gradients_have_left_is_found(ps: Any) -> None:
    model = perceptron()
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=0.1), bucket_bytes=1)
    loss_of(model, *batch()).backward()
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(ConfigError, match="learning rate of group 'dense0'"):
        optimizer.step()


def test_scaled_gradients_are_refused(ps: Any) -> None:
    model = perceptron()
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=0.1))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, *batch())).backward()
    with pytest.raises(ConfigError, match="bfloat16 autocast"):
        scaler.step(optimizer)
    for _ in range(2):  # without a scaler, as if nothing had been
        optimizer.zero_grad()
        loss_of(model, *batch()).backward()
        optimizer.step()


def test_scaled_gradients_are_refused_after_unscale(ps: Any) -> None:
    """Which leaves out rows: theirs would be applied 65,536 times too large."""
    model = nn.Sequential(Embedding(ps, "users", 3, optimizer=SGD(lr=1.0), init=Zeros()), nn.Linear(3, 1))
    optimizer = Optimizer(ps, model, SGD(lr=1.0), overlap=False)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.tensor([1])).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(ConfigError, match="bfloat16 autocast"):
        scaler.step(optimizer)
    assert ps.targets["users"].weights == {}
    optimizer.zero_grad()
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert np.abs(ps.tables["users"].row(1)).max() < 1.0


def test_a_wrapper_that_averages_gradients_is_refused_before_any_leaves(ps: Any, tmp_path: Path) -> None:
    """Ray's `prepare_model` wraps a model whose Optimizer may have been built already."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for overlap in (True, False):
            model, other = nn.Linear(3, 1), nn.Linear(3, 1)
            optimizer = Optimizer(ps, model, optimizer=SGD(lr=1.0), overlap=overlap, bucket_bytes=1)
            elsewhere = nn.parallel.DistributedDataParallel(other)  # does no harm
            wrapped = nn.parallel.DistributedDataParallel(model)

            def train(trained: Any = wrapped, optimizer: Any = optimizer) -> None:
                trained(torch.ones(1, 3)).sum().backward()
                optimizer.step()

            with pytest.raises(ConfigError, match="leave out prepare_model"):
                train()
            assert ps.parts == []
            optimizer.close()
            del wrapped, elsewhere
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_moves_while_gradients_of_rows_wait(ps: Any) -> None:
    """Lightning moves it to the CPU after an error."""
    model = nn.Sequential(Embedding(ps, "users", 3, optimizer=SGD(lr=1.0)), nn.Linear(3, 1))
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=1.0), overlap=False)
    model(torch.tensor([1])).sum().backward()
    model.cpu()
    optimizer.step()
    assert ps.clock == 1
    assert ps.tables["users"].row(1).all()


def test_without_torch_the_error_names_the_package_to_install() -> None:
    code = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
try:
    import elasticps.torch
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "elasticps.torch needs torch: pip install 'elasticps[torch]'\n"
