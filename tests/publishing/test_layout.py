"""Names and bytes of published rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticps.errors import ConfigError
from elasticps.publishing.core import layout

NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_characters="/"), min_size=1, max_size=8)
PREFIXES = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=5)
INT64 = st.integers(-(2**63), 2**63 - 1)


@given(PREFIXES, st.dictionaries(NAMES, st.sets(INT64)))
def test_keys_are_found_again_by_table(prefix: str, tables: dict[str, set[int]]) -> None:
    names = [layout.meta_key(prefix, table) for table in tables]
    for table, keys in tables.items():
        names += layout.row_keys(prefix, table, np.array(sorted(keys), np.int64))
    found = layout.sort_keys(prefix, names)
    assert {table: set(keys.tolist()) for table, keys in found.rows.items()} == {t: k for t, k in tables.items() if k}
    assert found.described == tables.keys()


@pytest.mark.parametrize("name", [b"p:users", b"p:users:007", b"p:users:+7", b"p:users:-0", b"q:users:7", b"p::7",
                                  b"p:users:99999999999999999999", b"p:\xff\xfe:7", b"p:users:7\n"])  # fmt: skip
def test_keys_of_others_are_left_alone(name: bytes) -> None:
    found = layout.sort_keys("p:", [name])
    assert not found.rows
    assert not found.described


def test_a_prefix_is_no_pattern() -> None:
    assert layout.pattern("a[b]*?\\") == "a\\[b\\]\\*\\?\\\\*"
    assert layout.pattern("elasticps:") == "elasticps:*"


@given(st.lists(st.floats(width=32), min_size=1, max_size=8))
def test_bfloat16_is_the_nearest(values: list[float]) -> None:
    rows = np.array([values], np.float32)
    published = layout.words(rows, "bfloat16")
    again = layout.floats(published, "bfloat16")
    assert published.dtype == np.dtype("<u2")
    assert (np.isnan(again) == np.isnan(rows)).all()
    finite = np.isfinite(rows) & (np.abs(rows) < 3e38)
    assert (np.abs(again[finite] - rows[finite]) <= np.abs(rows[finite]) / 256 + 1e-38).all()
    assert (layout.words(again, "bfloat16") == published)[~np.isnan(rows)].all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_that_fit_come_back_as_they_were(dtype: str) -> None:
    rows = np.array([[0, 1, -2], [0.5, -0.25, 128]], np.float32)
    assert (layout.floats(layout.words(rows, dtype), dtype) == rows).all()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="int8"):
        layout.check_dtype("int8")
    with pytest.raises(ConfigError, match="prefix"):
        layout.check_prefix("a\nb")
    assert layout.parse_description(b"[1]") == layout.parse_description(b"{") == {}
