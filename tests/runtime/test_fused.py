"""Sums that go through a block program, over real aggregators."""

from __future__ import annotations

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job
from pairwise import pairwise
from program_oracle import Oracle
from transports import KINDS

from omnireduce import Communicator, UsageError
from omnireduce.core.block_program import BlockProgram, Operation, packed
from omnireduce.core.dtypes import Array
from omnireduce.support.config import Config

MOMENTUM, WEIGHTS = 8, 9  # columns


def code(*instructions: tuple[int, ...]) -> bytes:
    return b"".join(bytes([*instruction, 0, 0, 0][:4]) for instruction in instructions)


def momentum(*, every: bool, rate: float = 0.5) -> BlockProgram:
    """m = m / 2 + g; w -= rate * m, and the totals of m and 1."""
    return BlockProgram(
        state=7, columns=2, cells=1, scalars=packed(0.5, -rate, 1.0), every_block=every, totals=2,
        code=code(
            (Operation.SCALE, MOMENTUM, 0, 0),
            (Operation.ADD, MOMENTUM, 0),
            (Operation.ADD_SCALED, WEIGHTS, MOMENTUM, 1),
            (Operation.COPY, 0, WEIGHTS),
            (Operation.ADD_TO_TOTAL, MOMENTUM, 0, 0),
            (Operation.FILL, 1, 0, 2),
            (Operation.ADD_TO_TOTAL, 1, 0, 1),
        ),
    )  # fmt: skip


