"""The errors of coordination. A lost race is a value, never an error."""

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
    """Another process now has this one's name or office; its writes under that would be refused."""


class LeaseLost(CoordinationError):
    """The store no longer knows the lease: it ran out or was revoked, and its keys are gone."""


class OtherCluster(StoreUnavailable):
    """The store holds another cluster of this name, or none: it has lost its data, or was replaced."""


class NotPermitted(CoordinationError):
    """The store does not allow this to the user that the certificate names."""


class WritesRefused(StoreUnavailable):
    """The store answers reads but takes no writes; the text says why, and what to do. The write did not happen."""


class Unreadable(StoreUnavailable, ValueError):
    """The view, the roster or the config in the store makes no sense. That may pass: a leader that knows the last good
    value puts it back. The text says which key it is, what it holds, and what to do otherwise."""


class TooLarge(CoordinationError, ValueError):
    """The value is too large for the store. Nothing was written."""


class UnknownServer(CoordinationError, ValueError):
    """No server of that name is registered; the text names those that are."""


class Damaged(CoordinationError, ValueError):
    """The value under a key of the store makes no sense; the text says what to put there."""


class ForkedProcess(CoordinationError, ValueError):
    """This process was forked from one that uses gRPC, so it cannot use gRPC; the text says what works instead."""
