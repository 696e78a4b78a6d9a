"""A refusal of one rank reaches the others, and no call is taken for another one."""

from __future__ import annotations

import hashlib
import inspect
import re
import threading
from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest
from local_cluster import Daemon, Ranks, configured, run_job, unique_job
from test_fused import momentum
from transports import KINDS, MEMORY, TRANSPORTS, over

from omnireduce import AbortedError, ClosedError, Communicator, UsageError
from omnireduce.runtime.aggregator_client import ask
from omnireduce.runtime.rank import joining
from omnireduce.runtime.rank.reported_errors import reason_of
from omnireduce.support.config import Config

INDICES = np.array([1, 3])
PROGRAM = momentum(every=False)
HOSTS = {0: 0, 1: 0, 2: 1, 3: 1}  # rank: host


def ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


# A proper call of every collective: its method, and its arguments on three ranks.
CALLS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "allreduce": ("allreduce", lambda: {"x": ones(300)}),
    "group": ("allreduce", lambda: {"x": {"w": ones(300), "b": [ones(1 << 18), np.ones(3)]}}),
    "reduce": ("reduce", lambda: {"x": ones(300), "root": 2}),
    "broadcast": ("broadcast", lambda: {"x": ones(300)}),
    "allgather": ("allgather", lambda: {"x": ones(300)}),
    "allgather_ragged": ("allgather_ragged", lambda: {"x": ones(300)}),
    "gather": ("gather", lambda: {"x": ones(300)}),
    "scatter": ("scatter", lambda: {"out": ones(300), "parts": ones(3, 300)}),
    "alltoall": ("alltoall", lambda: {"x": ones(3, 100)}),
    "broadcast_object": ("broadcast_object", lambda: {"x": {"step": 7}}),
    "allgather_object": ("allgather_object", lambda: {"x": {"step": 7}}),
    "reduce_scatter": ("reduce_scatter", lambda: {"x": ones(300)}),
    "barrier": ("barrier", dict),
    "allreduce_rows": ("allreduce_rows", lambda: {"indices": INDICES, "values": ones(2, 8), "n_rows": 9}),
    "allreduce_rows_into": (
        "allreduce_rows_into",
        lambda: {"out": ones(9, 8), "indices": INDICES, "values": ones(2, 8)},
    ),
    "allreduce_tables": ("allreduce_tables", lambda: {"tables": [(INDICES, ones(2, 8), 9), (INDICES, ones(2, 4), 9)]}),
    "fused_allreduce": ("fused_allreduce", lambda: {"x": ones(300), "program": PROGRAM, "out": ones(300)}),
    "fused_allreduce_rows": (
        "fused_allreduce_rows",
        lambda: {"indices": INDICES, "values": ones(2, 8), "program": PROGRAM, "n_rows": 9},
    ),
}
CASES = list(zip(CALLS, cycle(product((*KINDS, MEMORY), ("", "_async"))), strict=False))


def begin(comm: Communicator, what: str, form: str, **more: Any) -> Any:
    """Call it, and wait for it."""
    method, arguments = CALLS[what]
    result = getattr(comm, method + form)(**arguments() | more)
    return result.wait() if form else result


def test_no_collective_is_forgotten() -> None:
    names = {name for name, _ in inspect.getmembers(Communicator, callable) if not name.startswith("_")}
    public = {name for name in names if f"{name.removesuffix('_async')}_async" in names}
    tried = {name for name, _ in CALLS.values()}
    untried = {name.removesuffix("_async") for name in public} - tried
    assert not untried, f"{untried}: 'A collective' in CONTRIBUTING.md gives each a row in CALLS"


def reasons(config: Config, size: int, work: Callable[[Communicator], object]) -> list[str]:
    """Reason for the end of a job, as each rank gets it from its next call at the latest."""

    def until_the_end(comm: Communicator) -> None:
        comm.barrier()  # all have joined
        work(comm)
        comm.barrier()

    def run(comm: Communicator) -> str:
        with pytest.raises(AbortedError) as caught:
            until_the_end(comm)
        return str(caught.value)

    return run_job(config, size, run)


@pytest.mark.parametrize(("what", "where"), CASES, ids=lambda each: "".join(each))
def test_what_one_rank_refuses_ends_all(daemon: Daemon, what: str, where: tuple[str, str]) -> None:
    """A rank that waits gets an error at once, and the refusing rank with its next call. Nothing is summed."""
    transport, form = where
    stateful = (*over(KINDS[0]), "protocol.state_bytes=100_000")
    config = configured(daemon.addresses, *(stateful if "fused" in what else over(transport)))

    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            with pytest.raises(UsageError, match="name is a list; expected a str"):
                begin(comm, what, form, name=[1])
        else:
            begin(comm, what, form)

    kind = CALLS[what][0].removeprefix("fused_").removesuffix("_into").replace("_tables", "_rows")
    for reason in reasons(config, 3, work):
        assert re.match(rf"rank 1 \(host .*\): refused collective 1, which rank [02] called as {kind}\b", reason)
        assert reason.endswith(": name is a list; expected a str")


