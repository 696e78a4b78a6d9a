"""Callbacks for `fit` that work on all ranks together, with Horovod's names.

Give them to `fit` in this order: the broadcast, the average of metrics, the learning rates, and then callbacks that use
their results.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras.src.utils import io_utils

from omnireduce.data_parallel import session
from omnireduce.data_parallel.session import ProcessSet, global_process_set
from omnireduce.errors import UsageError
from omnireduce.keras.collectives import broadcast_variables
from omnireduce.keras.values import array_of

Logs = dict[str, Any] | None


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """After the first batch, give all ranks the weights and the optimizer's state of rank `root_rank`.

    It is after the first batch because the optimizer has its state then. States of random numbers stay as they are:
    ranks drop out different units.
    """

    def __init__(self, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.root_rank, self.process_set, self.broadcast_done = root_rank, process_set, False

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self.broadcast_done:
            return
        model = self.model
        variables = [*model.weights, *model.optimizer.variables]
        broadcast_variables(variables, self.root_rank, self.process_set)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """At the end of an epoch, replace each metric by its mean over all ranks.

    Callbacks after this one see the means. All ranks have the same metrics; else each of them gets a UsageError.
    """

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if not logs or self.process_set.size() == 1:
            return
        queue, names = session.queue(self.process_set), sorted(logs)
        lists = queue.allgather_object_async(names, name="names of metrics").wait()
        for rank, metrics in enumerate(lists):
            if metrics != lists[0]:
                first_text, rank_text = (json.dumps(metric_names) for metric_names in (lists[0], metrics))
                raise UsageError(
                    f"metrics differ: rank 0 has {first_text}, rank {rank} has {rank_text}; expected the same"
                )
        values = np.array([float(logs[name]) for name in names])
        means = queue.allreduce_async(values, name="metrics", op="mean").wait()
        logs.update(zip(names, means.tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """In epochs from `start_epoch` to before `end_epoch` (None: the last one), set the learning rate to
    `initial_lr` · `multiplier`(epoch).

    `multiplier`: a function of the epoch, or a number. With `staircase` the rate changes once in each epoch; without,
    before each batch, and epochs are fractions then: after a fourth of the batches of epoch 2 it is 2.25.
    `steps_per_epoch`: batches in an epoch; None: as many as `fit` knows of.

    With `momentum_correction` the momentum that SGD and RMSprop have gathered is multiplied by new rate / old rate when
    the rate changes: it holds sums of steps, whose length has the rate in it. After Goyal et al., "Accurate, Large
    Minibatch SGD", 2017.

    Raises UsageError when `fit` begins for an optimizer whose rate cannot be set, and where the number of steps is not
    known.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: Callable[[float], float] | float,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None or initial_lr < 0:
            raise UsageError(f"initial_lr is {initial_lr}: expected a learning rate of 0 or more")
        if callable(multiplier):
            self.multiplier, self.staircase = multiplier, staircase
        else:
            factor = float(multiplier)
            self.multiplier, self.staircase = lambda epoch: factor, True
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self.current_epoch = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        try:
            self._set(self._rate())
        except TypeError as error:
            raise UsageError(
                "the optimizer has a LearningRateSchedule, which no callback changes: expected a number as its "
                "learning_rate"
            ) from error
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise UsageError("steps_per_epoch is not known to fit: expected the number of batches in an epoch")

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None:  # Keras's own name for it
            logs["learning_rate"] = self._rate()

    def _rate(self) -> float:
        return float(array_of(self.model.optimizer.learning_rate))

    def _set(self, rate: float) -> None:
        self.model.optimizer.learning_rate = rate

    def _adjust(self, epoch: float) -> None:
        old, new = self._rate(), self.initial_lr * self.multiplier(epoch)
        self._set(new)
        if self.momentum_correction and old and new != old:
            for momentum in _momentums(self.model.optimizer):
                momentum.assign(momentum * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """In the first `warmup_epochs`, let the learning rate grow from `initial_lr` / size to `initial_lr`, in equal steps
    before each batch.

    `initial_lr` is the rate for all ranks: that of one rank times their number. At the end of epoch e (from 0) it is
    initial_lr / size · ((e + 1) · (size - 1) / warmup_epochs + 1). With `verbose` each rank says when it is over. The
    rest is as in `LearningRateScheduleCallback`. After Goyal et al., 2017.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        if warmup_epochs < 0:
            raise UsageError(f"warmup_epochs is {warmup_epochs}: expected 0 or more")

        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            size = session.size()
            finished_epochs = epoch + 1 / self.steps_per_epoch  # with this batch
            return 1 / size * (finished_epochs * (size - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0:
            io_utils.print_msg(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Rank 0 saves the model to `filepath`, which ends in .keras, each time when `monitor` is better than before.

    It comes after `MetricAverageCallback`: else it is the metric of rank 0 alone. `mode` ("min", "max" or "auto") and
    `save_freq` ("epoch", or a number of batches): see `keras.callbacks.ModelCheckpoint`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        *,
        filepath: str | Path,
    ) -> None:
        super().__init__(
            filepath, monitor=monitor, verbose=verbose, save_best_only=True, mode=mode, save_freq=save_freq
        )

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if session.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if session.rank() == 0:
            super().on_epoch_end(epoch, logs)


def _momentums(optimizer: Any) -> list[Any]:
    """The momentum variables of SGD or RMSprop; none for other optimizers, and none without momentum."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not getattr(optimizer, "momentum", 0):
        return []
    momentums = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None)
    return list(momentums or ())
