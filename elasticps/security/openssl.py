"""The OpenSSL that Python's `ssl` is linked with, called as its manual says, by itself: compiled code can then encrypt
and send, or receive and decrypt, in one call, which through `ssl.SSLObject` is a dozen.

Only what libssl's stable interface has; nothing is known of how Python keeps its objects, and none of them is touched.
A Python whose OpenSSL cannot be called so, for it lies within the interpreter or is older than 3.0, has `LIBRARY` None,
and connections go through `ssl` (`security/stream.py`, `security/transport.py`).

Sources: OpenSSL 3.0's manual pages SSL_CTX_new(3), SSL_CTX_set_verify(3), SSL_read(3), SSL_get_error(3),
BIO_meth_new(3); `include/openssl/ssl.h` and `bio.h` for the numbers that are macros there.
"""

from __future__ import annotations

import _ssl
import ctypes
import os
import ssl
from ctypes import c_char_p, c_int, c_long, c_size_t, c_uint64, c_ulong, c_void_p
from typing import Any

from coordinator.core.url import TlsFiles
from elasticps.errors import ConfigError

READ_AHEAD_BYTES = 64 << 10  # received in one call, at most, and kept only while something of it was not decrypted

PEM = 1
VERIFY_PEER, VERIFY_FAIL_IF_NO_PEER_CERT = 1, 2
_TLS1_3 = 0x0304
_SET_MIN_VERSION, _SET_MODE, _SET_READ_AHEAD, _SET_SESSION_CACHE = 123, 33, 41, 44  # SSL_CTX_ctrl
_IGNORE_UNEXPECTED_EOF = 1 << 7  # as Python's: a frame says how long it is, so one that is cut off is known
_SOURCE_SINK = 0x400  # BIO_TYPE_SOURCE_SINK
_RELEASE_BUFFERS, _MOVING_BUFFER = 0x10, 0x2

ERROR_SSL, WANT_READ, WANT_WRITE, ERROR_SYSCALL, ZERO_RETURN = 1, 2, 3, 5, 6  # SSL_get_error

_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "BIO_get_data": (c_void_p, [c_void_p]),
    "BIO_meth_new": (c_void_p, [c_int, c_char_p]),
    "BIO_meth_set_ctrl": (c_int, [c_void_p, c_void_p]),
    "BIO_meth_set_write": (c_int, [c_void_p, c_void_p]),
    "BIO_new": (c_void_p, [c_void_p]),
    "BIO_new_socket": (c_void_p, [c_int, c_int]),
    "BIO_number_read": (c_uint64, [c_void_p]),
    "BIO_set_data": (None, [c_void_p, c_void_p]),
    "CRYPTO_free": (None, [c_void_p, c_char_p, c_int]),
    "CRYPTO_realloc": (c_void_p, [c_void_p, c_size_t, c_char_p, c_int]),
    "ERR_clear_error": (None, []),
    "ERR_peek_error": (c_ulong, []),
    "ERR_reason_error_string": (c_char_p, [c_ulong]),
    "SSL_CTX_check_private_key": (c_int, [c_void_p]),
    "SSL_CTX_ctrl": (c_long, [c_void_p, c_int, c_long, c_void_p]),
    "SSL_CTX_free": (None, [c_void_p]),
    "SSL_CTX_load_verify_locations": (c_int, [c_void_p, c_char_p, c_char_p]),
    "SSL_CTX_new": (c_void_p, [c_void_p]),
    "SSL_CTX_set_default_read_buffer_len": (None, [c_void_p, c_size_t]),
    "SSL_CTX_set_options": (c_uint64, [c_void_p, c_uint64]),
    "SSL_CTX_set_num_tickets": (c_int, [c_void_p, c_size_t]),
    "SSL_CTX_set_verify": (None, [c_void_p, c_int, c_void_p]),
    "SSL_CTX_use_PrivateKey_file": (c_int, [c_void_p, c_char_p, c_int]),
    "SSL_CTX_use_certificate_chain_file": (c_int, [c_void_p, c_char_p]),
    "SSL_do_handshake": (c_int, [c_void_p]),
    "SSL_free": (None, [c_void_p]),
    "SSL_get1_peer_certificate": (c_void_p, [c_void_p]),
    "SSL_get_error": (c_int, [c_void_p, c_int]),
    "SSL_get_verify_result": (c_long, [c_void_p]),
    "SSL_has_pending": (c_int, [c_void_p]),
    "SSL_new": (c_void_p, [c_void_p]),
    "SSL_read": (c_int, [c_void_p, c_void_p, c_int]),
    "SSL_set_accept_state": (None, [c_void_p]),
    "SSL_set_bio": (None, [c_void_p, c_void_p, c_void_p]),
    "SSL_set_connect_state": (None, [c_void_p]),
    "SSL_shutdown": (c_int, [c_void_p]),
    "SSL_write": (c_int, [c_void_p, c_void_p, c_int]),
    "TLS_method": (c_void_p, []),
    "X509_free": (None, [c_void_p]),
    "X509_verify_cert_error_string": (c_char_p, [c_long]),
    "i2d_X509": (c_int, [c_void_p, c_void_p]),
}


