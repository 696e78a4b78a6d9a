"""Counters of the aggregator's machine, and the ranks that it takes for late, in virtual time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import InprocCluster
from hypothesis import given
from hypothesis import strategies as st
from machine_bench import BLOCKS, Bench, aggregator, message

from omnireduce.core.status_messages import MAX_TOTAL, LateRank, Status, StatusRequest, Traffic
from omnireduce.core.wire.control import PROTOCOL_VERSION, Report, decode_control, encode_control
from omnireduce.errors import ProtocolError
from omnireduce.protocol.counters import Account
from omnireduce.protocol.shard import ShardMachine
from omnireduce.runtime.shard.status_requests import StatusPages

BLOCK = 8


def machine(bench: Bench) -> ShardMachine:
    assert isinstance(bench.machine, ShardMachine)
    return bench.machine


def collective(bench: Bench, number: int, order: list[int], pause_s: float) -> None:
    """The ranks begin in this order, with a pause between them; then the collective is complete."""
    for rank in order:
        bench.receive(rank, message(number, BLOCKS, [0], first=True))
        bench.advance()
        if rank != order[-1]:
            bench.now += pause_s
    for rank in order:
        bench.credit(rank)
    bench.now += 1000.0  # computing between two collectives is nobody's fault


def test_the_rank_that_comes_last_is_late_by_the_time_that_the_first_one_waited() -> None:
    bench = aggregator()
    collective(bench, 0, [0, 1], 2.5)
    assert machine(bench).account.late == [LateRank(1, 2.5)]
    collective(bench, 1, [1, 0], 4.0)
    collective(bench, 2, [0, 1], 0.25)
    assert machine(bench).account.late == [LateRank(0, 4.0), LateRank(1, 2.75)]


def test_ranks_that_come_together_are_not_late() -> None:
    bench = aggregator()
    collective(bench, 0, [0, 1], 0.0)
    assert machine(bench).account.late == []


def test_whom_a_collective_waits_for_and_since_when() -> None:
    bench = aggregator()
    assert machine(bench).waiting(bench.now) is None
    bench.now = 5.0
    bench.receive(1, message(0, 2, [0, 1], first=True))
    bench.advance()
    bench.now = 8.0
    wait = machine(bench).waiting(bench.now)
    assert wait is not None
    assert (wait.ranks, wait.who, wait.seconds) == ([0], "rank 0", 3.0)
    assert wait.what.startswith("collective 0 (allreduce 'w'")
    assert machine(bench).slots_in_use == (1, 1)
    bench.receive(0, message(0, BLOCKS, [0], first=True))
    bench.advance()
    wait = machine(bench).waiting(bench.now)
    assert wait is not None
    assert wait.ranks == [1]
    bench.receive(1, message(0, BLOCKS))
    bench.advance()
    assert machine(bench).waiting(bench.now) is None
    assert machine(bench).slots_in_use == (0, 2)  # the first result was full with two blocks
    for rank in (0, 0, 1):
        bench.credit(rank)
    assert machine(bench).slots_in_use == (0, 1)
    bench.credit(1)
    assert machine(bench).slots_in_use == (0, 0)


@pytest.mark.parametrize("shards", [1, 3])
def test_blocks_are_counted_once_on_the_shard_that_has_them(shards: int) -> None:
    """Rank 0 has blocks 0 to 19 of 50, rank 1 blocks 10 to 49, the last of them short; twice."""
    cluster = InprocCluster(2, shards=shards)
    for number in range(2):
        for rank, blocks in enumerate([range(20), range(10, 50)]):
            x = np.zeros(50 * BLOCK - 3, np.float32)
            for block in blocks:
                x[block * BLOCK] = 1.0
            cluster.allreduce(rank, x, name=str(number))
    cluster.run()
    total = Traffic()
    for each in cluster.aggregators:
        assert each.account.traffic.collectives == 2
        total.add(each.account.traffic)
    assert (total.own_blocks, total.union_blocks) == (2 * 60, 2 * 50)


def test_totals_stay_where_integers_end() -> None:
    """Ranks may announce 2^48 blocks with a message of none, as often as they like."""
    bench = aggregator()
    account, report = machine(bench).account, StatusPages("a:1", lambda: 0.0)
    account.traffic.rank_blocks = report._ended.rank_blocks = MAX_TOTAL - BLOCKS
    collective(bench, 0, [0, 1], 0.0)
    assert (account.traffic.rank_blocks, account.traffic.blocks) == (MAX_TOTAL, BLOCKS)
    report._ended.add(account.traffic)
    page = report.page(StatusRequest(PROTOCOL_VERSION), [], [], connections=0)
    assert decode_control(encode_control(page)) == page
    assert isinstance(page, Status)
    assert page.traffic.rank_blocks == MAX_TOTAL


@pytest.mark.parametrize("kind", ["broadcast", "allgather", "barrier"])
def test_only_reductions_count_for_the_density(kind: Any) -> None:
    cluster = InprocCluster(2)
    for rank in range(2):
        target = np.ones(0 if kind == "barrier" else 100, np.float64)
        cluster.move_bytes(rank, kind, target if rank == 0 else None, target)
    cluster.run()
    [result] = [each.account.traffic for each in cluster.aggregators]
    assert result.collectives == 1
    assert result.density is result.union_density is None


def test_who_has_reported_later_is_not_late() -> None:
    account = Account(range(3))
    account.report(0, Report(behind=[1], total=1, what="x", waited_s=1.0), 1.0)
    assert account.late_ranks_of([0, 2]) == [1, 2]
    account.report(1, Report(), 2.0)
    assert account.late_ranks_of([0, 2]) == [0, 2]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 8)), min_size=1, max_size=4), st.data())
def test_reports_of_different_moments_make_no_density_above_one(collectives: list[tuple[int, int]], data: Any) -> None:
    """Each rank has reported the first few collectives, of so many blocks, all of them its own. Of each result rank 0
    has so many blocks, rank 1 the others."""
    account, done = (
        Account(range(2)),
        [data.draw(st.integers(0, len(collectives)), label=f"rank {r}") for r in range(2)],
    )
    for rank, count in enumerate(done):
        blocks = sum(all_of_it for all_of_it, _ in collectives[:count])
        first = sum(min(part, all_of_it) for all_of_it, part in collectives[:count])
        union = blocks - first if rank else first
        account.report(rank, Report(collectives=count, blocks=blocks, own_blocks=blocks, union_blocks=union), 0.0)
    result = account.total()
    assert result.collectives == max(done)
    assert result.density in (1.0, None)
    assert result.union_density is None or result.union_density <= 1.0
    if done[0] == done[1] == len(collectives):
        assert (result.blocks, result.rank_blocks, result.union_density) == (blocks, 2 * blocks, 1.0)


@pytest.mark.parametrize("name", ["own_blocks", "union_blocks"])
def test_a_rank_that_reports_more_blocks_than_there_were_breaks_the_rules(name: str) -> None:
    account = Account(range(2))
    account.report(0, Report(blocks=3, **{name: 3}), 0.0)
    with pytest.raises(ProtocolError, match="more blocks than there were"):
        account.report(0, Report(blocks=4, **{name: 5}), 0.0)
