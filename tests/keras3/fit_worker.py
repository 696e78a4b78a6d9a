"""A rank that trains models in several ways; it prints one line of JSON for each way. Run it by mpirun, on two ranks.

All numbers are small multiples of powers of two, so that sums and products are exact: a model that two ranks have
trained is the one that one process trains with their batches together, bit by bit.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

import omnireduce.keras as hvd
from omnireduce.errors import UsageError

BATCH, STEPS = 4, 4  # for each rank


def data() -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of all ranks: step by step, in each step rank by rank."""
    chance = np.random.default_rng(7)
    inputs = chance.integers(-1, 2, (STEPS * hvd.size() * BATCH, 4)).astype(np.float32)
    targets = chance.integers(-2, 3, (len(inputs), 2)).astype(np.float32)
    return inputs, targets


def samples_of_rank(values: np.ndarray) -> np.ndarray:
    """Samples of this rank."""
    return values.reshape(STEPS, hvd.size(), BATCH, -1)[:, hvd.rank()].reshape(STEPS * BATCH, -1)


def model_of(first: float = 0.0) -> keras.Model:
    """A linear model whose weights are `first`."""
    layer = keras.layers.Dense(2, kernel_initializer=keras.initializers.Constant(first))
    return keras.Sequential([keras.Input((4,)), layer])


def bits(model: keras.Model) -> list[str]:
    return [np.asarray(keras.ops.convert_to_numpy(weight)).tobytes().hex() for weight in model.weights]


def fitted(
    optimizer: Any, *, whole: bool = False, model: keras.Model | None = None, callbacks: Any = (), **more: Any
) -> keras.Model:
    model = model or model_of()
    model.compile(optimizer, "mse", jit_compile=False if keras.backend.backend() == "tensorflow" else "auto")
    inputs, targets = data()
    if not whole:
        inputs, targets = samples_of_rank(inputs), samples_of_rank(targets)
    size = BATCH * (hvd.size() if whole else 1)
    model.fit(inputs, targets, batch_size=size, shuffle=False, verbose=0, callbacks=list(callbacks), **more)
    return model


def sgd(**more: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(**{"learning_rate": 0.125, "momentum": 0.5} | more)


def same(mine: keras.Model, reference: keras.Model) -> dict[str, Any]:
    return {"bits": bits(mine), "alike": bits(mine) == bits(reference)}


def averaged() -> dict[str, Any]:
    return same(fitted(hvd.DistributedOptimizer(sgd())), fitted(sgd(), whole=True))


def clipped() -> dict[str, Any]:
    """As one process would: first combined, then clipped."""
    how = {"clipvalue": 0.25}
    return same(fitted(hvd.DistributedOptimizer(sgd(**how))), fitted(sgd(**how), whole=True))


def summed() -> dict[str, Any]:
    plain = fitted(sgd(learning_rate=0.125), whole=True)
    return same(fitted(hvd.DistributedOptimizer(sgd(learning_rate=0.125 / hvd.size()), op=hvd.Sum)), plain)


def predivided() -> dict[str, Any]:
    optimizer = hvd.DistributedOptimizer(sgd(), gradient_predivide_factor=2.0)
    return same(fitted(optimizer), fitted(sgd(), whole=True))


def grouped() -> dict[str, Any]:
    return same(fitted(hvd.DistributedOptimizer(sgd(), num_groups=1)), fitted(sgd(), whole=True))


def in_lists() -> dict[str, Any]:
    model = model_of()
    optimizer = hvd.DistributedOptimizer(sgd(), groups=[model.trainable_variables[1:]])
    return same(fitted(optimizer, model=model), fitted(sgd(), whole=True))


def averaged_passes() -> dict[str, Any]:
    optimizer = hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2, average_aggregated_gradients=True)
    return same(fitted(optimizer), fitted(sgd(gradient_accumulation_steps=2), whole=True))


def summed_passes() -> dict[str, Any]:
    optimizer = hvd.DistributedOptimizer(sgd(learning_rate=0.0625), backward_passes_per_step=2)
    return same(fitted(optimizer), fitted(sgd(gradient_accumulation_steps=2), whole=True))


def halved() -> dict[str, Any]:
    """Two ranks agree, though it is not what one process finds."""
    return {"bits": bits(fitted(hvd.DistributedOptimizer(sgd(), compression=hvd.Compression.fp16)))}


def adasum() -> dict[str, Any]:
    return {"bits": bits(fitted(hvd.DistributedOptimizer(sgd(), op=hvd.Adasum)))}


def eager() -> dict[str, Any]:
    model, (inputs, targets) = model_of(), data()
    model.compile(hvd.DistributedOptimizer(sgd()), "mse", run_eagerly=True)
    model.fit(samples_of_rank(inputs), samples_of_rank(targets), batch_size=BATCH, shuffle=False, verbose=0)
    return same(model, fitted(sgd(), whole=True))


