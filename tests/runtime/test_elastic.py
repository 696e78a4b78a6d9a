"""Jobs that go on with other workers: reform, commit, restore, sync, over real aggregators."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from free_ports import free_address
from local_cluster import SETTLE, Daemon, Ranks, configured, eventually, never_wait, run_job, unique_job
from transports import TRANSPORTS, over

import omnireduce as omni
from omnireduce import AbortedError, ClosedError, Communicator, ElasticState, RefusedError, UsageError, run_elastic
from omnireduce.elastic import ObjectState, State, run
from omnireduce.errors import NewcomersError
from omnireduce.runtime.aggregator_client import ask
from omnireduce.runtime.rank.calls import single
from omnireduce.runtime.rank.calls.single import Call, CallContext
from omnireduce.support.config import Config

ELASTIC = ("elastic.enabled=true", SETTLE, "security.allow_no_secret=true")


@pytest.fixture(params=TRANSPORTS)
def elastic(request: pytest.FixtureRequest, daemon: Daemon) -> Config:
    return configured(daemon.addresses, *ELASTIC, *over(request.param))


def total(comm: Communicator) -> float:
    """The sum over all ranks of their rank plus 1, in every one of many blocks."""
    x = np.full(100_000, comm.rank + 1, np.float32)
    comm.allreduce(x)
    assert (x == x[0]).all()
    return float(x[0])


def is_told_to_reform(state: ElasticState) -> bool:
    """Whether a commit says that others wait."""
    try:
        state.commit()
    except NewcomersError as error:
        return "reform" in str(error)
    return False


def until_aborted(comm: Communicator) -> str:
    """Go on until the job fails; return whose fault that is."""
    try:
        while True:
            total(comm)
    except AbortedError as error:
        return error.culprit


class Together:
    """Sums of ranks that are threads, with a barrier: a fault may end a sum that some ranks have completed already."""

    def __init__(self, *sizes: int) -> None:
        self._barriers = {size: threading.Barrier(size) for size in sizes}

    def total(self, comm: Communicator) -> float:
        result = total(comm)
        self._barriers[comm.size].wait(60)
        return result


def start(config: Config, size: int, work: Callable[[Communicator], object]) -> Ranks:
    job = unique_job("elastic")

    def run(rank: int) -> object:
        with Communicator(config, rank=rank, size=size, job=job) as comm:
            return work(comm)

    return Ranks(size, run)


def test_survivors_go_on_without_the_one_that_failed(elastic: Config) -> None:
    together = Together(3)

    def work(comm: Communicator) -> object:
        generation = comm.generation
        assert together.total(comm) == 6.0
        if comm.rank == 1:
            raise KeyboardInterrupt
        launched = comm.rank
        assert until_aborted(comm).startswith("rank 1 (")
        comm.reform()
        assert comm.generation > generation
        assert comm.statistics().collectives == 0
        return launched, comm.rank, comm.size, total(comm)

    first, failed, third = start(elastic, 3, work).outcomes()
    assert isinstance(failed, KeyboardInterrupt)
    assert [first, third] == [(0, 0, 2, 3.0), (2, 1, 2, 3.0)]


def test_again_and_again(elastic: Config) -> None:
    """One rank after the other fails; the last one is alone."""
    together = Together(2, 3)

    def work(comm: Communicator) -> object:
        launched, sizes = comm.rank, [comm.size]
        while comm.size > 1:
            together.total(comm)
            if comm.rank == comm.size - 1:
                comm._engine.abort("had enough")
                return launched, sizes
            until_aborted(comm)
            comm.reform()
            sizes.append(comm.size)
        assert total(comm) == 1.0
        return launched, sizes

    assert start(elastic, 3, work).results() == [(0, [3, 2, 1]), (1, [3, 2]), (2, [3])]


def test_a_worker_that_is_started_again_joins_the_others(elastic: Config) -> None:
    """It waits until they form the job anew, which they do when they hear of it; all ranks are what they were."""
    job, restarted, together = unique_job("elastic"), threading.Event(), Together(3)

    def run(rank: int) -> object:
        with Communicator(elastic, rank=rank, size=3, job=job) as comm:
            together.total(comm)
            if rank == 1:
                comm._engine.abort("killed")
            else:
                until_aborted(comm)
                comm.reform()
                assert (comm.size, total(comm)) == (2, 3.0)
                restarted.set()
                assert eventually(lambda: agreed(comm))
                comm.reform()
                return comm.rank, comm.size, total(comm)
        assert restarted.wait(60)
        with Communicator(elastic, rank=rank, size=3, job=job) as comm:
            return comm.rank, comm.size, total(comm)

    def agreed(comm: Communicator) -> bool:
        return bool(comm.allreduce(np.array([comm.newcomers]), op="max")[0])

    assert Ranks(3, run).results() == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]


def test_too_few_survivors_say_so_and_may_try_again(daemon: Daemon) -> None:
    config = configured(daemon.addresses, *ELASTIC, "elastic.last_call_s=0.3", "cluster.join_timeout_s=0.5")

    together = Together(2)

    def work(comm: Communicator) -> object:
        together.total(comm)
        if comm.rank == 1:
            comm._engine.abort("gone")
            return None
        until_aborted(comm)
        with pytest.raises(RefusedError, match=r"waiting for rank 1 of job .* after cluster.join_timeout_s = 0.5"):
            comm.reform(min_ranks=2)
        with pytest.raises(AbortedError, match="gone"):
            total(comm)
        comm.reform(min_ranks=1)
        return total(comm)

    assert start(config, 2, work).results() == [1.0, None]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"min_ranks": 0}, "from 0 to 1 workers"),
        ({"min_ranks": 3, "max_ranks": 2}, "from 3 to 2 workers"),
        ({"min_ranks": 1.5}, "min_ranks is 1.5, a float"),
        ({"max_ranks": True}, "max_ranks is True, a bool"),
    ],
)
def test_numbers_that_cannot_be(daemon: Daemon, arguments: dict[str, int], words: str) -> None:
    with Communicator(configured(daemon.addresses, *ELASTIC), rank=0, size=1, job=unique_job()) as comm:
        with pytest.raises(UsageError, match=words):
            comm.reform(**arguments)
        assert total(comm) == 1.0  # nothing has happened


def test_a_call_that_was_made_for_one_generation_is_not_started_in_the_next(daemon: Daemon) -> None:
    """Another thread calls `reform` between the two: rank, size and shards may have changed."""

    def barrier(context: CallContext) -> Call[None]:
        comm.reform()
        return single.barrier(context, "")

    with Communicator(configured(daemon.addresses, *ELASTIC), rank=0, size=1, job=unique_job()) as comm:
        with pytest.raises(ClosedError, match="shut down"):
            comm._start(barrier)
        assert total(comm) == 1.0


def test_a_job_cannot_be_smaller_than_its_smallest(daemon: Daemon) -> None:
    config = configured(daemon.addresses, *ELASTIC, "elastic.min_ranks=3")
    with pytest.raises(UsageError, match=r"elastic\.min_ranks is 3, expected at most the size, 2"):
        Communicator(config, rank=0, size=2)


def test_a_job_that_began_as_a_fixed_one_can_be_formed_anew(daemon: Daemon) -> None:
    """And grow, if everybody says so."""
    config, job, formed = configured(daemon.addresses, ELASTIC[1]), unique_job(), threading.Barrier(3)

    def run(rank: int) -> object:
        if rank < 2:
            with Communicator(config, rank=rank, size=2, job=job) as comm:
                total(comm)
                formed.wait(60)
                comm.reform(min_ranks=1, max_ranks=3)
                return comm.size, total(comm)
        formed.wait(60)
        elastic = configured(daemon.addresses, *ELASTIC)
        with Communicator(elastic, rank=2, size=3, job=job) as comm:
            return comm.size, total(comm)

    assert Ranks(3, run).results() == [(3, 6.0)] * 3


# state


def test_a_state_goes_back_to_its_last_commit(daemon: Daemon) -> None:
    with Communicator(configured(daemon.addresses, *ELASTIC), rank=0, size=1, job=unique_job()) as comm:
        weights = np.zeros(3)
        state = ElasticState(comm, {"weights": weights})
        weights += 1
        state.step = 5
        state.commit()
        weights += 1
        state.step = 6
        state.restore()
        assert (state.step, state.committed_step, weights.tolist()) == (5, 5, [1.0] * 3)


def test_all_states_become_that_of_the_farthest(elastic: Config) -> None:
    def work(comm: Communicator) -> object:
        weights, names = np.full(5, comm.rank), np.array([f"rank {comm.rank}"])
        state = ElasticState(comm, {"weights": weights, "names": names}, step=[3, 7, 7][comm.rank])
        source = state.sync()
        return source, state.step, state.committed_step, weights.tolist(), names.tolist()

    assert start(elastic, 3, work).results() == [(1, 7, 7, [1] * 5, ["rank 1"])] * 3


def test_a_loop_goes_on_from_the_last_commit(elastic: Config) -> None:
    """Every rank fails once, each in another step, and joins again as a new process would."""
    job, steps, failures = unique_job("loop"), 12, {2: 3, 0: 6, 1: 9}

    def run(rank: int, fails: bool = True) -> object:
        with Communicator(elastic, rank=rank, size=3, job=job) as comm:
            weights = np.zeros(1000, np.float32)
            state = ElasticState(comm, {"weights": weights})

            def train(source: int) -> None:
                while state.step < steps or comm.size < 3:  # until those that failed are back
                    if fails and state.step == failures[rank]:
                        raise ZeroDivisionError("struck")
                    gradient = np.ones(1000, np.float32)
                    comm.allreduce(gradient, op="mean")
                    weights[:] += gradient
                    state.step += 1
                    state.commit()

            try:
                run_elastic(comm, state, train)
            except ZeroDivisionError:
                fails = False
            else:
                return state.step, float(weights[0]), comm.size
        return run(rank, fails=False)

    done = Ranks(3, run).results()
    [(step, weight, size)] = set(done)
    assert (weight, size) == (step, 3)


def test_a_loop_that_gets_nowhere_gives_up(daemon: Daemon) -> None:
    """A fault that comes again after each new start ends it with that fault."""
    calls = []

    def work(comm: Communicator) -> None:
        def train(source: int) -> None:
            calls.append(comm.rank)
            comm.allreduce(np.ones(10 + comm.rank, np.float32))  # never the same on all ranks

        run_elastic(comm, ElasticState(comm, {}), train, attempts=2)

    failed = start(configured(daemon.addresses, *ELASTIC), 2, work).outcomes()
    assert all(isinstance(error, AbortedError) and "of float32 (10,)" in str(error) for error in failed)
    assert sorted(calls) == [0] * 2 + [1] * 2


def test_a_loop_goes_on_however_many_ranks_are_lost(daemon: Daemon) -> None:
    """Nobody commits, but each formation has fewer ranks."""

    def work(comm: Communicator) -> object:
        number = comm.rank

        def train(source: int) -> object:
            if number == comm.size - 1 > 0:
                raise ZeroDivisionError("struck")
            return comm.size, total(comm)

        return run_elastic(comm, ElasticState(comm, {}), train, attempts=2)

    last, *lost = start(configured(daemon.addresses, *ELASTIC), 4, work).outcomes()
    assert last == (1, 1.0)
    assert [type(error) for error in lost] == [ZeroDivisionError] * 3


@pytest.fixture
def alone(daemon: Daemon) -> Iterator[Communicator]:
    with omni.init(configured(daemon.addresses, *ELASTIC), job=unique_job("alone"), rank=0, size=1) as comm:
        yield comm


STATES = {"arrays": lambda comm: ElasticState(comm, {}), "objects": lambda comm: ObjectState(batch=0)}


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
@pytest.mark.parametrize(("commits_at", "calls"), [((), 3), ((2,), 4), ((1, 2, 3, 4, 5), 7)], ids=str)
def test_all_states_have_one_rule_for_giving_up(
    alone: Communicator, make: Callable[[Communicator], State], commits_at: tuple[int, ...], calls: int
) -> None:
    """Three faults in a row without a commit."""
    state, starts = make(alone), list[int]()

    def train(*_: object) -> None:
        starts.append(alone.generation)
        if len(starts) in commits_at:
            state.commit()
        raise AbortedError("rank 1", "gone")

    go_on = partial(run_elastic, alone, state, train) if isinstance(state, ElasticState) else partial(run(train), state)
    with pytest.raises(AbortedError, match="rank 1: gone"):
        go_on()
    assert len(set(starts)) == len(starts) == calls


def test_a_state_of_another_communicator_is_refused(alone: Communicator, daemon: Daemon) -> None:
    with Communicator(configured(daemon.addresses, *ELASTIC), rank=0, size=1, job=unique_job()) as other:
        state = ElasticState(other, {})
        with pytest.raises(UsageError, match="the state belongs to another communicator"):
            run_elastic(alone, state, lambda source: source)


def test_newcomers_find_the_state_as_it_is(alone: Communicator) -> None:
    """A fault takes it back to the last commit, and newcomers do not, even between two commits."""
    state, seen = ObjectState(batch=0), list[int]()
    errors = [NewcomersError("others wait"), AbortedError("rank 1", "gone")]

    @run
    def train(state: ObjectState) -> None:
        seen.append(state.batch)  # type: ignore[attr-defined]
        state.batch += 1  # type: ignore[attr-defined]
        if errors:
            raise errors.pop(0)

    train(state)
    assert seen == [0, 1, 1]


def test_a_job_that_cannot_be_formed_anew_leaves_the_last_commit(alone: Communicator) -> None:
    """The program can save it."""
    state = ElasticState(alone, {"weights": np.zeros(3)})

    def train(source: int) -> None:
        state.arrays["weights"] += 1
        alone.reform = refuse  # type: ignore[method-assign]
        raise AbortedError("rank 1", "gone")

    def refuse(**_: object) -> None:
        raise RefusedError("too few ranks")

    with pytest.raises(RefusedError, match="too few ranks"):
        run_elastic(alone, state, train)
    assert state.arrays["weights"].tolist() == [0] * 3


@pytest.mark.parametrize("prepare", [lambda comm: None, never_wait], ids=["waits", "never waits"])
def test_a_commit_tells_all_ranks_of_a_newcomer_after_the_same_step(
    daemon: Daemon, prepare: Callable[[Communicator], None]
) -> None:
    """A rank that never waits for other ranks reads the aggregator's messages all the same."""
    config, job, together, goes_on = (
        configured(daemon.addresses, *ELASTIC),
        unique_job(),
        Together(3),
        threading.Event(),
    )

    def run(rank: int) -> object:
        with Communicator(config, rank=rank, size=3, job=job) as comm:
            together.total(comm)
            if rank < 2:
                comm.reform()
                prepare(comm)
                goes_on.set()
                state = ElasticState(comm, {})
                while not is_told_to_reform(state):
                    state.step += 1
                steps = comm.allgather(np.array([state.step]))
                assert steps[0] == steps[1] == state.committed_step
                comm.reform()
                return comm.rank, comm.size
        assert goes_on.wait(60)
        with Communicator(config, rank=rank, size=3, job=job) as comm:
            return comm.rank, comm.size

    assert Ranks(3, run).results() == [(0, 3), (1, 3), (2, 3)]


