"""Block programs on the blocks of a shard, against an interpreter in NumPy."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_oracle import Oracle

from omnireduce.block_program import FIRST_COLUMN, BlockProgram, Operation, packed
from omnireduce.descriptor import Descriptor
from omnireduce.dtypes import Array
from omnireduce.errors import ProtocolError
from omnireduce.kernels.merge import ABSENT
from omnireduce.layout import Stripes
from omnireduce.protocol.shard_states import ShardStates

BLOCK, BLOCKS, RANKS, COLUMNS, CELLS, TOTALS = 8, 11, 3, 2, 2, 2
ELEMENTS = BLOCK * BLOCKS - 3
ROUNDED = (Operation.EXPONENTIAL, Operation.LOGARITHM, Operation.TANH)  # libraries differ in the last bits
SUMMED = (Operation.BLOCK_SUM, Operation.ADD_TO_TOTAL)
EXACT = [each for each in Operation if each not in ROUNDED + SUMMED]
SCALARS = packed(0.5, -2.0, 1.25, 0.0)


@st.composite
def programs(draw: st.DrawFn, operations: list[Operation] = EXACT, most: int = 12) -> BlockProgram:
    """Registers are filled first: what they hold before is nobody's business."""
    arrays = [0, 1, 2, *range(FIRST_COLUMN, FIRST_COLUMN + COLUMNS)]
    code = [(Operation.FILL, 1, 0, 0), (Operation.COPY, 2, 0, 0)]
    for _ in range(draw(st.integers(0, most))):
        operation = draw(st.sampled_from(operations))
        target, operand, other = draw(st.permutations(arrays))[:3]
        third = other if operation is Operation.SELECT else draw(st.integers(0, 1))
        if operation in (Operation.MOMENTS, Operation.ROOT_STEP):  # one of its arrays is the first of two
            pair, single = draw(st.sampled_from([(1, 0), (1, FIRST_COLUMN), (FIRST_COLUMN, 0), (FIRST_COLUMN, 2)]))
            target, operand = (pair, single) if operation is Operation.MOMENTS else (single, pair)
            third = 0
        code.append((operation, target, operand, third))
    return BlockProgram(
        state=0, columns=COLUMNS, cells=CELLS, code=b"".join(map(bytes, code)), scalars=SCALARS,
        every_block=draw(st.booleans()), totals=TOTALS,
    )  # fmt: skip


def run(states: ShardStates, program: BlockProgram, blocks: Array, out: Array) -> Array:
    """Run on the sums of `blocks`, (ranks, blocks, block size), as one shard of one does; return the totals."""
    called = Descriptor("allreduce", "", "float32", (ELEMENTS,), block_size=BLOCK, program=program)
    running = states.begin(called, program, Stripes())
    is_there = blocks.any(axis=2)
    numbers = np.arange(BLOCKS) if program.every_block else np.flatnonzero(is_there.any(axis=0))
    places = np.arange(RANKS * BLOCKS).reshape(RANKS, BLOCKS) * BLOCK
    parts = np.where(is_there, places, ABSENT).T[numbers]
    results = np.full((numbers.size, BLOCK), np.nan, np.float32)
    with np.errstate(all="ignore"):  # without the compiler NumPy would warn
        running.run(0, blocks.reshape(-1), parts, results, divisor=1, numbers=numbers)
    padded = np.zeros(BLOCKS * BLOCK, np.float32)
    padded[:ELEMENTS] = out
    padded.reshape(BLOCKS, BLOCK)[numbers] = results
    out[:] = padded[:ELEMENTS]
    return running.totals


def some_blocks(seed: int) -> Array:
    """Small whole numbers; no sum of a block is zero unless all ranks have zeros there."""
    rng = np.random.default_rng(seed)
    found = rng.integers(1, 5, (RANKS, BLOCKS, BLOCK)) * (rng.random((RANKS, BLOCKS, 1)) < 0.4)
    found[:, -1, BLOCK - 3 :] = 0
    return found.astype(np.float32)


