"""Interrupts at the worst places, and forked children: no rank waits for ever, none gets a wrong sum."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from local_cluster import CLOSED, WAIT_S, Daemon, Process, Ranks, configured, run_job, start_job, unique_job
from transports import MEMORY, over

from omnireduce.core.descriptor import Descriptor
from omnireduce.errors import AbortedError, RefusedError
from omnireduce.protocol.collective.dense_operands import DenseTensor
from omnireduce.protocol.collective.effects import Effect
from omnireduce.protocol.rank import RankMachine
from omnireduce.runtime.rank import engine, poller
from omnireduce.runtime.rank.calls.single import Call
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.handles import Handle
from omnireduce.support.config import Config
from omnireduce.support.logs import BoundLog
from omnireduce.transport import framing
from omnireduce.transport.shm import ShmLink
from omnireduce.transport.slot_memory import private_slots

BLOCK = 256


@pytest.fixture(params=["shm", MEMORY])
def either(daemon: Daemon, request: pytest.FixtureRequest) -> Config:
    """Tensors go by the shards, or in memory that the ranks share."""
    return configured(daemon.addresses, *over(request.param))


def raising(error: type[BaseException]) -> Callable[..., Any]:
    def interrupted(*_: object) -> None:
        raise error

    return interrupted


def test_an_interrupt_while_a_collective_is_submitted_aborts_it_on_all_ranks(either: Config) -> None:
    """The message that was being packed is lost: going on would leave its blocks out of the sum. In memory it would be
    a step."""

    def work(comm: Communicator) -> str:
        x = np.ones(100 * BLOCK, np.float32)
        if comm.rank == 0:
            comm.barrier()  # all have joined: an abort before that is an error of joining
            if comm._machine.host is None:
                comm._channels[0].links[1].send = raising(KeyboardInterrupt)  # type: ignore[method-assign]
            else:
                comm._machine.host.advance = raising(KeyboardInterrupt)  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                comm.allreduce(x)
        with pytest.raises(AbortedError) as caught:  # rank 1 may learn of the abort while its barrier ends
            comm.barrier() or comm.allreduce(np.ones(100 * BLOCK, np.float32))
        return caught.value.culprit

    culprits = start_job(either, 2, work).results(WAIT_S)
    assert all(culprit.startswith("rank 0") for culprit in culprits)


def test_a_second_interrupt_during_the_abort_leaves_no_handle_waiting(local: Config) -> None:
    over = threading.Event()

    def work(comm: Communicator) -> None:
        with contextlib.suppress(AbortedError):  # rank 1 may learn of the abort while its barrier ends
            comm.barrier()
        if comm.rank == 1:
            assert over.wait(WAIT_S)
            return
        handle = comm.allreduce_async(np.ones(BLOCK, np.float32))
        for link in comm._channels[0].links:
            link.send_control = raising(KeyboardInterrupt)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            comm._engine.abort("interrupted once")
        with pytest.raises(AbortedError, match="interrupted once"):
            handle.wait(WAIT_S)
        over.set()

    start_job(local, 2, work).results(WAIT_S)


def test_a_forked_child_that_ends_does_not_end_the_job_of_its_parent(local: Config) -> None:
    def work(comm: Communicator) -> list[float]:
        if comm.rank == 0:
            child = os.fork()
            if child == 0:
                refused = False
                try:
                    comm.barrier()
                except AbortedError:
                    refused = True
                comm.shutdown()
                os._exit(0 if refused else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return comm.allreduce(np.ones(3, np.float32)).tolist()

    assert run_job(local, 2, work) == [[2.0] * 3] * 2


def test_a_fork_while_another_thread_drives(local: Config) -> None:
    """The child gets the lock as it was, but not the thread that would release it."""
    forked = threading.Event()

    def work(comm: Communicator) -> float:
        if comm.rank == 1:
            assert forked.wait(WAIT_S)
            return float(comm.allreduce(np.ones(3, np.float32))[0])
        handle = comm.allreduce_async(np.ones(3, np.float32))
        held, child_is_there = threading.Event(), threading.Event()

        def hold() -> None:
            with comm._engine._lock:
                held.set()
                assert child_is_there.wait(WAIT_S)

        holder = Ranks(1, lambda _: hold())
        assert held.wait(WAIT_S)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the test forks while there are threads
            child = os.fork()
        if child == 0:
            os._exit(in_the_child(comm, handle))
        child_is_there.set()
        holder.results()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        forked.set()
        assert status == 0
        return float(handle.wait()[0])

    assert run_job(local, 2, work) == [2.0, 2.0]


def in_the_child(comm: Communicator, handle: Handle[Any]) -> int:
    """Exit status 0 if the child learns in time that it is none of the job's ranks."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(20)
    refused = 0
    for call in (comm.barrier, handle.wait, lambda: handle.wait(1.0)):
        try:
            call()
        except AbortedError as error:
            refused += "forked" in str(error)
    comm.shutdown()
    return 0 if refused == 3 and handle.done() else 1


