"""Publishes, reads, lists and deletes the checkpoints under one URL."""

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
    """The number of files in a folder, and their bytes."""

    files: int
    bytes: int


@dataclass(frozen=True)
class StorageListing:
    """All checkpoints under a URL. manifests: by cut; unreadable: the error by cut; unpublished: cuts with a folder but
    no manifest."""

    manifests: dict[int, Manifest]
    unreadable: dict[int, str]
    unpublished: tuple[int, ...]


def publish(storage: Storage, manifest: Manifest) -> bool:
    """Publishes a checkpoint whose files are written; False if another process has published one of that number.

    Ours may be there already: a bucket's answer was lost, and the second request finds what the first one wrote."""
    path, data = path_of(manifest.cut), manifest.encode()
    return storage.put_new(path, data) or storage.get(path) == data


def read(storage: Storage, cut: int) -> Manifest:
    """Reads a checkpoint's manifest. Raises CheckpointError; UnknownCheckpoint if there is none of that number."""
    try:
        return _manifest(storage, cut)
    except NotThere:
        there = ", ".join(map(str, cuts_of(storage))) or "none"
        raise UnknownCheckpoint(f"{storage.url} has no checkpoint {cut}; there are {there}") from None


def _manifest(storage: Storage, cut: int) -> Manifest:
    """Like `read`, but raises NotThere if there is none."""
    path = path_of(cut)
    manifest = Manifest.decode(storage.get(path), f"{storage.url}/{path}")
    if manifest.cut != cut:
        raise CheckpointError(f"{storage.url}/{path} is the manifest of checkpoint {manifest.cut}: it was moved there")
    return manifest


def cuts_of(storage: Storage) -> list[int]:
    """The cuts that have folders, published or not."""
    found = []
    for folder in storage.folders():
        if (cut := cut_of(folder)) is not None:
            found.append(cut)
        elif folder.isdecimal():
            _leave_out(storage, folder, "no checkpoint can have that number")
    return sorted(found)


def used_numbers(storage: Storage) -> tuple[int, set[int]]:
    """(the highest number of any checkpoint, published, under way or given up, 0 for none; higher numbers whose folders
    hold other things: no checkpoint is written there)."""
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
    """Reads a published manifest back. Raises CheckpointError if it is missing, or differs from what was written."""
    if read(storage, manifest.cut).encode() != manifest.encode():
        raise CheckpointError(f"{storage.url}/{path_of(manifest.cut)} is another manifest than was written")


def check_segment(storage: Storage, manifest: Manifest) -> None:
    """Reads one segment of a checkpoint: the one with most rows in its largest file. Raises CheckpointError."""
    if manifest.files:
        entry = max(manifest.files, key=lambda file: file.bytes)
        reader = reader_of(storage, manifest, entry, manifest.spec(entry.table))
        reader.read([max(reader.segments, key=lambda segment: segment.rows)])


def look(storage: Storage) -> StorageListing:
    """Lists all checkpoints."""
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
    """A checkpoint (None: the newest) with all that it builds on, the full one first. Raises CheckpointError for one
    that is missing or cannot be read."""
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
    """The newest cut. Raises CheckpointError if there is none, or its manifest cannot be read: an older one has to be
    named by number."""
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
    """Deletes the checkpoints that `keep` does not cover, and returns their cuts."""
    going = superfluous(look(storage).manifests, keep)
    for cut in going:
        _remove(storage, cut)
    return going


def clean(storage: Storage, *, cluster: str = "", below: int = 0, still_s: float = STILL_S) -> list[int]:
    """Deletes files that no checkpoint needs (see `retention`), and returns the cuts that they belonged to.

    cluster, below: a published cut and its cluster, whose files of older, given-up cuts go at once. still_s: elsewhere,
    for how long a folder must have been still, by the storage's clock."""
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
    """The files in a checkpoint's folder that its manifest does not name: a merge died there, or is under way."""
    named = {f"{manifest.folder}/{file.path}" for file in manifest.files} | {path_of(manifest.cut)}
    sizes = [
        size
        for path, size in storage.files(manifest.folder)
        if path not in named and is_of_checkpoint(path.partition("/")[2])
    ]
    return Usage(len(sizes), sum(sizes))


def lacking(storage: Storage, manifest: Manifest) -> str:
    """The first of a checkpoint's own files that is missing or has another length, in words; "" if all are there."""
    sizes = dict(storage.files(manifest.folder))
    for file in manifest.files:
        if sizes.get(path := f"{manifest.folder}/{file.path}") != file.bytes:
            has = f"has {sizes[path]} bytes, not {file.bytes}" if path in sizes else "is missing"
            return f"{storage.url}/{path} {has}"
    return ""


def usage(storage: Storage, cut: int) -> Usage:
    """The files in a checkpoint's folder."""
    sizes = [size for _, size in storage.files(folder_of(cut))]
    return Usage(len(sizes), sum(sizes))


def _remove(storage: Storage, cut: int) -> None:
    """Deletes a checkpoint's files, the manifest first; other files in its folder stay."""
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
