"""The state of a training with Keras, on one rank; how ranks fail and come: tests/pytorch/test_torch_elastic.py."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np
import pytest
from local_cluster import Daemon, configured, unique_job

import omnireduce as omni
import omnireduce.keras as hvd
from omnireduce import AbortedError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


@pytest.fixture
def model(daemon: Daemon) -> Iterator[keras.Model]:
    with omni.init(configured(daemon.addresses), job=unique_job("alone"), rank=0, size=1):
        found = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        found.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5)), loss=lambda y, x: x)
        yield found
        hvd.shutdown()


def weight(model: keras.Model) -> float:
    return float(model.get_weights()[0][0, 0])


def test_a_training_goes_on_from_the_last_commit(model: keras.Model) -> None:
    """It fails once, in the second batch of the second epoch, before that is committed."""
    ones, failures, begins = np.ones((3, 1), np.float32), [(1, 1)], list[tuple[int, int]]()
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    class Failing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if (state.epoch, batch) in failures:
                failures.clear()
                raise AbortedError("rank 1", "gone")

    @hvd.elastic.run
    def train(state: hvd.elastic.KerasState) -> int:
        begins.append((state.epoch, state.batch))
        callbacks = [
            Failing(), hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state),
        ]  # fmt: skip
        left = ones[state.batch :]
        if len(left) < len(ones):  # what is left of an epoch
            model.fit(left, left, batch_size=1, verbose=0, callbacks=callbacks[:1])
            state.batch, state.epoch = 0, state.epoch + 1
        model.fit(
            ones, ones, batch_size=1, verbose=0, epochs=3, initial_epoch=state.epoch, shuffle=False, callbacks=callbacks
        )  # fmt: skip
        return state.epoch

    assert train(state) == 3
    assert begins == [(0, 0), (1, 1)]
    expected, gathered = 0.0, 0.0
    for _ in range(9):
        gathered = 0.5 * gathered - 1
        expected += gathered
    assert weight(model) == expected


def test_what_cannot_be(model: keras.Model) -> None:
    with pytest.raises(UsageError, match="the model has no optimizer; compile it first"):
        hvd.elastic.KerasState(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
    bare = keras.Sequential([keras.layers.Dense(1)])
    bare.compile("sgd")
    with pytest.raises(UsageError, match="the model is not built"):
        hvd.elastic.KerasState(bare)
    with pytest.raises(UsageError, match="batches_per_commit 0: expected 1 or more"):
        hvd.elastic.CommitStateCallback(hvd.elastic.KerasState(model), 0)
