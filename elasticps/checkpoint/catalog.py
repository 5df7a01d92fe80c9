"""The checkpoints under one URL: published, read, listed, deleted."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.core import fields
from elasticps.checkpoint.contents import reader_of
from elasticps.checkpoint.manifest import NAME, Manifest, cut_of, folder_of, path_of
from elasticps.checkpoint.retention import (
    STILL_S,
    Keep,
    UnknownCheckpoint,
    chain_of,
    deletion,
    is_of_checkpoint,
    left_over,
    mark_of,
    superfluous,
)
from elasticps.checkpoint.storage import NotThere, Storage
from elasticps.errors import CheckpointError

log = fields.logger(__name__)

_NOTHING = "nothing of a checkpoint lies in it"
_left_out: set[str] = set()  # what was warned of


class Usage(NamedTuple):
    """What a folder has: files, and bytes of them."""

    files: int
    bytes: int


@dataclass(frozen=True)
class StorageListing:
    """manifests: by cut; unreadable: what is wrong with others; unpublished: cuts with a folder and no manifest."""

    manifests: dict[int, Manifest]
    unreadable: dict[int, str]
    unpublished: tuple[int, ...]


def publish(storage: Storage, manifest: Manifest) -> bool:
    """Makes a checkpoint of what has been written; False if somebody else has made one of that number. Ours may be
    there already: the answer of a bucket was lost, and who asks it again comes second."""
    path, data = path_of(manifest.cut), manifest.encode()
    return storage.put_new(path, data) or storage.get(path) == data


def read(storage: Storage, cut: int) -> Manifest:
    """A checkpoint's manifest. Raises CheckpointError: UnknownCheckpoint if there is none of that number."""
    try:
        return _manifest(storage, cut)
    except NotThere:
        there = ", ".join(map(str, cuts_of(storage))) or "none"
        raise UnknownCheckpoint(f"{storage.url} has no checkpoint {cut}; there are {there}") from None


def _manifest(storage: Storage, cut: int) -> Manifest:
    """The same. Raises NotThere too."""
    path = path_of(cut)
    manifest = Manifest.decode(storage.get(path), f"{storage.url}/{path}")
    if manifest.cut != cut:
        raise CheckpointError(f"{storage.url}/{path} is the manifest of checkpoint {manifest.cut}: it was moved there")
    return manifest


def cuts_of(storage: Storage) -> list[int]:
    """The numbers that have folders, published or not."""
    found = []
    for folder in storage.folders():
        if (cut := cut_of(folder)) is not None:
            found.append(cut)
        elif folder.isdecimal():
            _leave_out(storage, folder, "no checkpoint can have that number")
    return sorted(found)


def used_numbers(storage: Storage) -> tuple[int, set[int]]:
    """(the highest number that a checkpoint has, published, under way or given up; 0 for none; numbers above that which
    other things have: no checkpoint is written there)."""
    foreign: set[int] = set()
    for cut in reversed(cuts_of(storage)):
        if storage.exists(path_of(cut)):
            return cut, foreign
        if files := [path.partition("/")[2] for path, _ in storage.files(folder_of(cut))]:
            if any(map(is_of_checkpoint, files)):
                return cut, foreign
            _leave_out(storage, folder_of(cut), _NOTHING)
            foreign.add(cut)
    return 0, foreign


def _leave_out(storage: Storage, folder: str, why: str) -> None:
    if (where := f"{storage.url}/{folder}") not in _left_out:  # once: a dashboard looks every few seconds
        _left_out.add(where)
        log.warning("a folder is left out", folder=where, reason=why)


def read_back(storage: Storage, manifest: Manifest) -> None:
    """Reads the manifest that was published. CheckpointError if it is not there, or not as it was written."""
    if read(storage, manifest.cut).encode() != manifest.encode():
        raise CheckpointError(f"{storage.url}/{path_of(manifest.cut)} is another manifest than was written")


def check_segment(storage: Storage, manifest: Manifest) -> None:
    """Reads one segment of a checkpoint, that with the most rows of its largest file. CheckpointError."""
    if manifest.files:
        entry = max(manifest.files, key=lambda file: file.bytes)
        reader = reader_of(storage, manifest, entry, manifest.spec(entry.table))
        reader.read([max(reader.segments, key=lambda segment: segment.rows)])


def look(storage: Storage) -> StorageListing:
    """All that is there."""
    manifests, unreadable, unpublished = {}, {}, []
    for cut in cuts_of(storage):
        try:
            manifests[cut] = _manifest(storage, cut)
        except NotThere:
            files = [path.partition("/")[2] for path, _ in storage.files(folder_of(cut))]
            if files and not any(map(is_of_checkpoint, files)):
                _leave_out(storage, folder_of(cut), _NOTHING)
            else:
                unpublished.append(cut)
        except CheckpointError as error:
            unreadable[cut] = str(error)
    return StorageListing(manifests, unreadable, tuple(unpublished))


