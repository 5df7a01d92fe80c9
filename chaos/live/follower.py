"""The process of a reader beside the load, which says what it shows.

Each pull is compared with what workers have pushed, moments that it holds are, too, and how old rows are is noted. When
it is asked to end, and training rests, the reader must have what the servers have, bit for bit.

A reader is followed in this process; or behind the process of another one, as a relay's reader, or by pulls.

Run as `python -m chaos.live.follower JSON`, it writes what it finds into a file, a line each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import elasticps as eps
from chaos.live import churn
from chaos.live.load import APP, TIMEOUT_S, Job, open_filled, open_filtered, open_tables, say_ready, signals_to_end
from chaos.live.witness import ShownRows, Witness, life_name
from elasticps.readers import AppliedWindow

PAUSE_S = 0.05
HOLD_EVERY = 20  # looks
HOLD_S = 2.0
REST_S = 60.0
Content = dict[str, tuple[NDArray[np.int64], NDArray[np.float32]]]


@dataclass(frozen=True)
class FollowerJob:
    """What to follow. url: the cluster's, or a relay's as reader://host:port; address: of a reader's process to pull
    from instead; worker_url: the cluster's for a worker; tables: their salts by name; load: any life of the load."""

    name: str
    url: str
    address: str
    worker_url: str
    folder: str
    tables: Mapping[str, int]
    load: Mapping[str, Any]

    @property
    def findings(self) -> Path:
        """The file that the process writes."""
        return findings_of(Path(self.folder), self.name)


def findings_of(folder: Path, name: str) -> Path:
    """The file that the process of this reader writes."""
    return folder / f"{name}.findings"


