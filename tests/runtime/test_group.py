"""Communicators that a communicator creates for some of its ranks, on the same aggregators."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from local_cluster import WAIT_S, Daemon, configured, eventually, run_job

from omnireduce import AbortedError, ClosedError, Communicator, OmniReduceError, RefusedError, UsageError
from omnireduce.runtime.aggregator_client import ask


def test_some_ranks_have_a_communicator_of_their_own(daemon: Daemon) -> None:
    """In the order in which they are given; beside the one of all, which goes on."""

    def run(comm: Communicator) -> tuple[int, float] | None:
        result = None
        if comm.rank != 1:
            with comm.create_group([2, 0], name="outer") as group:
                result = group.rank, float(group.allreduce(np.full(5, 1.0 + comm.rank))[0])
        assert comm.allreduce(np.ones(3))[0] == 3
        return result

    assert run_job(configured(daemon.addresses), 3, run) == [(1, 4.0), None, (0, 4.0)]


def test_orders_of_collectives_are_apart(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        group = comm.create_group(name="all")
        handles = [group.allreduce_async(np.ones(3), name="g"), comm.allreduce_async(np.ones(4), name="w")]
        for handle in handles if comm.rank else handles[::-1]:
            assert handle.wait(60)[0] == 2
        comm.shutdown()
        with pytest.raises(ClosedError):
            group.allreduce(np.ones(3))

    run_job(configured(daemon.addresses), 2, run)


def test_a_rank_that_ends_before_it_joins_a_group_is_named(daemon: Daemon) -> None:
    """At once: not after `cluster.join_timeout_s`."""
    have_joined = threading.Barrier(2)

    def run(comm: Communicator) -> str:
        have_joined.wait(WAIT_S)
        if comm.rank == 1:
            comm.__exit__(ValueError, ValueError("early"), None)
            return ""
        with pytest.raises(AbortedError) as caught:
            comm.create_group(name="late")
        return caught.value.culprit

    results = run_job(configured(daemon.addresses), 2, run)
    assert results[0].startswith("rank 1 (")


def test_ranks_that_name_other_ranks_are_told(daemon: Daemon) -> None:
    """Each is a rank of a group of two, and they would meet."""

    def run(comm: Communicator) -> str:
        if comm.rank == 2:
            return ""
        with pytest.raises(UsageError) as caught:
            comm.create_group([0, 1] if comm.rank == 0 else [2, 1], name="pair")
        with comm.create_group([0, 1], name="pair") as group:
            assert group.allreduce(np.ones(3))[0] == 2
        return str(caught.value)

    differ = (
        "'ranks of the group' differs between ranks: rank 0 has [0, 1], rank 1 has [2, 1]; expected the same on all"
    )
    assert run_job(configured(daemon.addresses), 3, run) == [f"{differ} ranks"] * 2 + [""]


def test_ranks_that_name_more_ranks_than_the_others_are_told_at_once(daemon: Daemon) -> None:
    """Also where nothing but `cluster.job` tells the launch from others."""
    config = configured(daemon.addresses, f"cluster.join_timeout_s={100 * WAIT_S}")

    def run(comm: Communicator) -> str:
        with pytest.raises(RefusedError) as refused:
            comm.create_group([0, 1] if comm.rank == 0 else None, name="pair")
        return str(refused.value)

    assert all("world_size" in result for result in run_job(config, 3, run))


@pytest.mark.parametrize("who_is_first", ["the rank that refuses", "the others"])
def test_a_rank_that_refuses_a_group_is_named_to_the_others(daemon: Daemon, who_is_first: str) -> None:
    """At once: not after `cluster.join_timeout_s`. The next attempt is sound, of whatever ranks."""
    config = configured(daemon.addresses, f"cluster.join_timeout_s={100 * WAIT_S}")
    has_refused = threading.Event()

    def others_wait() -> bool:
        jobs = [job for job in ask(daemon.addresses[0], config, WAIT_S).jobs if "+pair." in job.name]
        return any(job.joined == 2 for job in jobs)

    def run(comm: Communicator) -> str:
        if comm.rank == 1:
            assert who_is_first != "the others" or eventually(others_wait)
            with pytest.raises(UsageError) as raised:
                comm.create_group([0, 2], name="pair")
            has_refused.set()
            message = str(raised.value)
        else:
            assert who_is_first == "the others" or has_refused.wait(WAIT_S)
            with pytest.raises(RefusedError) as refused:
                comm.create_group(name="pair")
            message = str(refused.value)
        with comm.create_group(name="pair") as group:
            assert group.allreduce(np.ones(3))[0] == 3
        assert comm.allreduce(np.ones(3))[0] == 3
        return message

    results = run_job(config, 3, run)
    assert results[1] == "ranks [0, 2]: this is rank 1, which is not among them"
    for each in (results[0], results[2]):
        assert "cannot start: rank 1 (host " in each
        assert each.endswith(f"has refused: {results[1]}")


REFUSALS: dict[str, tuple[Callable[[Communicator], object], str]] = {
    "ranks": (lambda comm: comm.create_group([0, 0], name="g"), "expected different ranks"),
    "no number": (lambda comm: comm.create_group(["one"], name="g"), "rank is 'one'"),
    "state": (lambda comm: comm.create_group(name="g", state_bytes=-1), "protocol.state_bytes"),
    "by itself": (lambda comm: _refuse(comm, OSError("the disk is full")), "OSError: the disk is full"),
}  # fmt: skip


def _refuse(comm: Communicator, error: Exception) -> None:
    comm.refuse_group(error, name="g")
    comm.refuse_group(error, name="g")  # once for each error
    raise error


@pytest.mark.parametrize("what", REFUSALS)
def test_whatever_a_rank_refuses_reaches_the_others(daemon: Daemon, what: str) -> None:
    """Also where all ranks refuse it, which nobody has to wait for."""
    wrong, message = REFUSALS[what]
    config = configured(daemon.addresses, f"cluster.join_timeout_s={100 * WAIT_S}")

    def run(comm: Communicator) -> str:
        with pytest.raises((OmniReduceError, OSError)) as caught:
            wrong(comm) if comm.rank == 0 else comm.create_group(name="g")
        with pytest.raises((OmniReduceError, OSError)):
            wrong(comm)
        with comm.create_group(name="g") as group:
            assert group.allreduce(np.ones(3))[0] == 2
        return str(caught.value)

    assert message in run_job(config, 2, run)[1]


def test_what_cannot_be(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        for ranks, caught in (
            ([], "expected different ranks from 0 to 0"),
            ([0, 0], "expected different ranks from 0 to 0"),
            ([3], "expected different ranks from 0 to 0"),
            ([-1, 0], "expected different ranks from 0 to 0"),
        ):
            with pytest.raises(UsageError, match=caught):
                comm.create_group(ranks, name="wrong")
        with pytest.raises(UsageError, match="expected a string of 1 to 128 characters"):
            comm.create_group(name=" /")

    run_job(configured(daemon.addresses), 1, run)
