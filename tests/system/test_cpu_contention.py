"""Detection of more threads than cores from the kernel's counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticps.system.cpu_contention import LOOK_S, CpuContention


class Kernel:
    """Counts of waiting, as the files have them."""

    def __init__(self, folder: Path, *, pressure: bool) -> None:
        self.now, self.waited_s = 100.0, 5.0
        self._pressure = pressure
        self.file = folder / "counts"
        self.none = folder / "missing"
        self.pass_(0.0, 0.0)
        self.contention = CpuContention(
            str(self.file if pressure else self.none), str(self.none if pressure else self.file)
        )

    def pass_(self, seconds: float, waiting: float) -> None:
        self.now += seconds
        self.waited_s += seconds * waiting
        us = int(self.waited_s * 1e6)
        text = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={us}\nfull avg10=0.00 total=0\n"
        self.file.write_text(text if self._pressure else f"123 {us * 1000} 7\n")

    def contended(self, looks: int, waiting: float) -> bool:
        found = False
        for _ in range(looks):
            self.pass_(1.5 * LOOK_S, waiting)
            found = self.contention.contended(self.now)
        return found


@pytest.mark.parametrize("pressure", [True, False])
def test_contention_and_its_end_are_noticed(tmp_path: Path, pressure: bool) -> None:
    kernel = Kernel(tmp_path, pressure=pressure)
    assert not kernel.contended(20, 0.1)
    assert kernel.contended(20, 0.9)
    assert not kernel.contended(20, 0.1)


def test_a_long_wait_is_contention_and_a_single_sample_is_not(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, pressure=True)
    assert not kernel.contended(20, 0.0)
    assert not kernel.contended(1, 1.0)
    kernel.pass_(1.0, 1.0)
    assert kernel.contention.contended(kernel.now)


def test_without_kernel_counters_there_is_no_contention(tmp_path: Path) -> None:
    contention = CpuContention(str(tmp_path / "a"), str(tmp_path / "b"))
    assert not contention.contended(1.0)
    (tmp_path / "a").write_text("nothing of this kind")
    contention = CpuContention(str(tmp_path / "a"), str(tmp_path / "b"))
    assert not contention.contended(1.0)
