"""Supervisor: the process on each host that starts ranks, and ends them when its standard input closes.

It has a single thread. So PR_SET_PDEATHSIG, which is about the thread that has forked, is about the process. Orphans of
ranks become its children (PR_SET_CHILD_SUBREAPER): it ends them, too, when the job is over. A rank that has ended stays
a zombie until then, so that no other process gets its number, which is also the number of its group.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from omnireduce.launch.connection import (
    ALL_RANKS,
    CHUNK,
    MAGIC,
    MAX_REASON_CHARACTERS,
    MOST_BYTES,
    RESULT,
    RESULT_FD,
    SSH_CONNECTION,
    STDERR,
    STDOUT,
    Ended,
    Frames,
    Greeting,
    News,
    Output,
    RankFailed,
    Start,
    Started,
    decode_order,
    frame,
)
from omnireduce.support.addresses import ANYWHERE, listen
from omnireduce.support.control_groups import OutOfMemory

MOST_WAITING = 1 << 20  # the most bytes that the launcher has not taken; beyond that processes wait
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
KILLED_S = 5.0  # the longest wait for the end of a killed process: it may hang in the system
ORPHANS_S = 2.0  # the time for orphans to end by themselves, as the aggregator of rank 0 does
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)


class _Process:
    """A process under `number`, and the ends of its pipes that the supervisor reads."""

    def __init__(self, order: Start) -> None:
        self.number = order.number
        self.has_ended = self.was_asked = False
        self._child_descriptors: list[int] = []
        self.streams: dict[int, int] = {}  # descriptor: stream
        environ = {**os.environb, **order.environ} if order.inherits else dict(order.environ)
        try:
            stdout, stderr = self._pipe(STDOUT), self._pipe(STDERR)
            inherited = []
            if order.with_result:
                inherited = [self._pipe(RESULT)]
                environ[RESULT_FD.encode()] = str(inherited[0]).encode()
            self._popen = subprocess.Popen(
                order.words, env=environ, cwd=order.folder, stdin=self._input(order.given), stdout=stdout,
                stderr=stderr, pass_fds=inherited, start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
        except BaseException:
            for descriptor in self.streams:
                os.close(descriptor)
            raise
        finally:
            for descriptor in self._child_descriptors:
                os.close(descriptor)
        self.pid = self._popen.pid
        self.pidfd = os.pidfd_open(self.pid)

    def _pipe(self, stream: int) -> int:
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self.streams[read_end] = stream
        self._child_descriptors.append(write_end)
        return write_end

    def _input(self, data: bytes) -> int:
        if not data:
            return subprocess.DEVNULL
        descriptor = os.memfd_create("omnireduce-input")
        self._child_descriptors.append(descriptor)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def status(self) -> int:
        """The exit status. The process stays a zombie."""
        exit_info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert exit_info is not None
        return exit_info.si_status if exit_info.si_code == os.CLD_EXITED else -exit_info.si_status

    def send(self, number: int) -> None:
        has_ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        self.was_asked |= number in ENDING_SIGNALS and not has_ended
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def forget(self) -> None:
        """End the rest of its group, and release its number."""
        self.send(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(KILLED_S)


def _die_with_parent() -> None:
    _libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Supervisor:
    """Reads orders from one descriptor and writes news to the other, until the first one closes."""

    def __init__(self, orders: int, news: int, grace_s: float) -> None:
        self._orders, self._news, self._grace_s = orders, news, grace_s
        self._frames, self._unsent = Frames(MOST_BYTES), bytearray(MAGIC)
        self._processes: dict[int, _Process] = {}
        self._memory = OutOfMemory()
        self._selector = selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ, self._read_orders)
        self._paused_descriptors: list[int] = []
        self._has_no_reader = False  # the news has no reader any more
        self._watches_writable = False
        self._kill_at: float | None = None  # monotonic time; set when no orders come any more
        os.set_blocking(news, False)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)  # handled by the byte that arrives in this pipe
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._read_signals)

    def serve(self) -> None:
        """Carry out orders. In the end no process is left."""
        self._send_news(Greeting(os.getpid(), free_port(), os.environ.get(SSH_CONNECTION, "")[:256]))
        while self._kill_at is None or any(not process.has_ended for process in self._processes.values()):
            for key, _ in self._selector.select(self._seconds_to_kill()):
                if key.fd in self._selector.get_map():
                    key.data(key.fd)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._send(ALL_RANKS, signal.SIGKILL, also_others=True)
                self._kill_at = float("inf")
        for process in self._processes.values():
            process.forget()
        end_orphans(ORPHANS_S)
        for process in self._processes.values():
            self._drain(process)
        with suppress(OSError):
            os.set_blocking(self._news, True)
            self._write(self._news)

    def stop(self) -> None:
        """Take no more orders; end all processes."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace_s
            self._selector.unregister(self._orders)
            self._send(ALL_RANKS, signal.SIGTERM, also_others=True)

    def _read_signals(self, _: int) -> None:
        if signal.SIGTERM in self._wake_reader.recv(CHUNK):
            self.stop()

    def _seconds_to_kill(self) -> float | None:
        if self._kill_at in (None, float("inf")):
            return None
        assert self._kill_at is not None
        return max(0.0, self._kill_at - time.monotonic())

    def _read_orders(self, descriptor: int) -> None:
        data = os.read(descriptor, CHUNK)
        if not data:
            self.stop()
            return
        for message in self._frames.feed(data):
            order = decode_order(message)
            if isinstance(order, Start):
                self._start(order)
            else:
                self._send(order.number, order.signal)

    def _start(self, order: Start) -> None:
        former = self._processes.pop(order.number, None)
        if former is not None:  # the rank is started again
            former.forget()
            self._drain(former)
        try:
            process = _Process(order)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            program = getattr(error, "filename", None) or order.words[0]
            reason = f"{os.fsdecode(program)}: {getattr(error, 'strerror', None) or error}"
            self._send_news(RankFailed(order.number, reason.encode(errors="replace").decode()[:MAX_REASON_CHARACTERS]))
            return
        self._processes[order.number] = process
        self._send_news(Started(order.number, process.pid))
        self._selector.register(process.pidfd, selectors.EVENT_READ, lambda _: self._finish(process))
        for descriptor in process.streams:
            self._selector.register(descriptor, selectors.EVENT_READ, lambda fd: self._pass_on(process, fd))

    def _send(self, number: int, signum: int, *, also_others: bool = False) -> None:
        for process in self._processes.values():
            if process.number == number or (number == ALL_RANKS and (also_others or process.number >= 0)):
                process.send(signum)

    def _pass_on(self, process: _Process, descriptor: int) -> int:
        """Pass on a piece of the output in this pipe; return its number of bytes."""
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return 0
        if not data:
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
            os.close(descriptor)
            del process.streams[descriptor]
            return 0
        self._send_news(Output(process.number, process.streams[descriptor], data))
        return len(data)

    def _drain(self, process: _Process) -> None:
        """Pass on the last output of a process, up to the size of a pipe: its children may write for ever."""
        for descriptor in list(process.streams):
            left_bytes = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
            while left_bytes > 0 and (passed_bytes := self._pass_on(process, descriptor)):
                left_bytes -= passed_bytes

    def _finish(self, process: _Process) -> None:
        status, was_asked = process.status(), process.was_asked
        process.has_ended = True
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)
        self._drain(process)
        if status:
            process.send(signal.SIGKILL)  # for its children
        self._send_news(
            Ended(process.number, status, was_asked, self._memory.news() if status and not was_asked else "")
        )

    def _send_news(self, news: News) -> None:
        if self._has_no_reader:
            return
        self._unsent += frame(news)
        self._write(self._news)
        if not self._paused_descriptors and len(self._unsent) > MOST_WAITING:
            self._paused_descriptors = [fd for process in self._processes.values() for fd in process.streams]
            self._paused_descriptors = [fd for fd in self._paused_descriptors if fd in self._selector.get_map()]
            for descriptor in self._paused_descriptors:
                self._selector.unregister(descriptor)

    def _write(self, descriptor: int) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(descriptor, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._has_no_reader = True
            self._unsent.clear()
        if bool(self._unsent) != self._watches_writable:
            self._watches_writable = not self._watches_writable
            if self._watches_writable:
                self._selector.register(descriptor, selectors.EVENT_WRITE, self._write)
            else:
                self._selector.unregister(descriptor)
        if self._paused_descriptors and len(self._unsent) < MOST_WAITING // 2:
            self._resume_reading()

    def _resume_reading(self) -> None:
        paused, self._paused_descriptors = set(self._paused_descriptors), []
        for process in self._processes.values():
            for descriptor in (paused & process.streams.keys()) - self._selector.get_map().keys():
                self._selector.register(descriptor, selectors.EVENT_READ, lambda fd, of=process: self._pass_on(of, fd))


def free_port() -> int:
    """A port that is free just now at all addresses of this host."""
    with listen(ANYWHERE, 0, 1) as listener:
        return int(listener.getsockname()[1])


def _children() -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:  # not every kernel has this file
        return []


def end_orphans(limit_s: float) -> None:
    """Wait for children that this process has got from others, and kill those that stay longer than `limit_s`."""
    deadline = time.monotonic() + limit_s
    while children := _children():
        with selectors.DefaultSelector() as selector:
            pidfds = {os.pidfd_open(child): child for child in children}
            for pidfd in pidfds:
                selector.register(pidfd, selectors.EVENT_READ)
            left_s = deadline - time.monotonic()
            ended_pidfds = [key.fd for key, _ in selector.select(max(0.0, left_s) or None)] if left_s > 0 else []
            for descriptor, pid in pidfds.items():
                if left_s <= 0:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                if left_s <= 0 or descriptor in ended_pidfds:
                    os.waitpid(pid, 0)
                os.close(descriptor)


def main() -> None:
    """Serve the launcher at standard input and output. The argument: the seconds that ranks have after SIGTERM."""
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    orders, news = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # other output of this process must not disturb the news
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        # The launcher decides. Unlike SIG_IGN, ranks do not inherit this.
        signal.signal(signum, lambda *_: None)
    Supervisor(orders, news, float(sys.argv[1])).serve()


if __name__ == "__main__":
    main()
