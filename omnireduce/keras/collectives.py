"""Collectives of Keras tensors, variables, NumPy arrays and numbers, in Horovod's words.

Each returns what its value is: a tensor for a tensor or a variable, otherwise an array. What has no `name` is done in
the order in which the program calls it, on all ranks the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from omnireduce.data_parallel import session
from omnireduce.data_parallel.queue import Queue, QueueOp
from omnireduce.data_parallel.session import ProcessSet, global_process_set
from omnireduce.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.keras.compression import Compression, NoneCompressor
from omnireduce.keras.values import array_of, is_symbolic, like, through_arrays

Average: QueueOp = "mean"
Sum: QueueOp = "sum"
Min: QueueOp = "min"
Max: QueueOp = "max"
Product: QueueOp = "prod"
Adasum: QueueOp = "adasum"
OPS = {"Average": Average, "Sum": Sum, "Min": Min, "Max": Max, "Product": Product, "Adasum": Adasum}


@dataclass(frozen=True)
class Combining:
    """How arrays of the ranks of a set are combined.

    They are multiplied by `prescale` before, by `postscale` after that. Raises UsageError for what is none.
    """

    op: QueueOp = Average
    prescale: float = 1.0
    postscale: float = 1.0
    compression: type[NoneCompressor] = Compression.none
    process_set: ProcessSet = global_process_set

    def __post_init__(self) -> None:
        if self.op not in OPS.values():
            raise UsageError(f"op is {self.op!r}: expected one of {', '.join(OPS)}")
        if not (isinstance(self.compression, type) and issubclass(self.compression, NoneCompressor)):
            raise UsageError(f"compression is {self.compression!r}: expected Compression.none or Compression.fp16")
        if not isinstance(self.process_set, ProcessSet):
            raise UsageError(f"process_set is {self.process_set!r}: expected a ProcessSet")

    @property
    def queue(self) -> Queue:
        return session.queue(self.process_set)

    def combined(self, groups: Sequence[tuple[str, Sequence[Array]]]) -> list[list[Array]]:
        """The arrays of these named groups, combined. Those of a group are done together. They are overwritten."""
        queue, under_way = self.queue, []
        for name, arrays in groups:
            sent = [self.compression.compress(each) for each in arrays]
            task = queue.grouped_allreduce_async(
                [each for each, _ in sent], name=name, op=self.op, prescale=self.prescale, postscale=self.postscale
            )
            under_way.append((task, [context for _, context in sent]))
        found = []
        for task, contexts in under_way:
            result = task.wait()
            parts = result if isinstance(result, list) else [result]
            found.append([self.compression.decompress(*each) for each in zip(parts, contexts, strict=True)])
        return found


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
    if average is not None and op is not None:
        raise UsageError("both average and op are given: expected one of them")
    chosen = op or (Sum if average is False else Average)
    how = Combining(chosen, prescale_factor, postscale_factor, compression, process_set)
    called = name or "allreduce"
    return through_arrays(lambda arrays: how.combined([(called, arrays)])[0], [value])[0]


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """The values of all ranks, one behind the other. The lengths of the first dimension may differ.

    Raises UsageError for a value without a dimension, and inside of a compiled step: there nobody knows the length.
    """
    if is_symbolic(value):
        raise UsageError("allgather in a step that is compiled: the shape is not known there. Call it outside")
    task = session.queue(process_set).allgather_async(array_of(value), name=name or "allgather")
    return like(task.wait(), value)


def broadcast(
    value: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The value of rank `root_rank` (its number in the job) on all ranks: of the shape and dtype of `value`, which all
    ranks have alike. Raises UsageError for a root that does not belong to the set."""
    root = root_in(process_set, root_rank)

    def found(arrays: list[Array]) -> list[Array]:
        return [session.queue(process_set).broadcast_async(arrays[0], root, name=name or "broadcast").wait()]

    return through_arrays(found, [value])[0]


def broadcast_object(value: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The object of rank `root_rank` on all ranks: plain data, as `omnireduce.broadcast_object` has it. Ranks call this
    in one order."""
    return session.communicator().broadcast_object(value, root_rank, name=name or "")


def allgather_object(value: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, by rank: plain data. Ranks call this in one order."""
    return session.communicator().allgather_object(value, name=name or "")


def broadcast_variables(
    variables: Iterable[Any], root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Give variables the values that they have on rank `root_rank` (its number in the job): `model.weights`,
    `optimizer.variables`. All ranks give as many, in one order.

    Raises UsageError where shapes or dtypes differ between ranks, or the root does not belong to the set.
    """
    own, root, queue = list(variables), root_in(process_set, root_rank), session.queue(process_set)
    tasks = [
        queue.broadcast_async(array_of(each), root, name=f"variable {number} of {len(own)}")
        for number, each in enumerate(own)
    ]
    for variable, task in zip(own, tasks, strict=True):
        variable.assign(task.wait())


def root_in(process_set: ProcessSet, root_rank: int) -> int:
    """The number in the set of the rank that has this one in the job."""
    members = process_set.ranks if process_set.ranks is not None else range(session.size())
    if root_rank not in members:
        raise UsageError(f"root_rank is {root_rank}: expected one of the ranks {list(members)}")
    return list(members).index(root_rank)
