"""TCP links through TLS 1.3. All bytes are encrypted, those of block messages too.

If OpenSSL had the socket, it would read until the socket is empty, for as long as the peer keeps sending. So it works
on memory here: the link hands it one record at a time, and counts them. One poll takes few records. The rest stays in
the socket, where the descriptor shows it. Only the beginning of an incomplete record is kept.

Until the handshake is complete, the link takes nothing else. By then the peer's certificate is verified, if one is
demanded.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import stat
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from omnireduce.core.dtypes import Array
from omnireduce.errors import ConfigError, TransportError
from omnireduce.support.addresses import Address, connect
from omnireduce.support.config import Metrics, Security
from omnireduce.support.files.paths import without_waiting
from omnireduce.support.os_error_origin import raised_by_signal_handler
from omnireduce.support.secret import read_private
from omnireduce.transport.base import EVERYTHING, Event, Lost
from omnireduce.transport.framing import CONTROL, EVENTS_PER_POLL, TLS, guessed_protocol
from omnireduce.transport.tcp import TcpLink

_OTHER_KEY = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH")


def aggregator_context(files: Security | Metrics, section: str = "security") -> ssl.SSLContext | None:
    """An aggregator's TLS context: it shows its certificate and, with `tls_ca`, demands certificates of its peers. None
    without TLS.

    `files` is the `section` of the configuration. Raises ConfigError.
    """
    if not (files.tls_certificate or files.tls_key or files.tls_ca):
        return None
    if not files.tls_certificate:
        raise ConfigError(f"{section}.tls_certificate: an aggregator with TLS needs one, and {section}.tls_key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # sessions are never resumed
    if files.tls_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return _with_files(context, files, section)


def worker_context(security: Security) -> ssl.SSLContext | None:
    """A worker's TLS context: it accepts certificates of `tls_ca` and, with `tls_certificate`, shows its own. None
    without TLS.

    Raises ConfigError.
    """
    if not (security.tls_certificate or security.tls_key or security.tls_ca):
        return None
    if not security.tls_ca:
        raise ConfigError("security.tls_ca: a worker with TLS needs it, to know the aggregators' certificates")
    return _with_files(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), security, "security")


def _with_files(context: ssl.SSLContext, files: Security | Metrics, section: str) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    certificate, key = files.tls_certificate, files.tls_key
    if bool(certificate) != bool(key):
        raise ConfigError(
            f"{section}.tls_certificate and {section}.tls_key go together: got one, expected both or neither"
        )
    if files.tls_ca:
        _add_authority(context, f"{section}.tls_ca", files.tls_ca)
    if certificate:
        _add_authority(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), f"{section}.tls_certificate", certificate)  # is it one?
        read_private(key, f"{section}.tls_key")
        _add_certificate(context, section, certificate, key)
    return context


def _add_authority(context: ssl.SSLContext, name: str, file: str) -> None:
    """Let `context` trust the certificates in a file, the value of the key `name`."""
    try:
        with open(file, "rb", opener=without_waiting) as stream:  # opened here, because OpenSSL's errors say less
            if stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
                raise ConfigError(f"{name}: {file} is a pipe, expected a file")
        context.load_verify_locations(file)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{name}: {file} has no certificate that can be read, expected PEM{_reason_text(error)}"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: {file} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _add_certificate(context: ssl.SSLContext, section: str, certificate: str, key: str) -> None:
    passphrase_requests = []

    def no_passphrase() -> str:
        passphrase_requests.append(key)
        return ""

    try:
        context.load_cert_chain(certificate, key, password=no_passphrase)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None)
        if passphrase_requests:
            wrong = f"{key} has a passphrase, expected a key without one: openssl pkey -in {os.path.basename(key)}"
        elif reason in _OTHER_KEY:
            wrong = f"{key} is not the key of the certificate {certificate}"
        elif reason is None or "PEM" in reason or "NO_START_LINE" in reason:
            wrong = f"{key} has no private key that can be read, expected PEM"
        else:
            wrong = f"OpenSSL refuses {certificate} and {key}{_reason_text(error)}"
        raise ConfigError(f"{section}.tls_key: {wrong}") from None


def _reason_text(error: Exception) -> str:
    """OpenSSL's name of the error, in small letters."""
    reason = getattr(error, "reason", None) or ""
    return f" ({reason.replace('_', ' ').lower()})" if reason else ""


