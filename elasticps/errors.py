"""Every error that elasticps raises on purpose.

Two families matter to a caller who wants to retry: after a `Definite` error the operation did not happen;
after an `Indefinite` one nobody knows, and asking again is safe because servers recognise duplicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Error(Exception):
    """Root of the family: what happened, to what, and what to do about it."""


class Definite(Error):
    """The operation did not happen."""


class Indefinite(Error):
    """The outcome is unknown; retrying is safe."""


class ConfigError(Definite, ValueError):
    """A setting, URL or argument is unusable."""


class KernelsMissing(ConfigError, ImportError):
    """numba is not installed, which compiles the kernels of servers and workers."""

    def __init__(
        self,
        text: str = "servers, coordinators, workers and checkpoints need numba, which compiles their kernels: "
        "pip install 'elasticps[kernels]'",
    ) -> None:
        super().__init__(text)
        self.name = "numba"

    @classmethod
    def check(cls) -> None:
        """Raises it unless numba is installed. Imports nothing."""
        if find_spec("numba") is None:
            raise cls


class SpecError(Definite, ValueError):
    """A table, optimizer or initialiser is described wrongly, or differently from the one that exists."""


class InputError(Definite, ValueError):
    """Keys, gradients or values have the wrong type, shape or content."""


class OtherShare(InputError):
    """A key was asked for at a reader that has another share of them. share: the number of the share that has it, from
    1 on."""

    def __init__(self, text: str, share: int = 0) -> None:
        super().__init__(text)
        self.share = share


class Refused(Definite):
    """A request that servers refused. Of a push they refuse single rows: the step counts, and all of its other rows are
    applied.

    refused: keys of the rows that were not applied, by the name of their table, int64 [n] each in ascending order; of a
    tensor the numbers of its blocks. Empty for all other requests. To push exactly these rows again, once the reason is
    gone, applies each row of the step once; to push the whole step again applies all others twice. Of a step in parts
    (`OpenStep`) it has a key if the row of any part was refused; so this needs each key in one part only.
    others: what `flush` raises is the error of the oldest such step; here are those of later ones, each with its rows.
    """

    refused: Mapping[str, NDArray[np.int64]] = MappingProxyType({})
    others: Sequence[Exception] = ()


class UnknownTable(Refused, KeyError):
    """No table of that name or id. A push to a table that was dropped raises it, and counts without its rows."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class VersionMismatch(Definite):
    """Client and server speak different versions of the wire protocol."""


class ClusterUnreachable(Indefinite, ConnectionError):
    """Neither the coordination store nor the servers named there could be reached in time."""


class CheckpointError(Definite):
    """A checkpoint, or the place where it lies, cannot be used; nothing was changed there that others can see."""


class Timeout(Indefinite, TimeoutError):
    """An operation did not finish in time; the text names who was waited for."""


class GroupLost(Indefinite):
    """Ranks of an `elasticps.torch.LocalGroup` cannot go on together: one has ended, is silent, or does something else
    than the others. Start all of them again: they go on where the group's last committed step was."""


class Closed(Definite):
    """The client was closed, or fenced by a newer incarnation of the same worker."""


class ServerError(Refused):
    """A server refused a request; the text is the server's own. A push that raises it counts as a step, and `refused`
    has the rows that it lacks."""


class LeftOut(ServerError):
    """A synchronous round was closed without this worker, which had been away for longer than its lease. The client
    pushes the step again for a later round, so nobody is told."""


class ServerFull(ServerError):
    """A push would add rows for which a server has no memory. These rows are refused, and named in `refused`: push them
    again, and no others, when there is room. Rows that are there are updated.

    server: which one is full; table: name of the table; nbytes: what the rows would take.
    """

    def __init__(self, text: str, server: str, table: str, nbytes: int) -> None:
        super().__init__(text)
        self.server, self.table, self.nbytes = server, table, nbytes

    def __reduce__(self) -> tuple[type[ServerFull], tuple[str, str, str, int], dict[str, object]]:
        return type(self), (str(self), self.server, self.table, self.nbytes), self.__dict__


class DataLost(Definite):
    """Every replica of some ranges was gone, and they came back from a checkpoint. Raised once for each such loss, by
    the next operation of a client with `raise_on_loss`; the operation has not begun, and may be done as if nothing was.

    loss: what is missing, as `Client.losses` has it.
    """

    def __init__(self, text: str, loss: object) -> None:
        super().__init__(text)
        self.loss = loss

    def __reduce__(self) -> tuple[type[DataLost], tuple[str, object]]:
        return type(self), (str(self), self.loss)


class NotFinite(ServerError):
    """A push had gradients with NaN or infinity for a table that takes none, or such scores, as sums of some are.
    These rows are refused, and named in `refused`; all others are applied.

    table: name of the table; key: of the first such row there.
    """

    def __init__(self, text: str, table: str, key: int) -> None:
        super().__init__(text)
        self.table, self.key = table, key

    def __reduce__(self) -> tuple[type[NotFinite], tuple[str, str, int], dict[str, object]]:
        return type(self), (str(self), self.table, self.key), self.__dict__
