"""The channel for urgent tensors: they overtake others, with the same sums; both channels begin and end together."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np
import pytest
from local_cluster import SETTLE, WAIT_S, Daemon, Ranks, configured, eventually, run_job, start_job, unique_job
from msgspec.structs import replace
from transports import TRANSPORTS, over

from omnireduce import AbortedError, ClosedError, Communicator, RefusedError, UsageError
from omnireduce.core import names
from omnireduce.runtime.aggregator_client import ask
from omnireduce.runtime.rank import joining
from omnireduce.runtime.rank.channels import urgent_config
from omnireduce.runtime.rank.joining import join
from omnireduce.support.config import Config
from omnireduce.support.config.loading import load_config, override_config

URGENT = ("protocol.urgent_bytes=65536", "security.allow_no_secret=true")
LARGE, SMALL = 1 << 20, 1000  # elements of float32


@pytest.fixture(params=TRANSPORTS)
def urgent(request: pytest.FixtureRequest, daemon: Daemon) -> Config:
    return configured(daemon.addresses, *URGENT, *over(request.param))


def ones(elements: int) -> np.ndarray:
    return np.ones(elements, np.float32)


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.allreduce(ones(SMALL)),
        lambda comm: comm.allreduce_async(ones(SMALL)).wait(),
        lambda comm: comm.allreduce([ones(SMALL)], priority=1)[0],
        lambda comm: comm.allreduce(ones(LARGE), priority=1),
        lambda comm: comm.allreduce(ones(SMALL), priority=1, block_size=64),
    ],
    ids=["small", "async", "group", "large", "blocks"],
)
def test_an_urgent_tensor_does_not_wait_for_a_large_one(
    urgent: Config, call: Callable[[Communicator], np.ndarray]
) -> None:
    """Rank 1 begins the large tensor only after the urgent one is complete on both."""
    has_overtaken = threading.Event()

    def work(comm: Communicator) -> list[float]:
        large = np.full(LARGE, comm.rank + 1, np.float32)
        handle = comm.allreduce_async(large) if comm.rank == 0 else None
        result = call(comm)
        if handle is not None:
            assert not handle.done()
            has_overtaken.set()
        assert has_overtaken.wait(WAIT_S)
        handle = handle or comm.allreduce_async(large)
        handle.wait()
        return [float(each) for array in (result, large) for each in (array.min(), array.max())]

    assert run_job(urgent, 2, work) == [[2.0, 2.0, 3.0, 3.0]] * 2


def test_tensors_that_are_not_urgent_keep_their_order(urgent: Config) -> None:
    def work(comm: Communicator) -> bool:
        first = comm.allreduce_async(ones(LARGE))
        second = comm.allreduce_async(ones(SMALL), priority=0)
        second.wait()
        return first.done()

    assert run_job(urgent, 2, work) == [True, True]


def test_sums_are_the_same_bit_by_bit(daemon: Daemon) -> None:
    """On three ranks the order of additions shows."""
    inputs = np.random.default_rng(7).standard_normal((3, 3, SMALL)).astype(np.float32)

    def work(comm: Communicator) -> bytes:
        pairs = zip(inputs[comm.rank], ("sum", "mean", "max"), strict=True)
        return b"".join(comm.allreduce(x.copy(), op=op).tobytes() for x, op in pairs)

    settings = [configured(daemon.addresses, *extra, *URGENT[1:]) for extra in ((), URGENT[:1])]
    plain, own = (run_job(config, 3, work) for config in settings)
    assert plain == own


def test_without_a_channel_of_its_own_a_priority_changes_nothing(daemon: Daemon) -> None:
    config = configured(daemon.addresses, *URGENT[1:])
    assert run_job(config, 2, lambda comm: float(comm.allreduce(ones(3), priority=1)[0])) == [2.0, 2.0]


@pytest.mark.parametrize("priority", ["high", 0.5, True])
def test_a_priority_is_a_whole_number(daemon: Daemon, priority: object) -> None:
    config = configured(daemon.addresses, *URGENT)
    with Communicator(config, rank=0, size=1, job=unique_job()) as comm:
        with pytest.raises(UsageError, match="priority"):
            comm.allreduce(ones(3), priority=priority)  # type: ignore[call-overload]
        assert comm.allreduce(ones(3))[0] == 1


def test_arrays_of_one_channel_are_refused_in_the_other(daemon: Daemon) -> None:
    is_refused = threading.Event()

    def work(comm: Communicator) -> None:
        x = ones(LARGE)
        if comm.rank == 1:
            assert is_refused.wait(WAIT_S)
        handle = comm.allreduce_async(x)
        if comm.rank == 0:
            with pytest.raises(UsageError, match="in use by a collective that is under way"):
                comm.allreduce(x[:SMALL])
            is_refused.set()
        handle.wait()

    run_job(configured(daemon.addresses, *URGENT), 2, work)


def test_statistics_and_aggregators_know_both(daemon: Daemon) -> None:
    config, job = configured(daemon.addresses, *URGENT), unique_job()

    def work(comm: Communicator) -> tuple[int, bool]:
        comm.allreduce(ones(LARGE))
        comm.allreduce(ones(SMALL))
        counts = comm.statistics()
        names = set()
        if comm.rank == 0:
            names = {each.name for each in ask(config.cluster.aggregators[0], config, WAIT_S).jobs}
        comm.barrier()
        return counts.collectives, comm.rank == 1 or {job, f"{job}+urgent"} <= names

    assert run_job(config, 2, work, job) == [(2, True)] * 2


def until_aborted(comm: Communicator, elements: int) -> str:
    """Go on until the job fails; return why."""
    try:
        while True:
            comm.allreduce(ones(elements))
    except AbortedError as error:
        return error.reason


def test_a_rank_that_dies_ends_both(urgent: Config) -> None:
    all_are_here = threading.Barrier(2)

    def work(comm: Communicator) -> list[str]:
        all_are_here.wait(WAIT_S)
        if comm.rank == 1:
            raise ZeroDivisionError("a bug")
        return [until_aborted(comm, elements) for elements in (SMALL, LARGE)]

    first, second = start_job(urgent, 2, work).outcomes(WAIT_S)
    assert first == ["left because of ZeroDivisionError: a bug"] * 2
    assert isinstance(second, ZeroDivisionError)


def test_who_has_lost_one_channel_starts_nothing_in_the_other(daemon: Daemon) -> None:
    def work(comm: Communicator) -> str:
        with pytest.raises(AbortedError, match="submitted different collectives"):
            comm.allreduce(ones(SMALL + comm.rank))
        with pytest.raises(AbortedError) as caught:
            comm.allreduce(ones(LARGE))
        return caught.value.culprit

    assert run_job(configured(daemon.addresses, *URGENT), 2, work) == ["ranks 0 and 1"] * 2


def test_a_fault_of_one_channel_ends_what_is_under_way_on_the_other(urgent: Config) -> None:
    """Rank 1 never begins the small tensor. The large ones differ."""

    def work(comm: Communicator) -> list[str]:
        handle = comm.allreduce_async(ones(SMALL)) if comm.rank == 0 else None
        results = [until_aborted(comm, LARGE + comm.rank)]
        if handle is not None:
            with pytest.raises(AbortedError) as caught:
                handle.wait()
            results.append(caught.value.reason)
        return results

    first, second = run_job(urgent, 2, work)
    assert first == second * 2
    assert second[0].startswith("submitted different collectives")


def test_who_waits_for_one_channel_does_not_hold_up_the_other(urgent: Config) -> None:
    """Also where no thread of the communicator is wanted."""

    def work(comm: Communicator) -> list[float]:
        comm.drives_in_background = False
        arrays = [ones(SMALL), ones(4 * LARGE)]
        handles = [comm.allreduce_async(array) for array in arrays]
        for handle in handles if comm.rank == 0 else reversed(handles):
            handle.wait()
        return [float(array[-1]) for array in arrays]

    assert run_job(urgent, 2, work) == [[2.0, 2.0]] * 2


def test_without_a_second_channel_no_thread_comes_where_none_is_wanted(daemon: Daemon) -> None:
    """Also after another thread has taken over, as with torch."""
    with Communicator(configured(daemon.addresses), rank=0, size=1, job=unique_job()) as comm:
        comm.drives_in_background = False

        def other() -> None:
            comm.take_over()
            comm.allreduce_async(ones(SMALL)).wait()

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(WAIT_S)
        assert comm._engine._background is None


def test_ranks_with_other_limits_are_refused(daemon: Daemon) -> None:
    def config(rank: int) -> Config:
        limit = f"protocol.urgent_bytes={(65536, 1024)[rank]}"
        one_launch = "cluster.launch=one"  # so that the refusal ends both
        return configured(daemon.addresses, limit, one_launch, *URGENT[1:])

    job = unique_job()

    def join_as(rank: int) -> str:
        with pytest.raises(RefusedError) as caught:
            Communicator(config(rank), rank=rank, size=2, job=job)
        return str(caught.value)

    results = Ranks(2, join_as).results()
    assert all("urgent_bytes" in str(result) for result in results)
    assert any("give every worker the same protocol.urgent_bytes" in str(result) for result in results)


def test_larger_blocks_than_usual_go_the_ordinary_way(daemon: Daemon) -> None:
    """They would not fit the slots of the other channel."""
    with Communicator(configured(daemon.addresses, *URGENT), rank=0, size=1, job=unique_job()) as comm:
        assert comm.allreduce(ones(SMALL), priority=1, block_size=65536)[0] == 1


def test_a_name_belongs_to_one_thread_in_both(daemon: Daemon) -> None:
    with Communicator(configured(daemon.addresses, *URGENT), rank=0, size=1, job=unique_job()) as comm:
        comm.allreduce(ones(SMALL), name="mine")
        results: list[str] = []

        def other() -> None:
            with pytest.raises(UsageError) as caught:
                comm.allreduce(ones(LARGE), name="mine")
            results.append(str(caught.value))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(WAIT_S)
    assert "belongs to thread" in results[0]


def test_a_handler_that_interrupts_one_channel_closes_both(daemon: Daemon) -> None:
    """The handler returns at once: what it interrupts closes the first, and then the second is closed."""
    comm = Communicator(configured(daemon.addresses, *URGENT), rank=0, size=1, job=unique_job())
    first, second = comm._channels
    closed: list[bool] = []

    def handled() -> None:
        comm.shutdown()
        closed.extend((first.engine.is_closed, second.engine.is_closed))

    first.engine.exclusively(handled)  # as a handler does on top of a call
    assert closed == [False, False]
    assert first.engine.is_closed
    assert second.engine.is_closed
    with pytest.raises(ClosedError):
        comm.allreduce(ones(SMALL))


@pytest.mark.parametrize("first", [SMALL, LARGE])
def test_who_shuts_down_reads_so_from_both(urgent: Config, first: int) -> None:
    """Whichever channel closes first, and whoever waits."""
    others_have_seen = threading.Event()

    def work(comm: Communicator) -> bool:
        if comm.rank == 1:
            return others_have_seen.wait(WAIT_S)
        sizes = [first, SMALL + LARGE - first]
        handles = [comm.allreduce_async(ones(elements)) for elements in sizes]
        waiting = Ranks(2, lambda at: handles[at].wait())
        comm.shutdown()
        outcomes = waiting.outcomes(WAIT_S)
        others_have_seen.set()
        return all(type(outcome) is ClosedError for outcome in outcomes)

    outcomes = start_job(urgent, 2, work).outcomes(WAIT_S)
    assert outcomes[0] is True


def test_a_channel_that_is_closing_can_be_told_that_the_other_one_failed(daemon: Daemon) -> None:
    with Communicator(configured(daemon.addresses, *URGENT), rank=0, size=1, job=unique_job()) as comm:
        first, second = (channel.engine for channel in comm._channels)
        second._poller.close()  # as it does before it is closed
        first.abort("failed")
        with pytest.raises(AbortedError, match="failed"):
            comm.allreduce(ones(LARGE))


def test_where_one_job_is_allowed_a_rank_reads_that_it_wants_two() -> None:
    with (
        Daemon(1, "aggregator.max_jobs=1") as alone,
        pytest.raises(RefusedError, match=r"second job, '.*\+urgent'.*aggregator\.max_jobs"),
    ):
        Communicator(configured(alone.addresses, *URGENT), rank=0, size=1, job=unique_job())


def test_who_dies_while_the_second_channel_forms_is_named(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it there, and learn it from the first channel."""

    def joined(config: Config, hello: object, *arguments: object) -> object:
        if hello.job.endswith(names.URGENT) and hello.rank == 1:  # type: ignore[attr-defined]
            raise ZeroDivisionError("a bug")
        return join(config, hello, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(joining, "join", joined)
    config = configured(daemon.addresses, *URGENT, "cluster.join_timeout_s=600")
    first, second = start_job(config, 2, lambda comm: comm.size).outcomes(WAIT_S)
    assert isinstance(first, AbortedError)
    assert first.reason == "left because of ZeroDivisionError: a bug"
    assert isinstance(second, ZeroDivisionError)


def test_shutdown_while_the_second_channel_forms(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else comes: only the shutdown ends that."""
    known: list[Communicator] = []

    def joined(config: Config, hello: object, secret: object, gave_up: Callable[[], bool]) -> object:
        if hello.job.endswith(names.URGENT):  # type: ignore[attr-defined]
            hello = replace(hello, world_size=2)  # type: ignore[type-var]
            threading.Thread(target=known[0].shutdown).start()
        return join(config, hello, secret, gave_up)  # type: ignore[arg-type]

    form = Communicator._join_job

    def forming(self: Communicator, hello: object, parent: object) -> None:
        known.append(self)
        self._channels = []
        form(self, hello, parent)  # type: ignore[arg-type]

    monkeypatch.setattr(joining, "join", joined)
    monkeypatch.setattr(Communicator, "_join_job", forming)
    with pytest.raises(ClosedError, match="while it joined"):
        Communicator(configured(daemon.addresses, *URGENT), rank=0, size=1, job=unique_job())


def test_both_are_formed_anew(daemon: Daemon) -> None:
    config = configured(daemon.addresses, *URGENT, "elastic.enabled=true", SETTLE)

    all_have_it = threading.Barrier(3)

    def totals(comm: Communicator) -> list[float]:
        return [float(comm.allreduce(ones(elements))[0]) for elements in (SMALL, LARGE)]

    def work(comm: Communicator) -> list[float]:
        assert totals(comm) == [3.0, 3.0]
        all_have_it.wait(WAIT_S)
        if comm.rank == 2:
            raise ZeroDivisionError("a bug")
        until_aborted(comm, LARGE)
        comm.reform()
        return totals(comm)

    outcomes = start_job(config, 3, work).outcomes(WAIT_S)
    assert outcomes[:2] == [[2.0, 2.0]] * 2
    assert isinstance(outcomes[2], ZeroDivisionError)


def test_a_forked_child_lets_go_of_both(daemon: Daemon) -> None:
    with Communicator(configured(daemon.addresses, *URGENT), rank=0, size=1, job=unique_job()) as comm:
        comm.allreduce(ones(SMALL))
        child = os.fork()
        if not child:
            failed = 0
            for elements in (SMALL, LARGE):
                try:
                    comm.allreduce(ones(elements))
                except AbortedError:
                    failed += 1
            os._exit(failed)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        assert [comm.allreduce(ones(elements))[0] for elements in (SMALL, LARGE)] == [1.0, 1.0]


def test_another_thread_takes_over_both(daemon: Daemon) -> None:
    def work(comm: Communicator) -> float:
        results: list[float] = []

        def other() -> None:
            comm.take_over()
            results.extend(float(comm.allreduce(ones(elements))[0]) for elements in (SMALL, LARGE))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(WAIT_S)
        return sum(results)

    assert run_job(configured(daemon.addresses, *URGENT), 2, work) == [4.0, 4.0]


@pytest.mark.parametrize(
    ("urgent_bytes", "block_size", "slot_bytes", "expected"),
    [
        (1, 256, 1 << 20, 65536),
        (65536, 256, 1 << 20, 139264),
        (1 << 20, 256, 1 << 20, 1 << 20),
        (1, 65536, 1 << 20, 532480),
    ],
)
def test_slots_of_urgent_tensors_are_small(urgent_bytes: int, block_size: int, slot_bytes: int, expected: int) -> None:
    changes = {"urgent_bytes": urgent_bytes, "block_size": block_size, "slot_bytes": slot_bytes}
    changed = {f"protocol.{name}": value for name, value in changes.items()}
    config = override_config(load_config(None), changed, source="test")
    assert urgent_config(config).protocol.slot_bytes == expected


def test_all_is_closed_in_the_end(daemon: Daemon) -> None:
    config, job = configured(daemon.addresses, *URGENT), unique_job()
    ranks: Ranks = start_job(config, 2, lambda comm: float(comm.allreduce(ones(SMALL))[0]), job)
    assert ranks.results() == [2.0, 2.0]
    assert eventually(
        lambda: not any(each.name.startswith(job) for each in ask(daemon.addresses[0], config, WAIT_S).jobs)
    )
