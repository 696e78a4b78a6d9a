"""State of block programs on a shard: the states of one job, and the program of the current collective."""

from __future__ import annotations

import numpy as np

from omnireduce.core.block_program import FIRST_COLUMN, INSTRUCTION_BYTES, BlockProgram
from omnireduce.core.blocks_and_stripes import Layout, Stripes
from omnireduce.core.descriptor import Descriptor
from omnireduce.core.dtypes import Array
from omnireduce.errors import ProtocolError
from omnireduce.kernels.interpret import run_on_blocks
from omnireduce.protocol.collective.dense_operands import DenseTensor, Memory
from omnireduce.protocol.collective.row_operands import RowSet


class Totals:
    """The totals that a program has added up on each shard that took part."""

    def __init__(self, count: int) -> None:
        self._by_shard, self._count = dict[int, Array](), count

    def take(self, shard: int, totals: Array) -> None:
        self._by_shard[shard] = totals.copy()

    @property
    def sums(self) -> Array:
        """The totals over all shards: float64 (totals,). They are added in the order of the shards, so all ranks get
        the same bits."""
        parts = [self._by_shard[shard] for shard in sorted(self._by_shard)]
        return np.sum(parts, axis=0) if parts else np.zeros(self._count)


class ProgrammedTensor(DenseTensor):
    """A tensor, `source`, whose sum goes through a program. The results go to `target`. Blocks without a result stay
    there as they are.

    Both are flat contiguous arrays of float32 of one size. `source` None contributes nothing; `drops`: this rank does
    not want the results. `results`: the number of blocks that come back, if that is known.
    """

    def __init__(
        self, source: Array | None, target: Array, layout: Layout, zero_mask: np.uint64, totals: Totals,
        *, drops: bool = False, results: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(source, target, layout, zero_mask)
        self.totals, self._drops, self._results, self._put = totals, drops, results, list[int]()
        blocks = self.blocks
        unwritten = blocks.target_tail.copy()
        self._scanned = blocks._replace(target=blocks.target[:0], target_tail=unwritten, in_place=True)

    @property
    def is_divisible(self) -> bool:
        return True

    def start(self, shard: int) -> int:
        return self.layout.blocks if self.blocks.silent else self.layout.first_block(shard)

    def put(self, rows: Array, indices: Array, unchanged: Array, left_out: bool) -> None:
        self._put.append(indices.size)
        if not self._drops:
            super().put(rows, indices, unchanged, left_out)

    def take_totals(self, shard: int, totals: Array) -> None:
        self.totals.take(shard, totals)

    def finish(self) -> None:
        blocks = sum(self._put)
        if self._results not in (None, blocks):
            raise ProtocolError(f"results of a program with {blocks} blocks; expected {self._results}")
        if not self._drops:
            super().finish()


class ProgrammedRows(RowSet):
    """Rows whose sums go through a program. `out`, (n_rows, row length): the results are written there, too. `drops`:
    this rank does not want the results."""

    def __init__(
        self, numbers: Array, values: Array, layout: Layout, memory: Memory, totals: Totals,
        *, out: Array | None, drops: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(numbers, values, layout, memory)
        self.totals, self._out, self._drops = totals, out, drops

    def put(self, rows: Array, indices: Array, unchanged: Array, left_out: bool) -> None:
        if not self._drops:
            super().put(rows, indices, unchanged, left_out)

    def take_totals(self, shard: int, totals: Array) -> None:
        self.totals.take(shard, totals)

    def finish(self) -> None:
        super().finish()
        if self._out is not None:
            numbers, rows = self.result
            row = np.dtype((np.void, self.block_bytes))  # one item: NumPy copies it as a whole
            self._out.reshape(-1).view(row)[numbers] = np.ascontiguousarray(rows).reshape(-1).view(row)


NUMBER_BYTES = 4  # size of a float32


def row_numbers(columns: int, cells: int, block_size: int) -> int:
    """The numbers that a state keeps for one block."""
    return columns * block_size + cells


class ShardStates:
    """The states of one job on one shard, by number. Together they take no more than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.nbytes = max_bytes, 0
        self._states: dict[int, tuple[tuple[object, ...], Array]] = {}

    def begin(self, descriptor: Descriptor, program: BlockProgram, stripes: Stripes) -> ProgramRun:
        """Make a program ready for a collective, of which this shard has `stripes`. Raises ProtocolError when its state
        was made for another tensor, or finds no room."""
        layout = descriptor.layout
        kind = layout, stripes, program.columns, program.cells
        made_for, state = self._states.get(program.state, (kind, None))
        if state is None:
            state = self._new_state(program, stripes.count(layout.blocks), layout.block_size)
            if state.size:  # an empty state takes no memory: then peers could make any number of them
                self._states[program.state] = kind, state
        if made_for != kind:
            raise ProtocolError(
                f"state {program.state} keeps {program.columns} columns and {program.cells} cells of a tensor of "
                f"{layout.elements} elements in blocks of {layout.block_size}; it was made for another one"
            )
        return ProgramRun(program, state, stripes, layout.elements, layout.block_size)

    def _new_state(self, program: BlockProgram, blocks: int, block_size: int) -> Array:
        width = row_numbers(program.columns, program.cells, block_size)
        needed_bytes = blocks * width * NUMBER_BYTES
        if self.nbytes + needed_bytes > self._max_bytes:
            raise ProtocolError(
                f"state {program.state} needs {needed_bytes} bytes; {self.nbytes} of the {self._max_bytes} that this "
                "job may keep on a shard are taken: raise protocol.state_bytes"
            )
        self.nbytes += needed_bytes
        return np.zeros((blocks, width), np.float32)  # no memory before it is used

    def drop(self, number: int) -> None:
        """Forget a state."""
        if number in self._states:
            self.nbytes -= self._states.pop(number)[1].nbytes


class ProgramRun:
    """A program during one collective. `totals`: float64, its sums so far."""

    def __init__(self, program: BlockProgram, state: Array, stripes: Stripes, elements: int, block_size: int) -> None:
        self.program, self._state, self._stripes, self._elements = program, state, stripes, elements
        self._code = np.array(bytearray(program.code), np.uint8).reshape(-1, INSTRUCTION_BYTES)
        self._scalars = np.array((*program.numbers, 0.0), np.float32)
        self._scalars[np.abs(self._scalars) < np.finfo(np.float32).tiny] *= 0  # the product keeps the sign
        self._registers = np.zeros((FIRST_COLUMN, block_size), np.float32)
        self.totals = np.zeros(program.totals, np.float64)

    @property
    def work(self) -> int:
        """The cost of a block, in units of one read of the block from memory. The state is read from memory. A pass
        over data in the nearest cache costs half as much."""
        return self.program.columns + (1 + self.program.work) // 2

    def run(self, op: int, slots: Array, parts: Array, out: Array, *, divisor: int, numbers: Array) -> None:
        """Combine `parts`, as `Union.plan` lists them, of `slots` into `out`, (blocks, block size), and run on each
        block. `numbers`: the block numbers."""
        run_on_blocks(
            op, slots, parts, out, divisor,
            numbers=numbers, shards=self._stripes.shards, stripe_blocks=self._stripes.stripe_blocks,
            elements=self._elements, code=self._code, scalars=self._scalars, state=self._state,
            columns=self.program.columns, registers=self._registers, totals=self.totals,
        )  # fmt: skip
