"""The carriers of a benchmark's bytes are counted, and a benchmark that says something else fails."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from local_cluster import MPIRUN, ROOT, Daemon
from transports import MEMORY, over

import benchmarks.harness.group
from benchmarks.harness.carriers import CARRIED_BY, NO_SOCKET, tcp_bytes, wrong_carrier
from benchmarks.harness.group import Group, PeerError, mpi_group, service_group, socket_path
from omnireduce.support.printing import carriers_text

CASE = {"elements": 4096, "density": 1.0, "overlap": "random", "distribution": "uniform", "block_size": 256, "seed": 1}
ROUND = {"kind": "dense", "method": "allreduce", "check": True}


@pytest.mark.parametrize(
    ("carried", "text"),
    [
        ({}, "nothing"),
        ({"tcp": 0}, "nothing"),
        ({"tcp": 5, "shm": 0}, "tcp"),
        ({"memory": 990, "tcp": 10}, "memory"),
        ({"tcp": 500, "memory": 500}, "memory+tcp"),
    ],
)
def test_a_word_for_what_carried_so_many_bytes(carried: dict[str, int], text: str) -> None:
    assert carriers_text(carried) == text


def test_what_is_wrong_with_a_carrier() -> None:
    assert wrong_carrier("tcp", "tcp") == ""
    assert wrong_carrier("verbs", "memory") == "memory carried the tensors, and not verbs, as the benchmark says"


@pytest.mark.parametrize("transport", ["shm", "tcp", MEMORY])
def test_ranks_say_what_carried_each_round(daemon: Daemon, tmp_path: Path, transport: str) -> None:
    with service_group(2, str(tmp_path), daemon.addresses, *over(transport), carrier=transport) as group:
        group.tell(do="case", **CASE)
        assert (group.carrier, sum(group.carried.values())) == ("nothing", 0)
        for number in range(2):
            group.tell(do="round", number=number, **ROUND)
            assert list(+group.carried_last) == [transport]
            assert group.carried_last[transport] >= 2 * 4096 * 4
        assert group.carrier == transport


@pytest.mark.parametrize(("says", "sets"), [("verbs", ()), ("tcp", ("transport.kind=tcp",)), ("memory", over("tcp"))])
def test_a_benchmark_that_measures_something_else_fails(
    daemon: Daemon, tmp_path: Path, says: str, sets: tuple[str, ...]
) -> None:
    """As where ranks share memory, though a transport is configured."""
    result = "tcp" if says == "memory" else "memory"
    with service_group(2, str(tmp_path), daemon.addresses, *sets, carrier=says) as group:
        group.tell(do="case", **CASE)
        with pytest.raises(PeerError, match=f"service failed: {result} carried the tensors, and not {says}"):
            group.tell(do="round", number=0, **ROUND)


def test_a_benchmark_in_which_nothing_was_carried_fails(daemon: Daemon, tmp_path: Path) -> None:
    """Unless there are only zeros."""
    for density in (1.0, 0.0):
        folder = tmp_path / f"{density}"
        folder.mkdir()
        group = service_group(2, str(folder), daemon.addresses, carrier=MEMORY)
        group.tell(do="case", **CASE | {"density": density})
        group.has_only_zeros = not density
        if density:
            with pytest.raises(PeerError, match="nothing carried the tensors, and not memory"), group:
                pass
        else:
            with group:
                group.tell(do="round", number=0, **ROUND)


OURS = """\
import sys, numpy as np, omnireduce as omni
with omni.init() as comm: comm.allreduce(np.ones(1000))
print(*sys.argv[1:])
"""
GLOO = """\
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1000))
dist.destroy_process_group()
print(*sys.argv[1:])
"""
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="no torch here; `make torch` installs it")


@pytest.mark.parametrize(
    ("program", "ranks", "expected"),
    [(OURS, "1", "shm"), (OURS, "2", "memory"), pytest.param(GLOO, "2", "tcp", marks=needs_torch)],
)
def test_a_program_of_its_own_is_told_from_outside(tmp_path: Path, program: str, ranks: str, expected: str) -> None:
    """Also of a communicator, or a process group, that is closed by then."""
    script = tmp_path / "script.py"
    script.write_text(program)
    command = [sys.executable, "-m", "omnireduce", "run", "-np", ranks, sys.executable]
    result = subprocess.run(
        [*command, "-m", "benchmarks.harness.carriers", str(script), "a", "b"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    outputs, errors = (
        [line.partition(":")[2] for line in text.splitlines()] for text in (result.stdout, result.stderr)
    )
    assert outputs == ["a b"] * int(ranks)
    assert CARRIED_BY.findall("\n".join(errors)) == [expected] * int(ranks), result.stderr


def ways(folder: Path, **carriers: str) -> Group:
    """A rank that says of an order for a variant that this has carried its bytes."""
    rank = "lambda: (0, {'turn': lambda variant: {'carried': {variant: 1}}})"
    program = f"import sys; from benchmarks.harness.orders import serve; serve(sys.argv[1], {rank})"
    command = [sys.executable, "-c", program, socket_path(str(folder), "ways")]
    return Group("ways", 1, [command], str(folder), carrier=carriers)


def test_each_way_has_its_own_carrier(tmp_path: Path) -> None:
    """One of which nothing is said may go by whatever it likes."""
    with ways(tmp_path, tcp="tcp", shm="memory") as group:
        for transport in ("tcp", "other"):
            group.tell(do="turn", variant=transport)
            assert group.carrier_of(transport) == transport
        assert group.carrier == "other+tcp"
        with pytest.raises(PeerError, match="ways failed: shm carried the tensors, and not memory"):
            group.tell(do="turn", variant="shm")


def test_a_way_that_carried_nothing_fails(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="nothing carried the tensors, and not shm"), ways(tmp_path, shm="shm") as group:
        group.tell(do="turn", variant="other")


@pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")
@pytest.mark.parametrize(("transport", "carrier"), [("tcp", "tcp"), ("shm", NO_SOCKET)])
def test_the_sockets_of_a_competitor_are_counted(tmp_path: Path, transport: str, carrier: str) -> None:
    with mpi_group("mpich", 2, str(tmp_path), transport) as group:
        group.tell(do="case", **CASE)
        group.tell(do="round", number=0, **ROUND | {"method": "in place"})
        assert group.carrier == carrier
        assert carrier == NO_SOCKET or group.carried["tcp"] >= 2 * 4096 * 4 // 2  # half of a tensor comes to each rank


@pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")
def test_a_competitor_that_shares_memory_instead_of_tcp_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.harness.group, "MPICH_OVER_TCP", {})
    with mpi_group("mpich", 2, str(tmp_path), "tcp") as group:
        group.tell(do="case", **CASE)
        with pytest.raises(PeerError, match="mpich failed: no socket carried the tensors, and not tcp"):
            group.tell(do="round", number=0, **ROUND | {"method": "in place"})


def test_the_kernel_counts_what_this_process_has_received() -> None:
    """And what looks at that keeps nothing open."""
    before, listener = tcp_bytes(), socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as far, listener.accept()[0] as near:
        far.sendall(bytes(1000))
        assert len(near.recv(1000, socket.MSG_WAITALL)) == 1000
        descriptors = os.listdir("/proc/self/fd")
        assert tcp_bytes() == before + 1000
        assert os.listdir("/proc/self/fd") == descriptors
