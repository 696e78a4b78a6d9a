"""Collectives of pytrees of JAX: outside of a compiled function at once, within one by an ordered callback of the host.

So collectives come in the order of the program, on all ranks alike. A callback runs in a thread of JAX, and they come
one at a time: each takes the communicator over.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from omnireduce.core.descriptor import Op
from omnireduce.core.dtypes import Array
from omnireduce.data_parallel.broadcasting import broadcast_arrays
from omnireduce.data_parallel.default_communicator import communicator
from omnireduce.errors import UsageError
from omnireduce.runtime.rank.calls.arguments import check_root
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.error_agreement import check_agreement
from omnireduce.runtime.rank.reported_errors import report_errors_to
from omnireduce.support.rounding import scaled

HostFunction = Callable[[Communicator, list[Array]], list[Array]]

_order = threading.RLock()  # of the collectives of this process
_failures: list[Exception] = []  # of callbacks, the last one


def allreduce(tree: Any, op: Op = "sum", *, weights: Any = None) -> Any:
    """Combine the leaves of all ranks, element by element: a tree like this one. All ranks call this with the same
    structure, shapes and dtypes.

    Leaves: arrays of JAX or NumPy, or numbers, of any dtype that `omnireduce.allreduce` takes, bfloat16 among them.
    Those of JAX stay on their devices, others become arrays of NumPy. `op`: sum, mean, min, max or prod, and of bool
    any or all; mean needs floats. All leaves travel in one exchange for each dtype, but each large one in its own.

    `weights`: the weight of this rank in a mean, a number of 0 or more, for example its number of samples. The ranks
    first exchange their weights, in a small collective. None, on all ranks: all weights are equal.

    Works within `jax.jit`, not within `jax.vmap`; no gradient flows through. Raises UsageError for keys of
    `jax.random`, and on all ranks for a weight that is negative or not finite; otherwise the errors of
    `omnireduce.allreduce`. For errors within a compiled function, see `jit`.
    """

    def combine(comm: Communicator, arrays: list[Array]) -> list[Array]:
        comm.allreduce(arrays, op=op)
        return arrays

    def combine_weighted(comm: Communicator, arrays: list[Array]) -> list[Array]:
        *leaves, weight = arrays
        share = share_of(comm, weight)
        for array in leaves:
            scaled(array, share, array)
        return [*combine(comm, leaves), weight]

    if weights is None:
        return _map_leaves(combine, tree)
    with report_errors_to(communicator()):
        if op != "mean":
            raise UsageError(f"weights with op {op!r}: expected op='mean'")
    return _map_leaves(combine_weighted, (tree, weights))[0]


def share_of(comm: Communicator, weight: Array) -> float:
    """The weight of this rank divided by the mean of all weights. Raises UsageError on all ranks if one gives no
    number, or a negative one, and if all are 0."""
    try:
        own_weight = float(weight.item())
    except (TypeError, ValueError):  # the others are waiting: they are told, too
        own_weight = np.nan
    weights = comm.allgather(np.array([own_weight]))[:, 0]
    invalid = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if invalid.size:
        raise UsageError(
            f"the weight of rank {invalid[0]} is {weights[invalid[0]]:g}: expected one number of 0 or more"
        )
    if not weights.any():
        raise UsageError("the weights of all ranks are 0: expected more on one of them")
    return float(weights[comm.rank] * comm.size / weights.sum())


def broadcast(tree: Any, root: int = 0) -> Any:
    """A tree with the leaves of rank `root`, bit by bit: of parameters, or the state of an optimizer. All ranks call
    this with the same structure, shapes and dtypes.

    The rest is as in `allreduce`. Raises UsageError on all ranks if their leaves differ in shape or dtype, and for a
    root that is no rank.
    """
    names = [f"tree{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]

    def broadcast_leaves(comm: Communicator, arrays: list[Array]) -> list[Array]:
        terms = [(name, f"{array.dtype}{list(array.shape)}") for name, array in zip(names, arrays, strict=True)]
        check_agreement(comm, [("root", str(root)), *terms], "")
        return broadcast_arrays(comm, check_root(root, comm.size), arrays, "")

    return _map_leaves(broadcast_leaves, tree)


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` for a function with collectives: their errors reach the caller unchanged.

    With `jax.jit` alone, the caller gets an error of JAX that quotes the text of ours. `options` are passed to
    `jax.jit`. Calls return when their results are ready, because the host waits for other ranks anyway.
    """
    compiled = jax.jit(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _failures.clear()
        try:
            return jax.block_until_ready(compiled(*args, **kwargs))
        except Exception as error:
            failure = _failures.pop() if _failures else None
            if failure is None or str(failure) not in str(error):
                raise
            raise failure from error

    return call


def _map_leaves(function: HostFunction, tree: Any) -> Any:
    """The tree with its leaves replaced by the arrays that `function` makes of them: the same number, shapes and
    dtypes. `function` may overwrite its arguments."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    with report_errors_to(communicator()):
        if any(_is_key(leaf) for leaf in leaves):
            raise UsageError(
                "a leaf is a key of jax.random, which is no array of numbers; expected its jax.random.key_data, of "
                "which jax.random.wrap_key_data makes a key again"
            )
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        results = _call_at_run_time(function, leaves)
    else:
        jax.effects_barrier()  # callbacks of what was called before come first, on all ranks
        with report_errors_to(communicator()):
            copies = [np.array(leaf, order="C") for leaf in leaves]
        arrays = _run_on_host(function, copies)
        results = [
            jax.device_put(array, leaf.sharding) if isinstance(leaf, jax.Array) else array
            for array, leaf in zip(arrays, leaves, strict=True)
        ]
    return jax.tree_util.tree_unflatten(structure, results)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _run_on_host(function: HostFunction, arrays: list[Array]) -> list[Array]:
    with _order:
        comm = communicator()
        comm.take_over()
        return function(comm, arrays)


def _call_at_run_time(function: HostFunction, leaves: Sequence[Any]) -> list[Any]:
    def host_call(*values: Any) -> list[Array]:
        try:
            return _run_on_host(function, [np.array(leaf, order="C") for leaf in values])
        except Exception as error:
            _failures[:] = [error]
            raise

    shapes = [jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in leaves]
    return list(io_callback(host_call, shapes, *leaves, ordered=True))
