"""Compiled: receive and decrypt, encrypt and send, each in one call. `security/session.py` calls them.

A connection is an int64 array of the fields below. OpenSSL reads from the socket itself, READ_AHEAD_BYTES at once, and
writes into memory that all connections share, from where a whole piece is sent before the call is over: a system call
for each record would be another fifth of the time. What a socket does not take then, and what TLS itself has to say, is
kept in memory of the connection's own, FLOOD_BYTES at most.

The interpreter's lock is kept, as in `server/fast`: so a call is whole for every other thread.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite.binding import add_symbol
from numba import types

from elasticps.kernels import compiled_once, njit
from elasticps.security.openssl import ERROR_SSL, ERROR_SYSCALL, WANT_READ, address_of
from elasticps.store.native import carray, copy, pointer

(
    S_SSL,  # 0 once it is closed
    S_FD,
    S_STAGED_AT,  # RECORD_BYTES of memory, for what is encrypted together
    S_OUT_AT,  # OUT_BYTES of memory, where `put` has what is encrypted
    S_OUT,  # so much of it; -1 outside of `put`
    S_BACKLOG_AT,  # what was encrypted and has not left: memory of the connection's own, 0 = none
    S_BACKLOG_START,
    S_BACKLOG_END,
    S_BACKLOG_BYTES,
    S_WHY,  # what ended the connection: see SSL_get_error, or FLOODED; WANT_READ and 0: nothing has
    S_ERROR,  # with ERROR_SSL OpenSSL's number, with ERROR_SYSCALL errno
    S_MORE,  # 1: `take` may have more although the socket has not
    SESSION,
) = range(13)

RECORD_BYTES = 16 << 10
PIECE_BYTES = 32 << 10  # encrypted before it is sent, and decrypted meanwhile; 16, 64 or 128 KiB take 10 to 25 % longer
OUT_BYTES = PIECE_BYTES + (32 << 10)  # with what TLS adds
FLOOD_BYTES = 2 * OUT_BYTES
FLOODED = 100  # the other end asks for answers of TLS itself and does not read them

_BIO_FLUSH = 11
_DONT_WAIT, _NO_SIGNAL = 0x40, 0x4000
_AGAIN, _INTERRUPTED = 11, 4

for _name in (
    "BIO_get_data", "CRYPTO_free", "CRYPTO_realloc", "ERR_clear_error", "ERR_peek_error", "SSL_get_error",
    "SSL_has_pending", "SSL_read", "SSL_write",
):  # fmt: skip
    add_symbol(f"elasticps_{_name}", address_of(_name))

_int, _long = types.int32, types.int64
_get_data: Any = types.ExternalFunction("elasticps_BIO_get_data", _long(_long))
_free: Any = types.ExternalFunction("elasticps_CRYPTO_free", types.void(_long, _long, _int))
_realloc: Any = types.ExternalFunction("elasticps_CRYPTO_realloc", _long(_long, _long, _long, _int))
_clear_error: Any = types.ExternalFunction("elasticps_ERR_clear_error", types.void())
_first_error: Any = types.ExternalFunction("elasticps_ERR_peek_error", _long())
_get_error: Any = types.ExternalFunction("elasticps_SSL_get_error", _int(_long, _int))
_has_pending: Any = types.ExternalFunction("elasticps_SSL_has_pending", _int(_long))
_ssl_read: Any = types.ExternalFunction("elasticps_SSL_read", _int(_long, _long, _int))
_ssl_write: Any = types.ExternalFunction("elasticps_SSL_write", _int(_long, _long, _int))
_send: Any = types.ExternalFunction("send", _long(_int, _long, _long, _int))
_move: Any = types.ExternalFunction("memmove", _long(_long, _long, _long))
_errno_address: Any = types.ExternalFunction("__errno_location", _long())

_WORDS = types.Array(types.int64, 1, "C")
_BYTES = types.Array(types.uint8, 1, "C")
_compile: Any = njit(cache=True, error_model="numpy")
_cfunc: Any = numba.cfunc


@_compile
def _errno():
    return carray(pointer(_errno_address()), (1,), np.int32)[0]


@_compile
def _keep(s, at, n):
    """Adds bytes to the backlog; False if there are too many."""
    end = s[S_BACKLOG_END] - s[S_BACKLOG_START]
    if end + n > FLOOD_BYTES:
        s[S_WHY] = FLOODED
        return False
    if s[S_BACKLOG_START]:
        _move(s[S_BACKLOG_AT], s[S_BACKLOG_AT] + s[S_BACKLOG_START], end)
        s[S_BACKLOG_START] = 0
        s[S_BACKLOG_END] = end
    if end + n > s[S_BACKLOG_BYTES]:
        size = max(end + n, min(2 * s[S_BACKLOG_BYTES], FLOOD_BYTES))
        memory = _realloc(s[S_BACKLOG_AT], size, 0, np.int32(0))
        if memory == 0:
            return False
        s[S_BACKLOG_AT] = memory
        s[S_BACKLOG_BYTES] = size
    copy(s[S_BACKLOG_AT] + end, at, n)
    s[S_BACKLOG_END] = end + n
    return True


def _write(bio, at, n):
    """OpenSSL's write callback: takes all that it has encrypted, or the connection is over."""
    s = carray(pointer(_get_data(bio)), (SESSION,), np.int64)
    out = s[S_OUT]
    if out < 0:
        return n if _keep(s, at, n) else np.int32(-1)
    if out + n > OUT_BYTES:
        return np.int32(-1)
    copy(s[S_OUT_AT] + out, at, n)
    s[S_OUT] = out + n
    return n


def _control(bio, command, number, at):
    """OpenSSL's control callback: flushing succeeds, as nothing is held back; other requests do not matter."""
    return np.int64(1) if command == _BIO_FLUSH else np.int64(0)


