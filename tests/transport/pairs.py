"""Two joined ends of each transport, ready for messages.

To put a new transport under the suite (say "verbs"): write a `Pair` whose constructor joins two links, attaches SLOTS
slots of SLOT_BYTES to both ends and frees in `close` what is not the links' own; say in `forge` how a peer that breaks
the rules looks on its wire; add it to PAIRS. If it needs hardware, leave it out of PAIRS where there is none.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from certificates import OPENSSL, certificates

from benchmarks.harness import inproc
from omnireduce.core.dtypes import Array
from omnireduce.support.config import load_config
from omnireduce.transport.base import Credited, Event, Link, Received
from omnireduce.transport.framing import CREDIT, DATA, FRAME, StreamLink
from omnireduce.transport.shm import ShmLink, connect_shm
from omnireduce.transport.slot_memory import Region, private_slots
from omnireduce.transport.tcp import TcpLink, connect_tcp, listen_tcp
from omnireduce.transport.tls import TlsLink, accept_tls, aggregator_context, connect_tls, worker_context
from omnireduce.transport.unix_sockets import listen_local
from omnireduce.transport.verbs import link as verbs
from omnireduce.transport.verbs.link import Failure, QueuePair, VerbsLink, Write
from tests.simulator.links import SimLink, sim_pair

SLOTS, SLOT_BYTES = 4, 65536
WAIT_S = 20.0  # longer than anything here takes on a busy machine
DEAD_PEER_S = 4.0


class Pair(ABC):
    """`left` is the aggregator's end, `right` the worker's."""

    name: str
    has_descriptors = True
    left: Link
    right: Link

    @property
    def ends(self) -> tuple[Link, Link]:
        return self.left, self.right

    @abstractmethod
    def wait(self, links: Sequence[Link], timeout_s: float) -> None:
        """Return when one of `links` has something to read, or room for what it wants to write."""

    @abstractmethod
    def forge(self, link: Link, event: Received | Credited) -> None:
        """Let `link`'s peer announce `event`, whether it may or not."""

    def close(self) -> None:
        self.left.close()
        self.right.close()

    def repeat(self, step: Callable[[], object], *links: Link) -> None:
        """Call `step` until it says that it is done, waiting for `links` in between; fail when that takes too long."""
        deadline = time.monotonic() + WAIT_S
        while not step():
            assert time.monotonic() < deadline, "the expected did not happen in time"
            self.wait(links or self.ends, deadline - time.monotonic())

    def collect(self, link: Link, count: int) -> list[Event]:
        """The next `count` events of `link`, and any more that come with them; its peer flushes."""
        peer = self.right if link is self.left else self.left
        results: list[Event] = []

        def step() -> bool:
            peer.flush()
            results.extend(link.poll())
            return len(results) >= count

        self.repeat(step, link, *([peer] if peer.wants_write else []))
        return results


class InprocPair(Pair):
    name = "inproc"
    has_descriptors = False

    def __init__(self) -> None:
        self.left, self.right = inproc.pair("right", "left")
        down, up = (np.zeros((SLOTS, SLOT_BYTES), np.uint8) for _ in range(2))
        self.left.attach(down, up)
        self.right.attach(up, down)

    def wait(self, links: Sequence[Link], timeout_s: float) -> None:
        """Nothing is ever on its way."""

    def forge(self, link: Link, event: Received | Credited) -> None:
        assert isinstance(link, inproc.InprocLink)
        link.deliver(event)


class SimPair(Pair):
    """Over a network that takes a millisecond and holds little."""

    name = "sim"
    has_descriptors = False

    def __init__(self) -> None:
        self._now, self._entered = 0.0, 0
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self.left, self.right = sim_pair("right", "left", self, lambda: 1e-3, pipe_bytes=SLOT_BYTES)
        for end in self.ends:
            end.attach(private_slots(SLOTS, SLOT_BYTES), private_slots(SLOTS, SLOT_BYTES))

    def now(self) -> float:
        return self._now

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._entered += 1
        heapq.heappush(self._queue, (time, self._entered, action))

    def wait(self, links: Sequence[Link], timeout_s: float) -> None:
        if self._queue:
            self._now, _, action = heapq.heappop(self._queue)
            action()

    def forge(self, link: Link, event: Received | Credited) -> None:
        assert isinstance(link, SimLink)
        self.at(self._now + 1e-3, lambda: link.deliver(event))  # behind what was sent before


