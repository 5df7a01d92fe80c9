"""The allocator: blocks never overlap, keep what is written, and give everything back."""

from __future__ import annotations

import ctypes

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticps.store.memory import Allocator

sizes = st.integers(1, 3000) | st.sampled_from([1 << 16, (1 << 21) - 64, 1 << 21, (1 << 21) + 1])


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 1 << 30)), max_size=120))
def test_blocks_keep_to_themselves(steps: list[tuple[bool, int, int]]) -> None:
    memory = Allocator()
    blocks: dict[int, tuple[int, int]] = {}  # address -> bytes, fill

    def check(address: int) -> None:
        size, fill = blocks.pop(address)
        assert ctypes.string_at(address, min(size, 4096)) == bytes([fill]) * min(size, 4096)
        assert ctypes.string_at(address + size - 1, 1) == bytes([fill])

    for number, (take, size, choice) in enumerate(steps):
        if take or not blocks:
            address, fill = memory.allocate(size), number % 251
            assert address % 64 == 0
            assert all(address + size <= other or other + taken <= address for other, (taken, _) in blocks.items())
            ctypes.memset(address, fill, size)
            blocks[address] = size, fill
        else:
            address = sorted(blocks)[choice % len(blocks)]
            check(address)
            memory.free(address)
    for address in list(blocks):
        check(address)
        memory.free(address)
    assert memory.nbytes == 0


def test_freed_neighbours_join() -> None:
    memory = Allocator()
    first = [memory.allocate(64) for _ in range(64)]
    held = memory.allocate(64)
    for address in first[1::2] + first[::2]:
        memory.free(address)
    assert memory.allocate(64 * 64) == first[0]
    memory.free(first[0])
    memory.free(held)
    assert memory.nbytes == 0


def test_memory_of_freed_blocks_goes_back_and_can_be_taken_again() -> None:
    memory = Allocator()
    blocks = [memory.allocate(1 << 20) for _ in range(40)]
    for number, address in enumerate(blocks):
        ctypes.memset(address, number + 1, 1 << 20)
    held, before = blocks[:8] + blocks[8::8], memory.nbytes  # one in each mapping at least
    for address in set(blocks) - set(held):
        memory.free(address)
    memory.trim()
    assert memory.nbytes == before
    for address in held:
        fill = bytes([blocks.index(address) + 1])
        assert ctypes.string_at(address, 1 << 20) == fill * (1 << 20)
    gone = [at for at in set(blocks) - set(held) if ctypes.string_at(at, 1 << 20) == bytes(1 << 20)]
    assert len(gone) > 15  # the system gives zeros for what it took back
    again = [memory.allocate(1 << 20) for _ in gone]
    for address in again + held:
        memory.free(address)
    assert memory.nbytes == 0