def _library() -> ctypes.CDLL | None:
    """Looked up in what Python's own module has loaded, so never another one than `ssl` uses."""
    path = getattr(_ssl, "__file__", None)
    if path is None or ssl.OPENSSL_VERSION_INFO < (3, 0) or not ssl.OPENSSL_VERSION.startswith("OpenSSL"):
        return None
    try:
        found = ctypes.CDLL(path, use_errno=True)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):
        return None
    return found


LIBRARY = _library()


def address_of(name: str) -> int:
    """The address of a function of the library. Only with a library."""
    return ctypes.cast(getattr(LIBRARY, name), c_void_p).value or 0


class TlsContext:
    """What all connections of one side begin with: TLS 1.3 only, both certificates required. ConfigError if the files
    cannot be used. Only with a library."""

    def __init__(self, files: TlsFiles) -> None:
        assert LIBRARY is not None
        self._library = lib = LIBRARY
        self._context = context = lib.SSL_CTX_new(lib.TLS_method())
        if not context:
            raise MemoryError("no memory for TLS")
        lib.ERR_clear_error()
        done = (
            lib.SSL_CTX_ctrl(context, _SET_MIN_VERSION, _TLS1_3, None)
            and lib.SSL_CTX_load_verify_locations(context, os.fsencode(files.ca), None)
            and lib.SSL_CTX_use_certificate_chain_file(context, os.fsencode(files.cert))
            and lib.SSL_CTX_use_PrivateKey_file(context, os.fsencode(files.key), PEM)
            and lib.SSL_CTX_check_private_key(context)
            and lib.SSL_CTX_set_num_tickets(context, 0)  # a session that is taken up again shows no certificate
        )
        if not done:
            why = reason_of(lib.ERR_peek_error())
            raise ConfigError(f"the certificate {files.cert}, its key or its authority cannot be used: {why}")
        lib.SSL_CTX_set_verify(context, VERIFY_PEER | VERIFY_FAIL_IF_NO_PEER_CERT, None)
        lib.SSL_CTX_set_options(context, _IGNORE_UNEXPECTED_EOF)
        lib.SSL_CTX_ctrl(context, _SET_SESSION_CACHE, 0, None)
        lib.SSL_CTX_ctrl(context, _SET_MODE, _RELEASE_BUFFERS | _MOVING_BUFFER, None)
        lib.SSL_CTX_ctrl(context, _SET_READ_AHEAD, 1, None)
        lib.SSL_CTX_set_default_read_buffer_len(context, READ_AHEAD_BYTES)

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._library.SSL_CTX_free(self._context)  # connections have references of their own

    def begin(self, descriptor: int, writes: int, state: int, *, server: bool) -> tuple[int, int]:
        """A connection that reads from a socket, and writes with the method `writes`, whose BIO has the address
        `state`: addresses of its SSL and of what that reads from and owns."""
        lib = self._library
        tls = lib.SSL_new(self._context)
        source, sink = lib.BIO_new_socket(descriptor, 0), lib.BIO_new(writes)
        if not (tls and source and sink):
            raise MemoryError("no memory for a TLS connection")
        lib.BIO_set_data(sink, state)
        lib.SSL_set_bio(tls, source, sink)
        (lib.SSL_set_accept_state if server else lib.SSL_set_connect_state)(tls)
        return tls, source


def sink_method(write_at: int, control_at: int) -> int:
    """A kind of BIO that compiled functions write to."""
    lib: Any = LIBRARY
    method = lib.BIO_meth_new(_SOURCE_SINK, b"elasticps")
    if not (method and lib.BIO_meth_set_write(method, write_at) and lib.BIO_meth_set_ctrl(method, control_at)):
        raise MemoryError("no memory for TLS")
    found: int = method
    return found


def free(address: int) -> None:
    """Frees memory from CRYPTO_realloc."""
    lib: Any = LIBRARY
    lib.CRYPTO_free(address, None, 0)


def peer_certificate(tls: int) -> bytes:
    """The peer's certificate in DER; b"" if it has shown none."""
    lib: Any = LIBRARY
    certificate = lib.SSL_get1_peer_certificate(tls)
    if not certificate:
        return b""
    at = c_void_p()
    try:
        size = lib.i2d_X509(certificate, ctypes.byref(at))
        return ctypes.string_at(at, size) if size > 0 else b""
    finally:
        lib.CRYPTO_free(at, None, 0)
        lib.X509_free(certificate)


def reason_of(error: int) -> str:
    """OpenSSL's own words for one of its errors."""
    lib: Any = LIBRARY
    text = lib.ERR_reason_error_string(error)
    return text.decode(errors="replace") if text else f"error {error}"


def verify_message(tls: int) -> str:
    """What is wrong with the peer's certificate; "" if nothing is."""
    lib: Any = LIBRARY
    result = lib.SSL_get_verify_result(tls)
    return lib.X509_verify_cert_error_string(result).decode(errors="replace") if result else ""
