"""TCP links whose every byte goes through TLS 1.3, block messages included.

OpenSSL holds what it has decrypted and nobody has taken yet: no descriptor tells of that. So `poll` leaves nothing
there, and then the descriptor can be relied on as everywhere.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

from omnireduce.config import Metrics, Security
from omnireduce.errors import ConfigError, TransportError
from omnireduce.secret import read_private
from omnireduce.transport.base import Event
from omnireduce.transport.tcp import TcpLink

WOULD_BLOCK = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class TlsLink(TcpLink):
    """A link over TCP and TLS. The handshake goes on in `poll`, unless it is over already."""

    def __init__(self, sock: ssl.SSLSocket, peer: str, dead_peer_s: float) -> None:
        super().__init__(sock, peer, dead_peer_s)
        self._tls = sock
        self._established = sock.version() is not None
        self._answers = False  # the handshake waits until it can write
        self._leftovers = False  # take what has been decrypted, and no more

    @property
    def wants_write(self) -> bool:
        return super().wants_write if self._established else self._answers

    def flush(self) -> None:
        if self._established:
            super().flush()

    def _write(self, views: Sequence[memoryview]) -> int:
        """Send the first one. OpenSSL wants it again, unchanged, when it could not be sent to the end."""
        try:
            return self._tls.send(views[0])
        except WOULD_BLOCK:
            raise BlockingIOError from None

    def poll(self) -> Sequence[Event]:
        events: list[Event] = []
        if not self._established:
            self._shake_hands(events)
            if not self._established:
                return events
            self.flush()
        events += super().poll()
        self._leftovers = True
        while self._lost is None and self._tls.pending():
            events += super().poll()
        self._leftovers = False
        return events

    def _receive(self, into: memoryview) -> int:
        """Fill `into`, over as many records as that takes: less than that means that nothing more is there."""
        filled = 0
        try:
            while filled < len(into):
                if self._leftovers and not self._tls.pending():
                    raise BlockingIOError
                most = min(len(into) - filled, self._tls.pending()) if self._leftovers else 0
                count = self._tls.recv_into(into[filled:], most)
                if count == 0:  # the next call will see it again
                    break
                filled += count
        except OSError as error:
            if filled == 0:
                raise BlockingIOError from None if isinstance(error, WOULD_BLOCK) else error
        return filled

    def _shake_hands(self, events: list[Event]) -> None:
        if self._lost is not None:
            return
        try:
            self._tls.do_handshake()
        except WOULD_BLOCK as stalled:
            self._answers = isinstance(stalled, ssl.SSLWantWriteError)
        except OSError as error:
            self._end(events, f"no TLS: {error.strerror or error}", violation=True)
        else:
            self._established = True


def connect_tls(host: str, port: int, timeout_s: float, dead_peer_s: float, context: ssl.SSLContext) -> TlsLink:
    """Connect to a listening aggregator and check its certificate. Raises OSError when it cannot be reached,
    TransportError when it does not prove to be `host`."""
    sock = socket.create_connection((host, port), timeout=timeout_s)
    try:
        sock = context.wrap_socket(sock, server_hostname=host)
        return TlsLink(sock, f"{host}:{port}", dead_peer_s)
    except OSError as error:  # also when the aggregator hangs up in the middle
        sock.close()
        raise TransportError(
            f"aggregator {host}:{port}: no TLS: {error.strerror or error}; is its certificate for this name, signed by "
            "security.tls_ca, and has it one at all (security.tls_certificate)?"
        ) from error


def accept_tls(sock: socket.socket, peer: str, dead_peer_s: float, context: ssl.SSLContext) -> TlsLink:
    """The link of a connection that was accepted; the handshake is still to come. Raises OSError."""
    sock.setblocking(False)
    return TlsLink(context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False), peer, dead_peer_s)


def aggregator_context(files: Security | Metrics, section: str = "security") -> ssl.SSLContext | None:
    """What an aggregator shows, and with `tls_ca` demands; None without TLS. `files` is the `section` of the
    configuration. Raises ConfigError."""
    if not (files.tls_certificate or files.tls_key or files.tls_ca):
        return None
    if not files.tls_certificate:
        raise ConfigError(f"{section}.tls_certificate: an aggregator with TLS needs one, and {section}.tls_key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if files.tls_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return _filled(context, files, section)


def worker_context(security: Security) -> ssl.SSLContext | None:
    """What a worker demands, and with `tls_certificate` shows; None without TLS. Raises ConfigError."""
    if not (security.tls_certificate or security.tls_key or security.tls_ca):
        return None
    if not security.tls_ca:
        raise ConfigError("security.tls_ca: a worker with TLS needs it, to know the aggregators' certificates")
    return _filled(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), security, "security")


def _filled(context: ssl.SSLContext, files: Security | Metrics, section: str) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    certificate, key, ca = files.tls_certificate, files.tls_key, files.tls_ca
    if bool(certificate) != bool(key):
        raise ConfigError(
            f"{section}.tls_certificate and {section}.tls_key go together: got one, expected both or neither"
        )
    try:
        if ca:
            context.load_verify_locations(ca)
        if certificate:
            read_private(key, f"{section}.tls_key")
            context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{section}: {ca}, {certificate} or {key} cannot be used for TLS: {error}") from None
    return context
