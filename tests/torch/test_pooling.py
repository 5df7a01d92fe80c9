"""Bags that compiled code pools, beside torch's own kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from elasticps.torch.pooling import Bags, pooled


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("modes", [("sum", "sum"), ("mean", "sum"), ("mean", "mean")])
def test_vectors_and_gradients_are_those_of_torchs_bags(modes: tuple[str, str], weighted: bool) -> None:
    if weighted and "mean" in modes:
        modes = "sum", "sum"
    random, samples, lists = torch.Generator().manual_seed(1), 5, 4
    lengths = np.array([0, 1, 2, 3, 1, 4, 0, 0, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0], np.int64)  # the last list is empty
    ends = np.concatenate([[0], np.cumsum(lengths)])
    # In the batch the lists of both groups alternate; in a group they come in another order than there.
    features_of, columns_of, dims = ([2, 0], [3, 1]), ([3, 0], [10, 6]), (3, 4)
    groups, shown = [], []
    for features, columns, dim, mode in zip(features_of, columns_of, dims, modes, strict=True):
        sizes = [int(lengths[f * samples : (f + 1) * samples].sum()) for f in features]
        rows = torch.randn(6, dim, generator=random).requires_grad_()
        positions = torch.randint(6, (sum(sizes),), generator=random)
        weights = torch.randn(sum(sizes), generator=random).requires_grad_() if weighted else None
        where = np.array([features, [0, sizes[0]], columns], np.int64).T.copy()
        groups.append(Bags(rows, positions, where, mode, weights))
        own = np.concatenate([[0], np.cumsum([lengths[f * samples : (f + 1) * samples] for f in features])])
        bags = functional.embedding_bag(
            positions, rows, torch.from_numpy(own), mode=mode, include_last_offset=True, per_sample_weights=weights
        )
        shown += list(zip(columns, bags.view(2, samples, dim), strict=True))
    theirs = torch.cat([vectors for _, vectors in sorted(shown, key=lambda pair: pair[0])], dim=1)
    ours = pooled(groups, ends, samples, 14)
    torch.testing.assert_close(ours, theirs)
    assert len(ends) == samples * lists + 1

    above = torch.randn(14, samples, generator=random).T  # not contiguous
    inputs = [tensor for bags in groups for tensor in (bags.rows, bags.weights) if tensor is not None]
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, above), torch.autograd.grad(theirs, inputs, above), strict=True
    ):
        torch.testing.assert_close(mine, other)


def test_a_second_backward_pass_counts_no_gradient_twice() -> None:
    rows = torch.ones(1, 2).requires_grad_()
    bags = Bags(rows, torch.tensor([0]), np.array([[0, 0, 0]]), "sum", None)
    total = pooled([bags], np.array([0, 1], np.int64), 1, 2).sum()
    total.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        total.backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [[1, 1]]


def test_rows_that_need_no_gradient_get_none() -> None:
    ends = np.array([0, 1, 3], np.int64)
    frozen, trained = (
        Bags(torch.ones(2, 2), torch.tensor([0]), np.array([[0, 0, 0]]), "sum", None),
        Bags(torch.ones(2, 2).requires_grad_(), torch.tensor([1, 1]), np.array([[1, 0, 2]]), "sum", None),
    )
    values = pooled([frozen, trained], ends, 1, 4)
    values.sum().backward()
    assert values.tolist() == [[1, 1, 2, 2]]
    assert frozen.rows.grad is None
    assert trained.rows.grad is not None
    assert trained.rows.grad.tolist() == [[0, 0], [2, 2]]


def test_a_batch_without_samples_has_no_vectors() -> None:
    rows, positions = torch.empty(0, 3).requires_grad_(), torch.empty(0, dtype=torch.int64)
    bags = Bags(rows, positions, np.array([[0, 0, 0]]), "mean", None)
    values = pooled([bags], np.zeros(1, np.int64), 0, 3)
    values.sum().backward()
    assert values.shape == (0, 3)
