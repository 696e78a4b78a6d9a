"""Collectives of Keras tensors, variables, NumPy arrays and numbers, in Horovod's words.

Each returns a tensor for a tensor or a variable, and an array for anything else. All ranks call collectives without a
`name` in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from omnireduce.core.dtypes import Array
from omnireduce.data_parallel import session
from omnireduce.data_parallel.dispatcher import Task
from omnireduce.data_parallel.horovod_names import Compression, NoneCompressor
from omnireduce.data_parallel.queue import Queue, QueueOp
from omnireduce.data_parallel.scaling import Average, Scaling, make_scaling, root_of
from omnireduce.data_parallel.session import ProcessSet, global_process_set, submit_each, submit_named
from omnireduce.errors import UsageError
from omnireduce.keras.values import array_of, call_with_arrays, convert_like, is_symbolic


@dataclass(frozen=True)
class Combining:
    """Settings for combining arrays of the ranks of a set. Raises UsageError for arguments that cannot be."""

    scaling: Scaling
    compression: type[NoneCompressor] = Compression.none
    process_set: ProcessSet = global_process_set

    def __post_init__(self) -> None:
        if not (isinstance(self.compression, type) and issubclass(self.compression, NoneCompressor)):
            raise UsageError(f"compression is {self.compression!r}: expected Compression.none or Compression.fp16")
        if not isinstance(self.process_set, ProcessSet):
            raise UsageError(f"process_set is {self.process_set!r}: expected a ProcessSet")

    @property
    def queue(self) -> Queue:
        return session.queue(self.process_set)

    def combine(self, groups: Sequence[tuple[str, Sequence[Array]]]) -> list[list[Array]]:
        """The arrays of these named groups, combined. The arrays of a group are combined together, and overwritten."""
        queue, started, (op, prescale, postscale) = self.queue, [], self.scaling
        for name, arrays in groups:
            sent = [self.compression.compress(array) for array in arrays]
            task = queue.grouped_allreduce_async(
                [compressed for compressed, _ in sent], name=name, op=op, prescale=prescale, postscale=postscale
            )
            started.append((task, [context for _, context in sent]))
        decompressed = []
        for task, contexts in started:
            result = task.wait()
            parts = result if isinstance(result, list) else [result]
            decompressed.append([self.compression.decompress(*pair) for pair in zip(parts, contexts, strict=True)])
        return decompressed


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: QueueOp | None = None,
    compression: type[NoneCompressor] = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Combine `value` of all ranks, element by element: a value of its shape and dtype.

    `op`: Average (the default), Sum, Min, Max, Product or Adasum. `average`, of older programs: True is Average, False
    is Sum. Works inside of a compiled step, too. Raises UsageError for what cannot be combined, and where ranks differ;
    otherwise what has ended the job.
    """
    full_name = name or "allreduce"

    def make_combining() -> Combining:
        return Combining(make_scaling(average, op, prescale_factor, postscale_factor), compression, process_set)

    combining = submit_named([full_name], process_set, make_combining)
    return call_with_arrays(lambda arrays: combining.combine([(full_name, arrays)])[0], [value])[0]


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """The values of all ranks, one behind the other. The lengths of the first dimension may differ.

    Raises UsageError for a value without a dimension, and inside of a compiled step: there nobody knows the length.
    """
    if is_symbolic(value):
        raise UsageError("allgather in a step that is compiled: the shape is not known there. Call it outside")
    full_name = name or "allgather"
    array = submit_named([full_name], process_set, lambda: array_of(value))
    return convert_like(session.queue(process_set).allgather_async(array, name=full_name).wait(), value)


def reducescatter(
    value: Any, name: str | None = None, op: QueueOp = Average, process_set: ProcessSet = global_process_set
) -> Any:
    """This rank's rows of the combined `value`; the first ranks have one more where they differ. `op`: Average, Sum,
    Min, Max or Product.

    Raises UsageError for a value without a dimension, and inside of a compiled step: there nobody knows the length.
    """
    if is_symbolic(value):
        raise UsageError("reducescatter in a step that is compiled: the shape is not known there. Call it outside")
    full_name = name or "reducescatter"
    array = submit_named([full_name], process_set, lambda: array_of(value))
    task = session.queue(process_set).reducescatter_async(array, name=full_name, op=cast(Any, op))
    return convert_like(task.wait(), value)


def broadcast(
    value: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The value of rank `root_rank` (its number in the job) on all ranks: of the shape and dtype of `value`, which all
    ranks have alike. Raises UsageError for a root that does not belong to the set."""
    full_name = name or "broadcast"
    root = submit_named([full_name], process_set, lambda: root_of(root_rank, process_set))

    def receive(arrays: list[Array]) -> list[Array]:
        return [session.queue(process_set).broadcast_async(arrays[0], root, name=full_name).wait()]

    return call_with_arrays(receive, [value])[0]


def broadcast_variables(
    variables: Iterable[Any], root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Give variables the values that they have on rank `root_rank` (its number in the job): `model.weights`,
    `optimizer.variables`. All ranks give as many, in one order.

    Raises UsageError where shapes or dtypes differ between ranks, or the root does not belong to the set.
    """
    variable_list, queue = list(variables), session.queue(process_set)
    names = [f"variable {number} of {len(variable_list)}" for number in range(len(variable_list))]

    def begin(at: int) -> Task:
        return queue.broadcast_async(array_of(variable_list[at]), root_of(root_rank, process_set), name=names[at])

    tasks = submit_each(names, process_set, begin)
    for variable, task in zip(variable_list, tasks, strict=True):
        variable.assign(task.wait())