def scaled() -> dict[str, Any]:
    """A step in which one rank has infinities is left out on all ranks."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=4.0))
    model = model_of()
    model.compile(optimizer, "mse", auto_scale_loss=False, jit_compile=False)
    inputs, targets = (samples_of_rank(each)[:BATCH].copy() for each in data())
    before = bits(model)
    spoilt = inputs.copy()
    spoilt[0] = np.inf if hvd.rank() == 1 else spoilt[0]
    model.train_on_batch(spoilt, targets)
    left_out = bits(model) == before
    model.train_on_batch(inputs, targets)
    return {"bits": bits(model), "alike": left_out and bits(model) != before}


def local() -> dict[str, Any]:
    """Weights of a layer of its own differ between ranks, others do not."""
    first, second = (keras.layers.Dense(2, kernel_initializer="ones", use_bias=False) for _ in range(2))
    model = keras.Sequential([keras.Input((4,)), first, second])
    fitted(hvd.PartialDistributedOptimizer(sgd(), local_layers=second), model=model)
    kernels = [keras.ops.convert_to_numpy(weight) for weight in model.weights]
    mine = hvd.allgather(kernels[1][None])
    return {"bits": kernels[0].tobytes().hex(), "alike": bool((mine[0] != mine[1]).any())}


def broadcast() -> dict[str, Any]:
    """Ranks begin with other weights. After the first batch all have those of rank 1, and its momentum."""
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1)
    model = fitted(hvd.DistributedOptimizer(sgd()), model=model_of(float(hvd.rank())), callbacks=[callback])
    moved = [np.asarray(keras.ops.convert_to_numpy(variable)).tobytes().hex() for variable in model.optimizer.variables]
    return {"bits": [*bits(model), *moved], "alike": callback.broadcast_done}


def dropped_out() -> dict[str, Any]:
    """A model with everything that makes ranks differ: weights, drop-out, order."""
    keras.utils.set_random_seed(hvd.rank())
    layers = [keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse", jit_compile="auto")
    if keras.backend.backend() == "tensorflow":
        model.jit_compile = False
    inputs, targets = data()
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = model.fit(
        samples_of_rank(inputs), samples_of_rank(targets), epochs=3, batch_size=BATCH, verbose=0, callbacks=callbacks
    ).history
    kept = model.optimizer.variables
    return {"bits": [*bits(model), *(repr(keras.ops.convert_to_numpy(each)) for each in kept), history["loss"]]}


def warmed_up() -> dict[str, Any]:
    """With momentum, whose length follows the rate."""
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.LearningRateWarmupCallback(0.125, warmup_epochs=2, verbose=0),
    ]
    model = fitted(hvd.DistributedOptimizer(sgd(nesterov=True)), callbacks=callbacks, epochs=3)
    rates = [round(each, 6) for each in model.history.history["learning_rate"]]
    return {"bits": bits(model), "alike": rates == [0.09375, 0.125, 0.125], "rates": rates}


def loaded() -> dict[str, Any]:
    """Training goes on from a file with the state of the optimizer, and combines gradients as before."""
    optimizer = hvd.DistributedOptimizer(sgd())
    model = fitted(optimizer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        plain = keras.models.load_model(path).optimizer
        again = hvd.load_model(path)
    inputs, targets = (samples_of_rank(each) for each in data())
    if keras.backend.backend() == "tensorflow":
        again.compile(again.optimizer, "mse", jit_compile=False)
    for each in (model, again):
        each.fit(inputs, targets, batch_size=BATCH, shuffle=False, verbose=0)
    is_plain = not isinstance(plain, type(optimizer).__mro__[1]) and type(plain).__name__ == "SGD"
    return {**same(again, model), "plain": is_plain}


def values() -> dict[str, Any]:
    """Collectives of tensors, variables, arrays and numbers."""
    rank = hvd.rank()
    tensor = keras.ops.convert_to_tensor(np.full((2, 3), rank + 1, np.float32))
    variable = keras.Variable(np.full(2, rank, np.int32), trainable=False)
    results = {
        "mean": hvd.allreduce(tensor),
        "sum": hvd.allreduce(tensor, average=False),
        "scaled": hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5),
        "max": hvd.allreduce(variable, op=hvd.Max),
        "number": hvd.allreduce(rank + 0.5, op=hvd.Product),
        "gathered": hvd.allgather(np.arange(rank + 1)),
        "from 1": hvd.broadcast(tensor, 1),
        "scattered": hvd.reducescatter(tensor, op=hvd.Sum),
    }
    kinds = [keras.ops.is_tensor(results[text]) for text in ("mean", "max", "from 1", "number", "gathered")]
    hvd.broadcast_variables([variable], 1)
    shown = {name: keras.ops.convert_to_numpy(result).tolist() for name, result in results.items()}
    one = hvd.add_process_set([1])
    if one.included():
        shown["alone"] = hvd.allreduce(tensor, process_set=one).shape == tensor.shape
    shown["object"] = hvd.broadcast_object({"rank": rank}, 1)
    return {"values": shown, "kinds": kinds, "variable": keras.ops.convert_to_numpy(variable).tolist()}


def refused() -> dict[str, Any]:
    """Each collective, by rank 1 alone; the next call of it is sound. Gives what rank 0 is told."""
    row, number, errors = np.ones((2, 3), np.float32), np.float32(1), {}
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "allreduce": (lambda: hvd.allreduce(row), lambda: hvd.allreduce(row, op="median")),
        "allgather": (lambda: hvd.allgather(row), lambda: hvd.allgather(number)),
        "reducescatter": (lambda: hvd.reducescatter(row), lambda: hvd.reducescatter(number)),
        "broadcast": (lambda: hvd.broadcast(row, 0), lambda: hvd.broadcast(row, 7)),
        "broadcast_object": (lambda: hvd.broadcast_object(7, 0), lambda: hvd.broadcast_object(7, 7)),
    }
    for name, (proper, wrong) in calls.items():
        try:
            (wrong if hvd.rank() else proper)()
        except UsageError as error:
            errors[name] = str(error)
        proper()
    return {"told": errors}


def averaged_metrics() -> dict[str, Any]:
    """Metrics of this rank are replaced by means. Ranks with other metrics get an error."""
    callback, rank = hvd.callbacks.MetricAverageCallback(), hvd.rank()
    logs = {"loss": 1.0 + rank, "accuracy": 0.25 * rank}
    if rank:  # in another order
        logs = dict(reversed(logs.items()))
    callback.on_epoch_end(0, logs)
    try:
        callback.on_epoch_end(1, {"loss": 0.0, f"mine {rank}": 0.0})
    except UsageError as error:
        return {"logs": logs, "error": str(error)}
    return {"logs": logs, "error": ""}


def best_saved() -> dict[str, Any]:
    """Rank 0 saves, once: the first epoch is the best."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "best.keras"
        model = model_of(1.0)
        callback = hvd.callbacks.BestModelCheckpoint(filepath=path, monitor="loss")
        callback.set_model(model)
        epochs = []
        for epoch, loss in enumerate((1.0, 2.0, 0.5)):
            callback.on_epoch_begin(epoch)
            callback.on_epoch_end(epoch, {"loss": loss})
            epochs.append(path.exists())
            path.unlink(missing_ok=True)
    return {"epochs": epochs}


