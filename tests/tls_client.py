"""A TLS client made of the libssl that Python's `ssl` uses: it can also do what that does not offer, send new keys."""

from __future__ import annotations

import ctypes
import re
import socket
import ssl
from pathlib import Path

import pytest

PIECE = 1 << 16
KEY_UPDATE, KEY_UPDATE_WITH_ANSWER = 0, 1  # SSL_KEY_UPDATE_NOT_REQUESTED, SSL_KEY_UPDATE_REQUESTED


def _library(name: str) -> ctypes.CDLL | None:
    """The library as this process has loaded it already."""
    assert ssl.OPENSSL_VERSION
    match = re.search(rf"\S*/{name}\.so\S*", Path("/proc/self/maps").read_text())
    return ctypes.CDLL(match[0]) if match else None


SSL, CRYPTO = _library("libssl"), _library("libcrypto")
needs_libssl = pytest.mark.skipif(SSL is None or CRYPTO is None, reason="Python's ssl has no libssl.so to call")


def _call(name: str, *arguments: object) -> int:
    """Call a function of pointers, integers and bytes."""
    function = getattr(SSL if name.startswith(("SSL_", "TLS_")) else CRYPTO, name)
    function.restype = ctypes.c_ssize_t
    return int(
        function(*(ctypes.c_ssize_t(argument) if isinstance(argument, int) else argument for argument in arguments))
    )


class TlsClient:
    """One connection, by memory: what it says is for the caller to send. It trusts anybody."""

    def __init__(self) -> None:
        self._context = _call("SSL_CTX_new", _call("TLS_client_method"))
        self._tls = _call("SSL_new", self._context)
        self._incoming, self._outgoing = (_call("BIO_new", _call("BIO_s_mem")) for _ in range(2))
        _call("SSL_set_bio", self._tls, self._incoming, self._outgoing)
        _call("SSL_set_connect_state", self._tls)

    def close(self) -> None:
        _call("SSL_free", self._tls)
        _call("SSL_CTX_free", self._context)

    def _said(self) -> bytes:
        data, piece = b"", ctypes.create_string_buffer(PIECE)
        while (count := ctypes.c_int(_call("BIO_read", self._outgoing, piece, PIECE)).value) > 0:
            data += piece.raw[:count]
        return data

    def hear(self, data: bytes) -> bytes:
        """Take what came; return what is to be sent, during the handshake and for new keys that were asked for."""
        _call("BIO_write", self._incoming, data, len(data))
        _call("SSL_do_handshake", self._tls)
        return self._said()

    @property
    def established(self) -> bool:
        return ctypes.c_int(_call("SSL_is_init_finished", self._tls)).value == 1

    def shake_hands(self, sock: socket.socket) -> None:
        """Do so on a blocking socket."""
        sock.sendall(self.hear(b""))
        while not self.established:
            data = sock.recv(PIECE)
            assert data, "the other side hangs up"
            sock.sendall(self.hear(data))

    def data(self, data: bytes) -> bytes:
        """A record with `data`."""
        assert ctypes.c_int(_call("SSL_write", self._tls, data, len(data))).value == len(data)
        return self._said()

    def key_updates(self, count: int, kind: int = KEY_UPDATE) -> bytes:
        """So many records that say: from now on with new keys."""
        answers = []
        for _ in range(count):
            assert ctypes.c_int(_call("SSL_key_update", self._tls, kind)).value == 1
            assert ctypes.c_int(_call("SSL_do_handshake", self._tls)).value == 1
            answers.append(self._said())
        return b"".join(answers)
