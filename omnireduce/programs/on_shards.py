"""A program whose fused AllReduce runs on the shards, which keep its tensors from step to step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from omnireduce.block_program import FIRST_COLUMN, PROGRAM_ELEMENTS, Assembly, BlockProgram, Operation, packed
from omnireduce.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.programs.expressions import Constant, Expression, Tensor, Variable
from omnireduce.programs.lowering import lowered
from omnireduce.programs.operations import Update, WholeReduction
from omnireduce.programs.phases import Phase
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.placement import Seat, bound_sizes, compute, input_value, sizes_in
from omnireduce.runtime.member.communicator import Communicator

STATE = 0  # the number of the state; the communicator has no other


def runs_on_shards(pipeline: Pipeline) -> bool:
    """Whether `OnShards` takes this pipeline."""
    if pipeline.groups > 1:
        return False
    try:
        lowered(pipeline)
    except UsageError:
        return False
    return True


class OnShards:
    """`pipeline` on the ranks of `comm`, with its tensors on the shards. `pipeline` has one fused AllReduce, as
    `fuse_into` makes it.

    `values`: by name this rank's arrays of all tensors but the one that is reduced: of Sliced ones its part. They are
    sent to the shards; a Replicated one is that of rank 0. The array of the tensor that gets the result is written in
    each run. Blocks that are zero on all ranks are computed, too, unless `lazy`: then what is kept for them stays as it
    is. `name` tells it from others of `comm` (empty: that of the pipeline). All ranks call all methods in the same
    order. Close it in the end.

    Raises UsageError for a program that shards cannot run, and says why; for values that do not fit; RefusedError where
    shards have no room; otherwise what `Communicator.create_group` raises.
    """

    def __init__(
        self, pipeline: Pipeline, comm: Communicator, values: Mapping[str, Any], *, lazy: bool = False, name: str = ""
    ) -> None:
        self._pipeline, self._lazy, self._lowered = pipeline, lazy, lowered(pipeline)
        tensors = [each for each in pipeline.inputs if isinstance(each, Tensor) and each is not self._lowered.reduced]
        known = [each.name for each in (*tensors, *sizes_in(pipeline.nodes))]
        if unknown := sorted(values.keys() - set(known)):
            raise UsageError(f"{pipeline.name} keeps no {', '.join(unknown)}; expected some of {', '.join(known)}")
        self._tensors = [each for each in pipeline.inputs if each in self._lowered.columns]
        seat = Seat(comm.rank, comm.size, bound_sizes(sizes_in(pipeline.nodes), self._tensors, values))
        self._seat = seat
        arrays: dict[Expression, Array] = {each: input_value(each, values, seat) for each in self._tensors}
        self._result = self._array_of_result(arrays)
        self._shape = seat.shape(self._lowered.reduced.type.shape)
        self._elements = int(np.prod(self._shape))
        self._block_size = min(comm.config.protocol.block_size, PROGRAM_ELEMENTS)
        if lazy and (self._result is None or len(self._lowered.phases) > 1):
            raise UsageError(f"{pipeline.name} cannot be lazy: it has norms, or updates no tensor with its result")
        self._group = comm.create_group(
            name=name or re.sub("[^A-Za-z0-9.-]", "-", pipeline.name),
            state_bytes=comm.state_bytes([(self._elements, self._block_size)], len(self._lowered.columns)),
        )
        for each, array in arrays.items():
            self._send(each, array)

    def _array_of_result(self, arrays: Mapping[Expression, Array]) -> Array | None:
        """Where results go: the tensor that is updated with them, if there is one."""
        users = self._pipeline.users[self._lowered.gather]
        found = next((arrays[each.tensor] for each in users if isinstance(each, Update)), None)
        if found is not None and not (found.flags.writeable and found.flags.c_contiguous):
            raise UsageError(f"{self._pipeline.name} updates an array that is read-only or not contiguous: pass a copy")
        return found

    def _send(self, tensor: Expression, array: Array) -> None:
        """Give the shards a tensor, of which this rank has its part."""
        code = Assembly()
        code.add(Operation.COPY, self._operand(tensor), 0)
        whole = np.zeros(self._shape, np.float32)
        if tensor.type.layout.is_sliced:
            self._seat.part(whole, tensor.type.layout)[...] = array
        elif self._seat.rank == 0:
            whole[...] = array
        program = self._program(code, returns=False)
        self._group.fused_allreduce(whole, program, out=np.empty_like(whole), block_size=self._block_size)

    def _operand(self, tensor: Expression) -> int:
        return FIRST_COLUMN + self._lowered.columns.index(tensor)

    def _program(self, code: Assembly, *, returns: bool) -> BlockProgram:
        return code.program(STATE, len(self._lowered.columns), 0, every_block=True, returns=returns)

    def run(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """One run, as all ranks make it. `values`: by name the tensor that is reduced, and all numbers.

        Returns the outputs by name that are here: the result, and numbers. What shards keep, `tensor` fetches. Raises
        UsageError for values that do not fit; otherwise what the collectives raise: then shards may have computed a
        part, and nothing that they keep is of use any more.
        """
        known: dict[Expression, Array] = {}
        for each in self._pipeline.inputs:
            if isinstance(each, Variable) or each is self._lowered.reduced:
                known[each] = input_value(each, values, self._seat)
        names = [each.name for each in self._pipeline.inputs if each in known]
        if unknown := sorted(values.keys() - set(names)):
            raise UsageError(f"a run takes no {', '.join(unknown)}; expected {', '.join(names)}")
        x = np.ascontiguousarray(known[self._lowered.reduced]).reshape(self._shape)
        out = np.empty(self._shape, np.float32) if self._result is None else self._result
        for at, phase in enumerate(self._lowered.phases):
            is_last = at == len(self._lowered.phases) - 1
            program = self._phase(phase, known, returns=is_last)
            done = self._group.fused_allreduce(None if at else x, program, out=out, block_size=self._block_size)
            for node, total in zip(phase.totals, done.totals, strict=True):
                known[node] = node.finish(np.asarray(total).reshape(1)).reshape(())
        return self._outputs(out, known)

    def _phase(self, phase: Phase, known: dict[Expression, Array], *, returns: bool) -> BlockProgram:
        scalars = []
        for each in phase.scalars:
            number = float(self._number(each.node, known))
            scalars.append(-number if each.negated else number)
        return BlockProgram(
            STATE, len(self._lowered.columns), 0, b"".join(bytes(each) for each in phase.code), packed(*scalars),
            every_block=not self._lazy, totals=len(phase.totals), returns=returns,
        )  # fmt: skip

    def _number(self, node: Expression, known: dict[Expression, Array]) -> Array:
        """The value of a node without dimensions, from numbers that are known."""
        if isinstance(node, Constant):
            return node.array
        if node not in known:
            known[node] = compute(node, [self._number(each, known) for each in node.operands], self._seat)
        return known[node]

    def _outputs(self, out: Array, known: dict[Expression, Array]) -> dict[str, Any]:
        found = dict[str, Any]()
        for name, node in zip(self._pipeline.output_names, self._pipeline.outputs, strict=True):
            if node is self._lowered.gather or (isinstance(node, Update) and node.value is self._lowered.gather):
                found[name] = out
            elif not node.type.shape:
                found[name] = known[node] if isinstance(node, WholeReduction) else self._number(node, known)
        return found

    def tensor(self, name: str) -> Array:
        """A tensor as the shards have it now: of a Sliced one this rank's part. All ranks call this."""
        tensor = next((each for each in self._tensors if isinstance(each, Tensor) and each.name == name), None)
        if tensor is None:
            kept = ", ".join(each.name for each in self._tensors if isinstance(each, Tensor))
            raise UsageError(f"the shards keep no {name!r}; they keep {kept}")
        code, found = Assembly(), np.zeros(self._shape, np.float32)
        code.add(Operation.COPY, 0, self._operand(tensor))
        program = self._program(code, returns=True)
        self._group.fused_allreduce(None, program, out=found, block_size=self._block_size)
        is_cut = tensor.type.layout.is_sliced
        return self._seat.part(found, tensor.type.layout).copy() if is_cut else found

    def close(self) -> None:
        """Give back what the shards keep."""
        self._group.shutdown()

    def __enter__(self) -> OnShards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