class ReaderProcess:
    """One life of the process."""

    def __init__(self, job: FollowerJob) -> None:
        self._job = job
        self._random = np.random.default_rng(os.getpid())
        self._witness = Witness(Path(job.folder), job.tables, Job(**job.load), Path(job.folder) / f"{job.name}.shown")
        self._file = os.open(job.findings, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._model: eps.Reader | eps.RemoteReader
        if job.address:
            self._model = eps.remote_reader(job.address, job.url or None, timeout=10.0)
        else:
            every = float(self._random.choice([0.005, 0.02, 0.1]))
            self._model = eps.reader(
                job.url, dtype="float32", every=every, application=APP, name=job.name, timeout=TIMEOUT_S
            )

    def step(self) -> None:
        """Looks at what is shown, or has it stay at one moment and looks then."""
        if isinstance(self._model, eps.Reader):
            self._model.check()
            if self._random.random() < 1 / HOLD_EVERY:
                self._hold(self._model)
                return
        try:
            self._look()
        except (eps.ClusterUnreachable, eps.ServerError) as error:  # the process that is asked is away
            self._note(failed=str(error))

    def _look(self) -> None:
        keys = self._witness.keys(self._model.tables)
        age_s, since_s = self._age()
        rows = self._model.pull(keys)
        wrong = self._witness.check(ShownRows(rows, since_s))
        self._note(age=round(age_s, 6), lag=round(self._witness.delays.lag_s, 6), wrong=wrong)

    def _age(self) -> tuple[float, float]:
        """How old the oldest rows are, and since when they have all that was committed."""
        if isinstance(self._model, eps.Reader):
            return self._model.age, self._model.as_of.time_s
        self._model.refresh()
        return float(self._model.welcome["age_s"]), float(self._model.welcome["as_of"]["time_s"])

    def _hold(self, model: eps.Reader) -> None:
        began = time.monotonic()
        try:
            as_of = model.hold(HOLD_S)
        except eps.Timeout as error:
            self._note(timeout=str(error))
            return
        took = time.monotonic() - began
        try:
            keys = self._witness.keys(model.tables)  # now: of all lives that the moment has steps of
            rows = model.pull(keys)
            wrong = self._witness.check(ShownRows(rows, as_of.time_s, as_of.steps))
            time.sleep(float(self._random.uniform(0, 0.3)))
            again = model.pull(keys)
            changed = [name for name in rows if not np.array_equal(rows[name], again[name])]
            if changed and not wrong:
                wrong = f"table {changed[0]!r}: rows changed while it held"
        finally:
            model.release()
        self._note(held=round(took, 6), wrong=wrong)

    # ------------------------------------------------------------------------------------------------------ at rest

    def compare(self) -> None:
        """Compares all rows with those of the servers; training must rest. Notes what differs in the end."""
        with eps.connect(self._job.worker_url, worker=f"judge-{self._job.name}", app=APP, timeout=TIMEOUT_S) as ps:
            counted, tensor = open_tables(ps)
            filtered, rounded = open_filtered(ps)
            tables = [counted, filtered, rounded, open_filled(ps), churn.open_passing(ps)]
            servers = {table.name: _sorted(list(table.items())) for table in tables}
            dense = tensor.pull()
            self._witness.keys({})
            own = {}
            for table in (counted, filtered):
                own[table.name] = {
                    life_name(life): table.pull(self._witness.own_keys(table.name, life), exact=True)[:, 0].astype(int)
                    for life in self._witness.incarnations
                }
        wrong = next(filter(None, (self._witness.check_rest(name, counts) for name, counts in own.items())), "")
        until_s = time.monotonic() + REST_S
        while (differs := self._differs(servers, dense)) and time.monotonic() < until_s:
            time.sleep(PAUSE_S)
        rows = sum(len(keys) for keys, _ in servers.values())
        self._note(compared=rows, wrong=wrong or (differs and f"{REST_S:g} s after the last push {differs}"))

    def _differs(self, servers: Content, dense: NDArray[np.float32]) -> str:
        """Says how what it has differs from that; "" if it does not."""
        model = self._model
        if isinstance(model, eps.Reader):
            if model.tables.keys() != {*servers, "summed"}:
                return f"it has tables {sorted(model.tables)}"
            here = listing(model)
        else:
            here = {name: (keys, model.pull({name: keys})[name]) for name, (keys, _) in servers.items()}
        for name, (keys, rows) in servers.items():
            ours, theirs = here[name][0], keys
            if not np.array_equal(ours, theirs):
                odd = np.setxor1d(ours, theirs)
                where = "here" if odd[0] in ours else "at the servers"
                return f"{len(odd)} keys of {name!r} are on one side only, the first is {odd[0]}, {where}"
            if here[name][1].tobytes() != rows.tobytes():
                at = int(np.flatnonzero((here[name][1] != rows).any(axis=1))[0])
                return f"key {keys[at]} of {name!r} is {here[name][1][at].tolist()}, servers have {rows[at].tolist()}"
        found = model.pull({"summed": None})["summed"]
        return "" if found.tobytes() == dense.tobytes() else "the tensor differs"

    def close(self) -> None:
        """Ends the reader."""
        self._note(undecided=self._witness.undecided, late=round(self._witness.delays.late_s, 6))
        self._model.close()

    def _note(self, **found: object) -> None:
        """Writes a line; what is wrong also goes to the log."""
        os.write(self._file, (json.dumps({"time": time.time(), **found}) + "\n").encode())
        if found.get("wrong"):
            sys.stderr.write(f"{self._job.name}: {found['wrong']}\n")
            sys.stderr.flush()


def listing(model: eps.Reader) -> Content:
    """All rows that a reader has, by table, in the order of their keys."""
    parts: dict[str, list[tuple[NDArray[np.int64], NDArray[np.float32]]]] = {}
    done: list[bool] = []

    def note(window: AppliedWindow) -> None:
        if window.listing and not done:
            for change in window.changes:
                parts.setdefault(change.table, []).append((change.keys.copy(), change.rows.copy()))
            if window.complete:
                done.append(True)

    model.subscribe(note)
    until_s = time.monotonic() + REST_S
    while not done and time.monotonic() < until_s:
        model.check()
        time.sleep(0.005)
    model.unsubscribe(note)
    return {name: _sorted(found) for name, found in parts.items()}


def _sorted(
    parts: Sequence[tuple[NDArray[np.int64], NDArray[np.float32]]],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    if not parts:
        return np.empty(0, np.int64), np.empty((0, 1), np.float32)
    keys, rows = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.argsort(keys)
    return keys[order], rows[order]


def main(arguments: Sequence[str] = sys.argv) -> None:
    """Runs one life until SIGTERM; then compares all rows, and ends."""
    ended = signals_to_end()
    follower = ReaderProcess(FollowerJob(**json.loads(arguments[1])))
    say_ready()
    while not ended:
        follower.step()
        time.sleep(PAUSE_S)
    follower.compare()
    follower.close()


if __name__ == "__main__":
    main()
