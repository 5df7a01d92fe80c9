from __future__ import annotations

import numpy as np
import pytest
import torch

from elasticps.torch.host import fetched, room, sent, staged


def test_tensors_of_devices_are_fetched_as_float32(device: str) -> None:
    values = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
    given = [
        values, values.bfloat16(), values.half().permute(2, 0, 1), values[:, 1], values[0, 0, 0], values[:, :0],
        values.clone().requires_grad_(),
    ]  # fmt: skip
    found = fetched([each.to(device) for each in given])
    for each, expected in zip(found, given, strict=True):
        assert each.dtype == np.float32
        assert each.flags.c_contiguous
        np.testing.assert_array_equal(each, expected.detach().float().numpy())
    assert fetched([]) == []


def test_floats_of_the_cpu_are_not_copied() -> None:
    values = torch.ones(3)
    assert fetched([values])[0].ctypes.data == values.data_ptr()
    assert sent(values, torch.device("cpu")).data_ptr() == values.data_ptr()
    assert staged(values, [torch.device("cpu")]) is values


def test_sent_values_arrive_though_their_memory_is_reused(device: str) -> None:
    """Many at once, and parts of them: a GPU reads rooms that nobody here has any more."""
    place, arrived = torch.device(device), []
    for number in range(200):
        floats = room(64, 1024, device=place)
        floats.numpy()[:] = number
        arrived.append((sent(floats[:1].view(-1), place), sent(floats[63 - number % 2 :], place)))
        del floats
    for number, parts in enumerate(arrived):
        for part in parts:
            assert str(part.device).split(":")[0] == device
            assert bool((part == number).all())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_for_gpus_is_pinned() -> None:
    gpu = torch.device("cuda:0")
    assert room(3, device=gpu).is_pinned()
    values = torch.rand(5, 3)
    there = staged(values, [torch.device("cpu"), gpu])
    assert there.is_pinned()
    np.testing.assert_array_equal(there.numpy(), values.numpy())
