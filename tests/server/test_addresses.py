from __future__ import annotations

import socket

import pytest

from elasticps.errors import ConfigError
from elasticps.server.process import addresses


def test_a_server_advertises_where_it_listens_or_the_given_address() -> None:
    assert addresses.found_under("10.1.2.3", "", ["127.0.0.1:2379"]) == "10.1.2.3"
    assert addresses.found_under("0.0.0.0", "ps1.example", ["127.0.0.1:2379"]) == "ps1.example"
    assert addresses.joined("::1", 7) == "[::1]:7"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_every_address_is_no_address(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"etcd0": "127.0.0.1", "etcd1": "192.0.2.7"}

    def way(name: str, port: int) -> tuple[str, str]:
        if name not in ways:
            raise OSError("no route")
        return ways[name], "192.0.2.9"

    monkeypatch.setattr(addresses, "_way", way)
    assert addresses.found_under(host, "", ["gone:2379", "etcd0:2379", "etcd1:2379"]) == "192.0.2.7"
    with pytest.raises(ConfigError, match="--advertise ADDRESS"):
        addresses.found_under(host, "", ["gone:2379", "etcd0:2379"])
    with pytest.raises(ConfigError, match="no address that others can connect to"):
        addresses.found_under(host, host or "0.0.0.0", ["etcd1:2379"])


def test_a_server_that_only_this_machine_can_reach_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"here": ("192.0.2.7", "192.0.2.7"), "there": ("192.0.2.7", "192.0.2.8")}
    monkeypatch.setattr(addresses, "_way", lambda name, port: ways[name])
    assert addresses.hidden("127.0.0.1", ["here:2379", "there:2379"])
    assert not addresses.hidden("127.0.0.1", ["here:2379"])
    assert not addresses.hidden("192.0.2.7", ["there:2379"])


def test_the_way_to_an_etcd_here_is_loopback() -> None:
    with pytest.raises(ConfigError, match="listens on every address"):
        addresses.found_under("0.0.0.0", "", ["127.0.0.1:2379"])


def test_a_port_that_is_taken_is_reported_in_one_line() -> None:
    with addresses.listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}: another process listens there; take another --port"):
            addresses.listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="no such address"):
        addresses.listen("192.0.2.1", 0)
    with pytest.raises(ConfigError, match="no such name is known"):
        addresses.listen("no-such-host.invalid", 0)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_an_ipv6_address_can_be_listened_on() -> None:
    with addresses.listen("::1", 0) as listening:
        assert listening.family is socket.AF_INET6
