"""The bound of an exchange over TCP on one host: plain TCP sockets on loopback that carry tensors up and down.

    python -m benchmarks.contest.loopback       an echo server: prints `ready HOST:PORT`, ends with its standard input

Over loopback one host carries every byte twice: up to an aggregator and down again. Here as many echo servers stand for
the shards, a process each: every rank sends each of them its part of the tensor, and receives it back at the same time,
in messages as long as the service's. Nothing is scanned, copied into slots, framed, added or scattered. An echo is the
faster way back: it sends what the cache still has. Each process has one thread, which waits in `poll`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
from collections.abc import Sequence

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.support.addresses import parse_address

MESSAGE_BYTES = 1 << 18
PATIENCE_S = 60.0  # for a single byte


class Carrier:
    """One rank's connections to all echo servers."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._sockets = [_ready(socket.create_connection(parse_address(address))) for address in addresses]

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()

    def carry(self, tensor: Array, result: Array) -> None:
        """Send all bytes of `tensor` and receive them in `result`, possibly the same contiguous array.

        Raises TimeoutError or OSError when an echo server fails.
        """
        source, target = (array.reshape(-1).view(np.uint8).data for array in (tensor, result))
        step = -(-len(source) // len(self._sockets))
        poll, unfinished = select.poll(), {}
        for number, sock in zip(range(0, len(source), step), self._sockets, strict=False):  # fewer parts: a tiny tensor
            part = slice(number, number + step)
            unfinished[sock.fileno()] = _Transfer(sock, source[part], target[part])
            poll.register(sock, select.POLLIN | select.POLLOUT)
        while unfinished:
            ready = poll.poll(PATIENCE_S * 1e3)
            if not ready:
                raise TimeoutError("an echo server does not answer")
            for number, events in ready:
                transfer = unfinished[number]
                if events & select.POLLOUT and transfer.send():
                    poll.modify(number, select.POLLIN)
                if events & ~select.POLLOUT and transfer.receive():
                    poll.unregister(number)
                    del unfinished[number]


class _Transfer:
    """The data that one connection still has to carry."""

    def __init__(self, sock: socket.socket, source: memoryview, target: memoryview) -> None:
        self._sock, self._source, self._target = sock, source, target

    def send(self) -> bool:
        """Send what goes at once; return whether that was the last."""
        self._source = self._source[self._sock.send(self._source[:MESSAGE_BYTES]) :]
        return not self._source

    def receive(self) -> bool:
        """The same for what comes."""
        count = self._sock.recv_into(self._target[:MESSAGE_BYTES])
        if not count:
            raise ConnectionError("an echo server closed the connection")
        self._target = self._target[count:]
        return not self._target


def _ready(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class _Echo:
    """One connection of an echo server."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._buffer, self._unsent = _ready(sock), memoryview(bytearray(MESSAGE_BYTES)), memoryview(b"")

    def turn(self) -> int:
        """Send what is there, else receive; return which event to wait for, 0 at the end."""
        try:
            if not self._unsent:
                count = self._sock.recv_into(self._buffer)
                if not count:
                    return 0
                self._unsent = self._buffer[:count]
            with contextlib.suppress(BlockingIOError):  # the other side reads too slowly
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except ConnectionError:
            return 0
        return select.POLLOUT if self._unsent else select.POLLIN


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"ready 127.0.0.1:{listener.getsockname()[1]}", flush=True)
    poll, echoes = select.poll(), {}
    for readable in (listener, sys.stdin):
        poll.register(readable, select.POLLIN)
    while True:
        for number, _ in poll.poll():
            if number == sys.stdin.fileno():
                return
            if number == listener.fileno():
                sock, _ = listener.accept()
                echoes[sock.fileno()] = _Echo(sock)
                poll.register(sock, select.POLLIN)
                continue
            event = echoes[number].turn()
            if event:
                poll.modify(number, event)
            else:
                poll.unregister(number)
                del echoes[number]


if __name__ == "__main__":
    main()
