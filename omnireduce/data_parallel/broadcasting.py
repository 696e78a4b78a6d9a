"""Parameters, buffers and an optimizer's state, as one rank has them, for all ranks: in one exchange of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.data_parallel.adapters import Adapter, ArrayAdapter, named_tensors
from omnireduce.data_parallel.default_communicator import communicator
from omnireduce.data_parallel.optimizer import DistributedOptimizer
from omnireduce.data_parallel.optimizer_state import OptimizerState
from omnireduce.errors import UsageError, a_type
from omnireduce.runtime.rank.calls.arguments import check_root
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.error_agreement import check_agreement
from omnireduce.runtime.rank.reported_errors import report_errors_to

NAME = "broadcast_parameters"


def broadcast_parameters(
    model: Any,
    root_rank: int = 0,
    *,
    optimizer: Any = None,
    adapter: Adapter | None = None,
    comm: Communicator | None = None,
) -> None:
    """Give all ranks the parameters and buffers of rank `root_rank`, bit by bit. All ranks call this together.

    `model`: an array, a list, tuple or dict of arrays, or an object with `parameters()` and, if it likes, `buffers()`.
    Their arrays are written to. `optimizer`: also give them the state of this optimizer: those of its attributes that
    are numbers, texts, arrays, or lists, tuples and dicts of these. The others need not have made a step. Attributes
    that are anything else stay as they are. `adapter`, `comm`: see `DistributedOptimizer`.

    Raises UsageError on all ranks where models differ, for a model without parameters, and for a root that there is
    not; otherwise what has ended the job.
    """
    comm, adapter = communicator(comm), ArrayAdapter() if adapter is None else adapter
    with report_errors_to(comm):
        named = named_tensors(list(model) if hasattr(model, "__next__") else model, adapter)
        parameter_ids = {id(tensor) for _, tensor in named}
        buffers = [pair for pair in adapter.buffers(model) if id(pair[1]) not in parameter_ids]
        arrays = [adapter.read(tensor) for _, tensor in named + buffers]
    terms = [
        (name, f"{array.dtype}{list(array.shape)}")
        for (name, _), array in zip(named + buffers, arrays, strict=True)
    ]  # fmt: skip
    kind = "none" if optimizer is None else type(optimizer).__name__
    check_agreement(comm, [("root_rank", str(root_rank)), ("optimizer", kind), *terms], NAME)
    if not named:
        raise UsageError(f"the model, {a_type(model)}, has no parameters: expected one or more")
    root = check_root(root_rank, comm.size, "root_rank")
    state = None if optimizer is None else _state_of(comm, root, optimizer, named, adapter)
    received = broadcast_arrays(comm, root, [*arrays, *(state.arrays if state else ())], NAME)
    if comm.rank != root:
        for (_, tensor), values in zip(named + buffers, received, strict=False):
            adapter.write(tensor, values)
        if state:
            state.restore(received[len(arrays) :])


def _state_of(
    comm: Communicator, root: int, optimizer: Any, named: Sequence[tuple[str, Any]], adapter: Adapter
) -> OptimizerState:
    """The state that the optimizer of the root has."""
    inner = optimizer.opt if isinstance(optimizer, DistributedOptimizer) else optimizer
    state = OptimizerState(inner, [tensor for _, tensor in named], adapter)
    description = state.describe() if comm.rank == root else None
    description = comm.broadcast_object(description, root, name=NAME)
    if comm.rank != root:
        state.expect(description)
    return state


def broadcast_arrays(comm: Communicator, root: int, arrays: Sequence[Array], name: str) -> list[Array]:
    """Return the root's values of these arrays as new arrays, in one exchange with this name. Dtypes and shapes are the
    same on all ranks. Raises UsageError for arrays of objects."""
    if not arrays:
        return []
    if any(array.dtype.hasobject for array in arrays):
        raise UsageError("an array of objects cannot be broadcast: expected arrays of numbers")
    ends = np.cumsum([0, *(array.nbytes for array in arrays)]).tolist()
    if comm.rank == root:
        whole = np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays])
    else:
        whole = np.empty(ends[-1], np.uint8)
    comm.broadcast(whole, root, name=name)
    copies = [np.empty(array.shape, array.dtype) for array in arrays]
    for copy, (start, end) in zip(copies, pairwise(ends), strict=True):
        copy.reshape(-1).view(np.uint8)[:] = whole[start:end]
    return copies
