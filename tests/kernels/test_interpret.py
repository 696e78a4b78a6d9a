"""Block programs on the blocks of a shard, against an interpreter in NumPy."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_oracle import FLUSHES_HERE, SMALLEST, Oracle

from omnireduce.core.block_program import (
    FIRST_COLUMN,
    PROGRAM_ELEMENTS,
    STEP_WORK,
    BlockProgram,
    Operation,
    packed,
)
from omnireduce.core.blocks_and_stripes import Stripes
from omnireduce.core.descriptor import Descriptor
from omnireduce.core.dtypes import Array
from omnireduce.errors import ProtocolError, UsageError
from omnireduce.kernels.merge_indices import ABSENT
from omnireduce.kernels.reduce import reduce_blocks
from omnireduce.protocol.collective.block_programs import ShardStates

BLOCK, BLOCKS, RANKS, COLUMNS, CELLS, TOTALS = 8, 11, 3, 2, 2, 2
ELEMENTS = BLOCK * BLOCKS - 3
ROUNDED = (Operation.EXPONENTIAL, Operation.LOGARITHM, Operation.TANH)  # libraries differ in the last bits
SUMMED = (Operation.BLOCK_SUM, Operation.ADD_TO_TOTAL)
EXACT = [each for each in Operation if each not in ROUNDED + SUMMED]
SCALARS = packed(0.5, -2.0, 1.25, 0.0)


@st.composite
def programs(draw: st.DrawFn, operations: list[Operation] = EXACT, limit: int = 12) -> BlockProgram:
    """Registers are filled first: what they hold before is nobody's business."""
    arrays = [0, 1, 2, *range(FIRST_COLUMN, FIRST_COLUMN + COLUMNS)]
    code = [(Operation.FILL, 1, 0, 0), (Operation.COPY, 2, 0, 0)]
    for _ in range(draw(st.integers(0, limit))):
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
    descriptor = Descriptor("allreduce", "", "float32", (ELEMENTS,), block_size=BLOCK, program=program)
    running = states.begin(descriptor, program, Stripes())
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
    result = rng.integers(1, 5, (RANKS, BLOCKS, BLOCK)) * (rng.random((RANKS, BLOCKS, 1)) < 0.4)
    result[:, -1, BLOCK - 3 :] = 0
    return result.astype(np.float32)


@settings(max_examples=5 * settings.default.max_examples)
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


def tiny_blocks(seed: int) -> Array:
    """Numbers about the smallest normal one, and denormal ones, of one rank: every sum is exact."""
    rng = np.random.default_rng(seed)
    result = np.ldexp(rng.integers(-(1 << 24), 1 << 24, (BLOCKS, BLOCK)), rng.integers(-152, -146, (BLOCKS, BLOCK)))
    others = np.zeros((RANKS - 1, BLOCKS, BLOCK))
    return np.concatenate([result[None], others]).astype(np.float32)


def bits_of(numbers: Array) -> Array:
    """Zeros with their signs; all that is no number alike."""
    return np.where(np.isnan(numbers), np.float32(np.nan), numbers).view(np.int32)


@settings(max_examples=5 * settings.default.max_examples)
@given(program=programs(), seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([0.5, 0.75, 1.0, 1e-39, 1e20]))
def test_denormal_numbers_are_zero(program: BlockProgram, seed: int, scale: float) -> None:
    """Bit for bit, and nothing smaller than a normal number comes out or is kept."""
    program = msgspec.structs.replace(program, every_block=True, scalars=packed(scale, 1e-30, -0.5, 2.0))
    states, oracle = ShardStates(1 << 20), Oracle(ELEMENTS, BLOCK, COLUMNS, CELLS)
    out, expected = np.zeros((2, ELEMENTS), np.float32)
    for step in range(2):
        blocks = tiny_blocks(seed + step)
        run(states, program, blocks, out)
        oracle.run(program, blocks[0].reshape(-1)[:ELEMENTS], expected)
        np.testing.assert_array_equal(bits_of(out), bits_of(expected))
        assert not FLUSHES_HERE or not np.any((out != 0) & (np.abs(out) < SMALLEST))


