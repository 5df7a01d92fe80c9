"""A store behind dynamicemb's tables in GPU memory: rows that do not fit there are at the servers.

    options = DynamicEmbTableOptions(…, caching=True, external_storage=elasticps.dynamicemb.server_storage(ps))

dynamicemb looks rows up in its cache, asks this store for those that it lacks, and gives back what it evicts: an
embedding with the state of its optimizer. It trains the rows itself, so servers only store them.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

if find_spec("torch") is None:
    raise ImportError("elasticps.dynamicemb needs torch: pip install 'elasticps[torch]'", name="torch")

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elasticps.errors import ConfigError
from elasticps.model.spec import Assign, Zeros

if TYPE_CHECKING:
    from elasticps.client import Client, SparseTable, Step

_NOTE = 5
"""Floats of a stored row in front of its values: 1 for a row that was inserted, and the score in four parts of 16 bits,
each of which a float32 holds exactly."""
_PARTS = 16 * np.arange(4, dtype=np.uint64)
_LOADED_BYTES = 16 << 20  # of rows of a file that are pushed at once
_open: WeakKeyDictionary[Client, WeakValueDictionary[str, ServerStorage]] = WeakKeyDictionary()  # by client and prefix


def server_storage(ps: Client, *, prefix: str = "dynamicemb") -> type[ServerStorage]:
    """The class to give as `external_storage`: its tables are named `<prefix>.<table's number>`, so each collection
    takes a prefix of its own, and each of its groups of tables if dynamicemb makes several. dynamicemb copies its
    options, and a class is what it may copy."""
    names = {"ps": ps, "prefix": prefix}
    base = _interface()
    return type("ServerStorage", (ServerStorage, base) if base is not object else (ServerStorage,), names)


def _interface() -> type[Any]:
    """dynamicemb's `Storage`, where dynamicemb is installed."""
    try:
        from dynamicemb.types import Storage
    except ImportError:
        return object
    interface: type[Any] = Storage
    return interface