@settings(max_examples=300, deadline=None)
@given(each=st.lists(programs(), min_size=1, max_size=3), seed=st.integers(0, 2**32 - 1))
def test_programs_do_what_their_instructions_say(each: list[BlockProgram], seed: int) -> None:
    """Bit for bit, one program after the other on the same state."""
    states, oracle = ShardStates(1 << 20), Oracle(ELEMENTS, BLOCK, COLUMNS, CELLS)
    out, expected = np.zeros((2, ELEMENTS), np.float32)
    for step, program in enumerate(each):
        blocks = some_blocks(seed + step)
        run(states, program, blocks, out)
        oracle.run(program, blocks.sum(axis=0, dtype=np.float32).reshape(-1)[:ELEMENTS], expected)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("operation", [*ROUNDED, *SUMMED])
def test_functions_and_sums(operation: Operation, every: bool) -> None:
    """Sums are exact here; the others differ by a few units in the last place."""
    code = bytes([Operation.ABSOLUTE, 0, 0, 0, Operation.ADD_SCALAR, 0, 0, 2, operation, 0, 0, 1])
    program = BlockProgram(0, COLUMNS, CELLS, code, SCALARS, every_block=every, totals=TOTALS)
    states, oracle = ShardStates(1 << 20), Oracle(ELEMENTS, BLOCK, COLUMNS, CELLS)
    out, expected = np.zeros((2, ELEMENTS), np.float32)
    blocks = some_blocks(5)
    totals = run(states, program, blocks, out)
    wanted = oracle.run(program, blocks.sum(axis=0, dtype=np.float32).reshape(-1)[:ELEMENTS], expected)
    if operation in SUMMED:
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(totals, wanted)
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_a_shard_keeps_only_its_own_blocks() -> None:
    """The second of two shards, in stripes of two blocks: blocks 2, 3, 6, 7, 10."""
    program = BlockProgram(0, 1, 0, bytes([Operation.ADD, FIRST_COLUMN, 0, 0, Operation.COPY, 0, FIRST_COLUMN, 0]))
    called = Descriptor("allreduce", "", "float32", (BLOCK * BLOCKS,), block_size=BLOCK, program=program)
    states = ShardStates(5 * BLOCK * 4)
    numbers = np.array([2, 3, 6, 7, 10])
    arena, found = np.arange(5 * BLOCK, dtype=np.float32), np.zeros((5, BLOCK), np.float32)
    for step in (1, 2):
        running = states.begin(called, program, Stripes(1, 2, 2))
        running.run(0, arena, (np.arange(5) * BLOCK).reshape(5, 1), found, divisor=1, numbers=numbers)
        np.testing.assert_array_equal(found.reshape(-1), arena * step)
    assert states.nbytes == 5 * BLOCK * 4
    states.drop(0)
    assert states.nbytes == 0


def test_states_have_a_limit_and_belong_to_one_tensor() -> None:
    program = BlockProgram(0, 1, 0, b"")
    called = Descriptor("allreduce", "", "float32", (BLOCK * BLOCKS,), block_size=BLOCK, program=program)
    states = ShardStates(BLOCK * BLOCKS * 4)
    states.begin(called, program, Stripes())
    with pytest.raises(ProtocolError, match="state 1 needs 352 bytes; 352 of the 352 that this job may keep"):
        states.begin(called, BlockProgram(1, 1, 0, b""), Stripes())
    for other, stripes in ((called, Stripes(0, 2, 2)), (msgspec.structs.replace(called, block_size=16), Stripes())):
        with pytest.raises(ProtocolError, match="it was made for another one"):
            states.begin(other, program, stripes)
    with pytest.raises(ProtocolError, match="it was made for another one"):
        states.begin(called, BlockProgram(0, 2, 0, b""), Stripes())
