"""A slow, obvious interpreter of block programs, in NumPy."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator

import numpy as np

from omnireduce.core.block_program import FIRST_COLUMN, INSTRUCTION_BYTES, REGISTERS, BlockProgram, Operation
from omnireduce.core.dtypes import Array
from omnireduce.kernels.compiling.jit import has_compiler
from omnireduce.kernels.instructions import FLUSHES

F = np.float32
FLUSHES_HERE = has_compiler() and platform.machine() in FLUSHES
SMALLEST = np.finfo(F).tiny
# A result below this is flushed to zero. x86 compares the result that is rounded to 24 bits, Arm the exact one.
TOO_SMALL = SMALLEST if platform.machine() == "aarch64" else SMALLEST * (1 - 2.0**-25)


def dropped(exact: Array) -> Array:
    """float64 to float32; what is smaller than a normal number is zero. Sums and scalars of a program are so before it
    begins, on every processor."""
    result = exact.astype(F)
    return np.where(np.abs(exact) < TOO_SMALL, np.copysign(F(0), result), result)


def rounded(exact: Array) -> Array:
    """float64 to float32, as the instructions of a program have it: where the processor can, they make zero of what is
    smaller than a normal number. Of one operation on two numbers of float32, float64 has enough digits for that."""
    return dropped(exact) if FLUSHES_HERE else exact.astype(F)


def wide(*numbers: Array | np.float32) -> Iterator[Array]:
    """As float64."""
    return (np.asarray(number, np.float64) for number in numbers)


def add(x: Array, y: Array | np.float32) -> Array:
    return rounded(np.add(*wide(x, y)))


def subtract(x: Array, y: Array) -> Array:
    return rounded(np.subtract(*wide(x, y)))


def multiply(x: Array, y: Array | np.float32) -> Array:
    return rounded(np.multiply(*wide(x, y)))


def divide(x: Array | np.float32, y: Array) -> Array:
    return rounded(np.divide(*wide(x, y)))


WITH_OPERAND: dict[Operation, Callable[[Array, Array, np.float32, np.float32], Array]] = {
    Operation.COPY: lambda d, a, s, t: a.copy(),
    Operation.ADD: lambda d, a, s, t: add(d, a),
    Operation.SUBTRACT: lambda d, a, s, t: subtract(d, a),
    Operation.SUBTRACT_FROM: lambda d, a, s, t: subtract(a, d),
    Operation.MULTIPLY: lambda d, a, s, t: multiply(d, a),
    Operation.DIVIDE: lambda d, a, s, t: divide(d, a),
    Operation.DIVIDE_INTO: lambda d, a, s, t: divide(a, d),
    Operation.MINIMUM: lambda d, a, s, t: np.minimum(d, a),
    Operation.MAXIMUM: lambda d, a, s, t: np.maximum(d, a),
    Operation.GREATER: lambda d, a, s, t: (d > a).astype(F),
    Operation.ADD_SCALED: lambda d, a, s, t: add(d, multiply(a, s)),
    Operation.MIX: lambda d, a, s, t: add(multiply(d, s), multiply(a, t)),
    Operation.MIX_SQUARE: lambda d, a, s, t: add(multiply(d, s), multiply(multiply(a, a), t)),
    Operation.ROOT: lambda d, a, s, t: add(multiply(np.sqrt(a), s), t),
}
ALONE: dict[Operation, Callable[[Array, np.float32], Array]] = {
    Operation.FILL: lambda d, s: np.full_like(d, s),
    Operation.ADD_SCALAR: lambda d, s: add(d, s),
    Operation.SCALE: lambda d, s: multiply(d, s),
    Operation.SQUARE: lambda d, s: multiply(d, d),
    Operation.SQUARE_ROOT: lambda d, s: np.sqrt(d),
    Operation.ABSOLUTE: lambda d, s: np.abs(d),
    Operation.NEGATE: lambda d, s: -d,
    Operation.RECIPROCAL: lambda d, s: divide(F(1), d),
    Operation.EXPONENTIAL: lambda d, s: rounded(np.exp(d).astype(np.float64)),
    Operation.LOGARITHM: lambda d, s: np.log(d),
    Operation.TANH: lambda d, s: np.tanh(d),
}


class Oracle:
    """State of a tensor of `elements`, in blocks of `block_size`, and a slow run of block programs on it."""

    def __init__(self, elements: int, block_size: int, columns: int, cells: int) -> None:
        self.elements, self.block_size = elements, block_size
        self.blocks = -(-elements // block_size)
        self.columns = np.zeros((columns, self.blocks, block_size), F)
        self.cells = np.zeros((cells, self.blocks), F)

    def run(self, program: BlockProgram, total: Array, out: Array) -> Array:
        """Run on the sum of all ranks, float32 (elements,); put results into `out`, return the program's totals."""
        padded = np.zeros((2, self.blocks * self.block_size), F)
        padded[:, : self.elements] = total, out
        sums, results = padded.reshape(2, self.blocks, self.block_size)
        totals = np.zeros(program.totals)
        with np.errstate(all="ignore"):
            for block in range(self.blocks):
                if program.every_block or (sums[block] != 0).any():
                    results[block] = self._run_on(program, sums[block], block, totals)
        out[:] = padded[1, : self.elements]
        return totals

    def _run_on(self, program: BlockProgram, block_sum: Array, block: int, totals: Array) -> Array:
        """One block. Registers that were not set hold anything: programs of tests do not read them."""
        operands = {
            0: dropped(block_sum.astype(np.float64)),
            **{number: np.zeros(self.block_size, F) for number in range(1, REGISTERS)},
        }
        operands |= {FIRST_COLUMN + at: self.columns[at, block].copy() for at in range(len(self.columns))}
        valid = min(self.block_size, self.elements - block * self.block_size)
        for at in range(0, len(program.code), INSTRUCTION_BYTES):
            number, d, a, third = program.code[at : at + INSTRUCTION_BYTES]
            operation = Operation(number)
            numbers = dropped(np.array([*program.numbers, 0]))
            s, t, u, v = (numbers[min(third + each, len(program.numbers))] for each in range(4))
            if operation in (Operation.MOMENTS, Operation.ROOT_STEP):
                _run_on_pair(operation, operands, d, a, (s, t, u, v))
            elif operation in WITH_OPERAND:
                operands[d] = WITH_OPERAND[operation](operands[d], operands[a], s, t)
            elif operation is Operation.SELECT:
                operands[d] = np.where(operands[d] != 0, operands[a], operands[third])
            elif operation in ALONE:
                operands[d] = ALONE[operation](operands[d], s)
            elif operation is Operation.BLOCK_SUM:
                operands[d] = np.full_like(operands[d], rounded(operands[d][:valid].astype(np.float64).sum()))
            elif operation is Operation.LOAD_CELL:
                operands[d] = np.full_like(operands[d], self.cells[third, block])
            elif operation is Operation.STORE_CELL:
                self.cells[third, block] = operands[d][0]
            else:
                totals[third] += operands[d][:valid].astype(np.float64).sum()
        for number in range(len(self.columns)):
            self.columns[number, block] = operands[FIRST_COLUMN + number]
        return operands[0]


def _run_on_pair(
    operation: Operation, operands: dict[int, Array], d: int, a: int, scalars: tuple[np.float32, ...]
) -> None:
    """An instruction one of whose arrays is the first of two."""
    s, t, u, v = scalars
    if operation is Operation.MOMENTS:
        operands[d + 1] = WITH_OPERAND[Operation.MIX_SQUARE](operands[d + 1], operands[a], u, v)
        operands[d] = WITH_OPERAND[Operation.MIX](operands[d], operands[a], s, t)
    else:
        root = WITH_OPERAND[Operation.ROOT](operands[d], operands[a + 1], s, t)
        operands[d] = add(operands[d], multiply(divide(operands[a], root), u))