RECORD = struct.Struct(">BBxH")  # the five bytes of its header: type, major version, length of the rest
RECORD_TYPES = range(20, 24)
PLAIN = bytes((CONTROL, 0))  # the beginning of a frame with a control message
RECORD_LIMIT = (1 << 14) + 256  # the longest rest of a record, by RFC 8446
WIRE_BYTES = 131072  # bytes read at once
STRANGER_WIRE_BYTES = 20480  # the same for a peer that is not admitted: one record
RECORDS_PER_POLL = 64  # 1 MiB, if they are full
HANDSHAKE_RECORDS = 64  # an honest handshake takes about ten
EMPTY_RECORDS = 8  # the most records in a row without data, such as new keys and tickets; an honest peer sends few
HUNG_UP = (7, 8)  # TCP_CLOSE, TCP_CLOSE_WAIT: states of a connection, from <netinet/tcp.h>
SEAL_BYTES = 131072  # bytes that are encrypted at once
ANSWER_BYTES = 65536  # bytes of OpenSSL's own answers that may wait for the peer; an honest peer asks for little


class TlsLink(TcpLink):
    """A link over TCP and TLS. The handshake goes on in `poll`.

    `host`: the name that a worker expects in the certificate; empty for an aggregator. `uses_tasks`: each step of the
    handshake is a `task`, because signing takes long. Until the task is done, this thread does not use OpenSSL.
    """

    loss_question = ""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        dead_peer_s: float,
        context: ssl.SSLContext,
        host: str = "",
        *,
        uses_tasks: bool = False,
    ) -> None:
        super().__init__(sock, peer, dead_peer_s)
        self._uses_tasks = uses_tasks
        self._step: _HandshakeStep | None = None  # the step of the handshake under way, until its outcome is handled
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=not host, server_hostname=host or None)
        self._wire = memoryview(bytearray(STRANGER_WIRE_BYTES))
        self._kept_bytes = 0  # bytes at the start of `_wire` that belong to an incomplete record
        self._sealed = memoryview(b"")  # records on their way out
        self.established = False
        self._empty_records = 0  # records since the last record with data
        if host:
            with suppress(ssl.SSLWantReadError):  # it has sent its greeting, and wants an answer
                self._tls.do_handshake()

    def __str__(self) -> str:
        return f"{self.kind} with TLS, from {self.local_host}"

    def attach(self, send_slots: Array, receive_slots: Array) -> None:
        super().attach(send_slots, receive_slots)
        self._wire = memoryview(bytearray(self._wire) + bytes(WIRE_BYTES - len(self._wire)))

    # output

    @property
    def wants_write(self) -> bool:
        if self._output_dead or self._lost is not None or self.task is not None:
            return False
        return bool(self._sealed or self._outgoing.pending or (self.established and self._output))

    @property
    def task(self) -> Callable[[], None] | None:
        step = self._step
        return None if step is None or step.is_done else step.run

    def flush(self, max_bytes: int = EVERYTHING) -> None:
        if self.task is not None:
            return
        if self.established:
            super().flush(max_bytes)
        try:
            self._send_sealed()
        except OSError as error:
            self._output_failed(error)

    def _write(self, views: Sequence[memoryview]) -> None:
        """Encrypt `views`, if the system has taken all output that was encrypted before.

        This is not a single call of C. If a signal handler raises here, some bytes may be sent twice, which ends the
        connection.
        """
        self._send_sealed()
        remaining = SEAL_BYTES
        for view in views:
            written = self._tls.write(view[:remaining])
            self._taken_bytes.append(self._taken_bytes[0] + written)
            remaining -= written
            if not remaining:
                break

    def _send_sealed(self) -> None:
        """Send all encrypted output. Raises BlockingIOError when the system does not take all, and OSError."""
        while not self._output_dead and (self._sealed or self._outgoing.pending):
            self._sealed = self._sealed or memoryview(self._outgoing.read())
            self._sealed = self._sealed[self._sock.send(self._sealed) :]

    @property
    def clogged(self) -> bool:
        """As for other stream links. A peer can also make OpenSSL send answers: their bytes are limited, too."""
        return super().clogged or self._outgoing.pending > ANSWER_BYTES

    # input

    def _receive(self, into: memoryview) -> int:
        return self._sock.recv_into(into, 0, socket.MSG_PEEK)

    def poll(self) -> Sequence[Event]:
        events: list[Event] = []
        if self.task is not None:
            return events
        if self._step is not None:
            step, self._step = self._step, None
            self._handle_step(step.error, events)
        self._end_if_unread(events)
        budget = RECORDS_PER_POLL
        while budget and self._lost is None:
            room = self._wire[self._kept_bytes :]
            count = self._receive_into(room, events)
            if not count:
                break
            at, budget = self._take_records(self._kept_bytes + count, budget, events)
            self._consume(at, self._kept_bytes + count, events, leave=not budget)
            if count < len(room):
                break
        if self._outgoing.pending:
            self.flush()
        return events

    def _take_records(self, end: int, budget: int, events: list[Event]) -> tuple[int, int]:
        """Take whole records from the first `end` bytes of the wire, at most `budget`.

        Returns the place where they end, and how many more records this poll may take. That is 0 when others should
        have their turn, or when the handshake is over: data behind the handshake is left to the next poll.
        """
        at = 0
        while budget and self._lost is None:
            size = self._record_size(at, end, events)
            if not size:
                break
            self._incoming.write(self._wire[at : at + size])
            at += size
            budget -= 1
            if self.established:
                self._take_data(events)
            else:
                self._take_handshake(events)
                budget *= self._step is None and not self.established
            budget *= len(events) < EVENTS_PER_POLL
        return at, budget

    def _record_size(self, at: int, end: int, events: list[Event]) -> int:
        """The size in bytes of the record that begins at `at`; 0 if it is incomplete, or no record of TLS."""
        if end - at < 5:
            return 0
        kind, major, length = RECORD.unpack_from(self._wire, at)
        if kind not in RECORD_TYPES or major != 3 or length > RECORD_LIMIT:
            first = bytes(self._wire[at : at + 5])
            name = "a worker without TLS (security.tls_ca)" if first[:2] == PLAIN else guessed_protocol(first)
            detail = f", with a record of {length} bytes" if name == TLS else ""
            description = f"it looks like {name}{detail}" if name else f"it sent {first!r}"
            self._end(events, f"no TLS: {description}", violation=True)
            return 0
        size = 5 + int(length)
        return size if size <= end - at else 0

    def _consume(self, at: int, end: int, events: list[Event], *, leave: bool) -> None:
        """Remove the bytes before `at` from the socket. The bytes from `at` up to `end` are not used yet: leave them in
        the socket (`leave`), or keep them here."""
        used, dropped = (at if leave else end) - self._kept_bytes, 0
        try:
            dropped = self._sock.recv_into(self._wire, used, socket.MSG_TRUNC)  # copies nothing
        except OSError as error:
            if raised_by_signal_handler(error):
                raise
        if dropped != used and self._lost is None:
            self._end(events, "connection broken: its last bytes were lost")
        self._kept_bytes = 0 if leave else end - at
        self._wire[: self._kept_bytes] = self._wire[at : at + self._kept_bytes]

    def _take_handshake(self, events: list[Event]) -> None:
        """Do the next step of the handshake, or let a task do it."""
        self._empty_records += 1
        if self._uses_tasks:
            self._step = _HandshakeStep(self._tls, self._sock)
            return
        try:
            self._tls.do_handshake()
        except OSError as error:
            if raised_by_signal_handler(error):
                raise
            self._handle_step(error, events)
        else:
            self._handle_step(None, events)

    def _handle_step(self, error: Exception | None, events: list[Event]) -> None:
        """Handle the outcome of a step of the handshake."""
        if error is None:
            self.established, self._empty_records = True, 0
            self.flush()
        elif isinstance(error, ConnectionResetError):
            self._end_closed(events, self._output_error if error.errno in (0, errno.EPIPE) else error.strerror)
        elif not isinstance(error, ssl.SSLWantReadError):
            self._end(events, f"no TLS: {getattr(error, 'strerror', '') or error}", violation=True)
        elif self._empty_records > HANDSHAKE_RECORDS:
            self._end(events, f"no TLS: a handshake of more than {HANDSHAKE_RECORDS} records", violation=True)

    def _take_data(self, events: list[Event]) -> None:
        """Decrypt a record, straight into the slot or the buffer of its bytes."""
        count = self._decrypt(events)
        self._empty_records = 0 if count else self._empty_records + 1
        while count:
            self._handle_input(count, events)
            count = self._decrypt(events) if self._lost is None and self._tls.pending() else 0
        if self._empty_records > EMPTY_RECORDS and self._lost is None:
            self._end(events, f"{self._empty_records} TLS records in a row without data", violation=True)

    def _decrypt(self, events: list[Event]) -> int:
        target = self._view[self._filled :] if self._body is None else self._body
        try:
            count: int = self._tls.read(len(target), target)  # type: ignore[assignment]
        except OSError as error:
            if raised_by_signal_handler(error):
                raise
            if isinstance(error, ssl.SSLWantReadError):
                return 0
            alert = "_ALERT_" in str(getattr(error, "reason", ""))  # an alert says that this side broke the rules
            problem = "connection broken" if alert else "no TLS"
            self._end(events, f"{problem}: {error.strerror or error}", not alert, refused=alert)
            return 0
        if count == 0:
            self._end(events, "connection closed")
        return count