def test_a_worker_with_another_state_leaves_and_the_others_go_on(daemon: Daemon) -> None:
    """A state with other shapes, or with the same shapes and another fingerprint."""

    def work(comm: Communicator) -> object:
        odd = comm.rank == 1
        state = ElasticState(comm, {"weights": np.zeros(8 if odd else 9)}, fingerprint=b"other" if odd else b"")

        def train(source: int) -> object:
            return source, comm.size, total(comm)

        return run_elastic(comm, state, train)

    first, second, third = start(configured(daemon.addresses, *ELASTIC), 3, work).outcomes()
    assert isinstance(second, UsageError)
    assert "this worker's state is another than that of rank 0" in str(second)
    assert first == third == (0, 2, 3.0)


def test_a_state_that_one_rank_cannot_keep_is_told_to_the_others(daemon: Daemon) -> None:
    def work(comm: Communicator) -> str:
        state = ElasticState(comm, {"weights": np.zeros(9)})
        state.sync()
        if comm.rank == 1:
            state.arrays["weights"] = np.zeros(8)
        with pytest.raises(ValueError if comm.rank == 1 else AbortedError) as caught:
            state.commit()
        return str(caught.value)

    error, reason = run_job(configured(daemon.addresses), 2, work)
    assert error.startswith("rank 1 ")
    assert reason in error


