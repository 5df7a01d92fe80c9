"""Names of workers: given ones are checked, and a process without one gets one."""

from __future__ import annotations

import pytest

import elasticps as eps
from coordinator.core.names import check_name
from elasticps.client.client import own_name


@pytest.mark.parametrize("host", ["h", "h" * 63, "h" * 250, "", "my host", "größe", "a.b-c_d"])
def test_a_worker_without_a_name_gets_a_valid_name(host: str) -> None:
    """Host names of 55 characters were refused, and the error named neither where the name came from nor `worker=`."""
    assert check_name("worker", own_name(host, 4_194_304)).startswith("worker-")


def test_processes_with_the_same_host_name_and_number_have_names_of_their_own() -> None:
    """In containers the first process is number 1, and host names are what the image or the pod says: one worker fenced
    the other, in turn."""
    names = set()
    for _ in range(3):
        names.add(own_name("trainer", 1))
        assert own_name("trainer", 1) in names  # a process that connects again is the same worker
        own_name.cache_clear()  # another process
    assert len(names) == 3


def test_an_invalid_worker_name_is_refused_before_any_request() -> None:
    with pytest.raises(eps.ConfigError, match=r"worker=: 'a b' is no usable worker name"):
        eps.connect("etcd://127.0.0.1:1/none", worker="a b")
