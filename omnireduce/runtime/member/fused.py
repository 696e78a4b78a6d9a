"""Collectives whose sums go through a block program on the shards before all ranks get the results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from omnireduce.block_program import BlockProgram
from omnireduce.descriptor import RowOp
from omnireduce.dtypes import Array
from omnireduce.layout import Layout
from omnireduce.protocol.collective.block_programs import NUMBER_BYTES, row_numbers
from omnireduce.runtime.member.collectives import Collectives
from omnireduce.runtime.member.fused_calls import Fused, FusedRows, fused_reduction, fused_rows
from omnireduce.runtime.member.handle import Handle


class FusedCollectives(Collectives):
    """Every rank calls the same ones in the same order, as other collectives, with the same program.

    They go through the aggregators, also between ranks of one host. So the job has `protocol.state_bytes`, or the
    communicator is one that `create_group` has made with `state_bytes`.
    """

    def state_bytes(self, tensors: Iterable[tuple[int, int]], columns: int, cells: int = 0) -> int:
        """How much the shard with the most of it keeps of states with so many columns and cells. `tensors`: of each
        tensor the number of elements, and of those in a block. For `create_group`."""
        sharding = self._member.ordinary.place.sharding._replace(slot_bytes=0)  # no host sends sums there
        total = 0
        for elements, block_size in tensors:
            layout = Layout(elements, block_size).dealt(
                sharding.shards, sharding.stripe_blocks, sharding.whole_bytes, block_size * NUMBER_BYTES
            )
            blocks = max(layout.stripes(shard).count(layout.blocks) for shard in range(min(2, sharding.shards)))
            total += blocks * row_numbers(columns, cells, block_size) * NUMBER_BYTES
        return total

    def fused_allreduce(
        self, x: Array | None, program: BlockProgram,
        *, out: Array, op: RowOp = "sum", name: str = "", block_size: int | None = None, wanted: bool = True,
    ) -> Fused:  # fmt: skip
        """Sum `x` of all ranks, let each shard run `program` on the sum of each of its blocks, and put what comes of it
        into `out`, the same on all ranks. Source: FusedAllReduce of CoCoNet (https://arxiv.org/abs/2105.05720).

        `x`, `out`: C-contiguous arrays of float32 of one shape, which do not overlap. `x` None: this rank brings
        nothing. Blocks that are zero on all ranks are neither sent nor run, and stay in `out` as they are, unless
        `program.every_block`. `op`: sum or mean. `wanted` False: this rank drops the results, and `out` only gives the
        shape. `name`, `block_size`: as for `allreduce`; a block has up to 16,384 elements.

        Raises UsageError for unsuitable arguments, and where ranks exchange in memory; otherwise what `allreduce`
        raises. A program whose state finds no room ends the job.
        """
        return self._start(
            fused_reduction, x, program, out=out, op=op, name=name, block_size=block_size, wanted=wanted
        ).wait()

    def fused_allreduce_async(self, x: Array | None, program: BlockProgram, **options: Any) -> Handle[Fused]:
        """Start a `fused_allreduce`, which has the same options; see `allreduce_async`."""
        options = {"op": "sum", "name": "", "block_size": None, "wanted": True} | options
        return self._start_async(fused_reduction, x, program, **options)

    def fused_allreduce_rows(
        self, indices: Array, values: Array, program: BlockProgram,
        *, n_rows: int, out: Array | None = None, op: RowOp = "sum", name: str = "", wanted: bool = True,
    ) -> FusedRows:  # fmt: skip
        """As `fused_allreduce`, of rows of a tall matrix as `allreduce_rows` takes them. A block is a row.

        `out`, (n_rows, row length): what comes of each row is also written there; the other rows stay as they are.
        `wanted` False: this rank gets no rows. Raises what `fused_allreduce` raises.
        """
        return self._start(
            fused_rows, indices, values, program, n_rows=n_rows, out=out, op=op, name=name, wanted=wanted
        ).wait()

    def fused_allreduce_rows_async(
        self, indices: Array, values: Array, program: BlockProgram, **options: Any
    ) -> Handle[FusedRows]:
        """Start a `fused_allreduce_rows`, which has the same options; see `allreduce_async`."""
        options = {"out": None, "op": "sum", "name": "", "wanted": True} | options
        return self._start_async(fused_rows, indices, values, program, **options)
