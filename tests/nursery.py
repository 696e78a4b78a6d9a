"""Processes of tests, forked from one that has imported everything and loaded the kernels.

Imports and kernels take longer than what most tests do, in a guest with an emulated processor ten times so. What is
forked here is a process like others: with an environment, descriptors, an exit status and an end of its own, exit
handlers included, which the processes of multiprocessing's fork server skip. It lacks a start of the interpreter only.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
IMPORTS = (
    "omnireduce.aggregator.daemon",
    "omnireduce.aggregator.cli",
    "omnireduce.worker.cli",
    "omnireduce.console.commands",
)
VERBS = "omnireduce.transport.verbs.link"  # loaded if pyverbs is installed
TORCH = ("omnireduce.torch", "torch._dynamo")  # optimizers import the second one at first use
MAX_ORDER_BYTES = 1 << 17
WELL_KNOWN = 3  # standard input, output and error


class Order(NamedTuple):
    """A request for a process: the words behind `python` (a file, `-m` a module or `-c` code), its environment, its
    working directory."""

    words: Sequence[str]
    environ: Mapping[str, str]
    folder: str


class Forked:
    """A process with those methods of `subprocess.Popen` that tests use. Input and output are pipes. The modules of
    `preloaded` are imported before the fork."""

    def __init__(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        stderr: int,
        folder: Path = ROOT,
        preloaded: tuple[str, ...] = (),
    ) -> None:
        sys.audit("nursery.fork")
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        self._news, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = json.dumps(Order(words, environ, str(folder))).encode()
        _, server = _server(preloaded)
        socket.send_fds(server, [order], [theirs_in, theirs_out, stderr, theirs.fileno()])
        for descriptor in (theirs_in, theirs_out):
            os.close(descriptor)
        theirs.close()
        self.stdin: IO[bytes] = open(ours_in, "wb")  # noqa: SIM115  Popen's user closes it
        self.stdout: IO[bytes] = open(ours_out, "rb")  # noqa: SIM115
        born, (self._pidfd,), _, _ = socket.recv_fds(self._news, 64, 1)
        self.pid, self.returncode = int(born), None

    def poll(self) -> int | None:
        """The exit status; minus the number of a signal that ended the process; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._news.settimeout(timeout)
            try:
                status = self._news.recv(64)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0) from None
            assert status, "the process that forks is gone"
            self.returncode = int(status)
            self._news.close()
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        """Ask the process to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def _server(preloaded: tuple[str, ...]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process that forks, and the connection to it. It ends when this process does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(theirs.fileno()), *preloaded]
    environ = os.environ | ({"OMP_NUM_THREADS": "1"} if preloaded else {})  # read when torch is loaded
    process = subprocess.Popen(command, cwd=ROOT, env=environ, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    return process, ours


class _Nursery:
    """The process that forks: it starts children on request, and reports the end of each."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders, self._selector = orders, selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ)

    def serve(self) -> Order | None:
        """Serve requests. Return in each child with its order, and in the parent with None at the end."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._orders:
                    self._tell_end(key)
                    continue
                data, descriptors, _, _ = socket.recv_fds(self._orders, MAX_ORDER_BYTES, 4)
                if not data:
                    return None
                if not self._fork(descriptors):
                    return Order(*json.loads(data))

    def _fork(self, descriptors: Sequence[int]) -> int:
        pid = os.fork()
        if not pid:
            self._forget()
            for number, descriptor in enumerate(descriptors[:WELL_KNOWN]):
                os.dup2(descriptor, number)
            for descriptor in descriptors:
                os.close(descriptor)
            return 0
        news, pidfd = socket.socket(fileno=descriptors[-1]), os.pidfd_open(pid)
        for descriptor in descriptors[:WELL_KNOWN]:
            os.close(descriptor)
        socket.send_fds(news, [str(pid).encode()], [pidfd])
        self._selector.register(pidfd, selectors.EVENT_READ, (pid, news))
        return pid

    def _forget(self) -> None:
        """Close the parent's sockets and descriptors. The garbage collector would do so later, when their numbers may
        belong to the child."""
        for key in self._selector.get_map().values():
            if key.fileobj is self._orders:
                self._orders.close()
            else:
                os.close(key.fd)
                key.data[1].close()
        self._selector.close()

    def _tell_end(self, key: selectors.SelectorKey) -> None:
        pid, news = key.data
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(key.fileobj)
        os.close(key.fd)
        with news, contextlib.suppress(OSError):  # nobody waits for it any more
            news.send(str(os.waitstatus_to_exitcode(status)).encode())


def _be(order: Order) -> None:
    """Run the program of the order, as `python` would."""
    os.environ.clear()
    os.environ.update(order.environ)
    os.chdir(order.folder)
    sys.path[1:1] = filter(None, order.environ.get("PYTHONPATH", "").split(os.pathsep))
    first, *rest = order.words
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


def _main() -> None:
    sys.path[0] = str(ROOT)
    for name in (*IMPORTS, *([VERBS] if find_spec("pyverbs") else []), *sys.argv[2:]):
        importlib.import_module(name)
    from omnireduce.kernels import warm

    warm.warm_up_all()
    gc.freeze()  # or the first collection in a child copies all that it shares with the others
    order = _Nursery(socket.socket(fileno=int(sys.argv[1]))).serve()
    if order is not None:
        _be(order)


if __name__ == "__main__":
    _main()
