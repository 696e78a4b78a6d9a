"""A rank of an elastic training with Keras. Its weight becomes less by 1 in each step, however many ranks there are.

With "dies" it dies when the others have begun a step.
"""

from __future__ import annotations

import os
import signal
import sys

import keras
import numpy as np

import omnireduce.keras as hvd

BATCHES, EPOCHS, RANKS = 4, 3, 2
DIES_AT = 0, 3


def say(text: str) -> None:
    sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()} {text}\n")
    sys.stdout.flush()


class Dying(keras.callbacks.Callback):
    """The last of the callbacks: all others have done what they do before a step."""

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        if (state.epoch, state.batch) == DIES_AT and "dies" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state: hvd.elastic.KerasState, ones: np.ndarray) -> None:
    say(f"goes on in epoch {state.epoch}, batch {state.batch}")
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state), Dying(),
    ]  # fmt: skip
    while state.epoch < EPOCHS or hvd.size() < RANKS or state.batch:
        left, epochs = ones[state.batch :], {"initial_epoch": state.epoch, "epochs": state.epoch + 1}
        state.model.fit(left, left, batch_size=1, verbose=0, shuffle=False, callbacks=callbacks, **epochs)


hvd.init()
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), loss=lambda _, found: found)
state = hvd.elastic.KerasState(model, batch=0, epoch=0)
train(state, np.ones((BATCHES, 1), np.float32))
say(f"is done: weight {model.get_weights()[0][0, 0]:g} after {state.epoch} epochs of {BATCHES} batches")
hvd.shutdown()