class ServerStorage:
    """dynamicemb's `Storage`: rows of several tables by key, on the device of the keys.

    options, optimizer: as dynamicemb gives them, DynamicEmbTableOptions of each table and the optimizer that runs on
    the GPU. Each `insert` is a step of the worker `ps`, `find` sees all of its own. A row is `value_dim` floats: the
    embedding, and the optimizer's state behind it. Rows that servers refuse are a ServerError of a later call. Raises
    ConfigError for rows that are not float32, and a prefix that another store of this client has.
    """

    ps: Client  # as whose steps rows are stored
    prefix: str  # before the numbers of tables

    def __init__(self, options: Sequence[Any], optimizer: Any) -> None:
        self._options, self._optimizer = list(options), optimizer
        self._dims = [int(each.dim) for each in options]
        self._value_dims = [dim + int(optimizer.get_state_dim(dim)) for dim in self._dims]
        dtypes = {getattr(each, "embedding_dtype", None) or torch.float32 for each in options}
        if dtypes != {torch.float32}:
            raise ConfigError(f"servers store rows of dynamicemb as float32, tables are of {sorted(map(str, dtypes))}")
        stores = _open.setdefault(self.ps, WeakValueDictionary())
        if self.prefix in stores:
            raise ConfigError(
                f"another store of this client has its rows in {self.prefix}.0 and so on: give each collection, and "
                "each of its groups of tables, its own server_storage(ps, prefix=…), or delete the other store first"
            )
        self._steps: deque[Step] = deque()  # inserted, and not known to be committed
        self._tables: list[SparseTable] = [
            self.ps.table(f"{self.prefix}.{number}", dim=_NOTE + floats, optimizer=Assign(), init=Zeros())
            for number, floats in enumerate(self._value_dims)
        ]
        stores[self.prefix] = self

    def find(
        self, unique_keys: Tensor, table_ids: Tensor, copy_mode: Any, lfu_accumulated_frequency: Tensor | None = None
    ) -> tuple[int, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        """Looks rows up: keys int64 [n], and the table of each.

        Returns how many are missing; their keys, indices, tables and frequencies (None if none were given); bool [n],
        which were found; scores int64 [n], 0 for missing ones; values float32 [n, dim], dim the largest embedding for
        `CopyMode.EMBEDDING`, else the largest embedding and behind it the largest state.
        """
        self._raise_refused()
        device, n = unique_keys.device, len(unique_keys)
        whole = copy_mode.value == "value"
        values = torch.zeros(n, self.max_value_dim() if whole else self.max_embedding_dim())
        found, scores = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.int64)
        here = unique_keys.cpu().numpy()
        positions = self._positions(table_ids)
        keys_by_table = {self._tables[number]: here[at.numpy()] for number, at in positions.items()}
        pulled = self.ps.pull(keys_by_table) if keys_by_table else {}
        for number, at in positions.items():
            rows, dim = torch.from_numpy(pulled[self._tables[number]]), self._dims[number]
            found[at] = rows[:, 0] > 0
            scores[at] = torch.from_numpy(_score(rows[:, 1:_NOTE].numpy()))
            values[at, :dim] = rows[:, _NOTE : _NOTE + dim]
            if whole:
                states_at = self.max_embedding_dim()
                values[at, states_at : states_at + self._value_dims[number] - dim] = rows[:, _NOTE + dim :]
        missing = (~found).nonzero().flatten().to(device)
        frequencies = None if lfu_accumulated_frequency is None else lfu_accumulated_frequency[missing]
        return (
            len(missing), unique_keys[missing], missing, table_ids[missing], frequencies, found.to(device),
            scores.to(device), values.to(device),
        )  # fmt: skip

    def insert(
        self,
        keys: Tensor,
        table_ids: Tensor,
        values: Tensor,
        scores: Tensor | None = None,
        preserve_existing: bool = False,
    ) -> None:
        """Stores rows: keys int64 [n], each once in a table; values float32 [n, largest value], as `find` has them;
        scores int64 [n], without which rows keep theirs, as they do with preserve_existing."""
        self._raise_refused()
        if not len(keys):
            return
        step: dict[Any, Any] = {}
        positions = self._positions(table_ids)
        ids, rows = keys.cpu().numpy(), values.detach().float().cpu()
        keep = preserve_existing or scores is None
        notes = self._notes({number: ids[at.numpy()] for number, at in positions.items()}) if keep else {}
        for number, at in positions.items():
            dim, states_at = self._dims[number], self.max_embedding_dim()
            stored = np.zeros((len(at), _NOTE + self._value_dims[number]), np.float32)
            stored[:, 0] = 1
            stored[:, 1:_NOTE] = notes[number] if keep else _parts(scores[at.to(scores.device)].cpu().numpy())  # type: ignore[index,union-attr]
            stored[:, _NOTE : _NOTE + dim] = rows[at, :dim]
            stored[:, _NOTE + dim :] = rows[at, states_at : states_at + self._value_dims[number] - dim]
            step[self._tables[number]] = ids[at.numpy()], stored
        self._steps.append(self.ps.push(step))

    def _raise_refused(self) -> None:
        """Raises the ServerError of a step that is done, if servers refused rows of it."""
        while self._steps and self._steps[0].done():
            self._steps.popleft().result()

    def _positions(self, table_ids: Tensor) -> dict[int, Tensor]:
        """Where the keys of each table stand, by the table's number."""
        here = table_ids.cpu()
        return {number: (here == number).nonzero().flatten() for number in here.unique().tolist()}

    def _notes(self, keys: dict[int, NDArray[np.int64]]) -> dict[int, NDArray[np.float32]]:
        """The parts of the scores that rows have now, by the table's number."""
        pulled = self.ps.pull({self._tables[number]: some for number, some in keys.items()})
        return {number: pulled[self._tables[number]][:, 1:_NOTE] for number in keys}

    def export_keys_values(
        self, device: torch.device, batch_size: int = 65536, table_id: int = 0
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
        """Yields all rows of a table in batches: keys, embeddings, states (None if the optimizer has none), scores."""
        dim = self._dims[table_id]
        for keys, rows in self._tables[table_id].items(batch_size):
            all_rows = torch.from_numpy(rows)
            states = all_rows[:, _NOTE + dim :].to(device) if self._value_dims[table_id] > dim else None
            scores = torch.from_numpy(_score(rows[:, 1:_NOTE])).to(device)
            yield torch.from_numpy(keys).to(device), all_rows[:, _NOTE : _NOTE + dim].to(device), states, scores

    def dump(
        self, table_id: int, meta_file_path: str, emb_key_path: str, embedding_file_path: str,
        score_file_path: str | None, opt_file_path: str | None, include_optim: bool = True, include_meta: bool = True,
        current_score: int | None = None, timestamp: int = 0,
    ) -> None:  # fmt: skip
        """Writes all rows of a table into dynamicemb's files: keys and scores int64, embeddings and states float32, row
        by row; the optimizer's settings as JSON. Each rank that calls it writes the whole table."""
        if include_meta:
            known = getattr(self._options[table_id], "dist_type", None)
            settings = self._optimizer.get_opt_args() | ({} if known is None else {"dist_type": known})
            with open(meta_file_path, "w", encoding="utf-8") as meta:
                json.dump(settings, meta)
        saved = self._saved_floats(table_id)
        with ExitStack() as files:
            paths = (emb_key_path, embedding_file_path, opt_file_path if include_optim else None, score_file_path)
            out = [files.enter_context(open(path, "wb")) if path else None for path in paths]
            for keys, embeddings, states, scores in self.export_keys_values(torch.device("cpu"), table_id=table_id):
                parts = (keys, embeddings, None if states is None else states[:, :saved], scores)
                for file, part in zip(out, parts, strict=True):
                    if file is not None and part is not None:
                        file.write(part.contiguous().numpy().tobytes())

    def _saved_floats(self, table_id: int) -> int:
        """Floats of a row's state that files have: dynamicemb leaves out what only aligns it."""
        dim = self._dims[table_id]
        count = getattr(self._optimizer, "get_ckpt_state_dim", self._optimizer.get_state_dim)
        return int(count(dim))

    def load(
        self, table_id: int, meta_file_path: str, emb_file_path: str, embedding_file_path: str,
        score_file_path: str | None, opt_file_path: str | None, include_optim: bool, timestamp: int = 0,
    ) -> None:  # fmt: skip
        """Stores the rows of files that `dump` wrote; without `include_optim`, or a file of states, these are as of
        new rows. Returns when all are committed. ConfigError for files of other sizes, before anything is stored."""
        dim, saved = self._dims[table_id], self._saved_floats(table_id)
        n = os.path.getsize(emb_file_path) // 8
        keys = _NumberFile(emb_file_path, np.int64, n)
        embeddings = _NumberFile(embedding_file_path, np.float32, n, dim)
        states = scores = None
        if include_optim and opt_file_path and os.path.exists(opt_file_path):
            states = _NumberFile(opt_file_path, np.float32, n, saved)
        if score_file_path and os.path.exists(score_file_path):
            scores = _NumberFile(score_file_path, np.int64, n)
        states_at = self.max_embedding_dim()
        step = max(1, _LOADED_BYTES // (4 * self.max_value_dim()))
        for at in range(0, n, step):
            some = min(step, n - at)
            values = torch.full((some, self.max_value_dim()), self.init_optimizer_state())
            values[:, :dim] = embeddings.read(at, some)
            if states is not None:
                values[:, states_at : states_at + saved] = states.read(at, some)
            zeros = torch.zeros(some, dtype=torch.int64)
            some_scores = zeros if scores is None else scores.read(at, some)[:, 0]
            self.insert(keys.read(at, some)[:, 0], torch.full((some,), table_id), values, some_scores)
        while self._steps:
            self._steps.popleft().result()

    def embedding_dtype(self) -> torch.dtype:
        """float32."""
        return torch.float32

    def embedding_dim(self, table_id: int) -> int:
        """Floats of an embedding of a table."""
        return self._dims[table_id]

    def value_dim(self, table_id: int) -> int:
        """Floats of an embedding and its optimizer's state."""
        return self._value_dims[table_id]

    def max_embedding_dim(self) -> int:
        """The largest of all tables."""
        return max(self._dims)

    def max_value_dim(self) -> int:
        """The largest embedding and the largest state together."""
        return self.max_embedding_dim() + max(v - d for v, d in zip(self._value_dims, self._dims, strict=True))

    def embedding_dims(self, on_device: bool = False) -> Tensor:
        """Floats of an embedding of each table, int64 [tables], on the CPU or the current CUDA device."""
        return torch.tensor(self._dims, device="cuda" if on_device else "cpu")

    def all_dims_vec4(self) -> bool:
        """Whether all of these are multiples of 4."""
        return all(floats % 4 == 0 for floats in [*self._dims, *self._value_dims])

    def init_optimizer_state(self) -> float:
        """What each float of a new row's state is."""
        return float(self._optimizer.get_initial_optim_states())


def _parts(scores: NDArray[np.int64]) -> NDArray[np.float32]:
    """Scores int64 [n] in parts of 16 bits, float32 [n, 4]."""
    bits = scores.view(np.uint64)[:, None]
    return (bits >> _PARTS & np.uint64(0xFFFF)).astype(np.float32)


def _score(parts: NDArray[np.float32]) -> NDArray[np.int64]:
    """The inverse of `_parts`."""
    total: NDArray[np.uint64] = np.bitwise_or.reduce(parts.astype(np.uint64) << _PARTS, axis=1)
    return total.view(np.int64)


class _NumberFile:
    """A file of numbers, `each` for each of so many rows. ConfigError if it has another size."""

    def __init__(self, path: str, dtype: type[np.int64 | np.float32], rows: int, each: int = 1) -> None:
        self._path, self._dtype, self._each = path, np.dtype(dtype), each
        size, what = os.path.getsize(path), "floats" if dtype is np.float32 else "integers"
        if size != rows * each * self._dtype.itemsize:
            raise ConfigError(f"{path} has {size // self._dtype.itemsize} {what}, and {rows} keys have {each} each")

    def read(self, at: int, rows: int) -> Tensor:
        """So many rows from one on, [rows, each]."""
        offset = at * self._each * self._dtype.itemsize
        found = np.fromfile(self._path, self._dtype, rows * self._each, offset=offset)
        return torch.from_numpy(found).view(rows, self._each)