def gradient(rank: int, step: int, elements: int) -> Array:
    """Small whole numbers in some of the blocks."""
    rng = np.random.default_rng([rank, step])
    x = rng.integers(-8, 9, elements).astype(np.float32)
    blocks = np.repeat(rng.random(-(-elements // 64)) < 0.4, 64)[:elements]
    return np.where(blocks, x, np.float32(0))


@pytest.mark.parametrize(
    ("elements", "by_shards", "every"),
    pairwise([1, 64, 3000, 100_003], KINDS, [False, True]),
    indirect=["by_shards"],
)
def test_a_program_runs_on_each_sum(by_shards: Config, elements: int, every: bool) -> None:
    """Three ranks, five steps; whole numbers and halves, so that sums are exact."""

    def run(comm: Communicator) -> list[tuple[Array, Array]]:
        with comm.create_group(name="programs", state_bytes=4 << 20) as group:
            weights, results = np.zeros(elements, np.float32), []
            for step in range(5):
                x = gradient(comm.rank, step, elements)
                before = x.copy()
                done = group.fused_allreduce(x, momentum(every=every), out=weights, block_size=64)
                assert done.out is weights
                assert (x.view(np.uint32) == before.view(np.uint32)).all()
                results.append((weights.copy(), done.totals))
            return results

    outcomes = run_job(by_shards, 3, run)
    oracle, expected = Oracle(elements, 64, 2, 1), np.zeros(elements, np.float32)
    for step in range(5):
        total = sum(gradient(rank, step, elements) for rank in range(3))
        totals = oracle.run(momentum(every=every), np.asarray(total), expected)
        for outcome in outcomes:
            assert (outcome[step][0] == expected).all(), step
            assert (outcome[step][1] == totals).all()


def test_rows_go_through_a_program(by_shards: Config) -> None:
    """Each row has a cell, which counts how often it was summed."""
    count = BlockProgram(
        state=1, columns=0, cells=1, scalars=packed(1.0),
        code=code(
            (Operation.LOAD_CELL, 1, 0, 0), (Operation.ADD_SCALAR, 1, 0, 0), (Operation.STORE_CELL, 1, 0, 0),
            (Operation.ADD, 0, 1),
        ),
    )  # fmt: skip

    def run(comm: Communicator) -> tuple[Array, Array, Array]:
        with comm.create_group(name="rows", state_bytes=1 << 20) as group:
            table = np.full((1000, 6), -1, np.float32)
            for step in range(3):
                numbers = np.array([comm.rank, 500 + step, 999])
                done = group.fused_allreduce_rows(numbers, np.ones((3, 6), np.float32), count, n_rows=1000, out=table)
            return table, done.indices, done.rows

    expected = np.full((1000, 6), -1, np.float32)
    expected[[0, 1, 2]] = 1 + 3
    expected[[500, 501, 502]] = 3 + 1
    expected[999] = 3 + 3
    for table, numbers, rows in run_job(by_shards, 3, run):
        assert (table == expected).all()
        assert numbers.tolist() == [0, 1, 2, 502, 999]
        assert (rows == expected[numbers]).all()


def test_a_state_is_read_by_a_rank_that_brings_nothing(local: Config) -> None:
    keep = BlockProgram(3, 1, 0, code((Operation.COPY, 8, 0)), every_block=True)
    read = BlockProgram(3, 1, 0, code((Operation.COPY, 0, 8)), every_block=True)

    def run(comm: Communicator) -> Array:
        with comm.create_group(name="reading", state_bytes=1 << 20) as group:
            own = np.arange(1000, dtype=np.float32) if comm.rank == 1 else None
            kept, result = np.ones(1000, np.float32), np.ones(1000, np.float32)
            group.fused_allreduce(own, keep, out=kept)
            group.fused_allreduce(None, read, out=result, wanted=comm.rank != 2)
            assert (kept == np.arange(1000)).all()
            return result

    first, second, third = run_job(local, 3, run)
    assert (first == np.arange(1000)).all()
    assert (second == first).all()
    assert (third == 1).all()


def test_a_state_may_end(local: Config) -> None:
    def run(comm: Communicator) -> list[float]:
        with comm.create_group(name="ending", state_bytes=1 << 12) as group:
            results, one = [], np.ones(1000, np.float32)
            for drops in (False, True, False):
                program = BlockProgram(0, 1, 0, code((Operation.ADD, 8, 0), (Operation.COPY, 0, 8)), drops=drops)
                results.append(float(group.fused_allreduce(one, program, out=np.empty_like(one)).out[0]))
            return results

    assert run_job(local, 2, run) == [[2, 4, 2]] * 2


def test_what_finds_no_room_ends_the_job(local: Config) -> None:
    def run(comm: Communicator) -> str:
        with comm.create_group(name="small", state_bytes=1000) as group:
            with pytest.raises(Exception, match=r"raise protocol\.state_bytes") as caught:
                group.fused_allreduce(np.ones(1000, np.float32), momentum(every=False), out=np.zeros(1000, np.float32))
            return str(caught.value)

    for text in run_job(local, 2, run):
        assert "state 7 needs" in text
        assert "1000 that this job may keep" in text


def test_a_state_belongs_to_one_tensor(local: Config) -> None:
    def run(comm: Communicator) -> str:
        with comm.create_group(name="two", state_bytes=1 << 20) as group:
            x = np.ones(1000, np.float32)
            group.fused_allreduce(x, momentum(every=False), out=np.zeros_like(x))
            with pytest.raises(Exception, match="it was made for another one") as caught:
                group.fused_allreduce(x[:900], momentum(every=False), out=np.zeros(900, np.float32))
            return str(caught.value)

    assert len(run_job(local, 2, run)) == 2


def test_wrong_arguments_are_told(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        x = np.ones(10, np.float32)
        with pytest.raises(UsageError, match="exchange in memory, where no program runs"):
            comm.fused_allreduce(x, momentum(every=False), out=np.zeros_like(x))
        with comm.create_group(name="wrong", state_bytes=1000) as group:
            for wrong, message in (
                (lambda: group.fused_allreduce(x, momentum(every=False), out=x), "needs two arrays"),
                (lambda: group.fused_allreduce(x, momentum(every=False), out=np.zeros(9, np.float32)), "the same"),
                (lambda: group.fused_allreduce(x.astype(float), momentum(every=False), out=x), "float32"),
                (lambda: group.fused_allreduce(x, "adam", out=x), "expected a BlockProgram"),
                (
                    lambda: group.fused_allreduce(x, momentum(every=False), out=np.zeros_like(x), block_size=1 << 15),
                    "at most 16384",
                ),
            ):
                with pytest.raises(UsageError, match=message):
                    wrong()

    run_job(configured(daemon.addresses), 2, run)


def test_scalars_are_told_apart_by_their_bits(local: Config) -> None:
    """0.0 and -0.0 are equal numbers."""

    def run(comm: Communicator) -> list[bool]:
        with comm.create_group(name="signs", state_bytes=1) as group:
            results, one = [], np.ones(10, np.float32)
            for number in (-0.0, 0.0):
                program = BlockProgram(0, 0, 0, code((Operation.FILL, 0, 0, 0)), packed(number))
                results.append(bool(np.signbit(group.fused_allreduce(one, program, out=np.ones_like(one)).out[0])))
            return results

    assert run_job(local, 2, run) == [[True, False]] * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"code": b"abc"}, "code of 3 bytes"),
        ({"code": bytes(4 * 65)}, "code of 260 bytes"),
        ({"code": bytes([99, 0, 0, 0])}, "operation 99"),
        ({"code": code((Operation.ADD, 0, 9))}, r"instruction 0 \(ADD\) uses operand 9 of 9"),
        ({"code": code((Operation.ADD, 1, 1))}, "uses an operand twice"),
        ({"code": code((Operation.SELECT, 1, 2, 2))}, "uses an operand twice"),
        ({"code": code((Operation.SCALE, 1, 0, 1)), "scalars": packed(1.0)}, "uses scalar 1 of 1"),
        ({"code": code((Operation.MOMENTS, 8, 1, 0)), "columns": 2, "scalars": packed(1, 2, 3)}, "uses scalar 3 of 3"),
        ({"code": code((Operation.MOMENTS, 8, 1, 0))}, "uses operand 9 of 9"),
        ({"code": code((Operation.MOMENTS, 1, 2, 0))}, "uses an operand twice"),
        ({"code": code((Operation.ROOT_STEP, 2, 1, 0))}, "uses an operand twice"),
        ({"code": code((Operation.STORE_CELL, 1, 0, 0))}, "uses cell 0 of 0"),
        ({"code": code((Operation.ADD_TO_TOTAL, 1, 0, 2)), "totals": 2}, "uses total 2 of 2"),
        ({"scalars": b"abc"}, "scalars of 3 bytes"),
        ({"columns": 9}, "columns 9; expected 0 to 8"),
        ({"state": -1}, "state -1; expected 0 to 65535"),
    ],
)
def test_programs_are_checked(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BlockProgram(**({"state": 0, "columns": 1, "cells": 0, "code": b""} | fields))  # type: ignore[arg-type]


def test_totals_alone_may_come_back(by_shards: Config) -> None:
    """The squared norm of a sum, of which no block is a result."""
    square = BlockProgram(
        0, 0, 0, code((Operation.SQUARE, 0), (Operation.ADD_TO_TOTAL, 0, 0, 0)), totals=1, returns=False
    )

    def run(comm: Communicator) -> tuple[Array, float]:
        with comm.create_group(name="norms", state_bytes=1) as group:
            out = np.full(100_003, 7, np.float32)
            done = group.fused_allreduce(gradient(comm.rank, 0, out.size), square, out=out, block_size=64)
            return out, float(done.totals[0])

    total = sum(gradient(rank, 0, 100_003) for rank in range(3))
    for out, norm in run_job(by_shards, 3, run):
        assert (out == 7).all()
        assert norm == np.square(total, dtype=np.float64).sum()
