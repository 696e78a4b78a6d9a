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

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import keras

from omnireduce import elastic
from omnireduce.core.dtypes import Array
from omnireduce.elastic import ObjectState
from omnireduce.errors import AbortedError as HorovodInternalError
from omnireduce.errors import NewcomersError as HostsUpdatedInterrupt
from omnireduce.errors import UsageError
from omnireduce.keras.collectives import broadcast_variables
from omnireduce.keras.values import array_of, raised_by_host

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

P = ParamSpec("P")
T = TypeVar("T")


def run(train: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """`omnireduce.elastic.run`, which knows errors that a compiled step has raised in its own way."""

    @functools.wraps(train)
    def call_train(state: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return train(state, *args, **kwargs)
        except Exception as error:
            raised = raised_by_host(error)
            if raised is None:
                raise
            raise raised from error

    return elastic.run(call_train)


class KerasState(ObjectState):
    """State of a training: the variables of a model and its optimizer, and values that are plain data.

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
        self._saved_arrays: list[Array] = []
        super().__init__(**values)

    def _variables(self) -> list[Any]:
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()  # within `fit` the backend has their values
        return [*self.model.weights, *self.optimizer.variables]

    def save(self) -> None:
        """Keep everything as it is now, on this rank."""
        super().save()
        self._saved_arrays = [array_of(variable).copy() for variable in self._variables()]

    def restore(self) -> None:
        """Go back to the state of the last `save`."""
        super().restore()
        for variable, saved in zip(self._variables(), self._saved_arrays, strict=True):
            variable.assign(saved)

    def on_reset(self) -> None:
        """The job was formed anew: steps were compiled for as many ranks as there were."""
        self.model.train_function = None
        super().on_reset()

    def sync(self) -> None:
        """Give all ranks the state of the one that has committed most often, and keep it."""
        broadcast_variables(self._variables(), self.root())
        super().sync()


class CommitStateCallback(keras.callbacks.Callback):
    """Commits after each so many batches, and after each epoch: before the next one begins, or training ends. So all
    callbacks have changed the state by then, in whatever order they are."""

    def __init__(self, state: elastic.State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise UsageError(f"batches_per_commit {batches_per_commit}: expected 1 or more")
        self.state, self.batches_per_commit = state, batches_per_commit
        self._is_due, self._commits = False, 0  # that were due in this epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self._is_due, self._commits = False, 0  # what came before has failed

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before, self._commits = self._commits, (batch + 1) // self.batches_per_commit
        self._is_due = self._is_due or self._commits > before

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._is_due, self._commits = True, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._commit()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._commit()

    def on_train_end(self, logs: Any = None) -> None:
        self._commit()

    def _commit(self) -> None:
        if self._is_due:
            self._is_due = False
            self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Counts the batches that are done of an epoch in `state.batch`. After a fault `fit` is given the others."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state, self._before = state, -1  # the last batch of this epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._before = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch += batch - self._before  # Keras may call this once for several batches
        self._before = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Counts the epochs that are done in `state.epoch`. After a fault `fit` is given `initial_epoch=state.epoch`, or
    fewer epochs."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch += 1