def connect_tls(host: str, port: int, timeout_s: float, dead_peer_s: float, context: ssl.SSLContext) -> TlsLink:
    """Connect to a listening aggregator and check its certificate. Raises OSError when it hangs up or cannot be
    reached, TransportError when it does not prove to be `host`."""
    deadline = time.monotonic() + timeout_s
    sock, address = connect(host, port, timeout_s), Address(host, port)
    try:
        link = TlsLink(sock, str(address), dead_peer_s, context, host.partition("%")[0])
        wrong = _shake_hands(link, deadline)
    except OSError as error:
        if raised_by_signal_handler(error) or not isinstance(error, ssl.SSLError):
            sock.close()
            raise
        wrong = error.strerror or str(error)
    if wrong:
        sock.close()
        raise TransportError(
            f"aggregator {address}: no TLS: {wrong.removeprefix('no TLS: ')}; does it have a certificate "
            "(security.tls_certificate), for this name, and signed by security.tls_ca?"
        )
    return link


def _shake_hands(link: TlsLink, deadline: float) -> str:
    """Return when the handshake is over: an empty text, or the reason why it failed. Raises TimeoutError, and
    ConnectionResetError when the aggregator hangs up, which says nothing about its certificate."""
    ready = select.poll()
    while not link.established:
        link.flush()
        ready.register(link, select.POLLIN | (select.POLLOUT if link.wants_write else 0))
        if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError(errno.ETIMEDOUT, "nobody answered its TLS handshake in time")
        for event in link.poll():  # nothing else comes before the handshake is over
            assert isinstance(event, Lost)
            if not event.violation:
                hint = "does it use TLS (security.tls_certificate there)?"
                raise ConnectionResetError(errno.ECONNRESET, f"{event.reason} in the TLS handshake; {hint}")
            return event.reason
    return ""


def accept_tls(
    sock: socket.socket, peer: str, dead_peer_s: float, context: ssl.SSLContext, *, uses_tasks: bool = False
) -> TlsLink:
    """The link of a connection that was accepted; the handshake is still to come. Raises OSError."""
    return TlsLink(sock, peer, dead_peer_s, context, uses_tasks=uses_tasks)


class _HandshakeStep:
    """One step of a handshake, which any thread may do. It does nothing if the peer has gone meanwhile."""

    def __init__(self, tls: ssl.SSLObject, sock: socket.socket) -> None:
        self._tls, self._sock = tls, sock
        self.error: Exception | None = None
        self.is_done = False

    def run(self) -> None:
        try:
            if self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in HUNG_UP:
                number = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                raise ConnectionResetError(number, os.strerror(number))
            self._tls.do_handshake()
        except Exception as error:
            self.error = error
        self.is_done = True