class StreamPair(Pair):
    left: StreamLink
    right: StreamLink

    def wait(self, links: Sequence[Link], timeout_s: float) -> None:
        wait_for(links, timeout_s)

    def forge(self, link: Link, event: Received | Credited) -> None:
        if isinstance(event, Received):
            self.write_raw(link, FRAME.pack(DATA, event.slot, event.nbytes))
        else:
            self.write_raw(link, FRAME.pack(CREDIT, event.slot, 0))

    def write_raw(self, link: Link, data: bytes) -> None:
        """Let `link` read `data`, whatever it means."""
        peer = self.right if link is self.left else self.left
        peer.flush()
        peer._sock.sendall(data)


def tcp_ends() -> tuple[TcpLink, TcpLink]:
    """An aggregator's and a worker's end."""
    with listen_tcp("127.0.0.1", 0) as listener:
        right = connect_tcp("127.0.0.1", listener.getsockname()[1], WAIT_S, DEAD_PEER_S)
        return TcpLink(accept(listener), "right", DEAD_PEER_S), right


def tls_ends() -> tuple[TlsLink, TlsLink]:
    """The worker's end shakes hands when it connects, the aggregator's in `poll`."""
    security = load_config(
        overrides=[*certificates().holder("aggregator"), certificates().trust()], environ={}
    ).security
    ours, theirs = aggregator_context(security), worker_context(security)
    assert ours is not None
    assert theirs is not None
    with listen_tcp("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as worker:
        address = "127.0.0.1", listener.getsockname()[1]
        joining = worker.submit(connect_tls, *address, WAIT_S, DEAD_PEER_S, theirs)
        left = accept_tls(accept(listener), "right", DEAD_PEER_S, ours)
        deadline = time.monotonic() + WAIT_S
        while not left.established:
            assert time.monotonic() < deadline, "the handshake does not come to its end"
            select.select([left], [], [], WAIT_S)
            assert left.poll() == []
        return left, joining.result()


class TcpPair(StreamPair):
    name = "tcp"
    join: Callable[[], tuple[TcpLink, TcpLink]] = staticmethod(tcp_ends)

    def __init__(self) -> None:
        self.left, self.right = self.join()
        for end in self.ends:
            end.attach(private_slots(SLOTS, SLOT_BYTES), private_slots(SLOTS, SLOT_BYTES))


class TlsPair(TcpPair):
    name = "tls"
    join = staticmethod(tls_ends)

    def write_raw(self, link: Link, data: bytes) -> None:
        peer = self.right if link is self.left else self.left
        peer._queue_output(data)
        peer.flush()


class ShmPair(StreamPair):
    name = "shm"
    left: ShmLink
    right: ShmLink

    def __init__(self) -> None:
        with listen_local("127.0.0.1", SHM_PORT) as listener:
            self.right = connect_shm("127.0.0.1", SHM_PORT, WAIT_S)
            self.left = ShmLink(accept(listener), "right")
        self.up, self.down = Region(SLOTS, SLOT_BYTES), Region(SLOTS, SLOT_BYTES)
        self.left.attach(self.down.slots, self.up.slots)
        self.left.send_welcome(b"welcome", self.up, self.down)
        self.collect(self.right, 1)
        self.right.take_slots(0, SLOTS, SLOT_BYTES)

    def close(self) -> None:
        super().close()
        self.up.close()
        self.down.close()


class Wire:
    """RDMA as the link sees it, within this process: writes arrive at once, and an eventfd tells.

    It stands in for a queue where there is no device, so that the order that the link restores is tested everywhere;
    tests/rdma runs the same suite over real queues.
    """

    peer: Wire
    unacknowledged = 0

    def __init__(self, send_slots: Array, receive_slots: Array) -> None:
        self.send_slots, self.receive_slots = send_slots, receive_slots
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK)
        self.news: list[Write | Failure] = []
        self.open = True

    def write(self, slot: int, nbytes: int, immediate: int) -> None:
        if self.peer.open:
            self.peer.receive_slots[slot, :nbytes] = self.send_slots[slot, :nbytes]
            self.peer.arrive(Write(immediate, nbytes))

    def announce(self, immediate: int) -> None:
        if self.peer.open:
            self.peer.arrive(Write(immediate, 0))

    def arrive(self, news: Write | Failure) -> None:
        self.news.append(news)
        os.eventfd_write(self.descriptor, 1)

    def poll(self) -> list[Write | Failure]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        return self.drain()

    def drain(self) -> list[Write | Failure]:
        result, self.news = self.news, []
        return result

    def close(self) -> None:
        if self.open:
            self.open = False
            os.close(self.descriptor)