class Signalled(Process):
    """`signalled_worker.py` as rank 0; this process is rank 1, which calls the same collective once `outcome` is known
    of rank 0, or it has ended."""

    def __init__(self, config: Config, where: str, what: str) -> None:
        self.job, addresses = unique_job("signal"), ",".join(config.cluster.aggregators)
        script = str(Path(__file__).with_name("signalled_worker.py"))
        exchange = config.transport.host_exchange
        arguments = (addresses, self.job, where, what, f"transport.host_exchange={exchange}")
        super().__init__(sys.executable, script, *arguments, environ={"PYTHONPATH": PATHS})

    def events(self) -> dict[str, dict[str, Any]]:
        """All that it reports until it ends, by kind."""
        results: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(AssertionError):
            while True:
                event = json.loads(self.line(SOON_S))
                results[event["event"]] = event
        assert self._lines.next(0.0) == CLOSED, f"it hangs\n{self.log}"
        return results


PATHS = os.pathsep.join(str(Path(__file__).parent.parent / part) for part in ("..", "."))
SOON_S = 20.0  # much shorter than the time limit of the collective, and longer than anything here takes


def play(config: Config, where: str, what: str) -> tuple[dict[str, dict[str, Any]], int, AbortedError]:
    """Interrupt rank 0; return its reports, its exit status, and the error of rank 1."""
    over = threading.Event()
    with Signalled(config, where, what) as process:

        def other(_: int) -> None:
            with Communicator(config, rank=1, size=2, job=process.job) as comm:
                comm.barrier()
                assert over.wait(WAIT_S)
                comm.allreduce(np.ones(10_000))

        ranks = Ranks(1, other)
        try:
            events, status = process.events(), process.wait(SOON_S)
        finally:
            over.set()
        [error] = ranks.outcomes()
    assert isinstance(error, AbortedError), error
    return events, status, error


PLACES = ("blocked", "turn", "submit", "waiting", "idle")


@pytest.mark.parametrize("what", ["shutdown", "twice"])
@pytest.mark.parametrize("where", PLACES)
def test_a_handler_shuts_down_what_it_interrupts(either: Config, where: str, what: str) -> None:
    events, status, error = play(either, where, what)
    assert status == 0
    assert events["handled"]["seconds"] < 2.0
    outcome = events["outcome"]
    assert (outcome["error"], outcome["closed"]) == ("ClosedError", True)
    assert "was shut down" in outcome["text"]
    assert events.get("thread", {"error": "ClosedError"})["error"] == "ClosedError"
    assert error.culprit.startswith("rank 0 (host ")
    assert error.reason == "shut down with a collective under way"


@pytest.mark.parametrize("where", PLACES)
def test_a_handler_shuts_down_and_exits(either: Config, where: str) -> None:
    events, status, error = play(either, where, "exit")
    assert status == 3
    assert "outcome" not in events
    assert error.culprit.startswith("rank 0 (host ")
    assert error.reason == "shut down with a collective under way"


@pytest.mark.parametrize("where", ["blocked", "turn", "submit", "waiting"])
def test_a_handler_must_not_call_a_collective_on_top_of_another(either: Config, where: str) -> None:
    events, status, error = play(either, where, "collective")
    assert status == 0
    refused = events["handled"]["refused"]
    assert len(refused) == (4 if where == "waiting" else 3)
    assert all(text.startswith("UsageError: ") and "signal handler" in text for text in refused), refused
    assert events["outcome"]["error"] == "ClosedError"
    assert error.reason == "shut down with a collective under way"


MODULES = (engine.__name__, poller.__name__, framing.__name__)


