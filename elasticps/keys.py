"""Names as keys: int64 keys of strings (`hashed`), and the names of keys, kept at the servers (`Names`)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NoReturn, overload

import numpy as np
import xxhash
from numpy.typing import NDArray

from elasticps.errors import ConfigError, InputError
from elasticps.model.spec import Assign

if TYPE_CHECKING:
    from elasticps.client import Client, SparseTable

log = logging.getLogger(__name__)

_CHUNK = 65_536  # names that are stored, and keys that are looked up, at once
_MOST_COLLIDING = 1_024  # names that are remembered, so that each of them is counted and logged once
_CHECK = 0x9E3779B97F4A7C15  # makes a second seed of the first
_TEXT = frozenset((str, np.str_))
_BYTES = frozenset((bytes, np.bytes_))
_SHOWN = 80  # characters of a name in an error
_PER_FLOAT = 3  # bytes of a name in a float32, which holds whole numbers below 2^24 exactly


@overload
def hashed(names: str | bytes, *, namespace: str = "") -> np.int64: ...  # type: ignore[overload-overlap]
@overload
def hashed(names: object, *, namespace: str = "") -> NDArray[np.int64]: ...
def hashed(names: object, *, namespace: str = "") -> Any:
    """Keys of names, int64 of the shape of `names`: a string or bytes, lists and tuples of them, nested or not, NumPy
    arrays of strings, bytes or objects, and whatever `np.asarray` makes such an array of, as of a pandas Series.

    The key of a text is XXH3-64 of its UTF-8, as a signed integer: the same in every version of elasticps, on every
    machine, in whichever container the text is; bytes count as UTF-8 as they are. The seed is 0, or XXH3-64 of
    `namespace` in UTF-8: names of two namespaces have keys that have nothing to do with each other. Tables take every
    int64 as a key. Of n names two have one key with a probability of about n² / 2^65: for ten million names 3e-6.

    Raises InputError, with the position, for None, NaN, numbers and anything else that is no text, for strings mixed
    with bytes, and for surrogates, which UTF-8 has not.
    """
    texts, shape = _texts(names)
    keys = _hash(texts, _seed(namespace)).reshape(shape)
    return keys if shape else keys[()]


def _seed(namespace: str) -> int:
    given: object = namespace
    if not isinstance(given, str):
        raise InputError(f"namespace must be a string, got {namespace!r:.100}")
    return xxhash.xxh3_64_intdigest(_utf8(namespace, "namespace")) if namespace else 0


def _hash(texts: Sequence[bytes], seed: int) -> NDArray[np.int64]:
    found = np.fromiter(map(xxhash.xxh3_64_intdigest, texts, repeat(seed)), np.uint64, len(texts))
    return found.view(np.int64)


def _texts(names: object) -> tuple[list[bytes], tuple[int, ...]]:
    """The UTF-8 of names, flat, and their shape. InputError for what is no text."""
    array = names if isinstance(names, np.ndarray) and names.dtype.kind in "US" else np.asarray(names, object)
    if isinstance(names, np.ma.MaskedArray) and names.mask.any():
        at = int(np.flatnonzero(np.asarray(names.mask).reshape(-1))[0])
        raise InputError(f"{_position(at, array.shape)} is masked: a missing name has no key")
    flat: list[Any] = array.reshape(-1).tolist()
    kinds = set(map(type, flat))
    if kinds <= _TEXT:
        try:
            return list(map(str.encode, flat)), array.shape
        except UnicodeEncodeError:
            for at, name in enumerate(flat):
                _utf8(name, _position(at, array.shape))
            raise
    if not kinds <= _BYTES:
        _refuse(flat, array.shape)
    return flat, array.shape


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what}, {text!r:.{_SHOWN}}, is no text that UTF-8 can hold: {error.reason}") from None


def _refuse(flat: Sequence[Any], shape: tuple[int, ...]) -> NoReturn:
    """Names the first that is no text, or not of the kind of those before it."""
    kinds = _BYTES if type(flat[0]) in _BYTES else _TEXT
    at = next(i for i, name in enumerate(flat) if type(name) not in kinds)
    name, what = flat[at], _position(at, shape)
    if type(name) in _TEXT | _BYTES:
        raise InputError(f"{what} is {type(name).__name__}, and those before it are not: decode bytes first")
    if name is None or name != name or type(name).__name__ in ("NAType", "NaTType"):
        raise InputError(f"{what} is {name!r}: a missing name has no key; drop it, or give it a name of its own")
    raise InputError(
        f"{what} is {name!r:.{_SHOWN}}, a {type(name).__name__}: names are strings or bytes; integers are keys already"
    )


def _position(at: int, shape: tuple[int, ...]) -> str:
    return f"names[{', '.join(map(str, np.unravel_index(at, shape)))}]" if shape else "the name"


class Names:
    """The names of keys: a table `name` of the application that has, for each key, the name that it was made of.

    It is a table as any other: replicated, in checkpoints and exports, there for all workers and after restarts. Each
    row has one name of up to `max_bytes` bytes of UTF-8; a table of that name that exists has to have the same. All
    workers of one table use one `namespace`, as for `hashed`. known: so many names that are certainly stored are
    remembered here, rounded up to a power of two, 16 bytes each, so that adding them again asks no server.
    What another worker has deleted meanwhile is still taken for stored: make a new object then.

    Threads may share it. ConfigError for the client of a group's rank, InputError for unusable arguments, else errors
    as for `Client.table`.
    """

    def __init__(
        self, ps: Client, name: str = "names", *, max_bytes: int = 60, namespace: str = "", known: int = 1 << 20
    ) -> None:
        if ps.collective:
            raise ConfigError("Names takes the client of one process: connect one besides the group's, at rank 0 say")
        numbers: dict[str, object] = {"max_bytes": max_bytes, "known": known}
        for what, given in numbers.items():
            if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given < 1 << 30:
                raise InputError(f"{what} is a number from 1 on, got {given!r}")
        self.max_bytes = max_bytes
        self.namespace = namespace
        self._seed = _seed(namespace)
        dim = 1 + -(-max_bytes // _PER_FLOAT)
        self.table: SparseTable = ps.table(name, dim=dim, optimizer=Assign())
        size = 1 << max(1, (known - 1).bit_length())
        self._mask = np.int64(size - 1)
        self._keys = np.arange(1, size + 1)  # by the lowest bits of a key; none of these lies where it would
        self._checks = np.zeros(size, np.int64)
        self._invalidations = self.table.invalidations  # what is remembered is of then
        self._lock = threading.Lock()
        self._collisions = 0
        self._colliding: set[bytes] = set()

    def __repr__(self) -> str:
        return f"<Names in table {self.table.name!r}: up to {self.max_bytes} bytes, collisions: {self._collisions}>"

    @property
    def collisions(self) -> int:
        """Names that this object was given whose key had another name already. That one stays; both were logged. Beyond
        1,024 such names, one that is given again may count, and be logged, again."""
        return self._collisions

    def add(self, names: object) -> NDArray[np.int64]:
        """Keys of names, as `hashed`; returns when the servers have all of the names. A name that is known to be there
        costs no request.

        It is no step. Raises InputError, before anything is stored, for a name longer than `max_bytes` or one that
        is no UTF-8, and while a step of this client is open; else errors as for `SparseTable.load`.
        """
        texts, shape = _texts(names)
        if max(map(len, texts), default=0) > self.max_bytes or not all(map(bytes.isascii, texts)):
            self._check(texts, shape)
        keys, checks = _hash(texts, self._seed), _hash(texts, self._seed ^ _CHECK)
        if self.table.invalidations != self._invalidations:
            with self._lock:
                if (now := self.table.invalidations) != self._invalidations:  # not by what another thread added
                    self._checks[:] = 0
                    self._keys[:] = np.arange(1, len(self._keys) + 1)
                    self._invalidations = now
        at = keys & self._mask
        new = np.flatnonzero((self._keys[at] != keys) | (self._checks[at] != checks))
        for start in range(0, len(new), _CHUNK):
            some = new[start : start + _CHUNK]
            with self._lock:
                self._store([texts[i] for i in some.tolist()], keys[some])
                self._keys[at[some]], self._checks[at[some]] = keys[some], checks[some]
        return keys.reshape(shape)

    def _check(self, texts: Sequence[bytes], shape: tuple[int, ...]) -> None:
        for at, text in enumerate(texts):
            if len(text) > self.max_bytes:
                raise InputError(
                    f"{_position(at, shape)} has {len(text)} bytes, and table {self.table.name!r} holds names of up to "
                    f"{self.max_bytes}: nothing was stored. Cut it, or make a table with max_bytes={len(text)}"
                )
            try:
                text.decode()
            except UnicodeDecodeError as error:
                raise InputError(f"{_position(at, shape)} is no UTF-8 ({error.reason}): nothing was stored") from None

    def _store(self, texts: Sequence[bytes], keys: NDArray[np.int64]) -> None:
        """Stores names that are not there yet. Where workers store different names of one key, the first one stays."""
        table, rows = self.table, encode(texts, self.max_bytes)
        distinct, first, which = np.unique(keys, return_index=True, return_inverse=True)
        stored = table.pull(distinct, exact=True)
        absent = stored[:, 0] == 0
        if absent.any():
            table.load(distinct[absent], rows[first[absent]], only_new=True)
            self._invalidations += 1  # by this `load`
            stored[absent] = table.pull(distinct[absent], exact=True)
        for i in np.flatnonzero((stored[which] != rows).any(axis=1)).tolist():
            self._note_collision(int(keys[i]), texts[i], stored[which[i]])

    def _note_collision(self, key: int, text: bytes, row: NDArray[np.float32]) -> None:
        if text in self._colliding:
            return
        (there,) = decode(row[None])
        self._collisions += 1
        if len(self._colliding) < _MOST_COLLIDING:
            self._colliding.add(text)
        log.warning(
            "two names have one key, %d, in table %s: %r, which stays, and %r; their rows are one",
            key, self.table.name, there, text.decode(),
        )  # fmt: skip

    def look_up(self, keys: object) -> list[str | None]:
        """The names of keys, int64 [n], in their order; None where no name is stored. Errors as for `pull`, and
        InputError for rows that are no names."""
        from elasticps.client.inputs import checked_keys

        given, found = checked_keys(self.table.name, keys), list[str | None]()
        for at in range(0, len(given), _CHUNK):
            found += decode(self.table.pull(given[at : at + _CHUNK], exact=True))
        return found


def encode(texts: Sequence[bytes], max_bytes: int) -> NDArray[np.float32]:
    """Names in UTF-8, none longer than `max_bytes`, as rows float32 [n, 1 + ⌈max_bytes / 3⌉] of whole numbers: the
    length plus one, then three bytes a float, the first in the lowest bits. A row of zeros is no name."""
    width = -(-max_bytes // _PER_FLOAT)
    padded = b"".join([text.ljust(_PER_FLOAT * width, b"\0") for text in texts])
    parts = np.frombuffer(padded, np.uint8).reshape(len(texts), width, _PER_FLOAT).astype(np.uint32)
    rows = np.empty((len(texts), 1 + width), np.float32)
    rows[:, 0] = np.fromiter(map(len, texts), np.int64, len(texts)) + 1
    rows[:, 1:] = parts[:, :, 0] | parts[:, :, 1] << 8 | parts[:, :, 2] << 16
    return rows


def decode(rows: NDArray[np.float32]) -> list[str | None]:
    """The inverse of `encode`, for rows float32 [n, dim] as a table of `Names` has them, or an export of it: a string
    for each row, None for one of zeros. Raises InputError for rows that are no names."""
    rows = np.asarray(rows, np.float32)
    width = 3 * (rows.shape[1] - 1)
    numbers = np.where((rows >= 0) & (rows < 1 << 24), rows, 0).astype(np.int64)
    lengths = numbers[:, 0] - 1
    wrong = (numbers != rows).any(axis=1) | (lengths > width)
    raw = np.stack([numbers[:, 1:] >> shift & 0xFF for shift in (0, 8, 16)], axis=2).astype(np.uint8).tobytes()
    found: list[str | None] = []
    for at, length in enumerate(lengths.tolist()):
        try:
            if wrong[at]:
                raise ValueError("its floats are none that names are kept as")
            found.append(None if length < 0 else raw[at * width : at * width + length].decode())
        except ValueError as error:
            raise InputError(
                f"row {at} is no name: {error}. Only `Names` may change its table, and exports of it have to be float32"
            ) from None
    return found
