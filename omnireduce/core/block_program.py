"""Block programs: short programs of checked instructions that a shard runs on the sum of each block before it sends it.

A program works on one block at a time. Its operands are arrays of float32, one number for each element of the block:

    register 0       the sum or mean of the block. All ranks get its final values
    registers 1-7    numbers that are forgotten after the block
    columns          numbers that the shard keeps for each element, in the state that the program names

A state also has cells: one number for each block. Totals are sums over all blocks of the collective. An instruction has
four bytes: the operation, its target, its operand, and the number of a scalar, a cell, a total or a third operand.
There are no jumps and no addresses, so a shard can bound the cost of any program that a rank sends.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec
import numpy as np

from omnireduce.errors import UsageError

INSTRUCTION_BYTES = 4
MAX_INSTRUCTIONS, MAX_SCALARS = 64, 16
REGISTERS, SUM = 8, 0  # the first one holds the sum
FIRST_COLUMN = REGISTERS  # operand numbers from here on are columns
MAX_COLUMNS, MAX_CELLS, MAX_TOTALS = 8, 4, 4
MAX_STATE = (1 << 16) - 1
PROGRAM_ELEMENTS = 1 << 14  # most elements of a block: a shard runs a program on a whole block in one step
STEP_WORK = 1 << 23  # most work of that step: elements of the block, times the work of the program
TOTAL_BYTES = 8  # size of one total, a float64
SCALAR_BYTES = 4  # size of one scalar, a float32


class Operation(IntEnum):
    """The operations, each with its effect on every element. d: the target, a: the operand, s: the scalar, t, u, v: the
    next scalars.

    Some operations replace several others, because each instruction is one pass over the block.
    """

    COPY = 0  # d = a
    ADD = 1  # d += a
    SUBTRACT = 2  # d -= a
    SUBTRACT_FROM = 3  # d = a - d
    MULTIPLY = 4  # d *= a
    DIVIDE = 5  # d /= a
    DIVIDE_INTO = 6  # d = a / d
    MINIMUM = 7  # d = the smaller of d and a
    MAXIMUM = 8  # d = the larger of d and a
    GREATER = 9  # d = 1 where d > a, else 0
    ADD_SCALED = 10  # d += a * s
    MIX = 11  # d = d * s + a * t
    MIX_SQUARE = 12  # d = d * s + a * a * t
    ROOT = 13  # d = (square root of a) * s + t
    SELECT = 14  # d = a where d is not 0, else the operand whose number stands in place of a scalar
    FILL = 15  # d = s
    ADD_SCALAR = 16  # d += s
    SCALE = 17  # d *= s
    SQUARE = 18  # d *= d
    SQUARE_ROOT = 19
    ABSOLUTE = 20
    NEGATE = 21
    RECIPROCAL = 22  # d = 1 / d
    EXPONENTIAL = 23
    LOGARITHM = 24
    TANH = 25
    BLOCK_SUM = 26  # each d = the sum of d over the elements of the block
    LOAD_CELL = 27  # each d = the cell
    STORE_CELL = 28  # the cell = the first d
    ADD_TO_TOTAL = 29  # the total += the sum of d over the elements of the block, in float64
    MOMENTS = 30  # d = d * s + a * t; e = e * u + a * a * v, with e the array after d
    ROOT_STEP = 31  # d += a / ((square root of b) * s + t) * u, with b the array after a


LAST_OPERATION = int(max(Operation))
WITH_OPERAND = (*range(Operation.COPY, Operation.SELECT + 1), Operation.MOMENTS, Operation.ROOT_STEP)
SCALARS = {  # number of scalars that an operation uses
    **dict.fromkeys((Operation.ADD_SCALED, Operation.FILL, Operation.ADD_SCALAR, Operation.SCALE), 1),
    **dict.fromkeys((Operation.MIX, Operation.MIX_SQUARE, Operation.ROOT), 2),
    Operation.ROOT_STEP: 3,
    Operation.MOMENTS: 4,
}
WORK = {  # cost of an operation, in passes over a block; 1 for the others
    Operation.EXPONENTIAL: 25,
    Operation.LOGARITHM: 35,
    Operation.TANH: 90,
    **dict.fromkeys((Operation.BLOCK_SUM, Operation.ADD_TO_TOTAL), 4),
    **dict.fromkeys((Operation.MOMENTS, Operation.ROOT_STEP), 2),
}
WITH_CELL = (Operation.LOAD_CELL, Operation.STORE_CELL)


class BlockProgram(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """A program, and the state that it works on. Raises UsageError for an invalid program.

    `state`: the number that the ranks gave to the state. A state is created, all zeros, when a program first names it,
    and ends with its generation of the job. `columns`, `cells`: how many numbers it keeps for each element, and for
    each block. `code`: INSTRUCTION_BYTES for each instruction. `scalars`: the constants, as `packed` returns them,
    because programs are compared by their bits. `every_block`: the program also runs on blocks that no rank sent, with
    a sum of zero, and all blocks are results; else those blocks stay as they are. `totals`: the number of totals.
    `drops`: the state ends after this run. `returns` False: no block is a result, the ranks get the totals only.
    """

    state: int
    columns: int
    cells: int
    code: bytes
    scalars: bytes = b""
    every_block: bool = False
    totals: int = 0
    drops: bool = False
    returns: bool = True

    def __post_init__(self) -> None:
        wrong = self._wrong_size() or next(filter(None, map(self._wrong_at, range(len(self)))), "")
        if wrong:
            raise UsageError(f"a block program that cannot be: {wrong}")

    def __len__(self) -> int:
        return len(self.code) // INSTRUCTION_BYTES

    @property
    def work(self) -> int:
        """The cost of a run on a block, in passes over the block."""
        return work_of(self.code)

    @property
    def max_elements(self) -> int:
        """The most elements of a block on which a shard may run it."""
        return min(PROGRAM_ELEMENTS, STEP_WORK // max(1, self.work))

    @property
    def total_bytes(self) -> int:
        """The bytes of the totals, which follow the last result of a shard."""
        return self.totals * TOTAL_BYTES

    @property
    def numbers(self) -> list[float]:
        """Its scalars."""
        numbers: list[float] = np.frombuffer(self.scalars, np.float32).tolist()
        return numbers

    def _wrong_size(self) -> str:
        if len(self.code) % INSTRUCTION_BYTES or len(self) > MAX_INSTRUCTIONS:
            maximum = MAX_INSTRUCTIONS * INSTRUCTION_BYTES
            return f"code of {len(self.code)} bytes; expected a multiple of {INSTRUCTION_BYTES} up to {maximum}"
        if len(self.scalars) % SCALAR_BYTES:
            return f"scalars of {len(self.scalars)} bytes; expected a multiple of {SCALAR_BYTES}"
        limits = {
            "state": (self.state, MAX_STATE), "columns": (self.columns, MAX_COLUMNS), "cells": (self.cells, MAX_CELLS),
            "scalars": (len(self.scalars) // SCALAR_BYTES, MAX_SCALARS), "totals": (self.totals, MAX_TOTALS),
        }  # fmt: skip
        for name, (value, maximum) in limits.items():
            if not 0 <= value <= maximum:
                return f"{name} {value}; expected 0 to {maximum}"
        return ""

    def _wrong_at(self, index: int) -> str:
        """The mistake in instruction `index`; empty if there is none."""
        number, target, operand, third = self.code[index * INSTRUCTION_BYTES : (index + 1) * INSTRUCTION_BYTES]
        where = f"instruction {index}"
        if number > LAST_OPERATION:
            return f"{where} has operation {number}; expected 0 to {LAST_OPERATION}"
        operation = Operation(number)
        used = _arrays_of(operation, target, operand, third)
        if max(used) >= FIRST_COLUMN + self.columns:
            return f"{where} ({operation.name}) uses operand {max(used)} of {FIRST_COLUMN + self.columns}"
        if len(set(used)) < len(used):
            return f"{where} ({operation.name}) uses an operand twice"
        kinds = (
            ("scalar", SCALARS.get(operation, 0), len(self.scalars) // SCALAR_BYTES),
            ("cell", operation in WITH_CELL, self.cells), ("total", operation is Operation.ADD_TO_TOTAL, self.totals),
        )  # fmt: skip
        for kind, needed, count in kinds:
            if needed and third + needed > count:
                return f"{where} ({operation.name}) uses {kind} {third + needed - 1} of {count}"
        return ""


def work_of(code: bytes) -> int:
    """The cost of a run of `code` on a block, in passes over the block."""
    return sum(WORK.get(Operation(operation), 1) for operation in code[::INSTRUCTION_BYTES])


def _arrays_of(operation: Operation, target: int, operand: int, third: int) -> list[int]:
    """The numbers of all arrays that an instruction names."""
    used = [target, operand] if operation in WITH_OPERAND else [target]
    if operation is Operation.MOMENTS:
        used.append(target + 1)
    elif operation is Operation.ROOT_STEP:
        used.append(operand + 1)
    elif operation is Operation.SELECT:
        used.append(third)
    return used


def packed(*numbers: float) -> bytes:
    """Scalars as a program has them: float32."""
    with np.errstate(over="ignore"):
        return np.array(numbers, np.float32).tobytes()


class Assembly:
    """Writes the instructions of a program, one after the other."""

    def __init__(self) -> None:
        self._code, self._scalars = bytearray(), list[float]()

    def add(self, operation: Operation, target: int, operand: int = 0, *scalars: float, third: int = 0) -> None:
        """An instruction with its scalars, or with the number of a cell or a total as `third`."""
        last = len(self._scalars) if scalars else third
        self._scalars += scalars
        self._code += bytes([operation, target, operand, last])

    def fetch(self, number: int, *, is_cell: bool = False) -> None:
        """Send the state to all ranks: the column with operand number `number`, or the cell `number`."""
        if is_cell:
            self.add(Operation.LOAD_CELL, SUM, third=number)
        else:
            self.add(Operation.COPY, SUM, number)

    def store(self, number: int, *, is_cell: bool = False) -> None:
        """Keep the sum of the ranks' values in the state: the reverse of `fetch`."""
        if is_cell:
            self.add(Operation.STORE_CELL, SUM, third=number)
        else:
            self.add(Operation.COPY, number, SUM)

    def program(self, state: int, columns: int, cells: int, **options: object) -> BlockProgram:
        """The finished program. `options` are fields of BlockProgram."""
        return BlockProgram(state, columns, cells, bytes(self._code), packed(*self._scalars), **options)  # type: ignore[arg-type]