class Interrupting:
    """Raise KeyboardInterrupt before the n-th line of `names` that this thread runs, n out of `lines`.

    Python stops tracing then; with the next `leave` of `machine` it goes on.
    """

    def __init__(self, names: tuple[str, ...], lines: tuple[int, ...], machine: RankMachine) -> None:
        self.names, self.lines, self.count = names, lines, 0
        self._leave = machine.leave
        machine.leave = self.leave  # type: ignore[method-assign]

    def leave(self, reason: str = "") -> Iterator[Effect]:
        sys.settrace(self.trace)
        return self._leave(reason)

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_name in self.names and frame.f_globals["__name__"] in MODULES:
            if event == "line":
                self.count += 1
                if self.count in self.lines:
                    raise KeyboardInterrupt
            return self.trace
        return None

    def __enter__(self) -> Interrupting:
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        self.lines = ()
        sys.settrace(None)


def lone_engine() -> tuple[engine.Engine, ShmLink, socket.socket]:
    """An engine whose only link leads to nobody who answers."""
    near, far = socket.socketpair()
    link = ShmLink(near, "host:1")
    link.attach(private_slots(2, 65536), private_slots(2, 65536))
    slots = [(link.send_slots, link.receive_slots)]
    machine = RankMachine(slots, ["host:1"], "me", rank=0, scan_span=1, timeout_s=9.0)
    return engine.Engine(machine, [link], 0.0, BoundLog(logging.getLogger(__name__))), link, far


@pytest.mark.slow
def test_two_interrupts_in_a_row_raise_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every pair of lines of what watches and closes links."""
    monkeypatch.setattr(engine, "GOODBYE_S", 0.01)
    names = ("_watch", "_unwatch", "_close_links", "close")
    descriptor, x = Descriptor("allreduce", "", "float32", (8,)), np.zeros(8, np.float32)
    first, second, twice = 1, 1, 0
    while True:
        ours, link, far = lone_engine()
        operand = DenseTensor(x, x, descriptor.layout, descriptor.element.zero_mask)
        [handle] = ours.submit(Call(descriptor, operand, lambda: x))
        with Interrupting(names, (first, first + second), ours._machine) as interrupting:
            with contextlib.suppress(KeyboardInterrupt):
                try:
                    handle.wait(0.001)
                except TimeoutError:
                    ours.abort("interrupted")
            with contextlib.suppress(KeyboardInterrupt):
                ours.shutdown()
        ours.shutdown()
        sys.settrace(None)
        twice += interrupting.count >= first + second
        assert link.over
        assert handle.done()
        assert ours.is_closed
        far.close()
        if interrupting.count < first:
            break
        first, second = (first, second + 1) if interrupting.count >= first + second else (first + 1, 1)
    assert first > 5
    assert twice > 20


@pytest.fixture
def high_descriptor() -> Iterator[int]:
    """A descriptor number beyond what select(2) can handle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1500:
        pytest.skip(f"only {hard} descriptors are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1500), hard))
    yield 1400
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_last_words_may_wait_on_any_descriptor(high_descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "GOODBYE_S", 0.05)
    low, peer = socket.socketpair()
    with low, peer:
        link = ShmLink(socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, high_descriptor)), "host:1")
        assert link.fileno() >= high_descriptor
        link.attach(private_slots(2, 65536), private_slots(2, 65536))
        slots = [(link.send_slots, link.receive_slots)]
        machine = RankMachine(slots, ["host:1"], "me", rank=0, scan_span=1, timeout_s=9.0)
        ours = engine.Engine(machine, [link], 0.0, BoundLog(logging.getLogger(__name__)))
        while not link.wants_write:
            link.send_control(b"x" * 60_000)
        ours.abort("nobody reads this")
        assert link.over
        ours.shutdown()


def test_ranks_that_deal_blocks_differently_are_refused(local: Config) -> None:
    """Each block would be summed on two shards, by one rank each."""
    other = configured(local.cluster.aggregators, "protocol.stripe_blocks=128", "cluster.join_timeout_s=3")
    mine = configured(local.cluster.aggregators, "cluster.join_timeout_s=3")
    outcomes = start_job([mine, other], 2, lambda comm: comm.barrier()).outcomes(WAIT_S)
    assert any(isinstance(outcome, RefusedError) and "stripe_blocks" in str(outcome) for outcome in outcomes)
    assert all(isinstance(outcome, Exception) for outcome in outcomes)
