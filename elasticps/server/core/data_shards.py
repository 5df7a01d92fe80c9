"""CLAIM_SHARDS: a worker asks for shards. `data_shards_state` has the whole story. Pure."""

from __future__ import annotations

from collections.abc import Callable

from elasticps.model.sharding import MAX_SAMPLES, MAX_SHARDS, ShardSpec
from elasticps.server.core.asker import Asker, Body
from elasticps.server.core.barrier_state import BarrierGroup
from elasticps.server.core.data_shards_state import Claim, ShardSet
from elasticps.server.core.group_log import GroupLog, Nobody
from elasticps.server.core.operations import RoundStep
from elasticps.server.core.request_error import RequestError
from elasticps.wire.frames import FrameError, Header, Kind, json_body, json_frame, text, whole, wholes
from elasticps.wire.headers import ClaimShardsHeader
from replication.messages import OperationKind
from replication.progress import MAX_CLOCK

MAX_HELD = 1024
MAX_NAME = 200


class ShardDispenser:
    """Its handler."""

    def __init__(self, log: GroupLog) -> None:
        self._group = log
        self._serving, self._rounds, self._shards = log.serving, log.rounds, log.shards
        self.handlers: dict[int, Callable[[Asker, Header, Body], None]] = {Kind.CLAIM_SHARDS: self._claim}

    def _claim(self, connection: Asker, header: Header, body: Body) -> None:
        asked = _read(connection, header, body)
        group = self._group.group_range(connection, header, body)
        if group is None:
            return
        found = self._shards.find(asked.app, asked.name)
        if found is not None:
            _check(asked, found)
            if self._group.knows_the_lost(asked.app):
                asked = asked._replace(lost=tuple(sorted(w for w in found.doing if w not in self._serving.workers)))
            if found.idle(asked):  # workers that wait ask often: that need not go down the log
                document = self._document(found, asked)
                connection.send(json_frame(Kind.SHARDS, document, request=header.request, epoch=self._serving.epoch))
                return

        def answer() -> bytes:
            found = self._shards.find(asked.app, asked.name)
            if found is None:
                raise RequestError("busy", f"there are too many sets of shards already for {asked.name!r} to be made")
            _check(asked, found)  # another one with that name may have been on its way
            document = self._document(found, asked)
            return json_frame(Kind.SHARDS, document, request=header.request, epoch=self._serving.epoch)

        version = self._serving.roster_version
        if self._rounds.groups.get(asked.app, BarrierGroup()).roster < version:  # by which whoever asks is known
            self._group.log(Nobody(), OperationKind.BARRIER_JOIN, RoundStep(asked.app, version, ()), group)
        self._group.log(self._group.once(connection, header.request, answer), OperationKind.CLAIM_SHARDS, asked, group)

    def _document(self, found: ShardSet, asked: Claim) -> dict[str, object]:
        rounds = self._rounds.groups.get(asked.app, BarrierGroup())
        held = [[shard, *used, rounds.last.get(used.worker, 0)] for shard, used in found.held(asked.worker)]
        decided = [rounds.decided, list(rounds.workers)]
        return {"set": found.id, "held": held, "done": found.done, "total": found.spec.total, "decided": decided}


def _read(connection: Asker, header: Header, body: Body) -> Claim:
    document, committed = json_body(body.data), ClaimShardsHeader.of(header).committed
    try:
        samples, size, epochs = (whole(document[name], MAX_SAMPLES, 1) for name in ("samples", "size", "epochs"))
        seed = None if document["seed"] is None else whole(document["seed"], (1 << 64) - 1)
        name, want = text(document["name"], MAX_NAME), whole(document["want"], MAX_HELD)
        done, back = (wholes(document[name], MAX_SHARDS) for name in ("done", "back"))
    except KeyError as error:
        raise FrameError(f"a take lacks {error}") from None
    spec = ShardSpec(samples, size, epochs, seed)
    if max(len(done), len(back)) > MAX_HELD:
        raise FrameError(f"a take speaks of at most {MAX_HELD} shards")
    if not spec.possible or committed >= MAX_CLOCK:
        raise FrameError(f"a take of shards that cannot be: {spec}")
    return Claim(connection.app, name, spec, connection.worker, committed, want, (), done, back)


def _check(asked: Claim, found: ShardSet) -> None:
    if found.spec != asked.spec:
        theirs, ours = found.spec._asdict(), asked.spec._asdict()
        differ = ", ".join(f"{key} {ours[key]} instead of {theirs[key]}" for key in theirs if ours[key] != theirs[key])
        raise RequestError(
            "spec", f"shards {asked.name!r} exist with another cut: {differ}. Use the same, or another name"
        )