def test_a_rank_that_does_not_come_along_is_left_behind(elastic: Config) -> None:
    """It is stopped, say, between the step after which all agreed to form the job anew and its own call."""
    job, formed, together = unique_job(), threading.Event(), Together(3)

    def run(rank: int) -> object:
        with Communicator(elastic, rank=rank, size=3, job=job) as comm:
            together.total(comm)
            if rank == 2:
                assert formed.wait(60)
                return until_aborted(comm)
            comm.reform()
            formed.set()
            return comm.rank, comm.size, total(comm)

    assert Ranks(3, run).results() == [(0, 2, 3.0), (1, 2, 3.0), "rank 2"]


def test_survivors_wait_for_an_aggregator_that_shuts_down_and_comes_back() -> None:
    together, down = Together(2), threading.Event()
    address = free_address()
    with Daemon(1, ELASTIC[2], listen=address):
        config = configured([address], *ELASTIC)

        def work(comm: Communicator) -> object:
            together.total(comm)
            down.set()
            until_aborted(comm)
            comm.reform()
            return comm.rank, comm.size, total(comm)

        ranks = start(config, 2, work)
        assert down.wait(60)
    with Daemon(1, ELASTIC[2], listen=address):
        assert ranks.results() == [(0, 2, 3.0), (1, 2, 3.0)]


