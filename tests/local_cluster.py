"""A cluster on this machine for tests: a real aggregator daemon, ranks as threads, ranks as processes.

Every wait is for an event and has a bound. Processes are ended by their own id.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import resource
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nursery import Forked
from transports import carriers, meant_by

from omnireduce.kernels.compiling.jit import kernel_files
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.support.config import Config, load_config

ROOT = Path(__file__).resolve().parent.parent
SLOWNESS = float(os.environ.get("SLOWNESS", "1"))  # factor for waits: an emulated processor needs more
WAIT_S = 30.0 * (1 + SLOWNESS)  # longer than anything here takes on a busy machine
BUSY = re.compile(
    r"event=(waiting|waiting_for_ranks|compiling) |\bwaiting for .* since \d|compiling kernels|^bench: case "
)
SETTLE = f"elastic.last_call_s={0.5 * SLOWNESS:g}"  # ranks that re-form come within this time, also on a busy machine
READY_S = 2 * WAIT_S  # the first start on a machine compiles the kernels
WHOLE_BYTES = 0  # `protocol.whole_bytes` in tests
CLOSED = "closed"
NURSERY = os.environ.get("NURSERY") != "0"  # processes are forked from one that has imported everything
LATE = (
    "OMNIREDUCE_",
    *("OMNIRUN_", "HOROVOD_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"),
    "PYTHONPATH",
)  # variables that count although the interpreter has started
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")

_T = TypeVar("_T")
_numbers = itertools.count(1)


def keep_kernels(cache: Path) -> None:
    """Let a test's own cache have the kernels that this user has compiled."""
    folder = kernel_files().folder
    if folder is not None:  # with the JIT off, too
        (cache / "kernels").symlink_to(folder.parent)


def unique_job(stem: str = "test") -> str:
    """A job name that nobody else uses."""
    return f"{stem}-{os.getpid()}-{next(_numbers)}"


def configured(aggregators: Sequence[str], *overrides: str) -> Config:
    """The defaults with these aggregators and `section.key=value` overrides; the environment does not count.

    Small tensors go to all shards, as large ones do.
    """
    carriers.meant.add(meant_by(overrides))
    changed = [f"cluster.aggregators={json.dumps(list(aggregators))}", f"protocol.whole_bytes={WHOLE_BYTES}"]
    return load_config(overrides=[*changed, *overrides], environ={})


class Lines:
    """Lines of a pipe, each waited for with a bound."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._rest = descriptor, b""

    def next(self, deadline: float) -> str | None:
        """The next line, `CLOSED` at the end of the file, or None when the deadline (monotonic) has passed."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._descriptor, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                data = os.read(self._descriptor, 65536)
                if not data:
                    return CLOSED
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


