"""Errors for users of torch's own layers name what to write instead."""

from __future__ import annotations

import copy
import pickle  # noqa: TID251  # to see it refused
from typing import Any

import pytest
import torch
from torch import nn

from elasticps.errors import ConfigError, InputError, SpecError
from elasticps.model.spec import SGD
from elasticps.torch import Embedding, EmbeddingBag, EmbeddingBagCollection, Jagged, Optimizer, TableConfig

RATE = SGD(lr=1.0)


@pytest.mark.parametrize("layer", [Embedding, EmbeddingBag])
def test_arguments_of_torch_are_refused_with_the_right_name(ps: Any, layer: Any) -> None:
    with pytest.raises(ConfigError, match=rf"write {layer.__name__}\(ps, 'name', 16, num_embeddings=1000, optimizer="):
        layer(1000, 16)
    with pytest.raises(ConfigError, match="num_embeddings=1000"):
        layer(1000, embedding_dim=16, sparse=True)
    for wrong in ("sparse", "scale_grad_by_freq", "device", "_weight", "norm_type"):
        with pytest.raises(ConfigError, match=rf"{layer.__name__} has no {wrong}="):
            layer(ps, "t", 16, optimizer=RATE, **{wrong: None})
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        layer(ps, "t", 16, optimizer=RATE, nonsense=1)


def test_subclasses_of_layers_may_have_their_own_arguments(ps: Any) -> None:
    class Mine(Embedding):
        def __init__(self, count: int, device: str) -> None:
            super().__init__(ps, "mine", 4, optimizer=RATE, num_embeddings=count)

    assert Mine(10, device="cpu").num_embeddings == 10


def test_invalid_ids_are_refused_with_the_reason(ps: Any) -> None:
    layer = Embedding(ps, "t", 4, optimizer=RATE)
    wrong: Any
    for wrong, says in (
        ([[1], [2, 3]], r"got list: write torch\.tensor\(ids\); lists of different lengths"),
        (torch.ones(3).bfloat16(), r"got torch\.bfloat16: write ids\.long\(\), before they are rounded"),
        (torch.ones(3, dtype=torch.int16), r"got torch\.int16: write ids\.long\(\)$"),
        (
            torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([2, 3])], layout=torch.jagged),
            "got a nested one",
        ),
    ):
        with pytest.raises(InputError, match=says):
            layer(wrong)


def test_ids_without_lengths_are_not_dropped(ps: Any) -> None:
    tables = [TableConfig("a", 4, optimizer=RATE)]
    collection = EmbeddingBagCollection(ps, tables)
    for lengths in ([], [0], [2], [4], [4, -1]):
        with pytest.raises(InputError, match="lengths must be those of 3 ids"):
            collection(Jagged(["a"], torch.tensor([1, 2, 3]), torch.tensor(lengths, dtype=torch.int64)))
    assert collection(
        Jagged(["a"], torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    ).values().shape == (0, 4)


@pytest.mark.parametrize("name", ["user id", "country/US", "x" * 200])
def test_a_module_with_an_impossible_tensor_name_is_named(ps: Any, name: str) -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 1)})
    with pytest.raises(
        SpecError, match=rf"parameter '{name}\.weight' would be the tensor .* give the module another name"
    ):
        Optimizer(ps, model, RATE)
    assert not ps.targets


def test_objects_of_a_process_are_not_pickled() -> None:
    from elasticps.client import Client, DenseTensor, SparseTable
    from elasticps.torch import GroupClient

    for kind in (Client, SparseTable, DenseTensor, GroupClient):
        handle: Any = object.__new__(kind)
        handle.name = "t"
        handle.worker = type("worker", (), {"name": "w0"})
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(
                ConfigError, match="cannot be copied or pickled, as it belongs to this process's connections"
            ):
                copied(handle)
