"""Training of Keras models that goes on when ranks fail or come, in Horovod's words.

@hvd.elastic.run
def train(state):
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state),
    ]
    state.model.fit(x, y, epochs=epochs, initial_epoch=state.epoch, callbacks=callbacks)

train(hvd.elastic.KerasState(model, batch=0, epoch=0))
"""

from __future__ import annotations

from typing import Any

import keras

from omnireduce.data_parallel.elastic import State, run
from omnireduce.dtypes import Array
from omnireduce.errors import AbortedError as HorovodInternalError
from omnireduce.errors import NewcomersError as HostsUpdatedInterrupt
from omnireduce.errors import UsageError
from omnireduce.keras.collectives import broadcast_variables
from omnireduce.keras.values import array_of

__all__ = [
    "CommitStateCallback",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

ObjectState = State


class KerasState(State):
    """The state of a training: the variables of a model and its optimizer, and values that are plain data.

    `optimizer`: None for that of the compiled model. It gets its variables now, if it has none. Raises UsageError for a
    model that is not built, or has no optimizer.
    """

    def __init__(self, model: keras.Model, optimizer: Any = None, **values: Any) -> None:
        self.model = model
        self.optimizer: Any = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if self.optimizer is None:
            raise UsageError("the model has no optimizer; compile it first, or give one")
        if not model.built:
            raise UsageError("the model is not built, so it has no weights; give it an Input, or call build")
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        self._kept_arrays: list[Array] = []
        super().__init__(**values)

    def _variables(self) -> list[Any]:
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()  # within `fit` the backend has their values
        return [*self.model.weights, *self.optimizer.variables]

    def save(self) -> None:
        """Keep everything as it is now, on this rank."""
        super().save()
        self._kept_arrays = [array_of(each).copy() for each in self._variables()]

    def restore(self) -> None:
        """Go back to what was kept."""
        super().restore()
        for each, kept in zip(self._variables(), self._kept_arrays, strict=True):
            each.assign(kept)

    def sync(self) -> None:
        """Give all ranks the state of the one that has committed most often, and keep it."""
        broadcast_variables(self._variables(), self.root())
        super().sync()


class CommitStateCallback(keras.callbacks.Callback):
    """Commits after each so many batches, and after each epoch. Give it to `fit` after those that change the state."""

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise UsageError(f"batches_per_commit {batches_per_commit}: expected 1 or more")
        self.state, self.batches_per_commit = state, batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (batch + 1) % self.batches_per_commit == 0:
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keeps the number of batches that are done of an epoch in `state.batch`."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keeps the number of epochs that are done in `state.epoch`: `initial_epoch` of the next `fit`."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = epoch + 1
