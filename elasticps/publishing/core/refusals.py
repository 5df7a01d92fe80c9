"""For how long a target has taken no rows, and when to say so. Pure: times are arguments, of a clock
that is never set."""

from __future__ import annotations

REPEAT_S = 10.0  # from one line about the same reason to the next


class Refusals:
    """What a target has refused since it had all rows last. reason: of the newest refusal, "" once it takes rows."""

    def __init__(self, now_s: float) -> None:
        self.reason = ""
        self._taken_s = now_s  # when it took rows last
        self._since_s: float | None = None  # when it had taken rows last before it refused; None: it has all rows
        self._logged_s = float("-inf")
        self._logged = ""  # that reason

    def note(self, now_s: float, reason: str) -> bool:
        """The target has refused rows, or cannot be reached. Whether to log that: the same reason now and then."""
        self.reason = reason
        if self._since_s is None:
            self._since_s = self._taken_s
        due = reason != self._logged or now_s - self._logged_s >= REPEAT_S
        if due:
            self._logged, self._logged_s = reason, now_s
        return due

    def taken(self, now_s: float, *, complete: bool) -> bool:
        """The target has taken a batch. complete: it has all rows with that. Whether to log that it is back."""
        self.reason, self._taken_s = "", now_s
        back = complete and self._since_s is not None
        if complete:
            self._since_s, self._logged = None, ""
        return back

    def seconds(self, now_s: float) -> float:
        """How long the target has been without all rows for what it refused; 0 while it takes rows: then nobody knows
        whether it will have all of them."""
        return now_s - self._since_s if self.reason and self._since_s is not None else 0.0