def embedded() -> dict[str, Any]:
    """Gradients of some rows of a table."""

    def trained(optimizer: Any, whole: bool) -> keras.Model:
        table = keras.layers.Embedding(64, 2, embeddings_initializer="ones")
        model = keras.Sequential([keras.Input((4,), dtype="int32"), table, keras.layers.Flatten()])
        model.compile(optimizer, "mse", jit_compile=False)
        words = np.arange(hvd.size() * BATCH * 4, dtype=np.int32).reshape(-1, 4) % 12
        targets = np.zeros((len(words), 8), np.float32)
        mine = slice(None) if whole else slice(hvd.rank() * BATCH, (hvd.rank() + 1) * BATCH)
        model.train_on_batch(words[mine], targets[mine])
        return model

    return same(trained(hvd.DistributedOptimizer(sgd()), False), trained(sgd(), True))


def different() -> dict[str, Any]:
    """Ranks whose models differ: each gets an error that has both sides."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2 + hvd.rank(), use_bias=False)])
    try:
        model.compile(hvd.DistributedOptimizer(sgd()), "mse", jit_compile=False)
        model.fit(np.ones((4, 4)), np.ones((4, 2 + hvd.rank())), verbose=0)
    except Exception as error:
        return {"error": str(error)}
    return {"error": ""}


def taped() -> dict[str, Any]:
    """The tape of TensorFlow: in a graph and without."""
    import tensorflow as tf

    weight = keras.Variable(np.ones((2, 2), np.float32))
    mine = tf.constant([[hvd.rank() + 1.0], [hvd.rank() * 2.0]])

    def gradient() -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(tf.matmul(weight.value, mine))
        return tape.gradient(loss, [weight])[0]

    results = [each().numpy().tolist() for each in (gradient, tf.function(gradient))]
    return {"bits": results, "alike": results == [[[1.5, 1.0], [1.5, 1.0]]] * 2}


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    each.__name__: each
    for each in (
        *(averaged, clipped, summed, predivided, grouped, in_lists, averaged_passes, summed_passes, halved, adasum),
        *(
            eager,
            scaled,
            local,
            broadcast,
            dropped_out,
            warmed_up,
            loaded,
            values,
            refused,
            averaged_metrics,
            best_saved,
            embedded,
            different,
        ),
    )
}

if keras.backend.backend() == "tensorflow":
    WAYS["taped"] = taped


def main() -> None:
    hvd.init()
    for name in sys.argv[1:] or WAYS:
        line = json.dumps({"rank": hvd.rank(), "way": name, **WAYS[name]()})
        for rank in range(hvd.size()):  # lines of two ranks do not mix
            hvd.allreduce(0, name=f"turn {rank}")
            if rank == hvd.rank():
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
    hvd.shutdown()


if __name__ == "__main__":
    main()
