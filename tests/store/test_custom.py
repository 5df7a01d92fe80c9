"""docs/guides/custom.md does what it says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elasticps.errors import SpecError
from elasticps.model import spec
from elasticps.model.spec import TableSpec
from elasticps.store import Table, register_filter
from elasticps.store.codec import Codec

PAGE = Path(__file__).parents[2] / "docs/guides/custom.md"
KEYS, DIM = np.arange(8), 5


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023, as plainly as it is printed."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                c = beta1 * m + (1 - beta1) * p.grad
                p -= lr * (torch.sign(c) + group["decay"] * p)
                m.copy_(beta2 * m + (1 - beta2) * p.grad)


@pytest.fixture(scope="module")
def _registered() -> None:
    module = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[0]
    exec(compile(module, "my_optimizers.py", "exec"), {})


def test_the_pages_filter_sends_a_bit_of_each_float() -> None:
    module = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[2]
    exec(compile(module, "my_filters.py", "exec"), {})
    signs = spec.CustomFilter("signs", bits=1, row_words=1, feedback=True)
    rows = np.random.default_rng(1).normal(size=(6, 70)).astype(np.float32)
    for codec, left in ((Codec([signs], 70), 70), (Codec([spec.TopK(0.5), signs], 70), 35)):
        found = codec.decode(codec.encode(rows))
        sent = np.where(found != 0, rows, np.float32(0))
        assert ((found != 0).sum(axis=1) == left).all()
        assert (np.sign(found) == np.sign(sent)).all()
        assert np.allclose(np.abs(found).max(axis=1), np.abs(sent).sum(axis=1) / (found != 0).sum(axis=1))
    assert Codec([signs], 64).words == 3


def test_an_unregistered_filter_is_refused() -> None:
    with pytest.raises(SpecError, match=r"no filter is registered as 'unheard'.*register_filter"):
        Table(TableSpec("t", DIM, spec.SGD(0.1), push=[spec.CustomFilter("unheard", bits=1)]), 3, 8)
    with pytest.raises(SpecError, match="does not compile"):
        register_filter("broken", lambda x, words, c: x.nothing, lambda words, x, c: None)
    register_filter("mine", _nothing, _nothing)
    register_filter("mine", _nothing, _nothing)
    with pytest.raises(SpecError, match="another filter is already registered as 'mine'"):
        register_filter("mine", _nothing, lambda words, x, c: None)
    with pytest.raises(SpecError, match="bits or row_words"):
        spec.CustomFilter("mine")


def _nothing(source: Any, target: Any, c: Any) -> None:
    pass


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (spec.Custom("lion", lr=0.01, constant_values=(0.9, 0.99, 0.1), slots=1),
         lambda p: Lion(p, 0.01, (0.9, 0.99), 0.1)),
        (spec.Custom("rmsprop", lr=0.01, constant_values=(0.99, 1e-8), slots=1),
         lambda p: torch.optim.RMSprop(p, lr=0.01)),
    ],
    ids=["lion", "rmsprop"],
)  # fmt: skip
def test_the_pages_optimizers_do_as_torch(
    ours: spec.Custom, theirs: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
) -> None:
    table = Table(TableSpec("t", DIM, ours, spec.Normal(std=0.5, seed=1)), 3, 8)
    rows = np.empty((len(KEYS), DIM), np.float32)
    table.gather(KEYS, rows)
    weights = torch.from_numpy(rows.copy()).requires_grad_()
    optimizer, random = theirs([weights]), np.random.default_rng(3)
    for clock in range(1, 16):
        gradient = random.standard_normal(rows.shape).astype(np.float32)
        weights.grad = torch.from_numpy(gradient)
        optimizer.step()
        table.apply(KEYS, gradient, ours.step_values(clock))
    table.gather(KEYS, rows)
    torch.testing.assert_close(torch.from_numpy(rows), weights.detach(), rtol=1e-4, atol=1e-5)
