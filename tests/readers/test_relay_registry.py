"""Which relay of a URL is followed, by what each says of itself."""

from __future__ import annotations

import time
from typing import Any

import pytest

from elasticps.client.runtime import Runtime
from elasticps.errors import ClusterUnreachable, ConfigError
from elasticps.readers import relay_registry
from elasticps.readers.relay_registry import RelayRegistry
from elasticps.readers.values import ReaderSpec

ADDRESSES = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")


class Relays:
    """What listens at the addresses, by address; in place of connections."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ages_s: float) -> None:
        self.welcomes: dict[str, dict[str, Any]] = {}
        self.questions = list[str]()
        for address, age_s in zip(ADDRESSES, ages_s, strict=True):
            self.set(address, age_s)
        relays = self

        class Remote:
            def __init__(self, address: str, **options: object) -> None:
                relays.questions.append(address)
                if address not in relays.welcomes:
                    raise ClusterUnreachable(f"nobody is at {address}")
                self.welcome = relays.welcomes[address]

            def __enter__(self) -> Remote:
                return self

            def __exit__(self, *error: object) -> None:
                """Nothing to close."""

        monkeypatch.setattr(relay_registry, "RemoteReader", Remote)

    def set(self, address: str, age_s: float, **fields: object) -> None:
        self.welcomes[address] = {
            "cluster": "demo", "identity": "demo@1", "incarnation": 1, "ranges": 4, "dtype": None, "share": "1/1",
            "oldest_us": round((time.time() - age_s) * 1e6), "every_ms": 20, **fields,
        }  # fmt: skip


def open_registry() -> RelayRegistry:
    return RelayRegistry(f"reader://{','.join(ADDRESSES)}", ReaderSpec(), Runtime(), 0.1)


def followed(registry: RelayRegistry) -> tuple[str, int]:
    view = registry.first_view(0.1)
    return view.servers[0].address, view.epoch


def test_a_relay_is_followed_while_it_has_a_new_state_and_others_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    relays = Relays(monkeypatch, 9.0, 0.0, 0.0)
    registry = open_registry()
    assert followed(registry) == (ADDRESSES[0], 1)
    assert set(relays.questions) == {ADDRESSES[0]}


def test_a_relay_with_an_old_state_is_left_for_a_newer_one_and_nobody_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relays = Relays(monkeypatch, 0.0, 0.0, 0.0)
    registry = open_registry()
    relays.set(ADDRESSES[0], 30.0)
    relays.set(ADDRESSES[1], 25.5)  # no good deal newer
    assert followed(registry) == (ADDRESSES[2], 1)
    for age_s in (11.0, 300.0):  # all servers are away
        for address, later_s in zip(ADDRESSES, (1.0, 2.0, 3.0), strict=True):
            relays.set(address, age_s + later_s)
        assert followed(registry) == (ADDRESSES[2], 1)
    del relays.welcomes[ADDRESSES[2]]
    assert followed(registry) == (ADDRESSES[0], 2)


def test_as_it_begins_a_reader_takes_no_relay_that_is_old_if_another_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relays = Relays(monkeypatch, 60.0, 60.0, 0.0)
    assert followed(open_registry()) == (ADDRESSES[2], 1)
    relays.set(ADDRESSES[2], 0.0, identity="demo@2")  # another cluster's
    assert followed(open_registry()) == (ADDRESSES[0], 1)
    relays.set(ADDRESSES[0], 60.0, every_ms=20_000)  # its windows are so far apart
    assert followed(open_registry()) == (ADDRESSES[0], 1)


@pytest.mark.parametrize("fields", [{"oldest_us": None}, {"oldest_us": -1}, {"every_ms": 1 << 40}, {"every_ms": "20"}])
def test_a_relay_that_does_not_say_how_old_it_is_is_refused(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, object]
) -> None:
    relays = Relays(monkeypatch, 0.0, 0.0, 0.0)
    relays.set(ADDRESSES[0], 0.0, **fields)
    with pytest.raises(ConfigError, match="does not say how old its rows are"):
        open_registry()


def test_a_reader_that_is_closed_does_not_say_that_no_relay_can_be_followed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    relays, views = Relays(monkeypatch, 0, 0, 0), list[object]()
    registry = open_registry()
    monkeypatch.setattr(registry.runtime, "spawn", lambda name, call: call())
    relays.welcomes.clear()
    registry.ask_view(views.append)
    assert "no relay can be followed: nobody is at" in caplog.text
    caplog.clear()
    registry.close()
    registry.ask_view(views.append)
    assert views == [None, None]
    assert not caplog.records
