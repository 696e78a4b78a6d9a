"""Rows of a union, and what a shard may not say of them."""

from __future__ import annotations

import numpy as np
import pytest

from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.errors import ProtocolError
from omnireduce.protocol.collective.dense_operands import DenseTensor
from omnireduce.protocol.collective.row_operands import RowSet, RowsInto
from omnireduce.runtime.rank.calls.single import Pool


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_union_larger_than_expected_in_stripes_of_several_shards(shards: int) -> None:
    """One row of our own, 40 of others; every shard's arrive in parts and in order."""
    width, rows = 3, 41
    values = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
    layout = Layout(rows * width, width, shards, 2)
    pool = Pool()
    for _ in range(2):
        operand = RowSet(np.array([7]), values[7:8], layout, pool.take)
        for shard in range(shards):
            own_rows = np.array([row for row in range(rows) if layout.owner(row) == shard])
            for part in np.array_split(own_rows, 3):
                operand.put(values[part].view(np.uint8), part, np.zeros(len(part), np.bool_), False)
        operand.finish()
        numbers, union = operand.result
        assert numbers.tolist() == list(range(rows))
        assert np.array_equal(union, values)


def test_rows_that_are_left_out_are_those_that_were_brought() -> None:
    width = 3
    values = np.arange(4 * width, dtype=np.float32).reshape(4, width)
    operand = RowSet(np.array([2, 5, 9]), values[:3], Layout(10 * width, width), Pool().take)
    operand.put(values[3:].view(np.uint8), np.array([2, 3, 9]), np.array([True, False, True]), True)
    operand.finish()
    numbers, union = operand.result
    assert numbers.tolist() == [2, 3, 9]
    assert np.array_equal(union, values[[0, 3, 2]])


@pytest.mark.parametrize("unknown", [1, 4, 10])
@pytest.mark.parametrize("brought", [[], [2, 5, 9]])
def test_rows_that_were_not_brought_cannot_be_left_out(unknown: int, brought: list[int]) -> None:
    operand = RowSet(np.array(brought, np.int64), np.ones((len(brought), 2), np.float32), Layout(40, 2), Pool().take)
    with pytest.raises(ProtocolError, match="rows which this rank does not have"):
        operand.put(np.zeros((0, 8), np.uint8), np.array([unknown]), np.array([True]), True)


def test_rows_of_a_dense_result_that_are_left_out_are_those_that_were_brought() -> None:
    width = 3
    values = np.arange(4 * width, dtype=np.float32).reshape(4, width)
    out, layout = np.full((10, width), 7, np.float32), Layout(10 * width, width)
    operand = RowsInto(np.array([2, 5, 9]), values[:3], layout, Pool().take, out=out)
    assert operand.start(0) == 0
    assert not operand.is_divisible
    assert (out == 7).all()
    operand.put(values[3:].view(np.uint8), np.array([2, 3, 9]), np.array([True, False, True]), True)
    assert operand.is_divisible
    operand.finish()
    assert np.flatnonzero(out.any(axis=1)).tolist() == [2, 3, 9]
    assert np.array_equal(out[[2, 3, 9]], values[[0, 3, 2]])
    with pytest.raises(ProtocolError, match="rows which this rank does not have"):
        operand.put(np.zeros((0, 12), np.uint8), np.array([1]), np.array([True]), True)


def test_who_brought_nothing_cannot_have_a_block() -> None:
    operand = DenseTensor(None, np.ones(16, np.float32), Layout(16, 8), np.uint64(0))
    with pytest.raises(ProtocolError, match="blocks which this rank did not bring"):
        operand.put(np.zeros((0, 4), np.uint64), np.array([1]), np.array([True]), True)
