"""Keeps the journal of changed keys of a server while readers are attached, and for a while after that."""

from __future__ import annotations

from elasticps.server.core.journal_marks import JournalMarks
from elasticps.server.fast import layout as at
from elasticps.server.roles.context import Context
from elasticps.store.journal import Journal
from replication.chain import Ranges, Role
from replication.messages import Seqs

MARK_S = 0.05
_FULL = int(Role.FULL)  # an array is compared with a number in a third of the time that a member of an enum takes
REST_S = 30.0  # the journal goes on for so long without readers: one may come back


class ChangeJournal:
    """journal: None while nobody has asked for one for a while."""

    def __init__(self, context: Context, words: int) -> None:
        self.journal: Journal | None = None
        self._loop = context.loop
        self._path, self._executor = context.path, context.executor
        self._words = words  # of the ring
        self._marks = JournalMarks()
        self._executor.store.on_gap = self._marks.forget
        self._marked_s = 0.0  # when a mark was added
        self._marked = -1  # position of the newest
        self._used_s = 0.0  # when a reader was there

    def begin(self) -> None:
        """A reader is there: from now on changed keys are noted."""
        self._used_s = self._loop.time()
        if self.journal is None:
            self._note_in(Journal(self._words))
            self._mark()

    def tick(self, used: bool) -> None:
        """Adds a mark when it is time; ends the journal when it is `used` no more, and nobody has come back."""
        if self.journal is None:
            return
        now = self._loop.time()
        if now - self._marked_s >= MARK_S:
            self._mark()
        if used:
            self._used_s = now
        elif now - self._used_s > REST_S:
            self._note_in(None)
            self._marks.clear()

    def find(self, ranges: Ranges, positions: Seqs) -> Seqs:
        """Where a reader goes on that has ranges [n] up to these numbers: positions of the journal, -1 for none."""
        assert self.journal is not None
        seqs = self._executor.replica.seq[ranges]
        return self._marks.find(ranges, positions, seqs, self.journal.end, self.journal.oldest)

    def _note_in(self, journal: Journal | None) -> None:
        self.journal, self._marked = journal, -1
        self._executor.store.keep_journal(journal)
        self._path.h[at.H_JOURNAL] = 0 if journal is None else journal.address

    def _mark(self) -> None:
        assert self.journal is not None
        replica = self._executor.replica
        self._marked_s = self._loop.time()
        if self.journal.end == self._marked:
            return  # the mark before is as good
        self._marked = self.journal.end
        self._marks.add(self.journal.end, replica.seq, (replica.role == _FULL) | replica.filled)
