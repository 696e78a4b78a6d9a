"""Callbacks against their formulas, in one process that believes to be one of several ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import omnireduce.keras as hvd
from omnireduce.data_parallel import session
from omnireduce.errors import UsageError

STEPS = 14
# Keras 3.15 turns its variables into arrays in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


@pytest.fixture(params=[8, 1, 3])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(session, "size", lambda: request.param)
    return int(request.param)


class Seen(keras.callbacks.Callback):
    """The learning rate of each batch, and what SGD has gathered before it."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.gathered: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        self.rates.append(float(keras.ops.convert_to_numpy(optimizer.learning_rate)))
        if optimizer.momentums:
            self.gathered.append(float(keras.ops.convert_to_numpy(optimizer.momentums[0])[0, 0]))


def fitted(callback: keras.callbacks.Callback, epochs: int = 5, steps: int = STEPS, **sgd: Any) -> Seen:
    """A model with one weight, whose gradient is 1 in each step."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(**{"learning_rate": 0.08} | sgd), loss=lambda y, x: x)
    seen = Seen()
    ones = np.ones((steps, 1), np.float32)
    model.fit(ones, ones, epochs=epochs, batch_size=1, verbose=0, callbacks=[callback, seen])
    return seen


def logged(callback: keras.callbacks.Callback) -> list[float]:
    result: list[float] = callback.model.history.history["learning_rate"]
    return result


def test_eight_ranks_warm_up_as_the_tutorial_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "size", lambda: 8)
    callback = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.08, warmup_epochs=3, verbose=1)
    fitted(callback)
    assert [f"{rate:.4f}" for rate in logged(callback)] == ["0.0333", "0.0567", "0.0800", "0.0800", "0.0800"]
    assert capsys.readouterr().out == "\nEpoch 3: finished gradual learning rate warmup to 0.08.\n"


@pytest.mark.parametrize("steps_per_epoch", [None, STEPS])
def test_the_rate_of_each_batch_of_a_warm_up(size: int, steps_per_epoch: int | None) -> None:
    callback = hvd.callbacks.LearningRateWarmupCallback(0.5, warmup_epochs=2, steps_per_epoch=steps_per_epoch)
    seen = fitted(callback, epochs=3)
    done = (np.arange(3 * STEPS) + 1) / STEPS
    expected = np.where(done <= 2 + 1e-9, 0.5 / size * (done * (size - 1) / 2 + 1), 0.5)
    assert np.allclose(seen.rates, expected, rtol=1e-6)


def test_no_warm_up_changes_nothing(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    callback = hvd.callbacks.LearningRateWarmupCallback(0.5, warmup_epochs=0, verbose=1)
    assert set(fitted(callback, epochs=1).rates) == {np.float32(0.08)}
    assert capsys.readouterr().out == ""


def test_a_staircase_changes_once_in_an_epoch() -> None:
    callback = hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: 0.5**epoch, start_epoch=1, end_epoch=3)
    seen = fitted(callback, epochs=4, steps=2)
    assert np.allclose(seen.rates, [0.08, 0.08, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25])
    assert np.allclose(logged(callback), [0.08, 0.5, 0.25, 0.25])


def test_without_a_staircase_epochs_are_fractions() -> None:
    epochs: list[float] = []

    def multiplier(epoch: float) -> float:
        epochs.append(epoch)
        return 1.0

    fitted(hvd.callbacks.LearningRateScheduleCallback(1.0, multiplier, staircase=False), epochs=2, steps=4)
    assert epochs == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]


def test_a_number_as_multiplier() -> None:
    callback = hvd.callbacks.LearningRateScheduleCallback(0.5, 0.5, staircase=False)
    assert set(fitted(callback, epochs=1).rates) == {0.25}


@pytest.mark.parametrize("corrects", [True, False])
def test_momentum_follows_the_rate(corrects: bool) -> None:
    """The momentum before a batch is multiplied by new rate / old rate: Goyal et al., 2017, remark 2."""
    rates = [0.5, 0.25, 1.0]
    callback = hvd.callbacks.LearningRateScheduleCallback(
        1.0, lambda epoch: rates[int(epoch)], momentum_correction=corrects
    )
    seen = fitted(callback, epochs=3, steps=2, learning_rate=0.5, momentum=0.5)
    gathered, before, expected = 0.0, 0.5, []
    for step in range(6):
        rate = rates[step // 2]
        gathered *= rate / before if corrects else 1
        expected.append(gathered)
        gathered, before = 0.5 * gathered - rate, rate
    assert seen.gathered == expected  # all are exact


def test_rates_that_no_callback_can_set() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    with pytest.raises(UsageError, match="has a LearningRateSchedule, which no callback changes: expected a number"):
        fitted(hvd.callbacks.LearningRateScheduleCallback(1.0, 0.5), learning_rate=schedule)


def test_steps_that_nobody_knows() -> None:
    callback = hvd.callbacks.LearningRateWarmupCallback(0.5)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    callback.set_model(model)
    callback.set_params({"epochs": 2, "steps": None})
    with pytest.raises(UsageError, match="steps_per_epoch is not known to fit: expected the number of batches"):
        callback.on_train_begin()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hvd.callbacks.LearningRateWarmupCallback(-1.0), "initial_lr is -1.0: expected a learning rate"),
        (lambda: hvd.callbacks.LearningRateScheduleCallback(None, 1.0), "initial_lr is None: expected"),
        (lambda: hvd.callbacks.LearningRateWarmupCallback(1.0, -1), "warmup_epochs is -1: expected 0 or more"),
    ],
)
def test_arguments_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
