"""How the ranks of one machine find each other: by an all-gather of their process group, and sockets that have no name
in any folder."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from elasticps.errors import ConfigError, GroupLost
from elasticps.torch.group.links import Links

_ID = 16  # bytes of a machine's id, and of a token
_HELLO = struct.Struct(f"<{_ID}sI")  # the token that rank 0 gave all, and who calls
_PEER = struct.Struct("3i")  # process, user, group
MEETING_S = 60.0


def machine_id() -> bytes:
    """An id of this machine and network of containers, 16 bytes: sockets reach no process with another id."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    network = os.stat("/proc/self/ns/net").st_ino
    return hashlib.blake2b(boot + str(network).encode(), digest_size=_ID).digest()


def machines(ids: Sequence[bytes]) -> list[list[int]]:
    """The ranks of each machine, in order; machines in the order of their first ranks. ids: of each rank's machine."""
    found: dict[bytes, list[int]] = {}
    for rank, each in enumerate(ids):
        found.setdefault(each, []).append(rank)
    return list(found.values())


def meet(process_group: Any, timeout_s: float) -> tuple[Links, int]:
    """Joins this rank with the others of its machine. Returns their links, and the number of the machine among those of
    the process group. ConfigError without a process group, GroupLost if ranks cannot reach each other."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ConfigError(
            "a LocalGroup needs torch's process group: call torch.distributed.init_process_group('gloo') first, in a "
            "script that torchrun starts"
        )
    own = distributed.get_rank(process_group)
    if own < 0:
        raise ConfigError("this process is not in the process group that it makes a LocalGroup of")
    token = secrets.token_bytes(_ID)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(_address(token))
        listener.listen(128)
        greetings = _gathered(machine_id() + token, process_group)
        together = machines([each[:_ID] for each in greetings])
        number = next(n for n, ranks in enumerate(together) if own in ranks)
        ranks = together[number]
        token, rank, size = greetings[ranks[0]][_ID:], ranks.index(own), len(ranks)
        deadline_s = time.monotonic() + min(MEETING_S, timeout_s)
        sockets = _accepted(listener, token, size, deadline_s) if rank == 0 else {0: _called(token, rank)}
        return Links(rank, size, sockets, timeout_s), number


def _address(token: bytes) -> bytes:
    """A socket's address in Linux's abstract namespace: no file in a folder, and nothing to remove."""
    return b"\0elasticps-" + token.hex().encode()


def _gathered(mine: bytes, process_group: Any) -> list[bytes]:
    """The bytes of each rank of the process group; all ranks give the same number of bytes."""
    backend = str(distributed.get_backend(process_group))
    device = torch.device("cpu" if "gloo" in backend or "mpi" in backend else "cuda")
    own = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    all_of_them = [torch.empty_like(own) for _ in range(distributed.get_world_size(process_group))]
    distributed.all_gather(all_of_them, own, group=process_group)
    return [bytes(each.cpu().numpy()) for each in all_of_them]


def _called(token: bytes, rank: int) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.connect(_address(token))
        peer.sendall(_HELLO.pack(token, rank))
    except OSError as error:
        peer.close()
        raise GroupLost(f"rank {rank} cannot reach rank 0 of the group on this machine: {error}") from error
    return peer


def _accepted(listener: socket.socket, token: bytes, size: int, deadline_s: float) -> dict[int, socket.socket]:
    """Waits until all other ranks have called; their sockets, by rank."""
    found: dict[int, socket.socket] = {}
    try:
        while len(found) < size - 1:
            listener.settimeout(max(0.001, deadline_s - time.monotonic()))
            peer, _ = listener.accept()
            rank = _caller(peer, token)
            if rank is None or not 0 < rank < size or rank in found:
                peer.close()
            else:
                found[rank] = peer
    except BaseException as error:
        for each in found.values():
            each.close()
        if isinstance(error, TimeoutError):
            missing = sorted(set(range(1, size)) - set(found))
            raise GroupLost(f"ranks {missing} of the group did not call in time") from None
        raise
    return dict(sorted(found.items()))


def _caller(peer: socket.socket, token: bytes) -> int | None:
    """The rank that calls; None for another user's process, and for one that does not know the token."""
    _, user, _ = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.getuid():  # not after it has kept us waiting
        return None
    peer.settimeout(5.0)
    try:
        hello = peer.recv(_HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return None
    if len(hello) != _HELLO.size:
        return None
    their_token, rank = _HELLO.unpack(hello)
    return int(rank) if secrets.compare_digest(their_token, token) else None