def test_a_job_that_goes_on_with_fewer_is_left_alone_by_the_others(daemon: Daemon) -> None:
    """The members go on without a rank. That rank waits as a newcomer does, until its time to join is over."""
    config = configured(daemon.addresses, *ELASTIC, "elastic.last_call_s=0.3", "cluster.join_timeout_s=1.5")
    together, formed, given_up = Together(4), threading.Event(), threading.Semaphore(0)

    def others_wait() -> bool:
        """For the last one: they wait for its generation to end, or have gone on."""
        jobs = ask(daemon.addresses[0], config, 60.0).jobs
        return formed.is_set() or any(job.generation == 0 and job.joined == 3 for job in jobs)

    def work(comm: Communicator) -> object:
        together.total(comm)
        assert comm.rank < 3 or eventually(others_wait)
        try:
            comm.reform(max_ranks=2)
        except RefusedError as error:
            given_up.release()
            return str(error)
        formed.set()
        generation, flag = comm.generation, np.zeros(1)
        while not flag[0]:
            flag[0] = comm.rank == 0 and given_up.acquire(blocking=False) and given_up.acquire(timeout=60)
            comm.allreduce(flag, op="max")
        return comm.size, total(comm), comm.generation - generation

    results = start(config, 4, work).results()
    assert sorted(result for result in results if isinstance(result, tuple)) == [(2, 3.0, 0)] * 2
    assert all("still waiting for rank" in result for result in results if isinstance(result, str))
