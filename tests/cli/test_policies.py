"""Policies as options of `elasticps tables set` write them."""

from __future__ import annotations

import pytest

import elasticps as eps
from elasticps.cli.policies import read_admission, read_evictions, shown
from elasticps.errors import SpecError


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("min_count:5", eps.MinCount(5)),
        ("min_count:5,forget_after=7d,most=1000", eps.MinCount(5, forget_after="7d", most=1000)),
        ("min_count_sketch:3,nbytes=4096", eps.MinCountSketch(3, nbytes=4096)),
        ("probability:0.25", eps.Probability(0.25)),
        ("none", None),
    ],
)
def test_an_option_names_an_admission_policy(text: str, policy: object) -> None:
    assert read_admission(text) == policy
    assert read_admission(shown([read_admission(text)])) == policy


def test_options_name_eviction_policies() -> None:
    texts = ["idle_for:30d", "capacity:50000000,keep=most_used,half_life=7d", "small_norm:1e-4", "none"]
    policies = read_evictions(texts)
    assert policies == [
        eps.IdleFor("30d"), eps.Capacity(50_000_000, keep="most_used", half_life="7d"), eps.SmallNorm(1e-4)
    ]  # fmt: skip
    assert read_evictions(shown(policies).split()) == policies
    assert read_evictions(["none"]) == []
    assert shown([]) == "none"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("often", "unknown admission policy 'often'; it is one of min_count, min_count_sketch, probability or none"),
        ("idle_for:30d", "unknown admission policy 'idle_for'"),
        ("min_count", "min_count needs count, as in min_count:VALUE"),
        ("min_count:5,7d", "'7d' says nothing of min_count; write min_count:COUNT,forget_after=…,most=…"),
        ("min_count:5,every=7d", "'every=7d' says nothing of min_count"),
        ("min_count:5,count=6", "'count=6' says nothing"),
        ("min_count:nan", "MinCount.count"),
        ("min_count:5,forget_after=soon", 'seconds or a text like "90s"'),
        ("probability:2", "Probability.p"),
    ],
)
def test_an_option_that_names_no_policy_is_refused(text: str, error: str) -> None:
    with pytest.raises(SpecError, match=error):
        read_admission(text)
