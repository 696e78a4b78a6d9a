"""Functions for training with JAX, beside collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from omnireduce import data_parallel
from omnireduce.data_parallel.dataset_loader import Loader
from omnireduce.jax.collectives import allreduce


def partition_dataset(dataset: Any, batch_size: int, *, seed: int = 0, shuffle: bool = True) -> tuple[Loader, int]:
    """Deal out a dataset to the ranks, in batches of arrays of JAX: see
    `omnireduce.data_parallel.partition_dataset`. The dataset may have arrays of JAX, too."""
    on_host = jax.tree_util.tree_map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, dataset)
    return data_parallel.partition_dataset(
        on_host, batch_size, seed=seed, shuffle=shuffle, to_tensor=jnp.asarray
    )  # fmt: skip


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    weights: Any = None,
    **options: Any,
) -> Callable[..., Any]:
    """`jax.value_and_grad` of a loss whose value and gradients are then averaged over all ranks, in one exchange.

    The other arguments are those of `jax.value_and_grad`. The value that `fun` returns beside the loss (`has_aux`)
    stays that of this rank. Works within `jax.jit`. Raises what `allreduce` raises.

    `weights`: how much this rank counts, or a function that says so of the arguments of `fun`. If the loss is a mean
    over samples, it is their number: then the average is that of one process with the samples of all ranks, also
    where ranks have other numbers of them. None, on all ranks: all count alike.
    """
    differentiated = jax.value_and_grad(fun, argnums=argnums, has_aux=has_aux, **options)

    @functools.wraps(fun)
    def averaged(*args: Any, **kwargs: Any) -> Any:
        own_weight = weights(*args, **kwargs) if callable(weights) else weights
        value, gradients = differentiated(*args, **kwargs)
        if not has_aux:
            return allreduce((value, gradients), op="mean", weights=own_weight)
        value, aux = value
        value, gradients = allreduce((value, gradients), op="mean", weights=own_weight)
        return (value, aux), gradients

    return averaged


class GradientTransformation(NamedTuple):
    """A part of an optimizer, as optax has them: `init(params)` is its state, and `update(updates, state, params)` the
    updates and its state after them."""

    init: Callable[..., Any]
    update: Callable[..., Any]


def average_gradients() -> GradientTransformation:
    """A part of an optimizer that averages gradients over all ranks: put it first, for instance into `optax.chain`.

    `update(..., weights=)`: how much this rank counts, as for `value_and_grad`. A chain does not hand it on: where
    ranks have other numbers of samples, average by `value_and_grad`.
    """

    def init(params: Any) -> tuple[()]:
        return ()

    def update(updates: Any, state: Any, params: Any = None, *, weights: Any = None, **more: Any) -> tuple[Any, Any]:
        return allreduce(updates, op="mean", weights=weights), state

    return GradientTransformation(init, update)
