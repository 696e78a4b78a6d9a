"""The supervisor's child processes.

Each child has a channel to the supervisor, and a pipe for the stacks of its threads, if it hangs. A child that dies is
started again, but not too often: see `Deaths`.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from typing import Literal, NamedTuple

import msgspec

from omnireduce.aggregator.heartbeats import HeartbeatWatch
from omnireduce.core.admin_messages import Order
from omnireduce.support.config import Config

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


class ChannelEnd:
    """One end of the channel. No call blocks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket, self.is_closed = sock, False

    @classmethod
    def pair(cls) -> tuple[ChannelEnd, ChannelEnd]:
        """The two ends of a new channel."""
        supervisor_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(supervisor_end), cls(child_end)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> bool:
        """Send a message; return whether the other end will get it."""
        try:
            self._socket.send(msgspec.msgpack.encode(message))
        except OSError:  # it is gone, or has not read for long
            return False
        return True

    def receive(self) -> Iterator[Message]:
        """Yield the messages that have arrived. Sets `is_closed` if the other end is closed."""
        for _ in range(AT_ONCE):
            try:
                packet = self._socket.recv(LONGEST)
            except BlockingIOError:
                return
            except OSError:  # it died with messages unread
                packet = b""
            if not packet:
                self.is_closed = True
                return
            yield _decoder.decode(packet)

    def close(self) -> None:
        self._socket.close()


RESTART_WINDOW_S = 60.0
RESTARTS_PER_WINDOW = 5
STACKS_SIGNAL = signal.SIGUSR1  # lets a child write the stacks of its threads into a pipe
STACKS_S, PAUSE_S = 1.0, 0.1  # the longest wait for the first bytes of the stacks, and for further bytes
STACKS_BYTES = 1 << 16


class Deaths:
    """Counts deaths within the last RESTART_WINDOW_S."""

    def __init__(self) -> None:
        self._times: list[float] = []

    @property
    def count(self) -> int:
        return len(self._times)

    def count_death(self) -> bool:
        """Count a death that happened now; return whether there were too many."""
        now = time.monotonic()
        self._times = [death_at for death_at in self._times if now - death_at < RESTART_WINDOW_S] + [now]
        return self.count > RESTARTS_PER_WINDOW


@dataclass(eq=False)
class Child:
    """A process that runs `run(channel)`, which returns once the other end of the channel is closed. `address` is where
    it serves."""

    kind: Literal["shard", "monitor"]
    address: str
    run: Callable[[ChannelEnd], None]
    deaths: Deaths
    watch: HeartbeatWatch | None  # None: the child takes no turns, as the monitor
    process: ForkProcess
    channel: ChannelEnd  # the supervisor's end
    stacks: int  # the descriptor from which its stacks are read

    @property
    def name(self) -> str:
        return f"{self.kind} {self.address}"


class Children:
    """All children, in the order of their first start."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("fork")
        self.members: list[Child] = []

    def start(
        self,
        kind: Literal["shard", "monitor"],
        address: str,
        run: Callable[[ChannelEnd], None],
        deaths: Deaths,
        watch: HeartbeatWatch | None = None,
    ) -> None:
        """Fork one more child."""
        process, channel, stacks = self._fork(f"{kind} {address}", run)
        self.members.append(Child(kind, address, run, deaths, watch, process=process, channel=channel, stacks=stacks))

    def restart(self, child: Child) -> None:
        """Fork a child again after its end."""
        child.process, child.channel, child.stacks = self._fork(child.name, child.run)
        if child.watch is not None:
            child.watch.reset()

    def send_hangup(self) -> None:
        """Send SIGHUP to all living children, so that they read their files again."""
        for child in self.members:
            pid = child.process.pid
            if pid is not None and child.process.is_alive():
                os.kill(pid, signal.SIGHUP)

    def release(self, child: Child) -> int:
        """Release the resources of a child that has ended; return its exit status."""
        child.process.join()
        _close_channel_and_pipe(child)
        status = child.process.exitcode
        assert status is not None
        return status

    def stop(self, children: Sequence[Child], timeout_s: float) -> list[Child]:
        """Ask children to stop, and wait up to `timeout_s`; return those that had to be killed."""
        for child in children:
            _close_channel_and_pipe(child)
        deadline, killed = time.monotonic() + timeout_s, []
        for child in children:
            child.process.join(max(0.0, deadline - time.monotonic()))
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
                killed.append(child)
        return killed

    def _fork(self, name: str, run: Callable[[ChannelEnd], None]) -> tuple[ForkProcess, ChannelEnd, int]:
        ends = _Ends(*ChannelEnd.pair(), *os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))  # the pipe never blocks the child
        process = self._context.Process(target=self._run_child, args=(run, ends), name=name)
        former_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # pending until the child takes it
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, former_mask)
        ends.child_end.close()
        os.close(ends.stacks_write_end)
        return process, ends.supervisor_end, ends.stacks

    def _run_child(self, run: Callable[[ChannelEnd], None], ends: _Ends) -> None:
        signal.set_wakeup_fd(-1)
        faulthandler.register(STACKS_SIGNAL, ends.stacks_write_end, all_threads=True)
        for channel in (ends.supervisor_end, *(child.channel for child in self.members)):
            channel.close()  # a copy of the supervisor's end here would keep the channel open
        for stacks in (ends.stacks, *(child.stacks for child in self.members if child.stacks >= 0)):
            os.close(stacks)
        run(ends.child_end)
        ends.child_end.close()


def process_count(config: Config) -> int:
    """The number of processes: the supervisor, the shards and, with metrics, the monitor."""
    return 1 + config.aggregator.shards + bool(config.metrics.listen)


class _Ends(NamedTuple):
    supervisor_end: ChannelEnd
    child_end: ChannelEnd
    stacks: int
    stacks_write_end: int  # the child's end


def _close_channel_and_pipe(child: Child) -> None:
    """Close the supervisor's ends, which makes the child stop."""
    child.channel.close()
    if child.stacks >= 0:
        os.close(child.stacks)
    child.stacks = -1


def read_stacks(child: Child) -> str:
    """The stacks of a child's threads; empty when it cannot say, for example because it is stopped."""
    assert child.process.pid is not None
    os.kill(child.process.pid, STACKS_SIGNAL)
    stacks, wait_s = b"", STACKS_S
    while len(stacks) < STACKS_BYTES and wait([child.stacks], wait_s):
        data = os.read(child.stacks, STACKS_BYTES)
        if not data:
            break
        stacks, wait_s = stacks + data, PAUSE_S
    return stacks.decode(errors="replace")