def chain(storage: Storage, cut: int | None = None) -> list[Manifest]:
    """A checkpoint with all that it builds on, the full one first; the newest if none is named. Raises CheckpointError
    for what is not there or cannot be read."""
    if cut is None:
        cut = newest(storage)
    found = {cut: read(storage, cut)}
    at = found[cut]
    while at.since:
        try:
            found[at.since] = read(storage, at.since)
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {at.cut} adds to {at.since}, which cannot be had: {error}") from error
        at = found[at.since]
    return chain_of(found, cut, storage.url)


def newest(storage: Storage) -> int:
    """The newest checkpoint. CheckpointError if there is none, or its manifest cannot be read: an older one in its
    place is to be asked for by number."""
    for cut in reversed(cuts_of(storage)):
        if storage.exists(path_of(cut)):
            return read(storage, cut).cut
    raise CheckpointError(f"{storage.url} has no checkpoint")


def delete(storage: Storage, cuts: Collection[int], tell: Callable[[int], None] = lambda cut: None) -> None:
    """Deletes checkpoints, each manifest before its files. CheckpointError if one that stays builds on one of them."""
    for cut in deletion(look(storage).manifests, cuts, storage.url):
        _remove(storage, cut)
        tell(cut)


def thin_out(storage: Storage, keep: Keep) -> list[int]:
    """Deletes what is not to be kept, and returns it."""
    going = superfluous(look(storage).manifests, keep)
    for cut in going:
        _remove(storage, cut)
    return going


def clean(storage: Storage, *, cluster: str = "", below: int = 0, still_s: float = STILL_S) -> list[int]:
    """Deletes files that nobody will ever need (see `leftovers`), and returns the numbers of the checkpoints that they
    were of. cluster, below: whose cut that is and is published; what it has left of older cuts goes at once. still_s:
    for how long nothing was written in other folders, by the storage's clock."""
    folders: dict[int, dict[str, float]] = {cut: {} for cut in cuts_of(storage)}
    foreign: set[int] = set()
    for file in storage.listing():
        folder, _, path = file.path.partition("/")
        if (cut := cut_of(folder)) is None:
            continue
        if is_of_checkpoint(path):
            folders.setdefault(cut, {})[path] = file.time
        else:
            foreign.add(cut)
    named = {cut: _names(storage, cut) for cut, files in folders.items() if NAME in files}
    newest_s = max((at for files in folders.values() for at in files.values()), default=0.0)
    before = (newest_s if cluster else time.time()) - still_s
    going = left_over(folders, named, before, own=mark_of(cluster) if cluster else "", below=below)
    for cut, paths in going.items():
        storage.delete([f"{folder_of(cut)}/{path}" for path in paths])
    without = {cut for cut, files in folders.items() if not files} - foreign
    empty = {cut for cut in without if storage.drop_empty(folder_of(cut))}
    return sorted({*going, *empty})


def _names(storage: Storage, cut: int) -> set[str] | None:
    """The files that a manifest names; None if it cannot be read, or has just gone."""
    try:
        return {file.path for file in read(storage, cut).files}
    except CheckpointError:
        return None


def unnamed(storage: Storage, manifest: Manifest) -> Usage:
    """What lies in a checkpoint's folder, and nobody needs: left by a merge that died, or being written by one."""
    named = {f"{manifest.folder}/{file.path}" for file in manifest.files} | {path_of(manifest.cut)}
    sizes = [
        size
        for path, size in storage.files(manifest.folder)
        if path not in named and is_of_checkpoint(path.partition("/")[2])
    ]
    return Usage(len(sizes), sum(sizes))


def lacking(storage: Storage, manifest: Manifest) -> str:
    """What of a checkpoint's own files is not there, or not as long as it was written, in words; "" if all are."""
    sizes = dict(storage.files(manifest.folder))
    for file in manifest.files:
        if sizes.get(path := f"{manifest.folder}/{file.path}") != file.bytes:
            has = f"has {sizes[path]} bytes, not {file.bytes}" if path in sizes else "is missing"
            return f"{storage.url}/{path} {has}"
    return ""


def usage(storage: Storage, cut: int) -> Usage:
    """What lies in a checkpoint's folder."""
    sizes = [size for _, size in storage.files(folder_of(cut))]
    return Usage(len(sizes), sum(sizes))


def _remove(storage: Storage, cut: int) -> None:
    """Deletes what is a checkpoint's, the manifest first; whatever else lies there stays."""
    folder = f"{folder_of(cut)}/"
    known = _names(storage, cut) or ()
    paths = [
        path
        for path, _ in storage.files(folder_of(cut))
        if is_of_checkpoint(name := path.removeprefix(folder)) or name in known
    ]
    manifest = f"{folder_of(cut)}/{NAME}"
    if manifest in paths:
        storage.delete([manifest])
    storage.delete([path for path in paths if path != manifest])
