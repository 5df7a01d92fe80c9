"""One end of a TLS connection over a non-blocking socket, in compiled code."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from cryptography import x509

from elasticps.security import openssl, records
from elasticps.security.channel import MAX_HANDSHAKE_BYTES, Proof
from elasticps.security.identity import Expect, Identity, NotAuthorised, identity_among

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

BUFFERS = 512  # of one call
READ_BYTES = 256 << 10  # of one call: other threads wait for it

# All sessions copy through the same memory: `put` and `take` are whole for every other thread, what precedes `put` is
# under the lock.
_filling = threading.Lock()
_STAGED = np.empty(records.RECORD_BYTES, np.uint8)
_OUT = np.empty(records.OUT_BYTES, np.uint8)
_VECTOR = np.empty(2 * BUFFERS, np.int64)
_staged, _vector = _STAGED.data, memoryview(cast(Any, _VECTOR))
_STAGED_AT = _STAGED.ctypes.data
_WRITES = openssl.sink_method(records.WRITE.address, records.CONTROL.address)


def _after_fork() -> None:
    """Another thread of the parent's may have had it."""
    global _filling
    _filling = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class TlsSession(Proof):
    """Receives from and sends to the socket `descriptor`, which stays the caller's: to be closed after this. Only where
    the credentials have a native context.

    Methods must not be called by two threads at once. ConnectionResetError says why a connection is over.
    """

    def __init__(self, credentials: Credentials, expect: Expect, descriptor: int, *, server: bool) -> None:
        context = credentials.native_context()
        assert context is not None
        super().__init__(credentials, expect)
        self._library = openssl.LIBRARY
        self._state = state = np.zeros(records.SESSION, np.int64)
        at = state.ctypes.data
        self._tls, self._reads = context.begin(descriptor, _WRITES, at, server=server)
        state[records.S_SSL], state[records.S_FD], state[records.S_OUT] = self._tls, descriptor, -1
        state[records.S_STAGED_AT], state[records.S_OUT_AT] = _STAGED_AT, _OUT.ctypes.data
        self._fields = memoryview(cast(Any, state))  # read faster so

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Closes at once, without TLS's goodbye; later calls do nothing."""
        tls, self._tls = getattr(self, "_tls", 0), 0
        if tls:
            self._fields[records.S_SSL] = 0
            self._library.SSL_free(tls)  # type: ignore[union-attr]
            openssl.free(self._fields[records.S_BACKLOG_AT])
            for field in (records.S_BACKLOG_AT, records.S_BACKLOG_START, records.S_BACKLOG_END):
                self._fields[field] = 0

    def say_goodbye(self) -> None:
        """Sends TLS's goodbye, if the socket takes it."""
        if self._tls and self.peer is not None and not self._over:
            self._library.ERR_clear_error()  # type: ignore[union-attr]
            self._library.SSL_shutdown(self._tls)  # type: ignore[union-attr]
            self.flush()

    @property
    def _over(self) -> bool:
        return self._fields[records.S_WHY] not in (0, openssl.WANT_READ)

    # --- the handshake ----------------------------------------------------------------------------------------------

    def shake(self) -> bool:
        """Goes on with the handshake; True when it is done. Call it at the start, and whenever the socket has something
        until then. What it has to say leaves, as far as the socket takes it."""
        if self.peer is not None:
            return True
        lib = self._library
        assert lib is not None
        if not self._tls:
            raise ConnectionResetError("the connection is closed")
        lib.ERR_clear_error()
        ctypes.set_errno(0)
        done = lib.SSL_do_handshake(self._tls)
        errno = ctypes.get_errno()
        why = 0 if done == 1 else lib.SSL_get_error(self._tls, done)
        reason = ""
        if why == openssl.ERROR_SYSCALL:
            reason = os.strerror(errno).lower() if errno else "the peer closed the connection during the handshake"
        elif why == openssl.ERROR_SSL:
            reason = self._reason(lib.ERR_peek_error())
        elif why == openssl.ZERO_RETURN:
            reason = "the peer closed the connection during the handshake"
        elif done != 1 and lib.BIO_number_read(self._reads) > MAX_HANDSHAKE_BYTES:
            reason = f"a handshake of more than {MAX_HANDSHAKE_BYTES} bytes"
        with suppress(ConnectionResetError):  # who has gone is told nothing; why it is over is told below
            self.flush()
        if reason:
            raise ConnectionResetError(reason)
        if done != 1:
            return False
        try:
            self._accept(*self._proved())
        except NotAuthorised as error:
            raise ConnectionResetError(str(error)) from None
        return True

    def _proved(self) -> tuple[Identity, float]:
        try:
            certificate = x509.load_der_x509_certificate(openssl.peer_certificate(self._tls))
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            named = names.get_values_for_type(x509.UniformResourceIdentifier)
        except x509.ExtensionNotFound:
            named = []
        except ValueError as error:
            raise NotAuthorised(f"a certificate that cannot be read: {error}") from None
        return identity_among(named), certificate.not_valid_after_utc.timestamp()

    def _reason(self, error: int) -> str:
        why = openssl.verify_message(self._tls)
        return f"TLS: {openssl.reason_of(error)}{f': {why}' if why else ''}"

    # --- afterwards -------------------------------------------------------------------------------------------------

    @property
    def buffered(self) -> bool:
        """Whether `read_into` may have more although the socket has not."""
        return bool(self._fields[records.S_MORE])

    @property
    def has_backlog(self) -> bool:
        """Whether `flush` has something to send."""
        return self.backlog_bytes > 0

    @property
    def backlog_bytes(self) -> int:
        """The bytes that `flush` has to send."""
        return self._fields[records.S_BACKLOG_END] - self._fields[records.S_BACKLOG_START]

    def read_into(self, buffer: memoryview) -> int:
        """The number of bytes that were put at the front of `buffer`, which is not empty; 0: there are no more now."""
        n: int = records.take(self._state, np.frombuffer(buffer[:READ_BYTES], np.uint8))
        if not n and (self._over or not self._tls):
            raise self._ended()
        return n

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        """How many bytes were taken; they may still wait for `flush`. BlockingIOError: none."""
        total = 0
        for buffer in buffers:
            total += len(buffer)
        with _filling:
            if total <= records.RECORD_BYTES:
                at = 0
                for buffer in buffers:
                    end = at + len(buffer)
                    _staged[at:end] = buffer
                    at = end
                _vector[0], _vector[1], count = _STAGED_AT, total, 1
            else:
                arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers[:BUFFERS] if len(buffer)]
                count = len(arrays)
                for i, array in enumerate(arrays):
                    _vector[2 * i], _vector[2 * i + 1] = array.ctypes.data, len(array)
            n: int = records.put(self._state, _VECTOR, count)
        if n < 0:
            raise self._ended()
        if not n:
            raise BlockingIOError
        return n

    def flush(self) -> bool:
        """Sends what was encrypted and did not fit into the socket; True if nothing of that is left."""
        state: int = records.flush(self._state)
        if state < 0:
            raise self._ended()
        return not state

    def _ended(self) -> ConnectionResetError:
        why, error = self._fields[records.S_WHY], self._fields[records.S_ERROR]
        if not self._tls:
            return ConnectionResetError("the connection is closed")
        if why == openssl.ERROR_SSL:
            return ConnectionResetError(self._reason(error))
        if why == records.FLOODED:
            return ConnectionResetError("the peer asks TLS for answers and does not read them")
        if why == openssl.ERROR_SYSCALL and error:
            return ConnectionResetError(os.strerror(error).lower())
        return ConnectionResetError("the peer has closed the connection")
