"""A rank that does collectives of JAX, and trains with it; it prints a line of JSON for each way. Its values go to
FOLDER."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import telling
from telling import keep

import omnireduce
import omnireduce.jax as ddp
from omnireduce.errors import UsageError

rank, SIZE = ddp.init()
tell = partial(telling.tell, rank)


def tree() -> dict[str, Any]:
    return {
        "half": jnp.full((2, 3), rank + 0.5, jnp.bfloat16),
        "many": [jnp.full(400_000, rank + 1.0), jnp.arange(3) + rank],
        "none": None,
        "scalar": jnp.float32(rank),
    }


def shown(found: Any) -> list[Any]:
    return [
        [
            str(tree_leaf.dtype),
            list(tree_leaf.shape),
            np.unique(np.asarray(tree_leaf, np.float64)).tolist(),
            isinstance(tree_leaf, jax.Array),
        ]
        for tree_leaf in jax.tree_util.tree_leaves(found)
    ]


def summed() -> None:
    of_numpy = np.full(2, rank + 1.0)  # float64, though JAX has no such numbers here
    tell(
        "summed",
        direct=shown(ddp.allreduce(tree())),
        compiled=shown(jax.jit(ddp.allreduce)(tree())),
        largest=shown(jax.jit(lambda x: ddp.allreduce(x, op="max"))(jnp.array([rank, -rank]))),
        of_numpy=shown(ddp.allreduce([of_numpy, 1.5], op="mean")),
        kept=of_numpy.tolist(),
        empty=ddp.allreduce({"nothing": None}),
    )


def in_order() -> None:
    """Compiled and direct calls in turns; what is compiled may still be under way when the next one begins."""
    step = jax.jit(lambda x: ddp.allreduce(ddp.allreduce(x, op="max") + 1, op="sum"))
    results, x = [], jnp.float32(rank)
    for at in range(20):
        later = step(x + at)
        results.append(float(ddp.allreduce(jnp.float32(rank), op="min")))
        results.append(float(later))
    tell("in order", alike=results == [each for at in range(20) for each in (0.0, SIZE * (SIZE - 1.0 + at + 1))])


def from_a_root() -> None:
    results = {"w": jnp.array([rank, jnp.nan, -0.0]), "t": np.array([rank], np.int8)}
    compiled = jax.jit(lambda x: ddp.broadcast(x, root=1))(jnp.full(2, rank))
    of_root = ddp.broadcast(results, root=SIZE - 1)
    bits = np.asarray(of_root["w"]).tobytes().hex()
    assert ddp.broadcast({"nothing": None}) == {"nothing": None}
    tell("from a root", bits=bits, t=of_root["t"].tolist(), compiled=compiled.tolist())


def loss_of(params: dict[str, Any], x: Any, y: Any) -> tuple[Any, Any]:
    error = jnp.tanh(x @ params["w"]) @ params["v"] - y
    return jnp.mean(error**2), len(x)


def samples(params: Any, x: Any, y: Any) -> int:
    return len(x)


def trained(way: str, compiling: Any, *, transformation: bool = False, batch: int = 12, weights: Any = None) -> None:
    """Batches of twelve can be divided among three ranks; those of ten, of which the last one has seven, cannot."""
    chance = np.random.default_rng(5)
    x, y = (chance.standard_normal((37 if batch == 10 else 36, width)).astype(np.float32) for width in (4, 2))
    loader, _ = ddp.partition_dataset((x, y), batch)
    own = np.random.default_rng(rank)
    params = ddp.broadcast({name: jnp.asarray(own.standard_normal(shape), jnp.float32)
                            for name, shape in (("w", (4, 5)), ("v", (5, 2)))})  # fmt: skip
    averages = ddp.average_gradients()

    def step(params: Any, x: Any, y: Any) -> Any:
        if transformation:
            result = jax.grad(loss_of, has_aux=True)(params, x, y)[0]
            gradients, _ = averages.update(result, averages.init(params), weights=weights and len(x))
        else:
            (_, own), gradients = ddp.value_and_grad(loss_of, has_aux=True, weights=weights)(params, x, y)
            assert own == len(x)
        return jax.tree_util.tree_map(lambda p, g: p - 0.125 * g, params, gradients)

    step = compiling(step)
    for _ in range(3):
        for batch in loader:
            params = step(params, *batch)
    keep(rank, SIZE, way, params)


def loss_is_averaged() -> None:
    value, gradient = ddp.value_and_grad(lambda p: p * (rank + 1.0))(jnp.float32(2))
    weighed = ddp.value_and_grad(lambda p: p * (rank + 1.0), weights=jnp.array([1, 0, 3])[rank])
    halves = ddp.allreduce(jnp.full(2, rank + 1, jnp.bfloat16), op="mean", weights=(rank == 1) * 0.5)
    by_rank = [float(each) for each in jax.jit(weighed)(jnp.float32(2))]
    tell("loss", value=float(value), gradient=float(gradient), by_rank=by_rank, halves=halves.tolist())


def datasets() -> None:
    """Arrays of JAX, and of JAX and NumPy."""
    results = []
    for dataset in (jnp.arange(6), (jnp.arange(6), np.arange(6)), [{"x": jnp.float32(at)} for at in range(6)]):
        loader, _ = ddp.partition_dataset(dataset, 6, shuffle=False)
        leaves = jax.tree_util.tree_leaves(next(iter(loader)))
        assert all(isinstance(leaf, jax.Array) for leaf in leaves)
        results.append([leaf.tolist() for leaf in leaves])
    tell("datasets", found=results)


def wrong() -> None:
    results = []
    for call in (
        lambda: ddp.allreduce(jnp.ones(3), op="sum", weights=1),
        lambda: ddp.allreduce(jnp.ones(3), op="mean", weights=-1.5 if rank == 1 else 1.0),
        lambda: ddp.jit(lambda x: ddp.allreduce(x, op="mean", weights=x if rank == 2 else 1.0))(jnp.ones(3)),
        lambda: ddp.allreduce(jnp.ones(3), op="mean", weights=0),
        lambda: ddp.allreduce(jnp.arange(3), op="mean"),
        lambda: ddp.jit(lambda x: ddp.allreduce(x, op="mean"))(jnp.arange(3)),
        lambda: ddp.broadcast(jnp.zeros(2), root=SIZE),
        lambda: ddp.broadcast({"w": jnp.zeros(2 + rank)}),
        lambda: ddp.jit(lambda x: ddp.broadcast(x))(jnp.zeros(2 + rank)),
        lambda: ddp.broadcast({"key": jax.random.key(rank)}),
        lambda: ddp.jit(lambda x: ddp.broadcast(x))(jax.random.key(rank)),
        lambda: ddp.partition_dataset((jnp.zeros(9), [0] * 9), 9),
    ):
        try:
            call()
        except UsageError as error:
            results.append(str(error))
    try:
        jax.block_until_ready(jax.jit(lambda x: ddp.allreduce(x, op="mean"))(jnp.arange(3)))
    except Exception as error:
        results.append(f"{type(error).__name__}: {'expected a float type' in str(error) or 'mean' in str(error)}")
    try:
        ddp.jit(lambda x: x + y_that_is_not_there)(jnp.zeros(2))  # noqa: F821
    except NameError as error:
        results.append(str(error))
    tell("wrong", errors=results)


def refused() -> None:
    """By rank 1 alone. It ends the job."""
    try:
        ddp.allreduce(jax.random.key(0) if rank == 1 else jnp.ones(3))
    except (UsageError, omnireduce.AbortedError) as error:
        tell("refused", kind=type(error).__name__, error=str(error))


if sys.argv[2:] == ["dies"]:
    step = ddp.jit(lambda x: ddp.allreduce(x))
    for at in range(1000):
        if (rank, at) == (1, 3):
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        try:
            step(jnp.ones(3))
        except omnireduce.AbortedError as error:
            tell("died", step=at, culprit=error.culprit.split()[:2])
            break
else:
    trained("compiled", jax.jit)
    trained("direct", lambda step: step)
    trained("transformed", ddp.jit, transformation=True)
    trained("uneven", jax.jit, batch=10, weights=samples)
    trained("uneven, transformed", ddp.jit, transformation=True, batch=10, weights=samples)
    if SIZE > 1:
        for way in (summed, in_order, from_a_root, loss_is_averaged, datasets, wrong, refused):
            way()
ddp.shutdown()