@pytest.mark.skipif(not FLUSHES_HERE, reason="nothing is compiled, or not for a processor that can")
def test_moments_that_decay_end_at_zero() -> None:
    """As of a row that no gradient touches any more. Rounded to denormal numbers, they would stay there for ever."""
    moments = bytes([Operation.MOMENTS, FIRST_COLUMN, 0, 0])
    shown = bytes([Operation.COPY, 0, FIRST_COLUMN, 0, Operation.ADD, 0, FIRST_COLUMN + 1, 0])
    program = BlockProgram(0, 2, 0, moments + shown, packed(0.9, 0.1, 0.99, 0.01), every_block=True)
    states, out = ShardStates(1 << 20), np.zeros(ELEMENTS, np.float32)
    run(states, program, some_blocks(3), out)
    assert out.any()
    nothing = np.zeros((RANKS, BLOCKS, BLOCK), np.float32)
    for _ in range(9000):
        run(states, program, nothing, out)
    assert not out.any()


def test_a_program_is_no_more_than_one_step_of_a_shard_may_be() -> None:
    """A block is worked on in one step, so the longer a program takes, the smaller blocks must be."""
    tanh, scale = (bytes([each, 0, 0, 0] * 64) for each in (Operation.TANH, Operation.SCALE))
    for code, size in ((scale, PROGRAM_ELEMENTS), (tanh, STEP_WORK // (64 * 90))):
        program = BlockProgram(0, 0, 0, code, packed(1.0))
        assert program.max_elements == size
        Descriptor("allreduce", "", "float32", (1 << 20,), block_size=size, program=program)
        with pytest.raises(UsageError, match=f"blocks of {size + 8} elements: expected at most {size} with this"):
            Descriptor("allreduce", "", "float32", (1 << 20,), block_size=size + 8, program=program)


def test_only_programs_take_denormal_numbers_for_zero() -> None:
    """The processor's mode is what it was before, and sums are exact."""
    program = BlockProgram(0, 1, 0, bytes([Operation.SCALE, 0, 0, 0]), packed(1.0))
    out, blocks = np.zeros(ELEMENTS, np.float32), np.full((RANKS, BLOCKS, BLOCK), SMALLEST / 4, np.float32)
    run(ShardStates(1 << 20), program, blocks[:, :, :], out)
    assert not FLUSHES_HERE or not out.any()
    half = np.full(3, SMALLEST / 2, np.float32)
    assert np.all(half * np.float32(0.5) == SMALLEST / 4)
    reduced = np.zeros((1, BLOCK), np.float32)
    reduce_blocks(0, blocks.reshape(-1), np.arange(2).reshape(1, 2) * BLOCK, reduced, 1)
    assert np.all(reduced == SMALLEST / 2)


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
    expected_totals = oracle.run(program, blocks.sum(axis=0, dtype=np.float32).reshape(-1)[:ELEMENTS], expected)
    if operation in SUMMED:
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(totals, expected_totals)
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_a_shard_keeps_only_its_own_blocks() -> None:
    """The second of two shards, in stripes of two blocks: blocks 2, 3, 6, 7, 10."""
    program = BlockProgram(0, 1, 0, bytes([Operation.ADD, FIRST_COLUMN, 0, 0, Operation.COPY, 0, FIRST_COLUMN, 0]))
    descriptor = Descriptor("allreduce", "", "float32", (BLOCK * BLOCKS,), block_size=BLOCK, program=program)
    states = ShardStates(5 * BLOCK * 4)
    numbers = np.array([2, 3, 6, 7, 10])
    arena, result = np.arange(5 * BLOCK, dtype=np.float32), np.zeros((5, BLOCK), np.float32)
    for step in (1, 2):
        running = states.begin(descriptor, program, Stripes(1, 2, 2))
        running.run(0, arena, (np.arange(5) * BLOCK).reshape(5, 1), result, divisor=1, numbers=numbers)
        np.testing.assert_array_equal(result.reshape(-1), arena * step)
    assert states.nbytes == 5 * BLOCK * 4
    states.drop(0)
    assert states.nbytes == 0


def test_states_have_a_limit_and_belong_to_one_tensor() -> None:
    program = BlockProgram(0, 1, 0, b"")
    descriptor = Descriptor("allreduce", "", "float32", (BLOCK * BLOCKS,), block_size=BLOCK, program=program)
    states = ShardStates(BLOCK * BLOCKS * 4)
    states.begin(descriptor, program, Stripes())
    with pytest.raises(ProtocolError, match="state 1 needs 352 bytes; 352 of the 352 that this job may keep"):
        states.begin(descriptor, BlockProgram(1, 1, 0, b""), Stripes())
    for other, stripes in (
        (descriptor, Stripes(0, 2, 2)),
        (msgspec.structs.replace(descriptor, block_size=16), Stripes()),
    ):
        with pytest.raises(ProtocolError, match="it was made for another one"):
            states.begin(other, program, stripes)
    with pytest.raises(ProtocolError, match="it was made for another one"):
        states.begin(descriptor, BlockProgram(0, 2, 0, b""), Stripes())
