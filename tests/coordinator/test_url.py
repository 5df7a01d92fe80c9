"""Cluster URLs and names."""

from __future__ import annotations

import pytest

from coordinator.core.names import check_address, check_host, check_name
from coordinator.core.url import EXAMPLE, ClusterUrl, TlsFiles, parse


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("etcd://127.0.0.1:2379/demo", ClusterUrl(("127.0.0.1:2379",), "demo")),
        ("etcd://etcd.example/demo/", ClusterUrl(("etcd.example:2379",), "demo")),
        ("etcd://a:1,b,[::1]:3,[fe80::1]/x", ClusterUrl(("a:1", "b:2379", "[::1]:3", "[fe80::1]:2379"), "x")),
        ("etcd://a/x?ca=/c.pem", ClusterUrl(("a:2379",), "x", TlsFiles(ca="/c.pem"))),
        (
            "etcd://a/x?ca=/my%20c%2B.pem&cert=/d.pem&key=/k.pem",
            ClusterUrl(("a:2379",), "x", TlsFiles("/my c+.pem", "/d.pem", "/k.pem")),
        ),
    ],
)
def test_valid_urls_are_parsed(url: str, expected: ClusterUrl) -> None:
    assert parse(url) == expected
    assert parse(str(expected)) == expected


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("", "begin with etcd://"),
        ("http://a/x", "begin with etcd://"),
        ("etcd:///x", "names no host"),
        ("etcd://a", "names no cluster"),
        ("etcd://a/", "names no cluster"),
        ("etcd://a/x/y", "no usable cluster name"),
        ("etcd://a/-x", "no usable cluster name"),
        ("etcd://a:0/x", "no etcd endpoint"),
        ("etcd://a:70000/x", "no etcd endpoint"),
        ("etcd://a:b/x", "no etcd endpoint"),
        ("etcd://a,,b/x", "no etcd endpoint"),
        ("etcd://[::1/x", "cannot use"),
        ("etcd://a,a:2379/x", "twice"),
        ("etcd://me:secret@a/x", "passwords are not supported"),
        ("etcd://a/x#y", "'#'"),
        ("etcd://a/x?tls=1", "unknown option tls"),
        ("etcd://a/x?ca", "cannot use"),
        ("etcd://a/x?ca=", "name a file"),
        ("etcd://a/x?ca=a&ca=b", "once"),
        ("etcd://a/x?cert=a", "go together"),
    ],
)
def test_bad_urls_are_refused_with_the_reason_and_an_example(url: str, complaint: str) -> None:
    with pytest.raises(ValueError, match="cannot use") as error:
        parse(url)
    assert complaint in str(error.value)
    assert EXAMPLE in str(error.value)


@pytest.mark.parametrize("name", ["", "a/b", "a b", ".a", "-a", "ä", "a\n", "x" * 64, None, 3])
def test_names_are_short_and_plain(name: object) -> None:
    with pytest.raises(ValueError, match="no usable server name"):
        check_name("server", name)


@pytest.mark.parametrize("host", ["no such", "a/b", "a:1", "[::1]", "*", "a\n", "..", "a" * 64])
def test_a_host_that_no_resolver_accepts_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="can be no host"):
        check_host(host)


@pytest.mark.parametrize("host", ["", "etcd-0.etcd_ns.svc", "bücher.example", "10.0.0.1", "::", "fe80::1%eth0"])
def test_names_and_addresses_are_hosts(host: str) -> None:
    assert check_host(host) == host


@pytest.mark.parametrize("address", ["", "a", "a:", ":1", "a:0", "a:65536", "a:1x", "a b:1", "a:1/", None, 3])
def test_addresses_are_host_and_port(address: object) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        check_address("server address", address)
