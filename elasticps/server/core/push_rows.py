"""The rows of a push as its head judges them: which are applied, and which are refused and why. What is decided here
travels in the log, so all replicas apply the same rows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from elasticps.server.core.contents import not_finite, unknown_table
from elasticps.server.core.request_error import RequestError
from elasticps.store import Table
from elasticps.wire.frames import Block
from elasticps.wire.refusals import refused_rows, why
from replication.refusals import Refusal

Mask = NDArray[np.bool_]


class PushRows:
    """blocks: what is applied; refused: the rows that are not; error: why the first of them is not."""

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = blocks
        self.refused: list[Block] = []
        self.error: RequestError | None = None

    def refuse(self, error: RequestError, chosen: Sequence[Mask]) -> None:
        """Refuses the chosen rows of each block, bool [n]."""
        kept = []
        for block, mask in zip(self.blocks, chosen, strict=True):
            count = np.count_nonzero(mask)
            if count:
                self.refused.append(_some(block, mask))
                self.error = self.error or error
            if count < len(mask):
                kept.append(_some(block, ~mask) if count else block)
        self.blocks = kept

    def refuse_all(self, error: RequestError) -> None:
        """Refuses all rows that are left."""
        self.refuse(error, [np.ones(len(block.keys), np.bool_) for block in self.blocks])

    def refuse_unknown(self, tables: Mapping[int, Table], server: str) -> None:
        """Refuses rows of tables that are not here."""
        gone = [block.table not in tables for block in self.blocks]
        if any(gone):
            error = unknown_table(server, self.blocks[gone.index(True)].table)
            chosen = [np.full(len(block.keys), out) for block, out in zip(self.blocks, gone, strict=True)]
            self.refuse(error, chosen)

    def refuse_not_finite(self, tables: Mapping[int, Table]) -> None:
        """Refuses gradients with NaN or infinity, for tables that take none."""
        chosen = [not_finite(tables[block.table], block) for block in self.blocks]
        for block, mask in zip(self.blocks, chosen, strict=True):
            if count := np.count_nonzero(mask):
                table, key = tables[block.table].spec.name, int(block.keys[np.argmax(mask)])
                text = f"table {table!r} takes finite gradients only; that of key {key} is not"
                if count > 1:
                    text += f", nor those of {count - 1:,} more"
                self.refuse(RequestError("not-finite", text, table=table, key=key), chosen)
                return

    def refusal(self, told: int, ranges: int, before: Refusal | None = None) -> Refusal | None:
        """What is logged of the refused rows, and of those that were refused before; None if there are none. told: as
        in `Refusal`; ranges: of the cluster."""
        if self.error is None:
            return before
        rows = refused_rows(self.refused, ranges)
        if before is not None:
            return before._replace(rows=rows if before.rows is None else before.rows.joined(rows))
        return Refusal(why(self.error.document), told, rows)


def _some(block: Block, mask: Mask) -> Block:
    return block._replace(keys=block.keys[mask], grads=block.grads[mask])