WRITE: Any = _cfunc(_int(_long, _long, _int), nopython=True, cache=True)(_write)
CONTROL: Any = _cfunc(_long(_long, _int, _long, _long), nopython=True, cache=True)(_control)


@_compile
def _broken(s, returned):
    """Notes why OpenSSL did nothing; returns whether the connection is over."""
    if s[S_WHY] == FLOODED:
        return True
    why = _get_error(s[S_SSL], np.int32(returned))
    s[S_WHY] = why
    if why == ERROR_SSL:
        s[S_ERROR] = _first_error()
    elif why == ERROR_SYSCALL:
        s[S_ERROR] = _errno()
    return why != WANT_READ


@_compile
def _sent(s, at, n):
    """Sends; returns how many bytes the socket took, 0 if it is full, -1 if the connection is over."""
    while True:
        sent = _send(np.int32(s[S_FD]), at, n, np.int32(_DONT_WAIT | _NO_SIGNAL))
        if sent >= 0:
            return sent
        error = _errno()
        if error == _AGAIN:
            return 0
        if error != _INTERRUPTED:
            s[S_WHY] = ERROR_SYSCALL
            s[S_ERROR] = error
            return -1


@_compile
def _flush(s):
    """Sends the backlog. 0: all of it left; 1: the socket is full; -1: the connection is over."""
    while s[S_BACKLOG_START] < s[S_BACKLOG_END]:
        sent = _sent(s, s[S_BACKLOG_AT] + s[S_BACKLOG_START], s[S_BACKLOG_END] - s[S_BACKLOG_START])
        if sent <= 0:
            return 1 if sent == 0 else -1
        s[S_BACKLOG_START] += sent
    if s[S_BACKLOG_AT]:
        _free(s[S_BACKLOG_AT], 0, np.int32(0))
        s[S_BACKLOG_AT] = s[S_BACKLOG_START] = s[S_BACKLOG_END] = s[S_BACKLOG_BYTES] = 0
    return 0


@_compile
def _send_out(s):
    """Sends what `put` has encrypted; what the socket does not take joins the backlog. Returns as `_flush`."""
    at, end = s[S_OUT_AT], s[S_OUT_AT] + s[S_OUT]
    s[S_OUT] = 0
    while at < end:
        sent = _sent(s, at, end - at)
        if sent < 0:
            return -1
        if sent == 0:
            return 1 if _keep(s, at, end - at) else -1
        at += sent
    return 0


@_compile
def flush(s):
    """Sends what is kept. 0: all of it; 1: the socket takes no more; -1: the connection is over."""
    return -1 if s[S_SSL] == 0 else _flush(s)


@_compile
def take(s, to):
    """Fills the front of `to` with what has come; how many bytes. S_WHY says whether the connection is over."""
    filled = 0
    s[S_MORE] = 0
    if s[S_SSL] == 0 or (s[S_WHY] != 0 and s[S_WHY] != WANT_READ):
        return 0
    _clear_error()
    at = to.ctypes.data
    while filled < len(to):
        n = _ssl_read(s[S_SSL], at + filled, np.int32(min(len(to) - filled, 1 << 30)))
        if n <= 0:
            if _broken(s, n):
                s[S_MORE] = 1  # what came before it is handed over first
            break
        filled += n
        if n < RECORD_BYTES and _has_pending(s[S_SSL]) == 0:
            break  # the end of what was sent together; whoever waits for the socket hears if it has more
        if filled == len(to):
            s[S_MORE] = 1
    if s[S_BACKLOG_START] < s[S_BACKLOG_END]:  # TLS itself has answered something
        _flush(s)
    return filled


@_compile
def _put(s, buffers, count):
    taken, staged, i, at = 0, 0, 0, 0
    while True:
        left = 0 if i == count else buffers[2 * i + 1] - at
        if i < count and not (staged == 0 and (left >= RECORD_BYTES or i == count - 1)):
            some = min(left, RECORD_BYTES - staged)
            copy(s[S_STAGED_AT] + staged, buffers[2 * i] + at, some)
            staged += some
            at += some
            if at == buffers[2 * i + 1]:
                i += 1
                at = 0
            if staged < RECORD_BYTES and i < count:
                continue
        if staged:
            start, size = s[S_STAGED_AT], staged
        elif i < count:
            start = buffers[2 * i] + at
            size = min(left, PIECE_BYTES)
        else:
            break
        if s[S_OUT] + size > PIECE_BYTES:
            state = _send_out(s)
            if state:
                return taken if state > 0 else -1
        n = _ssl_write(s[S_SSL], start, np.int32(size))
        if n != size:  # it writes into memory, so all or nothing
            _broken(s, n)
            return -1
        taken += size
        if staged:
            staged = 0
        else:
            at += size
            if at == buffers[2 * i + 1]:
                i += 1
                at = 0
    return -1 if _send_out(s) < 0 else taken


@_compile
def put(s, buffers, count):
    """Encrypts and sends `count` buffers, (address, bytes) each, until the socket takes no more; how many bytes it took
    of them, of which a piece may wait for `flush`; -1: the connection is over. Small ones share a record."""
    if s[S_SSL] == 0:
        return -1
    state = _flush(s)
    if state:
        return 0 if state > 0 else -1
    _clear_error()
    s[S_OUT] = 0
    taken = _put(s, buffers, count)
    s[S_OUT] = -1
    return taken


def warm() -> None:
    """Compiles the kernels, or loads them from the cache."""
    with compiled_once(__file__):
        for function, signature in (
            (flush, (_WORDS,)),
            (take, (_WORDS, _BYTES)),
            (put, (_WORDS, _WORDS, types.int64)),
        ):
            if not function.signatures:
                function.compile(signature)
                function.disable_compile()
