"""What coordination raises on purpose. A race that was lost is a value, never one of these."""

from __future__ import annotations


class CoordinationError(Exception):
    """Root of the family."""


class StoreUnavailable(CoordinationError):
    """The coordination store could not be reached in time; the text names the endpoints tried and for how long.

    `indefinite` is true when a write may or may not have happened. An outage says nothing about whether we are still
    who we think we are: that is `Fenced`.
    """

    def __init__(self, message: str, *, indefinite: bool = False) -> None:
        super().__init__(message)
        self.indefinite = indefinite


class Fenced(CoordinationError):
    """Somebody else now has our name or our office; what we write under it would be refused."""


class LeaseLost(CoordinationError):
    """The store no longer knows the lease: it ran out or was revoked, and its keys are gone."""


class OtherCluster(StoreUnavailable):
    """The store holds another cluster under our name, or none: its data were lost, or it was made anew."""


class NotPermitted(CoordinationError):
    """The store does not let whoever our certificate names do this."""


class WritesRefused(StoreUnavailable):
    """The store answers reads and takes no write; the text says why, and what to do. The write did not happen."""


class Unreadable(StoreUnavailable, ValueError):
    """The view, the roster or the config in the store makes no sense. It may again soon: a leader that knows the last
    good one puts it back. The text says which key, what is in it, and what to do else."""


class TooLarge(CoordinationError, ValueError):
    """The store does not take so much under one key. Nothing was written."""


class UnknownServer(CoordinationError, ValueError):
    """No server of that name is registered; the text names those that are."""


class Damaged(CoordinationError, ValueError):
    """What is under a key of the store makes no sense; the text says what to put there."""


class ForkedProcess(CoordinationError, ValueError):
    """This process was forked from one that uses gRPC, so it cannot use gRPC; the text says what works instead."""
