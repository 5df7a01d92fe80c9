"""Each check of a run against data that must fail it, and against data that must not."""

from __future__ import annotations

from chaos.live.nemesis import Fault
from chaos.live.verdict import epochs_back
from chaos.live.watch import Seen
from tests.chaos.scenes import action_of


def seen(*epochs: int) -> list[Seen]:
    """A view a second, of these epochs."""
    return [Seen(float(at), epoch, 0, 0, "because") for at, epoch in enumerate(epochs)]


def test_epochs_never_go_back() -> None:
    assert epochs_back(seen(3, 4, 7), []) == []
    (older,) = epochs_back(seen(3, 7, 4, 8), [])
    assert older == "at 2.0 s the view of epoch 7 was followed by another one of epoch 4: because"
    (same,) = epochs_back(seen(3, 7, 7, 8), [])
    assert same.startswith("at 2.0 s the view of epoch 7 was followed by another one of epoch 7")


def test_an_etcd_made_anew_may_have_missed_the_last_view() -> None:
    renewed = Fault(action_of("etcd-new", for_=1), "over", began=1.5, ended=2.5)
    assert epochs_back(seen(3, 7, 6, 7), [renewed]) == []
    assert len(epochs_back(seen(3, 7, 6, 7, 5), [renewed])) == 1