@pytest.mark.parametrize(("what", "where"), CASES, ids=lambda each: "".join(each))
def test_what_all_ranks_refuse_is_over(daemon: Daemon, what: str, where: tuple[str, str]) -> None:
    """Each has an error of its own, and the next call is sound."""
    transport, form = where
    stateful = (*over(KINDS[0]), "protocol.state_bytes=100_000")
    config = configured(daemon.addresses, *(stateful if "fused" in what else over(transport)))

    def run(comm: Communicator) -> list[float]:
        with pytest.raises(UsageError, match=f"a name of {300 + comm.rank} characters"):
            begin(comm, what, form, name="n" * (300 + comm.rank))
        begin(comm, what, form)
        return list(comm.allreduce(np.arange(3.0) + comm.rank))

    assert run_job(config, 3, run) == [[3.0, 6.0, 9.0]] * 3


@pytest.fixture
def this_thread(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Ranks are threads; each has the memory of the host of its `rank`."""
    result = threading.local()
    monkeypatch.setattr(joining, "memory_key", lambda: hashlib.sha256(b"%d" % HOSTS[result.rank]).hexdigest()[:32])
    return result


def on_two_hosts(daemon: Daemon, this_thread: threading.local, work: Callable[[Communicator], object]) -> list[Any]:
    config, job = configured(daemon.addresses), unique_job("hosts")

    def run(rank: int) -> object:
        this_thread.rank = rank
        with Communicator(config, rank=rank, size=len(HOSTS), job=job) as comm:
            return work(comm)

    return Ranks(len(HOSTS), run).outcomes()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("who", [(0,), (3,), (0, 1), (1, 2)])
def test_of_several_hosts(daemon: Daemon, this_thread: threading.local, who: tuple[int, ...], dtype: str) -> None:
    """Also where all ranks of a host refuse, and do nothing after that."""
    have_joined, are_told = threading.Barrier(len(HOSTS)), threading.Barrier(len(HOSTS))

    def work(comm: Communicator) -> str:
        have_joined.wait(30)
        with pytest.raises(UsageError if comm.rank in who else AbortedError) as caught:
            comm.allreduce(np.ones(100_000, dtype), op="median" if comm.rank in who else "sum")
        are_told.wait(30)
        return str(caught.value)

    outcomes = on_two_hosts(daemon, this_thread, work)
    for rank, reason in enumerate(outcomes):
        if rank not in who:
            assert re.match(r"rank [0-3] \(host .*: op 'median': expected one of sum", reason), outcomes


def test_what_all_ranks_of_several_hosts_refuse(daemon: Daemon, this_thread: threading.local) -> None:
    def work(comm: Communicator) -> float:
        for wrong in ([comm.rank], None, "x" * comm.rank):
            with pytest.raises(UsageError):
                comm.allreduce(wrong)
        return float(comm.allreduce(np.ones(1000))[0])

    assert on_two_hosts(daemon, this_thread, work) == [4.0] * 4


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_of_the_channel_for_urgent_tensors(daemon: Daemon, transport: str) -> None:
    """An argument that is no array could have been urgent or not."""
    config = configured(daemon.addresses, "protocol.urgent_bytes=65536", *over(transport))

    def all_refuse(comm: Communicator) -> list[float]:
        for wrong in ("x", [1.0], np.ones(3, complex), np.ones(1 << 20, complex)):
            with pytest.raises(UsageError):
                comm.allreduce(wrong)
        return [float(comm.allreduce(np.ones(size))[0]) for size in (3, 1 << 20)]

    assert run_job(config, 2, all_refuse) == [[2.0, 2.0]] * 2
    for size in (3, 1 << 20):

        def one_refuses(comm: Communicator, size: int = size) -> None:
            if comm.rank:
                with pytest.raises(UsageError, match="x is a str"):
                    comm.allreduce("x")
            else:
                comm.allreduce(np.ones(size))

        assert all("x is a str; expected a numpy.ndarray" in reason for reason in reasons(config, 2, one_refuses))


PARTS: dict[str, tuple[Callable[[Communicator], object], Callable[[Communicator], object], str]] = {
    # a call of rank 0, a call of the others, a call that rank 0 has refused
    "object of the root": (
        lambda comm: comm.broadcast_object(threading.Lock()),
        lambda comm: comm.broadcast_object(None),
        "lock is no plain data",
    ),
    "pickle of the root": (
        lambda comm: comm.broadcast_object(threading.Lock(), trust=True),
        lambda comm: comm.broadcast_object(None, trust=True),
        "the lock cannot be sent: cannot pickle",
    ),
    "object of one of all": (
        lambda comm: comm.allgather_object(threading.Lock()),
        lambda comm: comm.allgather_object({"step": 7}),
        "lock is no plain data",
    ),
    "too many bytes": (
        lambda comm: comm.allgather_ragged(np.ones(3000, np.uint8)),
        lambda comm: comm.allgather_ragged(np.ones(3, np.uint8)),
        "3000 bytes to send; expected at most protocol.max_part_bytes, 2000",
    ),
    "an object of too many bytes": (
        lambda comm: comm.broadcast_object_async(b"x" * 3000).wait(),
        lambda comm: comm.broadcast_object_async(None).wait(),
        "bytes to send; expected at most",
    ),
}  # fmt: skip


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("what", PARTS)
def test_a_part_says_itself_why_it_is_missing(daemon: Daemon, what: str, transport: str) -> None:
    """All ranks get a UsageError, and the job goes on."""
    wrong, proper, message = PARTS[what]
    config = configured(daemon.addresses, *over(transport), "protocol.max_part_bytes=2000")

    def run(comm: Communicator) -> list[str]:
        results = []
        for _ in range(2):
            with pytest.raises(UsageError) as caught:
                (wrong if comm.rank == 0 else proper)(comm)
            results.append(str(caught.value))
            assert comm.broadcast_object({"step": 7} if comm.rank == 0 else None) == {"step": 7}
        assert comm.allreduce(np.ones(5)).tolist() == [3.0] * 5
        return results

    first, *others = run_job(config, 3, run)
    assert all(message in each and not each.startswith("rank") for each in first)
    assert all(each == f"rank 0 refused its part: {first[0]}" for those in others for each in those)


def test_parts_that_all_ranks_refuse(daemon: Daemon) -> None:
    def run(comm: Communicator) -> list[int]:
        for _ in range(3):
            with pytest.raises(UsageError, match="lock is no plain data"):
                comm.allgather_object(threading.Lock())
        return comm.allgather_object(comm.rank)

    assert run_job(configured(daemon.addresses), 2, run) == [[0, 1]] * 2


def test_a_group_of_ranks_has_an_order_of_its_own(daemon: Daemon) -> None:
    """An error that ends the group does not end its job."""

    def run(comm: Communicator) -> float:
        group = comm.create_group(name="some")
        with pytest.raises(UsageError if comm.rank else AbortedError, match="expected one of sum"):
            group.allreduce(np.ones(3), op="median" if comm.rank else "sum")
        return float(comm.allreduce(np.ones(3))[0])

    assert run_job(configured(daemon.addresses), 2, run) == [2.0] * 2


def test_a_thread_that_starts_what_needs_a_name(daemon: Daemon) -> None:
    """It refuses in its turn, on all ranks alike."""

    def run(comm: Communicator) -> float:
        def stray() -> None:
            with pytest.raises(UsageError, match="a collective without a name"):
                comm.allreduce(np.ones(3))

        thread = threading.Thread(target=stray)
        thread.start()
        thread.join()
        return float(comm.allreduce(np.ones(3))[0])

    assert run_job(configured(daemon.addresses), 2, run) == [2.0] * 2


def test_who_leaves_after_a_refusal_says_so(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have not come to that call yet."""
    monkeypatch.setattr("omnireduce.runtime.rank.refusals.SETTLE_S", 0.01)
    has_left = threading.Event()

    def run(rank: int) -> str:
        with Communicator(config, rank=rank, size=2, job=job) as comm:
            if rank == 0:
                with pytest.raises(UsageError):
                    comm.allreduce(None)
                comm.shutdown()
                has_left.set()
                return ""
            assert has_left.wait(30)
            with pytest.raises(AbortedError) as caught:
                comm.allreduce(np.ones(3))
            return str(caught.value)

    config, job = configured(daemon.addresses), unique_job()
    _, error = Ranks(2, run).results()
    assert "left after it had refused a call: x is a NoneType; expected a numpy.ndarray" in error


def test_who_leaves_after_all_have_refused_leaves_in_order(daemon: Daemon) -> None:
    """However soon; and who is alone has nobody to tell."""

    def run(comm: Communicator) -> None:
        with pytest.raises(UsageError):
            comm.allreduce(None)
        comm.shutdown()
        with pytest.raises(ClosedError):
            comm.allreduce(np.ones(3))
        comm.refuse(ValueError("it is over"))

    config = configured(daemon.addresses)
    before = ask(daemon.addresses[0], config, 30.0).aborts
    run_job(config, 2, run)
    run_job(config, 1, run)
    assert ask(daemon.addresses[0], config, 30.0).aborts == before


def test_a_program_may_refuse_by_itself(daemon: Daemon) -> None:
    """Once for each error, whatever its kind."""

    def work(comm: Communicator) -> None:
        if comm.rank == 0:
            error = OSError("the disk\nis full")
            comm.refuse(error)
            comm.refuse(error)
        else:
            comm.barrier()

    for reason in reasons(configured(daemon.addresses), 2, work):
        assert "refused collective 1, which rank 1 called as barrier: OSError: the disk is full" in reason


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UsageError("x is\n a list"), "x is a list"),
        (KeyError("w"), "KeyError: 'w'"),
        (MemoryError(), "MemoryError"),
        (UsageError(""), "UsageError"),
        (UsageError("a\x1bb"), "a\\x1bb"),
        (UsageError("\udc80"), "\\udc80"),
        (UsageError("é" * 1000), "é" * 298 + "…"),
    ],
)
def test_a_reason_is_one_line_that_can_be_sent(error: Exception, expected: str) -> None:
    assert reason_of(error) == expected