class Process:
    """A Python process of this project. Its standard output is read line by line. Its standard error is kept in a file,
    or written to `stderr`. With `from_scratch` an interpreter starts; otherwise the process is forked where it can be,
    from one that has imported the modules of `preloaded`.
    """

    def __init__(
        self,
        *arguments: str,
        environ: dict[str, str] | None = None,
        stderr: int | None = None,
        from_scratch: bool = False,
        folder: Path = ROOT,
        preloaded: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OMNIREDUCE_")}
        kept["OMNIREDUCE_PROTOCOL_WHOLE_BYTES"] = str(WHOLE_BYTES)
        kept["OMNIREDUCE_CLUSTER_JOIN_TIMEOUT_S"] = str(WAIT_S / 2)  # the default, where nothing is emulated
        environ = environ or {}
        errors = self._log.fileno() if stderr is None else stderr
        usual = arguments[0] == sys.executable and not options and all(name.startswith(LATE) for name in environ)
        if usual and NURSERY and not from_scratch:
            self.popen: subprocess.Popen[bytes] | Forked = Forked(
                arguments[1:], kept | environ, errors, folder, preloaded
            )
        else:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            self.popen = subprocess.Popen(arguments, cwd=folder, env=kept | environ, **pipes, **options)
        assert self.popen.stdout is not None
        self._lines = Lines(self.popen.stdout.fileno())

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def log(self) -> str:
        """Standard error of the process so far."""
        return os.pread(self._log.fileno(), self.log_bytes, 0).decode(errors="replace")

    @property
    def log_bytes(self) -> int:
        """Bytes that the process and its children have written to standard error so far."""
        return os.fstat(self._log.fileno()).st_size

    def line(self, timeout_s: float = WAIT_S) -> str:
        """The next line of standard output; fails when none comes in time."""
        result = self._lines.next(time.monotonic() + timeout_s)
        assert result not in (None, CLOSED), f"no line of output: {result}, status {self.popen.poll()}\n{self.log}"
        assert result is not None
        return result

    def rest(self, timeout_s: float) -> str:
        """The lines of standard output that are left, up to its end."""
        lines, deadline = list[str](), time.monotonic() + timeout_s
        while (line := self._lines.next(deadline)) != CLOSED:
            assert line is not None, f"process {self.pid} still runs after {timeout_s:g} s\n{self.log}"
            lines.append(f"{line}\n")
        return "".join(lines)

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """The exit status."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"process {self.pid} still runs after {timeout_s:g} s\n{self.log}") from None

    def signal(self, number: int) -> float:
        """Send a signal; return the time just before (monotonic, the same clock in all processes)."""
        now = time.monotonic()
        self.popen.send_signal(number)
        return now

    def close(self) -> None:
        """End the process by force if it still runs, and forget it."""
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._log.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Daemon(Process):
    """`omnireduce aggregator`, behind `prefix`, ready. Leaving the `with` block stops it with SIGTERM and expects
    status 0."""

    def __init__(
        self,
        shards: int = 1,
        *overrides: str,
        listen: str = "127.0.0.1:0",
        prefix: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.expected_status: int | None = 0
        settings = [word for override in overrides for word in ("--set", override)]
        command = [
            *prefix,
            sys.executable,
            "-m",
            "omnireduce.aggregator",
            "--listen",
            listen,
            "--shards",
            str(shards),
            *settings,
        ]
        super().__init__(*command, **options)
        try:
            word, *self.addresses = self.line(READY_S).split()
            assert (word, len(self.addresses)) == ("ready", shards)
        except BaseException:
            self.close()
            raise

    @property
    def shard_pids(self) -> list[int]:
        """The processes of the shards, oldest first."""
        return children(self.pid)

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if self.popen.poll() is None:
                self.signal(signal.SIGTERM)
            status = self.wait()
            if kind is None and self.expected_status is not None:
                assert status == self.expected_status, self.log
        finally:
            self.close()


class Worker(Process):
    """A rank as a process of its own, `cluster/looping_worker.py`; it reports events as lines of JSON."""

    def __init__(
        self, daemon: Daemon, job: str, rank: int, size: int, *arguments: str, overrides: Sequence[str] = ()
    ) -> None:
        script = str(ROOT / "tests" / "cluster" / "looping_worker.py")
        settings = [word for override in overrides for word in ("--set", override)]
        addresses = ",".join(daemon.addresses)
        who = ["--job", job, "--rank", str(rank), "--size", str(size), "--aggregators", addresses]
        super().__init__(sys.executable, script, *who, *settings, *arguments)

    def expect(self, event: str, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """The next event of this kind; others before it are skipped."""
        deadline = time.monotonic() + timeout_s
        seen = []
        while True:
            line = self._lines.next(deadline)
            assert line not in (None, CLOSED), f"no event {event!r} ({line}) after {seen[-5:]}\n{self.log}"
            report: dict[str, Any] = json.loads(line or "")
            if report["event"] == event:
                return report
            seen.append(report)

    def go_on(self) -> None:
        """Let a worker that waits at `--hold-at` go on."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(b"\n")
        self.popen.stdin.flush()


@contextlib.contextmanager
def workers(
    daemon: Daemon,
    size: int,
    *arguments: str,
    job: str = "",
    overrides: Sequence[str] = (),
    per_rank: Sequence[Sequence[str]] = (),
) -> Iterator[list[Worker]]:
    """All ranks of a job as processes, joined; they are gone at the end. `per_rank[r]` are for rank r alone."""
    job = job or unique_job()
    with contextlib.ExitStack() as stack:
        results = []
        for rank in range(size):
            own_options = per_rank[rank] if per_rank else ()
            results.append(
                stack.enter_context(Worker(daemon, job, rank, size, *arguments, *own_options, overrides=overrides))
            )
        for worker in results:
            worker.expect("joined")
        yield results


class Ranks:
    """Threads that each run `function(rank)`."""

    def __init__(self, size: int, function: Callable[[int], _T]) -> None:
        self._results: list[Any] = [None] * size
        self._errors: list[BaseException | None] = [None] * size
        self._function = function
        self._threads = [threading.Thread(target=self._run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in self._threads:
            thread.start()

    def _run(self, rank: int) -> None:
        try:
            self._results[rank] = self._function(rank)
        except BaseException as error:
            self._errors[rank] = error

    def outcomes(self, timeout_s: float = WAIT_S) -> list[Any]:
        """Result of each rank, or the exception that it raised."""
        deadline = time.monotonic() + timeout_s
        for rank, thread in enumerate(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"rank {rank} hangs"
        return [self._results[i] if error is None else error for i, error in enumerate(self._errors)]

    def results(self, timeout_s: float = WAIT_S) -> list[Any]:
        """Result of each rank; raises the first exception."""
        outcomes = self.outcomes(timeout_s)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes


def never_wait(comm: Communicator) -> None:
    """Let this rank look for the steps of the others of its host until they have come: no collective leaves it anything
    to wait for."""
    assert comm._machine.host is not None
    comm._machine.host._looks = 1 << 22


def start_job(
    config: Config | Sequence[Config], size: int, function: Callable[[Communicator], _T], job: str = ""
) -> Ranks:
    """Join a job with `size` ranks, threads of this process, and run `function(communicator)` on each."""
    job = job or unique_job()

    def run(rank: int) -> _T:
        own_config = config if isinstance(config, Config) else config[rank]
        with Communicator(own_config, rank=rank, size=size, job=job) as comm:
            return function(comm)

    return Ranks(size, run)


def run_job(
    config: Config | Sequence[Config], size: int, function: Callable[[Communicator], _T], job: str = ""
) -> list[_T]:
    """`start_job`, and what each rank returned."""
    return start_job(config, size, function, job).results()


def complaints(stderr: str) -> list[str]:
    """The lines of what ranks said, without those that every program may say on a busy machine."""
    return [line for line in stderr.splitlines() if not BUSY.search(line)]


def eventually(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
    """Whether the condition comes true in time; for what no event tells, such as another process's log."""
    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        if time.monotonic() >= deadline:
            return False
        pause.wait(0.005)
    return True


def await_connections(listener: socket.socket, count: int) -> None:
    """Wait until so many connections can be accepted: the end that connects may know before the other one does."""
    unacked = slice(24, 28)  # of `struct tcp_info`: for a listening socket, how many wait

    def waiting() -> int:
        return int.from_bytes(listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28)[unacked], sys.byteorder)

    assert eventually(lambda: waiting() == count)


@contextlib.contextmanager
def descriptors_below(limit: int) -> Iterator[None]:
    """No new descriptor has this number or a higher one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def children(pid: int) -> list[int]:
    """The child processes of a process, oldest first; none when it is gone."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def gone_within(pid: int, timeout_s: float) -> bool:
    """Whether a process that need not be our child ends in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            return bool(selector.select(timeout_s))
    finally:
        os.close(descriptor)


def open_files(pid: int) -> list[str]:
    """Files and sockets to which the descriptors of a process refer."""
    results = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            results.append(os.readlink(path))
    return results


def resident_bytes(pid: int) -> int:
    """Memory of a process, shared memory included."""
    fields = Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0]) * 1024