class VerbsPair(Pair):
    """Two verbs links over TCP and queues that `queues` makes."""

    name = "verbs"
    left: VerbsLink
    right: VerbsLink
    join: Callable[[], tuple[TcpLink, TcpLink]] = staticmethod(tcp_ends)

    def __init__(self) -> None:
        left, right = self.join()
        slots = [private_slots(SLOTS, SLOT_BYTES) for _ in range(4)]
        self.queues = self.connected(slots[:2], slots[2:])
        self.left = VerbsLink(left, self.queues[0], *slots[:2])
        self.right = VerbsLink(right, self.queues[1], *slots[2:])

    def connected(self, left: Sequence[Array], right: Sequence[Array]) -> tuple[QueuePair, QueuePair]:
        """Two connected queues, each for these send and receive slots."""
        one, two = Wire(*left), Wire(*right)
        one.peer, two.peer = two, one
        return one, two

    def wait(self, links: Sequence[Link], timeout_s: float) -> None:
        wait_for(links, timeout_s)

    def forge(self, link: Link, event: Received | Credited) -> None:
        queue = self.queues[1] if link is self.left else self.queues[0]
        peer = self.right if link is self.left else self.left
        kind = verbs.CREDIT if isinstance(event, Credited) else verbs.MESSAGE
        slot = min(event.slot, verbs.SLOT_MASK)  # a larger number cannot be said
        immediate = kind << verbs.KIND_SHIFT | slot << verbs.SLOT_SHIFT | peer._control.controls_sent
        if isinstance(event, Received) and event.nbytes > SLOT_BYTES:
            self.overlong(queue, event.nbytes, immediate)
        else:
            queue.announce(immediate)

    def overlong(self, queue: QueuePair, nbytes: int, immediate: int) -> None:
        """Let `queue` write more than a slot holds."""
        assert isinstance(queue, Wire)
        queue.peer.arrive(Write(immediate, nbytes))


class VerbsTlsPair(VerbsPair):
    """Only what goes by TCP is encrypted."""

    name = "verbs with tls"
    join = staticmethod(tls_ends)


SHM_PORT = 65536 + os.getpid()  # a name only, of this process alone: others run tests beside it
WITH_TLS: tuple[type[Pair], ...] = (TlsPair, VerbsTlsPair) if OPENSSL else ()
PAIRS: tuple[type[Pair], ...] = (InprocPair, SimPair, ShmPair, TcpPair, VerbsPair, *WITH_TLS)


def accept(listener: socket.socket) -> socket.socket:
    """The connection that waits at a non-blocking listener, or comes soon."""
    ready, _, _ = select.select([listener], [], [], WAIT_S)
    assert ready, "nobody connects"
    return listener.accept()[0]


def wait_for(links: Sequence[Link], timeout_s: float) -> None:
    """Wait until one of `links` has something to read, or room for what it wants to write."""
    alive = [link for link in links if not link.over]
    select.select(alive, [link for link in alive if link.wants_write], [], timeout_s)
