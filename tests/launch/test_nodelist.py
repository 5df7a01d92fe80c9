"""SLURM's lists of machines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticps.launch.core import nodelist
from elasticps.launch.core.nodelist import expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node7", ["node7"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-10],login,gpu-[1,3]-ib", ["n08", "n09", "n10", "login", "gpu-1-ib", "gpu-3-ib"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
        ("10.77.0.[2-4]", ["10.77.0.2", "10.77.0.3", "10.77.0.4"]),
        ("a, b", ["a", "b"]),
        ("fd00::1,fd00::2", ["fd00::1", "fd00::2"]),
    ],
)
def test_a_list_of_machines_is_expanded_in_its_order(text: str, names: list[str]) -> None:
    assert list(expand(text)) == names


@pytest.mark.parametrize(
    "text", ["", ",", "a,,b", "n[", "n]", "n[1-2", "n[[1]]", "n[]", "n[a]", "n[2-1]", "n[1-]", "n[-1]", "n[1-2-3]",
             "n[1]]", "a b", "n[1,]", "n[¹]"],
)  # fmt: skip
def test_what_is_no_list_of_machines_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no list of machines"):
        expand(text)


@pytest.mark.parametrize("text", ["n[0-65536]", "n[0-999999999]", "a[0-999]b[0-999]", "n[0-65535],one"])
def test_a_list_without_end_is_refused_before_it_is_made(text: str) -> None:
    with pytest.raises(ValueError, match=f"more than {nodelist.NODES_MAX}"):
        expand(text)


_PREFIX = st.from_regex(r"[a-z][a-z0-9.-]{0,6}", fullmatch=True)
_NUMBERS = st.lists(st.integers(0, 1200), min_size=1, max_size=12)


def _compressed(numbers: list[int], width: int) -> str:
    """Writes numbers as SLURM does: runs as ranges, all with zeros up to one width."""
    runs: list[list[int]] = []
    for number in numbers:
        same_width = runs and len(str(number).zfill(width)) == len(str(runs[-1][0]).zfill(width))
        if runs and number == runs[-1][-1] + 1 and same_width:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [(str(run[0]).zfill(width), str(run[-1]).zfill(width)) for run in runs]
    return ",".join(first if first == last else f"{first}-{last}" for first, last in parts)


@given(st.lists(st.tuples(_PREFIX, _NUMBERS, st.integers(1, 4), st.sampled_from(["", "-ib"])), min_size=1, max_size=4))
def test_names_come_back_as_they_were_however_they_were_abbreviated(
    groups: list[tuple[str, list[int], int, str]],
) -> None:
    text = ",".join(f"{prefix}[{_compressed(numbers, width)}]{suffix}" for prefix, numbers, width, suffix in groups)
    names = [f"{prefix}{number:0{width}d}{suffix}" for prefix, numbers, width, suffix in groups for number in numbers]
    assert list(expand(text)) == names


@given(st.text(alphabet="n[]0123-, ", max_size=24))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        names = expand(text)
    except ValueError:
        return
    assert names
    assert not any(sign in name for name in names for sign in "[], ")
    assert list(expand(",".join(names))) == list(names)  # what has no brackets stays as it is
