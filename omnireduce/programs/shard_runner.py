"""Running a program whose fused AllReduce is done on the shards, which keep its tensors from step to step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from omnireduce.core.block_program import (
    FIRST_COLUMN,
    PROGRAM_ELEMENTS,
    STEP_WORK,
    Assembly,
    BlockProgram,
    packed,
    work_of,
)
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.programs.expressions import Constant, Expression, Input, Tensor
from omnireduce.programs.lowering import Lowered, Phase, lowered
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.placement import RankPlacement, bound_sizes, check_names, compute, input_value, sizes_in
from omnireduce.programs.runner import agreement_terms
from omnireduce.programs.whole_tensor_operations import Update, WholeReduction
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.error_agreement import check_agreement, run_agreed
from omnireduce.runtime.rank.reported_errors import report_errors_to

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


def run_inputs(pipeline: Pipeline, lowered: Lowered) -> list[Input]:
    """The inputs that each run is given: numbers, and what is reduced. The shards keep the others."""
    return [input_node for input_node in pipeline.inputs if input_node not in lowered.columns]


class OnShards:
    """`pipeline` on the ranks of `comm`, with its tensors on the shards. `pipeline` has one fused AllReduce, as
    `fuse_into` makes it.

    `values`: by name this rank's arrays of all tensors but the one that is reduced: of Sliced ones its part. They are
    sent to the shards, where -0.0 may become 0.0. The array of the tensor that gets the result is written in each run.
    Blocks that are zero on all ranks are computed, too, unless `lazy`: then what is kept for them stays as it is.
    `name` tells it from others of `comm` (empty: that of the pipeline). All ranks call all methods in the same order.
    Close it in the end.

    Raises UsageError for a program that shards cannot run, and says why; for values that do not fit, and on all ranks
    for Replicated ones that differ; RefusedError where shards have no room; otherwise what `Communicator.create_group`
    raises.
    """

    def __init__(
        self, pipeline: Pipeline, comm: Communicator, values: Mapping[str, Any], *, lazy: bool = False, name: str = ""
    ) -> None:
        self._pipeline, self._lazy, self._lowered = pipeline, lazy, lowered(pipeline)
        self._tensors = [column for column in self._lowered.columns if isinstance(column, Tensor)]
        self._run_inputs = run_inputs(pipeline, self._lowered)
        name = name or re.sub("[^A-Za-z0-9.-]", "-", pipeline.name)
        arrays = run_agreed(comm, f"{name}.values", lambda: self._arrays_of_rank(comm, values))
        terms = agreement_terms(pipeline, self._placement.sizes, arrays.items())
        check_agreement(comm, [("lazy", str(lazy)), *terms], f"{name}.inputs")
        state_bytes = comm.state_bytes([(self._elements, self._block_size)], len(self._lowered.columns))
        # Without state the ranks of a host would sum in memory, where no program runs.
        self._group = comm.create_group(name=name, state_bytes=max(1, state_bytes))
        try:
            for tensor, array in arrays.items():
                self._send(tensor, array)
        except BaseException:
            self.close()
            raise

    def _arrays_of_rank(self, comm: Communicator, values: Mapping[str, Any]) -> dict[Tensor, Array]:
        """This rank's arrays. Raises UsageError."""
        pipeline, sizes = self._pipeline, sizes_in(self._pipeline.nodes)
        check_names(values, [input_node.name for input_node in (*self._tensors, *sizes)], f"{pipeline.name} on shards")
        placement = self._placement = RankPlacement(comm.rank, comm.size, bound_sizes(sizes, self._tensors, values))
        arrays = {tensor: input_value(tensor, values, placement) for tensor in self._tensors}
        self._results = self._arrays_of_result(arrays)
        self._shape = placement.shape(self._lowered.reduced.type.shape)
        self._elements = int(np.prod(self._shape))
        max_work = max((work_of(_code_of(phase)) for phase in self._lowered.phases), default=1)
        self._block_size = min(comm.config.protocol.block_size, PROGRAM_ELEMENTS, STEP_WORK // max(1, max_work))
        if self._lazy and (not self._results or len(self._lowered.phases) > 1):
            raise UsageError(f"{pipeline.name} cannot be lazy: it has norms, or updates no tensor with its result")
        return arrays

    def _arrays_of_result(self, arrays: Mapping[Tensor, Array]) -> dict[Expression, Array]:
        """The arrays for results, by Update: those of the tensors that are updated."""
        users = self._pipeline.users[self._lowered.gather]
        results: dict[Expression, Array] = {
            update: arrays[update.tensor] for update in users if isinstance(update, Update)
        }
        if not all(array.flags.writeable and array.flags.c_contiguous for array in results.values()):
            raise UsageError(f"{self._pipeline.name} updates an array that is read-only or not contiguous: pass a copy")
        return results

    def _send(self, tensor: Tensor, array: Array) -> None:
        """Give the shards a tensor, of which this rank has its part."""
        code = Assembly()
        code.store(self._operand(tensor))
        whole = np.zeros(self._shape, np.float32)
        if tensor.type.layout.is_sliced:
            self._placement.part(whole, tensor.type.layout)[...] = array
        elif self._placement.rank == 0:
            whole[...] = array
        program = self._program(code, returns=False)
        self._group.fused_allreduce(whole, program, out=np.empty_like(whole), block_size=self._block_size)

    def _operand(self, tensor: Tensor) -> int:
        return FIRST_COLUMN + self._lowered.columns.index(tensor)

    def _program(self, code: Assembly, *, returns: bool) -> BlockProgram:
        return code.program(STATE, len(self._lowered.columns), 0, every_block=True, returns=returns)

    def run(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Make one run. All ranks call this. `values`: by name the tensor that is reduced, and all numbers.

        Returns the outputs by name that are here: the result, and numbers. The method `tensor` fetches the state of the
        shards. Raises UsageError for values that do not fit; otherwise what the collectives raise: then shards may have
        computed a part, and nothing that they keep is of use any more.
        """
        with report_errors_to(self._group):
            check_names(values, [input_node.name for input_node in self._run_inputs], f"a run of {self._pipeline.name}")
            computed: dict[Expression, Array] = {
                input_node: input_value(input_node, values, self._placement) for input_node in self._run_inputs
            }
            x = np.ascontiguousarray(computed[self._lowered.reduced]).reshape(self._shape)
        out, *other_arrays = self._results.values() or [np.empty(self._shape, np.float32)]
        for at, phase in enumerate(self._lowered.phases):
            is_last = at == len(self._lowered.phases) - 1
            program = self._phase(phase, computed, returns=is_last)
            result = self._group.fused_allreduce(None if at else x, program, out=out, block_size=self._block_size)
            for node, total in zip(phase.totals, result.totals, strict=True):
                computed[node] = node.finish(np.asarray(total).reshape(1)).reshape(())
        for array in other_arrays:
            array[...] = out
        return self._outputs(out, computed)

    def _phase(self, phase: Phase, computed: dict[Expression, Array], *, returns: bool) -> BlockProgram:
        scalars = []
        for scalar in phase.scalars:
            number = float(self._number(scalar.node, computed))
            scalars.append(-number if scalar.negated else number)
        return BlockProgram(
            STATE, len(self._lowered.columns), 0, _code_of(phase), packed(*scalars),
            every_block=not self._lazy, totals=len(phase.totals), returns=returns,
        )  # fmt: skip

    def _number(self, node: Expression, computed: dict[Expression, Array]) -> Array:
        """The value of a node without dimensions, from numbers that are known."""
        if isinstance(node, Constant):
            return node.array
        if node not in computed:
            computed[node] = compute(
                node, [self._number(operand, computed) for operand in node.operands], self._placement
            )
        return computed[node]

    def _outputs(self, out: Array, computed: dict[Expression, Array]) -> dict[str, Any]:
        outputs = dict[str, Any]()
        for name, node in zip(self._pipeline.output_names, self._pipeline.outputs, strict=True):
            if node is self._lowered.gather or node in self._results:
                outputs[name] = self._results.get(node, out)
            elif not node.type.shape:
                outputs[name] = computed[node] if isinstance(node, WholeReduction) else self._number(node, computed)
        return outputs

    def tensor(self, name: str) -> Array:
        """A tensor as the shards have it now: of a Sliced one this rank's part. All ranks call this."""
        with report_errors_to(self._group):
            tensor = next((column for column in self._tensors if column.name == name), None)
            if tensor is None:
                names = ", ".join(column.name for column in self._tensors)
                raise UsageError(f"the shards keep no {name!r}; they keep {names}")
        code, fetched = Assembly(), np.zeros(self._shape, np.float32)
        code.fetch(self._operand(tensor))
        program = self._program(code, returns=True)
        self._group.fused_allreduce(None, program, out=fetched, block_size=self._block_size)
        is_cut = tensor.type.layout.is_sliced
        return self._placement.part(fetched, tensor.type.layout).copy() if is_cut else fetched

    def close(self) -> None:
        """Give back what the shards keep."""
        self._group.shutdown()

    def __enter__(self) -> OnShards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _code_of(phase: Phase) -> bytes:
    return b"".join(bytes(instruction) for instruction in phase.code)
