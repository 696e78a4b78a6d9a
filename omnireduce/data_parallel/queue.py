"""Collectives that ranks submit in any order, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, Literal, ParamSpec

import numpy as np

from omnireduce.core.descriptor import NAME_CHARACTERS, Op, RowOp
from omnireduce.core.dtypes import Array
from omnireduce.data_parallel import operations
from omnireduce.data_parallel.dispatcher import Dispatcher, Statistics, Task
from omnireduce.data_parallel.negotiation import MAX_NAMES
from omnireduce.data_parallel.operations import JOIN, Operation, Reduction, ReductionTemplate, RowReduction
from omnireduce.errors import UsageError
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.reported_errors import is_reported, mark_reported, reason_of

RESERVED_NAMES = (JOIN, "(barrier)")
LONGEST_NAME = NAME_CHARACTERS - 20  # there is more before it in the names of the collectives of a queue
QueueOp = Op | Literal["adasum"]
P = ParamSpec("P")


def _refuses_on_error(method: Callable[Concatenate[Queue, P], Task]) -> Callable[Concatenate[Queue, P], Task]:
    """Decorate a method: if it raises an error, the ranks that wait for the same name learn of it."""

    @wraps(method)
    def submit(self: Queue, /, *args: P.args, **kwargs: P.kwargs) -> Task:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.refuse(error, kwargs.get("name"))
            raise

    return submit


class Queue:
    """Collectives of all ranks of `comm`, or of these `ranks`, in a communicator and a thread of its own. A collective
    begins when all ranks are ready for it.

    Ranks may submit in any order: a `name` says what belongs together, and all ranks give the same one. Small arrays of
    one type and operation travel together, up to `queue.fusion_bytes` of rank 0. Programs whose steps are alike need
    nothing beside their arrays: see `statistics`. If ranks differ about a name, each of them gets an error that says
    how.

    If a rank does not come to a collective that others wait for, rank 0 logs a warning after `stall.warn_s`, and the
    job ends after `stall.abort_s`.

    All its ranks make it at the same time. `name` tells it from other queues of `comm`. Close it before `comm`.

    Its ranks are numbered by their place in `ranks`. Each method returns a task, whose `wait` returns the result.
    Arrays belong to the queue until then. All methods raise UsageError for arguments that cannot be, and for a name
    that is under way; then the tasks of this name on other ranks fail with UsageError, too. They raise ClosedError when
    a rank has closed its queue; and otherwise what has ended the job.
    """

    def __init__(self, comm: Communicator, ranks: Sequence[int] | None = None, *, name: str = "queue") -> None:
        self._comm = comm.create_group(ranks, name=name)
        self.rank, self.size = self._comm.rank, self._comm.size
        self._dispatcher = Dispatcher(self._comm)
        self._last: dict[str, ReductionTemplate] = {}  # by name: the next one is alike, as a rule

    def allreduce_async(
        self,
        x: Array,
        *,
        name: str,
        op: QueueOp = "sum",
        out: Array | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Task:
        """Combine `x` of all ranks, in place or into `out` (of the same shape and dtype), which is the result.

        `op`: sum, mean, min, max, prod, of bool any and all, or adasum, for which the number of ranks is a power of
        two. The mean of integers is their sum, which wraps around in their dtype, divided and rounded towards
        zero. `x` is multiplied by `prescale` before and the result by `postscale` after that; each product, and a mean
        of integers that is scaled, is rounded once.
        """
        outs = None if out is None else [out]
        return self.grouped_allreduce_async([x], name=name, op=op, outs=outs, prescale=prescale, postscale=postscale)

    def grouped_allreduce_async(
        self,
        arrays: Sequence[Array],
        *,
        name: str,
        op: QueueOp = "sum",
        outs: Sequence[Array] | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Task:
        """`allreduce_async` of several arrays, which are done together. The result is a list, of one array itself."""
        try:
            last = self._last.get(name)
            if last is not None and outs is None:
                like_last = last.reduction_of(arrays, op, prescale, postscale)
                if like_last is not None:
                    return self._dispatcher.submit(like_last)
            return self._submit(self._reduction(arrays, name, op, outs, prescale, postscale))
        except Exception as error:
            self.refuse(error, name)
            raise

    def _reduction(
        self, arrays: Sequence[Array], name: str, op: QueueOp, outs: Sequence[Array] | None, *scales: float
    ) -> Operation:
        outs = arrays if outs is None else outs
        if not arrays or len(arrays) != len(outs):
            raise UsageError(
                f"{len(arrays)} arrays and {len(outs)} outs for '{name}': expected as many, and one or more"
            )
        if op == "adasum":
            if scales != (1, 1):
                raise UsageError(f"adasum of '{name}' is not scaled: expected prescale and postscale to be 1")
            return operations.combining(name, arrays, outs, self.size)
        operation = Reduction(name, arrays, outs, op, *scales)
        if len(self._last) == MAX_NAMES:
            self._last.clear()
        self._last[name] = operation.template
        return operation

    @_refuses_on_error
    def allreduce_rows_async(self, indices: Array, values: Array, n_rows: int, *, name: str, op: RowOp = "sum") -> Task:
        """Add rows of a tall matrix by number: see `Communicator.allreduce_rows`. The result is (indices, values)."""
        return self._submit(RowReduction(name, indices, values, n_rows, op))

    @_refuses_on_error
    def allgather_async(self, x: Array, *, name: str) -> Task:
        """Everybody's `x`, one behind the other; the lengths of the first dimension may differ. It takes up to
        `protocol.max_part_bytes`."""
        self._check_part(name, x)
        return self._submit(operations.gathering(name, x))

    @_refuses_on_error
    def broadcast_async(self, x: Array, root: int = 0, *, name: str) -> Task:
        """Replace `x` on all ranks by that of `root`."""
        return self._submit(operations.broadcasting(name, x, root, self.size))

    @_refuses_on_error
    def alltoall_async(self, x: Array, splits: Array | None = None, *, name: str) -> Task:
        """Send the first `splits[0]` rows of `x` to rank 0, the next `splits[1]` to rank 1, and so on.

        `splits`: integers (size,); None: parts of one length. The result: the rows that have come here, by the rank
        that sent them, and how many from each: int64 (size,). All rows travel to all ranks.
        """
        size = self.size
        self._check_part(name, x)
        if x.ndim == 0:
            raise UsageError(f"'{name}' has no rows to send; expected at least one dimension")
        if splits is None:
            if len(x) % size:
                raise UsageError(f"'{name}' is {list(x.shape)}: expected a multiple of {size} rows, or splits")
            splits = np.full(size, len(x) // size)
        splits = np.asarray(splits)
        if splits.shape != (size,) or splits.dtype.kind not in "iu" or splits.min() < 0 or splits.sum() != len(x):
            raise UsageError(
                f"splits of '{name}' are {splits.tolist()}: expected {size} numbers that add up to {len(x)}"
            )
        return self._submit(operations.exchanging(name, x, splits.astype(np.int64), self.rank))

    @_refuses_on_error
    def reducescatter_async(
        self, x: Array, *, name: str, op: Op = "sum", prescale: float = 1.0, postscale: float = 1.0
    ) -> Task:
        """This rank's rows of the combined `x`: part `rank` of `numpy.array_split(result, size)`."""
        if x.ndim == 0:
            raise UsageError(f"'{name}' has no rows to scatter; expected at least one dimension")
        return self._submit(operations.scattering(name, x, op, prescale, postscale))

    @_refuses_on_error
    def broadcast_object_async(self, x: object, root: int = 0, *, name: str, trust: bool = False) -> Task:
        """The object of `root`: see `Communicator.broadcast_object`, also for what it may be."""
        return self._submit(operations.sharing_object(name, x, root, size=self.size, trust=trust))

    @_refuses_on_error
    def allgather_object_async(self, x: object, *, name: str, trust: bool = False) -> Task:
        """A list of the objects of all ranks."""
        return self._submit(operations.sharing_object(name, x, None, size=self.size, trust=trust))

    def refuse(self, error: Exception, *names: object) -> None:
        """Let the ranks that wait for what has these names know that this one refuses it, because of `error`: their
        tasks raise UsageError. Later collectives of these names work as usual. For programs that find by themselves
        that they cannot submit. Does nothing where they know of the error, and for a name that cannot be. Raises
        nothing.
        """
        for name in names:
            if isinstance(name, str) and not _name_error(name) and not is_reported(error, name):
                self._dispatcher.refuse(name, reason_of(mark_reported(error, name)))

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._submit(operations.barrier("(barrier)")).wait()

    def join(self) -> int:
        """This rank has no more data. Return the rank that joined last, when all ranks have joined.

        Until then this rank changes nothing in the all-reduces of others, also of rows, but that means are divided by
        the number of all ranks.
        Raises UsageError while something is under way here. Other collectives fail on ranks that have not joined.
        """
        return int(self._submit(operations.joining()).wait())

    def statistics(self) -> Statistics:
        """Counters of the work that is done."""
        return self._dispatcher.statistics()

    def close(self) -> None:
        """End the queues of all ranks. Collectives under way on other ranks fail."""
        self._dispatcher.close()
        self._comm.shutdown()

    def _check_part(self, name: str, x: Array) -> None:
        max_bytes = self._comm.config.protocol.max_part_bytes
        if isinstance(x, np.ndarray) and x.nbytes > max_bytes:
            raise UsageError(f"'{name}' has {x.nbytes} bytes; expected at most protocol.max_part_bytes, {max_bytes}")

    def _submit(self, operation: Operation) -> Task:
        """Raises UsageError for a name that no collective may have: later it would end the job."""
        name, kind = operation.request.name, operation.request.kind
        if kind not in ("join", "barrier") and (error := _name_error(name)):
            raise UsageError(error)
        return self._dispatcher.submit(operation)


def _name_error(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        return f"name {name!r:.60}: expected a text of 1 to {LONGEST_NAME} characters that can be shown"
    return f"name {name!r}: a queue uses it itself; expected another one" if name in RESERVED_NAMES else ""
