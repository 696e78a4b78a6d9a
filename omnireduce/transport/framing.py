"""Links over a stream socket, with their framing.

A frame is 8 bytes: kind (u8), -, slot (u16), length (u32).

    DATA     a block message of `length` bytes. tcp: the bytes follow. shm: they lie in the slot that both sides map
    CREDIT   the slot is free again
    CONTROL  a control message of `length` bytes follows; the slot field holds `Control.after`

Small frames gather until `flush`, so that a turn of the driver costs one system call per peer.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections import deque
from collections.abc import Sequence
from itertools import islice
from operator import add

from omnireduce.core.dtypes import Array
from omnireduce.support.os_error_origin import raised_by_signal_handler
from omnireduce.transport.base import EVERYTHING, Control, Credited, Event, Link, Lost, Received

TLS = "TLS"
_HTTP = (b"GET", b"PUT", b"POST", b"HEAD", b"PATCH", b"DELETE", b"OPTIONS", b"CONNECT", b"TRACE")
_BEGINNINGS = {
    b"HTTP": "HTTP",
    b"PRI ": "HTTP/2",
    b"SSH-": "SSH",
    b"PROX": "the PROXY protocol of a load balancer",
    b"\r\n\r\n": "the PROXY protocol of a load balancer",
    **{(method + b" ")[:4]: "HTTP" for method in _HTTP},
}


def guessed_protocol(first: bytes) -> str:
    """The name of the protocol that a peer speaks, by its first four bytes or more; empty if it is not known."""
    if len(first) >= 2 and 20 <= first[0] <= 23 and first[1] == 3:  # a TLS record: type, then the major version
        return TLS
    return _BEGINNINGS.get(bytes(first[:4]), "")


FRAME = struct.Struct("<BxHI")
DATA, CREDIT, CONTROL = 1, 2, 3
READ_BYTES = 65536
FIRST_BYTES = 8192  # size of the input buffer until a longer message is announced: most newcomers say little
# Limits of one poll. Then others get their turn, no matter how fast the peer sends; the socket stays readable.
BYTES_PER_POLL = 4 << 20
EVENTS_PER_POLL = 256  # with those of the same read, there may be a few more; an honest peer has fewer under way
FRAMES_BYTES = 8192  # bytes read at once while frames are expected: this limits the events of one read
CONTROL_LIMIT = READ_BYTES - FRAME.size  # bytes: a control message and its frame fit the input buffer
GATHER = 16  # buffers per sendmsg
SMALL_LIMIT = 1 << 20  # bytes of frames and control messages that may wait for the peer; an honest peer leaves few


class StreamLink(Link):
    """A link over a connected, non-blocking stream socket. `inline` says whether DATA frames carry the bytes."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        super().__init__(peer)
        sock.setblocking(False)
        self._sock = sock
        self._small_frames = bytearray()
        # messages, as writable views, and small frames, as read-only views; each with the position of its end in bytes
        self._output: deque[tuple[int, memoryview]] = deque()
        self._taken_bytes: deque[int] = deque([0], 1)  # the bytes that the system has taken so far
        self._output_dead = False
        self._output_error = ""  # the error that ended the output, if reading does not show it
        self._control_limit = CONTROL_LIMIT
        self._buffer = bytearray(FIRST_BYTES)
        self._view = memoryview(self._buffer)
        self._filled = 0  # bytes of the buffer that hold unparsed input
        self._body: memoryview | None = None  # unread rest of the current DATA message
        self._arriving = Received(0, 0)
        self._lost: Lost | None = None
        self.controls_sent = self.controls_received = 0

    def attach(self, send_slots: Array, receive_slots: Array) -> None:
        super().attach(send_slots, receive_slots)
        self._control_limit = CONTROL_LIMIT
        self._grow()
        self._send_views = [memoryview(slot) for slot in send_slots]
        self._receive_views = [memoryview(slot) for slot in receive_slots]

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._output) and self._lost is None

    @property
    def over(self) -> bool:
        return self._lost is not None

    def close(self) -> None:
        self._lost = self._lost or Lost("closed by this side")  # done first: an interrupt may come after each line
        self._sock.close()
        self._output_dead = True
        self._output.clear()

    # output

    def _send(self, slot: int, nbytes: int) -> None:
        self.counters.sent_bytes += FRAME.size + nbytes
        if self.inline and nbytes:
            self._queue_output(FRAME.pack(DATA, slot, nbytes), self._send_views[slot][:nbytes])
        else:
            self._small_frames += FRAME.pack(DATA, slot, nbytes)

    def _send_message(self, slot: int, message: Array) -> None:
        self.counters.sent_bytes += FRAME.size + message.size
        self._queue_output(FRAME.pack(DATA, slot, message.size), message.data)

    def _return_credit(self, slot: int) -> None:
        self._small_frames += FRAME.pack(CREDIT, slot, 0)
        self.counters.sent_bytes += FRAME.size

    def send_control(self, body: bytes, after: int = 0) -> None:
        assert len(body) <= CONTROL_LIMIT, f"a control message of {len(body)} bytes"
        self.controls_sent += 1
        self._small_frames += FRAME.pack(CONTROL, after, len(body)) + body
        self.counters.sent_bytes += FRAME.size + len(body)
        self.flush()

    def _queue_output(self, frame: bytes = b"", *messages: memoryview) -> None:
        """Put the small frames, then `frame` and the `messages` that it announces, behind the waiting output.

        A signal handler that raises may come between two lines. Even then nothing is queued twice, and no frame is
        queued without its message. So a last message can still reach the peer.
        """
        small, self._small_frames = self._small_frames, bytearray()
        small += frame
        end = (self._output[-1] if self._output else self._taken_bytes)[0] + len(small)
        pieces = [(end, memoryview(small).toreadonly())]
        for view in messages:
            end += len(view)
            pieces.append((end, view))
        self._output.extend(pieces)

    def flush(self, max_bytes: int = EVERYTHING) -> None:
        is_bounded = max_bytes < EVERYTHING
        if self._output_dead:
            self._small_frames.clear()
            self._output.clear()
        output, taken = self._output, self._taken_bytes
        while True:
            while output and output[0][0] <= taken[0]:  # done first: an exception may have ended the last flush early
                output.popleft()
            if not (self._small_frames or output):
                return
            if self._small_frames and (max_bytes <= 0 or len(output) < GATHER):  # a peer must not cause many buffers
                self._queue_output()
            if max_bytes <= 0:  # `wants_write` shows that there is more
                return
            taken_before, (end, head) = taken[0], output[0]
            views = [head[taken_before - end :]]
            if len(output) > 1:
                views += [view for _, view in islice(output, 1, GATHER)]
            try:
                self._write(first_bytes(views, max_bytes) if is_bounded else views)
            except OSError as error:
                self._output_failed(error)
                return
            max_bytes -= taken[0] - taken_before if is_bounded else 0

    def _output_failed(self, error: OSError) -> None:
        """The system takes no more output, for now or for ever. Raises the error if a signal handler has raised it.

        `poll` reports the reason, because the peer's last messages may still be unread. But the system reports a
        time-out only once, so the error is noted here.
        """
        if raised_by_signal_handler(error):
            raise error
        if error.errno == errno.EAGAIN:
            return
        self._output_dead = True
        self._output_error = "" if error.errno == errno.EPIPE else error.strerror or str(error)
        self._output.clear()

    def _write(self, views: Sequence[memoryview]) -> None:
        """Hand `views` to the system, and count the bytes that it has taken: in a single call of C, so that no signal
        handler comes in between."""
        self._taken_bytes.extend(map(add, (self._taken_bytes[0],), map(self._sock.sendmsg, (views,))))

    @property
    def clogged(self) -> bool:
        """Whether more output waits than an honest peer could cause: it returns a credit only for a message that it has
        read."""
        small_bytes = len(self._small_frames) + sum(len(view) for _, view in self._output if view.readonly)
        return small_bytes > SMALL_LIMIT or len(self._output) > GATHER + 2 * len(self.send_slots)

    # input

    def bound_control(self, max_bytes: int) -> None:
        self._control_limit = max_bytes

    def _grow(self) -> None:
        """Make room in the buffer for the longest message. Its content stays."""
        self._buffer = self._buffer + bytes(READ_BYTES - len(self._buffer))
        self._view = memoryview(self._buffer)

    def _receive(self, into: memoryview) -> int:
        return self._sock.recv_into(into)

    def poll(self) -> Sequence[Event]:
        events: list[Event] = []
        if self._output:
            self._end_if_unread(events)
        budget = BYTES_PER_POLL
        while self._lost is None and budget > 0 and len(events) < EVENTS_PER_POLL:
            body, filled = self._body, self._filled
            target = self._view[filled : filled + FRAMES_BYTES] if body is None else body[:budget]
            count = self._receive_into(target, events)
            budget -= count
            if count:
                self._handle_input(count, events)
            if count < len(target):  # the socket is most likely empty; if not, it stays readable
                break
        return events

    def _end_if_unread(self, events: list[Event]) -> None:
        if self.wants_write and self.clogged:
            self._end(events, "it sends, but does not read", violation=True)

    def _receive_into(self, into: memoryview, events: list[Event]) -> int:
        """Receive; return how many bytes have come: 0 if there are none, or if the link is over."""
        try:
            count = self._receive(into)
        except OSError as error:
            if raised_by_signal_handler(error):
                raise
            if error.errno != errno.EAGAIN:
                self._end(events, f"connection broken: {error.strerror or error}")
            return 0
        if count == 0:
            self._end_closed(events, self._output_error)
        return count

    def _end_closed(self, events: list[Event], reason: str | None) -> None:
        """No more input will come. `reason`: the system's reason, unless the peer has closed the connection."""
        self._end(events, f"connection broken: {reason}" if reason else "connection closed")

    def _handle_input(self, count: int, events: list[Event]) -> None:
        """Handle `count` bytes, which were received into the slot of the current message, or into the buffer."""
        self.counters.received_bytes += count
        if self._body is None:
            self._filled += count
            self._parse(events)
        else:
            self._body_arrived(count, events)

    def _end(self, events: list[Event], reason: str, violation: bool = False, refused: bool = False) -> None:
        self._lost = Lost(reason, violation, refused)
        if not violation:  # a peer that has broken the rules can still get a last message
            self._output_dead = True
            self._output.clear()
        events.append(self._lost)

    def _body_arrived(self, count: int, events: list[Event]) -> None:
        assert self._body is not None
        self._body = self._body[count:]
        if not self._body:
            self._body = None
            events.append(self._arriving)

    def _parse(self, events: list[Event]) -> None:
        """Turn the buffered input into events. An incomplete frame stays at the start of the buffer."""
        position = 0
        while self._filled - position >= FRAME.size and self._body is None and self._lost is None:
            kind, slot, length = FRAME.unpack_from(self._buffer, position)
            body = position + FRAME.size
            if kind == CONTROL and length <= self._control_limit:
                if self._filled - body < length:
                    if FRAME.size + length > len(self._buffer):
                        self._grow()
                    break
                events.append(Control(bytes(self._view[body : body + length]), slot))
                self.controls_received += 1
                position = body + length
            elif kind in (DATA, CREDIT):
                position = body + self._credit_or_data(kind, slot, length, body, events)
            else:
                self._end(events, self._bad_frame_text(position, kind, length), violation=True)
        if position:
            rest = self._filled - position
            if rest:
                self._buffer[:rest] = self._buffer[position : self._filled]
            self._filled = rest

    def _bad_frame_text(self, position: int, kind: int, length: int) -> str:
        """The reason why the bytes from `position` on are no frame."""
        name = guessed_protocol(bytes(self._view[position : position + FRAME.size]))
        expected = f"; expected at most {self._control_limit} bytes" if kind == CONTROL else ""
        description = f"it looks like {name}" if name else f"kind {kind}, length {length}{expected}"
        hint = "; give both ends TLS or none (security.tls_certificate there, tls_ca here)" if name == TLS else ""
        return f"not a frame of this protocol: {description}{hint}"

    def _credit_or_data(self, kind: int, slot: int, length: int, body: int, events: list[Event]) -> int:
        """Handle one frame; return how many bytes of the message that it announces were in the buffer."""
        event = Received(slot, length) if kind == DATA else Credited(slot)
        wrong = self._check_credit(event) or (f"a credit of {length} bytes" if kind == CREDIT and length else "")
        if wrong:
            self._end(events, wrong, violation=True)
            return 0
        if not self.inline or kind == CREDIT or length == 0:
            if kind == DATA and not self.inline:
                self.counters.received_bytes += length
            events.append(event)
            return 0
        self._arriving = Received(slot, length)
        count = min(length, self._filled - body)
        target = self._receive_views[slot]
        target[:count] = self._view[body : body + count]
        self._body = target[:length]
        self._body_arrived(count, events)
        return count


def first_bytes(views: Sequence[memoryview], max_bytes: int) -> list[memoryview]:
    """The first `max_bytes` bytes of `views` together."""
    pieces = []
    for view in views:
        pieces.append(view[:max_bytes])
        max_bytes -= len(pieces[-1])
        if max_bytes <= 0:
            break
    return pieces
