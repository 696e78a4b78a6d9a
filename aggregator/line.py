"""The channel between the supervisor and a child: a pair of sockets on which each message is one packet.

The supervisor sends orders. A shard sends the orders that it got from clients and, while it drains, its number of jobs.
The child stops when the supervisor closes its end or dies.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec

from omnireduce.administration import Order

LONGEST = 16384  # bytes of a packet
AT_ONCE = 64  # packets that are read in a row


class RemainingJobs(msgspec.Struct, frozen=True, tag=True):
    """The number of jobs that run or gather on a shard that drains."""

    jobs: int


class ClientOrder(msgspec.Struct, frozen=True, tag=True):
    """An order that a shard got from a client. The shard has done its own part."""

    order: Order


Message = RemainingJobs | ClientOrder | Order
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Line:
    """One end of the channel. No call blocks."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end, self.over = end, False

    @classmethod
    def pair(cls) -> tuple[Line, Line]:
        """The two ends of a new channel."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    def fileno(self) -> int:
        return self._end.fileno()

    def say(self, message: Message) -> bool:
        """Send a message; return whether the other end will get it."""
        try:
            self._end.send(msgspec.msgpack.encode(message))
        except OSError:  # it is gone, or has not read for long
            return False
        return True

    def hear(self) -> Iterator[Message]:
        """Yield the messages that have arrived. Sets `over` if the other end is closed."""
        for _ in range(AT_ONCE):
            try:
                packet = self._end.recv(LONGEST)
            except BlockingIOError:
                return
            except OSError:  # it died with messages unread
                packet = b""
            if not packet:
                self.over = True
                return
            yield _decoder.decode(packet)

    def close(self) -> None:
        self._end.close()
