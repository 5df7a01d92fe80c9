"""Keys of names."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import elasticps as eps
from elasticps import keys

KNOWN = {
    ("", ""): 0x2D06800538D394C2,
    ("user:42", ""): 0x9FC1E605FA7174AA,
    ("Müller, Ωmega 東京", ""): 0x70182B92EFB4E13D,
    ("x" * 300, ""): 0xA5D1B4607DC83554,
    ("user:42", "users"): 0x600AAB417CDCF31A,
    ("user:42", "items"): 0x2313CEA4B4B4BB48,
}
"""XXH3-64, which no release may change: rows at the servers are found by it."""


@pytest.mark.parametrize(("name", "namespace"), KNOWN)
def test_the_key_of_a_name_is_what_it_has_always_been(name: str, namespace: str) -> None:
    key = eps.keys.hashed(name, namespace=namespace)
    assert isinstance(key, np.int64)
    assert int(key) % (1 << 64) == KNOWN[name, namespace]


NAMES = ["user:42", "", "Müller", "a\nb", "x" * 100]


@pytest.mark.parametrize(
    "container",
    [
        list, tuple, np.array, lambda names: np.array(names, object), lambda names: [name.encode() for name in names],
        lambda names: np.array([name.encode() for name in names]), lambda names: [np.str_(name) for name in names],
        lambda names: np.array(names, np.dtypes.StringDType()), lambda names: np.array(names)[::-1][::-1],
        lambda names: np.ma.array(names, mask=False),
    ],
)  # fmt: skip
def test_a_text_has_one_key_in_every_container(container: Any) -> None:
    found = keys.hashed(container(NAMES))
    assert found.dtype == np.int64
    assert found.tolist() == [int(keys.hashed(name)) for name in NAMES]


def test_keys_have_the_shape_of_the_names() -> None:
    assert keys.hashed([["a", "b"], ["c", "d"], ["e", "f"]]).shape == (3, 2)
    assert keys.hashed([]).shape == (0,)
    assert keys.hashed(np.empty((0, 3), "U4")).shape == (0, 3)
    assert keys.hashed(np.array("a")) == keys.hashed("a")
    assert keys.hashed(np.array([["a", "b"], ["c", "d"]]).T)[0, 1] == keys.hashed("c")


def test_what_ends_with_a_nul_is_another_name_in_a_list() -> None:
    """NumPy's own strings cannot end with one."""
    assert len({*keys.hashed(["a", "a\0", "a\0\0"]).tolist()}) == 3


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a", None], r"names\[1\] is None: a missing name has no key"),
        ([["a", "b"], ["c", float("nan")]], r"names\[1, 1\] is nan: a missing name"),
        (["a", b"b"], r"names\[1\] is bytes, and those before it are not: decode bytes first"),
        ([b"a", "b"], r"names\[1\] is str"),
        (["a", 42], r"names\[1\] is 42, a int: names are strings or bytes; integers are keys already"),
        ([np.int64(3)], r"names\[0\] is np.int64\(3\)|names\[0\] is 3"),
        (42, "the name is 42"),
        (None, "the name is None"),
        (["a", ["b"]], r"names\[1\] is \['b'\], a list"),
        ({"a"}, "the name is {'a'}, a set"),
        (["a", "b\ud800"], r"names\[1\], 'b\\ud800', is no text that UTF-8 can hold: surrogates not allowed"),
        (np.ma.array(["a", "b"], mask=[False, True]), r"names\[1\] is masked"),
    ],
)
def test_what_is_no_text_is_refused_with_its_position(names: Any, text: str) -> None:
    with pytest.raises(eps.InputError, match=text):
        keys.hashed(names)


def test_a_namespace_is_a_string() -> None:
    with pytest.raises(eps.InputError, match="namespace must be a string, got 3"):
        keys.hashed("a", namespace=3)  # type: ignore[call-overload]
    with pytest.raises(eps.InputError, match=r"namespace, 'b.ud800', is no text"):
        keys.hashed("a", namespace="b\ud800")


@given(st.lists(st.text(max_size=20).filter(lambda text: text.isprintable()), max_size=20), st.integers(60, 64))
def test_names_are_the_same_after_they_were_rows(names: list[str], max_bytes: int) -> None:
    texts = [name.encode()[:max_bytes].decode(errors="ignore") for name in names]
    rows = keys.encode([text.encode() for text in texts], max_bytes)
    assert rows.shape == (len(texts), 1 + -(-max_bytes // 3))
    assert np.isfinite(rows).all()
    assert keys.decode(rows) == texts


def test_a_row_of_zeros_is_no_name_and_an_empty_name_is_one() -> None:
    rows = np.concatenate([np.zeros((1, 3), np.float32), keys.encode([b"", b"a\0"], 6)])
    assert keys.decode(rows) == [None, "", "a\0"]


@pytest.mark.parametrize("row", [[1.5, 0, 0], [np.nan, 0, 0], [9, 0, 0], [-1, 0, 0], [2, 255, 0], [2, np.inf, 0]])
def test_a_row_that_is_no_name_is_refused(row: list[float]) -> None:
    with pytest.raises(eps.InputError, match="row 1 is no name"):
        keys.decode(np.array([[0, 0, 0], row], np.float32))


def test_keys_come_without_the_client_and_its_kernels() -> None:
    code = "import elasticps as eps, sys; eps.keys.hashed('a'); assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
