"""Relays as real processes: right sums through trees of them, and the right name when one of a tree fails."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from certificates import certificates, needs_openssl
from cluster_checks import DEATH_S, FAILURE_S, assert_serves, expect_round, name_of
from free_ports import free_address
from local_cluster import WAIT_S, Daemon, Worker, configured, eventually, run_job, start_job, unique_job
from oracle import reduce_by_tree
from transports import TRANSPORTS, over

from omnireduce import AbortedError, Communicator, ConfigError, OmniReduceError, RefusedError, UsageError
from omnireduce.aggregator.metrics import ShardCollector
from omnireduce.core.status_messages import JobRelay, JobStatus, Status, Traffic
from omnireduce.runtime.aggregator_client import ask
from omnireduce.support.config import Config

SOLO = over("tcp")


def below(*daemons: Daemon) -> str:
    """The setting of a relay with these above it."""
    return f"aggregator.upstream={json.dumps([address for daemon in daemons for address in daemon.addresses])}"


class Tree(NamedTuple):
    """Ranks 0 and 1 come through `left`, 2 and 3 through `right`. That is above `low`, through which rank 4 comes.
    Rank 5 comes to `root` directly."""

    root: Daemon
    left: Daemon
    right: Daemon
    low: Daemon

    def configs(self, *overrides: str) -> list[Config]:
        daemons = self.left, self.left, self.right, self.right, self.low, self.root
        return [configured(daemon.addresses, *overrides) for daemon in daemons]


SUMS = ((0, 1), (2, 3, (4,)), 5)  # nested by relay: ranks that are summed together, if no ranks share memory


@pytest.fixture(scope="module", params=[1, 2], ids=["one shard", "two shards"])
def tree(request: pytest.FixtureRequest) -> Iterator[Tree]:
    shards = request.param
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(Daemon(shards))
        left, right = (stack.enter_context(Daemon(shards, below(root))) for _ in range(2))
        low = stack.enter_context(Daemon(shards, below(right)))
        yield Tree(root, left, right, low)


@contextlib.contextmanager
def two_relays(*overrides: str) -> Iterator[tuple[Daemon, Daemon, Daemon]]:
    with (
        Daemon(1, *overrides) as root,
        Daemon(1, below(root), *overrides) as left,
        Daemon(1, below(root), *overrides) as right,
    ):
        yield root, left, right


def of_rank(rank: int, dtype: str) -> np.ndarray:
    """Some of its blocks are zero, others not; sums of six ranks are exact."""
    rng = np.random.default_rng(rank)
    x = rng.integers(-4, 5, 70_001).astype(dtype)
    for start in range(0, x.size, 256):
        if rng.random() < 0.6:
            x[start : start + 256] = 0
    return x


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sums_are_right(tree: Tree, transport: str) -> None:
    """Element types and operations of every kind, even those that no relay sums, and tensors without blocks."""
    calls = [(dtype, op) for dtype in ("float32", "int64", "float16") for op in ("sum", "max")] + [("float64", "mean")]
    brought = {dtype: [of_rank(rank, dtype) for rank in range(6)] for dtype, _ in calls}

    def run(comm: Communicator) -> list[np.ndarray]:
        totals = [comm.allreduce(brought[dtype][comm.rank].copy(), op=op) for dtype, op in calls]
        totals.append(comm.allreduce(np.empty(0, np.float32)))
        return totals

    results = run_job(tree.configs(*over(transport)), 6, run)
    for number, (dtype, op) in enumerate(calls):
        expected = reduce_by_tree(SUMS, brought[dtype], op)
        assert all(np.array_equal(result[number], expected) for result in results), (dtype, op)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_ranks_have_the_same_bits(tree: Tree, transport: str) -> None:
    """Also where the order of sums shows, twice in a row."""
    rng = np.random.default_rng(7)
    brought = rng.standard_normal((6, 50_000)).astype(np.float32)

    def run(comm: Communicator) -> list[bytes]:
        return [comm.allreduce(brought[comm.rank].copy()).tobytes() for _ in range(2)]

    results = run_job(tree.configs(*over(transport)), 6, run)
    assert len({each for result in results for each in result}) == 1
    if transport != "memory":  # in memory, ranks of one daemon are summed first
        assert results[0][0] == reduce_by_tree(SUMS, list(brought), "sum").tobytes()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_objects_and_the_rest(tree: Tree, transport: str) -> None:
    def run(comm: Communicator) -> bool:
        numbers = np.array([comm.rank, 10], np.int64)
        rows, values = comm.allreduce_rows(numbers, np.full((2, 8), comm.rank + 1, np.float32), n_rows=20)
        everybody = comm.allgather_object({"rank": comm.rank, "text": "x" * 5000 * comm.rank})
        x = np.full(1000, comm.rank, np.int32)
        comm.broadcast(x, root=4)
        parts = comm.allgather(np.full(3, comm.rank, np.float64))
        comm.barrier()
        return (
            rows.tolist() == [0, 1, 2, 3, 4, 5, 10]
            and values[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 21]
            and [each["rank"] for each in everybody] == list(range(6))
            and bool((x == 4).all())
            and parts.reshape(-1).tolist() == [rank for rank in range(6) for _ in range(3)]
        )

    assert run_job(tree.configs(*over(transport)), 6, run) == [True] * 6


def test_a_rank_that_refuses_a_group_is_named_to_the_others(tree: Tree) -> None:
    """The others learn its name, whichever rank comes first, and the next attempt succeeds."""

    def run(comm: Communicator) -> str:
        refuses = comm.rank in (1, 4)
        with pytest.raises(UsageError if refuses else RefusedError) as caught:
            comm.create_group([9] if refuses else None, name="all")
        with comm.create_group(name="all") as group:
            assert group.allreduce(np.ones(3))[0] == 6
        return str(caught.value)

    results = run_job(tree.configs(f"cluster.join_timeout_s={100 * WAIT_S}"), 6, run)
    own_errors = {results.pop(4), results.pop(1)}
    assert own_errors == {"ranks [9]: expected different ranks from 0 to 5"}
    assert all(result.endswith(f"has refused: {own_errors.copy().pop()}") for result in results)


def status_of(daemon: Daemon, job: str) -> JobStatus | None:
    answer = ask(daemon.addresses[0], configured(daemon.addresses), WAIT_S)
    return next((each for each in answer.jobs if each.name == job), None)


def test_a_relay_sends_the_union_once() -> None:
    """Two ranks with the same blocks: half of what they send goes on, and the status shows both levels."""
    x, job = np.ones(1_000_000, np.float32), unique_job("levels")
    with two_relays() as (root, left, right):

        def run(comm: Communicator) -> tuple[JobStatus | None, JobStatus | None]:
            comm.allreduce(x.copy())
            comm.barrier()
            result = (status_of(left, job), status_of(root, job)) if comm.rank == 0 else (None, None)
            comm.barrier()
            return result

        configs = [configured(each.addresses, *SOLO) for each in (left, left, right, right)]
        relay, top = run_job(configs, 4, run, job)[0]
    assert relay is not None
    assert top is not None
    assert (relay.upstream, top.upstream) == (root.addresses[0], "")
    assert (relay.joined, top.joined, relay.world_size) == (2, 4, 4)
    assert relay.traffic.received_bytes >= 2 * x.nbytes
    assert x.nbytes <= relay.traffic.up_sent_bytes < 1.05 * x.nbytes
    assert x.nbytes <= relay.traffic.up_received_bytes < 1.05 * x.nbytes
    assert 2 * x.nbytes <= top.traffic.received_bytes < 2.1 * x.nbytes
    assert [(each.address, each.ranks) for each in top.relays] == [(left.addresses[0], 2), (right.addresses[0], 2)]


def test_metrics_show_the_levels() -> None:
    job = JobStatus(
        name="a", generation=1, world_size=8, joined=4, age_s=1.0,
        traffic=Traffic(up_sent_bytes=3, up_received_bytes=4), upstream="top:1", relays=[JobRelay("low:1", 2)],
    )  # fmt: skip
    status = Status(
        shard="s", pid=1, version="1", uptime_s=1.0, connections=1, running=1, gathering=0, traffic=job.traffic,
        jobs_started=1, jobs_ended=0, aborts={}, refused=0, jobs=[job],
    )  # fmt: skip
    samples = [sample for metric in ShardCollector(lambda: {"s": status}).collect() for sample in metric.samples]
    results = {
        (sample.name, sample.labels.get("upstream", sample.labels.get("relay"))): sample.value for sample in samples
    }
    assert results["omnireduce_job_upstream", "top:1"] == 1
    assert results["omnireduce_job_relay_ranks", "low:1"] == 2
    assert results["omnireduce_job_up_sent_bytes_total", None] == results["omnireduce_up_sent_bytes_total", None] == 3


@contextlib.contextmanager
def looping(daemons: Sequence[Daemon], *arguments: str) -> Iterator[list[Worker]]:
    """A rank for each daemon, which has come that way."""
    job, size = unique_job("tree"), len(daemons)
    with contextlib.ExitStack() as stack:
        results = [
            stack.enter_context(Worker(daemon, job, rank, size, *arguments, overrides=SOLO))
            for rank, daemon in enumerate(daemons)
        ]
        for worker in results:
            worker.expect("joined")
        yield results


def expect_named(workers: Sequence[Worker], since: float, within_s: float, name: str) -> None:
    """All raise in time, and say this name."""
    errors = [worker.expect("error") for worker in workers]
    assert all(error["type"] == "AbortedError" and name in error["culprit"] for error in errors), errors
    assert all(error["at"] - since < within_s for error in errors), errors
    assert [worker.wait() for worker in workers] == [1] * len(workers)


@pytest.mark.parametrize("victim", ["relay", "root", "worker"])
def test_who_is_killed_is_named_on_all_ranks(victim: str) -> None:
    with two_relays() as (root, left, right), looping([left, left, right, right]) as workers:
        for worker in workers:
            expect_round(worker, "round", 1)
        if victim == "worker":
            killed = workers[1].signal(signal.SIGKILL)
            expect_named([workers[0], *workers[2:]], killed, DEATH_S, name_of(workers[1], 1))
        else:
            daemon = left if victim == "relay" else root
            killed = time.monotonic()
            os.kill(daemon.shard_pids[0], signal.SIGKILL)
            expect_named(workers, killed, DEATH_S, daemon.addresses[0])
        assert_serves(left)
        assert_serves(right)


def test_a_relay_that_stops_in_order_is_named() -> None:
    with Daemon(1) as root, Daemon(1, below(root)) as left, looping([left, root]) as workers:
        for worker in workers:
            expect_round(worker, "round", 1)
        stopped = left.signal(signal.SIGTERM)
        expect_named(workers, stopped, FAILURE_S, left.addresses[0])
        assert left.wait() == 0


def test_a_late_rank_is_named_through_its_relay() -> None:
    """The first rank of its relay is not taken for it."""
    with two_relays() as (_, left, right), looping([left, left, right, right], "--hold", "1", "1") as workers:
        workers[1].expect("held")
        expect_round(workers[2], "started", 1)
        warned = eventually(lambda: name_of(workers[1], 1) in workers[2].log, WAIT_S)
        assert warned, workers[2].log
        workers[1].go_on()
        for worker in workers:
            expect_round(worker, "round", 1)


def failure(daemon: Daemon, *overrides: str) -> OmniReduceError:
    config = configured(daemon.addresses, *SOLO, "cluster.join_timeout_s=20", *overrides)
    with pytest.raises(OmniReduceError) as caught:
        Communicator(config, rank=0, size=1, job=unique_job())
    return caught.value


def test_wrong_settings_are_explained() -> None:
    """Another number of aggregators above than the worker has, nobody above, and relays in a circle."""
    with Daemon(2) as root, Daemon(1, below(root)) as relay:
        error = failure(relay)
        assert isinstance(error, RefusedError)
        assert "cluster.aggregators has 1 addresses, and aggregator.upstream of this relay has 2" in str(error)
    address = free_address()
    with Daemon(1, f'aggregator.upstream=["{address}"]', "aggregator.join_timeout_s=0.5") as relay:
        assert (
            f"aggregator {address}, the upstream of relay {relay.addresses[0]}, could not be reached: Connection"
            in str(failure(relay))
        )
    relay_address, above = free_address(), free_address()
    with (
        Daemon(1, f'aggregator.upstream=["{above}"]', listen=relay_address) as relay,
        Daemon(1, f'aggregator.upstream=["{relay_address}"]', listen=above),
    ):
        assert "does aggregator.upstream lead in a circle?" in str(failure(relay))


def until_aborted(comm: Communicator) -> None:
    while True:
        comm.allreduce(np.ones(1000, np.float32))


@pytest.mark.parametrize("upstream", ['["nonsense"]', '["a:0"]', '["a:1", "a:1"]', "nonsense"])
def test_an_upstream_that_is_no_address_is_refused(upstream: str) -> None:
    with pytest.raises(ConfigError, match=r"aggregator\.upstream: .*expected"):
        configured([], f"aggregator.upstream={upstream}")


def test_an_elastic_job_goes_on_behind_relays() -> None:
    elastic = ("elastic.enabled=true", "elastic.min_ranks=2", "elastic.last_call_s=0.3", *SOLO)
    with two_relays() as (_, left, right):
        configs = [configured(each.addresses, *elastic) for each in (left, left, right)]

        def run(comm: Communicator) -> list[float]:
            results = [float(comm.allreduce(np.ones(1000, np.float32))[0])]
            if comm.rank == 1:
                return results
            with pytest.raises(AbortedError, match="rank 1"):
                until_aborted(comm)
            comm.reform()
            return [*results, float(comm.allreduce(np.ones(1000, np.float32))[0])]

        outcomes = start_job(configs, 3, run).outcomes()
    assert outcomes == [[3.0, 2.0], [3.0], [3.0, 2.0]]


@needs_openssl
def test_secrets_and_certificates(tmp_path: Path) -> None:
    """A relay proves the secret of its worker's team, and goes up by TLS."""
    teams = tmp_path / "teams"
    teams.mkdir(mode=0o700)
    secret = tmp_path / "secret"
    for file in (teams / "vision", secret):
        file.write_text("a secret of sixteen bytes or more\n" if file == secret else "another secret of many bytes\n")
        file.chmod(0o600)
    common = f"security.secret_file={secret}", f"security.teams_folder={teams}", *certificates().holder("aggregator")
    settings = "security.team=vision", f"security.secret_file={teams / 'vision'}", *certificates().holder("worker")
    with Daemon(1, *common) as root, Daemon(1, below(root), certificates().trust(), *common) as relay:
        config = configured(relay.addresses, *settings, certificates().trust(), *SOLO)
        assert run_job(config, 2, lambda comm: float(comm.allreduce(np.ones(9))[0]), "vision") == [2.0, 2.0]
