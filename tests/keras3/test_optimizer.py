"""A wrapped optimizer in one process without a job; and optimizers that cannot be wrapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import omnireduce.keras as hvd
from omnireduce.errors import UsageError
from omnireduce.keras.optimizer import CombiningMixin

# Keras 3.15 turns its variables into arrays in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def sgd(**more: Any) -> Any:
    return keras.optimizers.SGD(**{"learning_rate": 0.125, "momentum": 0.5} | more)


@keras.saving.register_keras_serializable("tests")
class Registered(keras.optimizers.SGD):
    """An optimizer of a user."""


class Unregistered(keras.optimizers.SGD):
    """One that Keras does not know of."""


def test_the_optimizer_stays_the_same_object_with_its_state() -> None:
    optimizer = sgd()
    optimizer.build([keras.Variable(np.ones(3, np.float32))])
    kept = list(optimizer.variables)
    result = hvd.DistributedOptimizer(optimizer)
    assert result is optimizer
    assert isinstance(result, keras.optimizers.SGD)
    assert all(a is b for a, b in zip(result.variables, kept, strict=True))


@pytest.mark.parametrize("make", [sgd, keras.optimizers.Adam, keras.optimizers.RMSprop, Registered])
def test_it_is_configured_and_saved_as_a_plain_one(make: Any) -> None:
    plain, combines = make(name="mine"), hvd.DistributedOptimizer(make(name="mine"))
    assert combines.get_config() == plain.get_config()
    shown, expected = (keras.optimizers.serialize(each) for each in (combines, plain))
    assert keras.optimizers.deserialize(shown).get_config() == keras.optimizers.deserialize(expected).get_config()


@pytest.mark.parametrize("more", [{}, {"backward_passes_per_step": 3, "average_aggregated_gradients": True}])
def test_one_of_its_configuration_combines_alike(more: dict[str, Any]) -> None:
    first = hvd.DistributedOptimizer(sgd(), compression=hvd.Compression.fp16, **more)
    second = type(first).from_config(first.get_config())
    assert isinstance(second, CombiningMixin)
    assert second._settings == first._settings
    assert second.get_config() == first.get_config()


@pytest.mark.parametrize("kind", [keras.optimizers.SGD, Registered, Unregistered])
def test_a_model_is_loaded_with_an_optimizer_that_combines(tmp_path: Path, kind: Any) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(kind(0.5)), "mse")
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    own = [kind] if kind is Unregistered else None
    result = hvd.load_model(tmp_path / "model.keras", custom_optimizers=own, compression=hvd.Compression.fp16)
    assert isinstance(result.optimizer, CombiningMixin)
    assert isinstance(result.optimizer, kind)
    assert result.optimizer._settings.compression is hvd.Compression.fp16
    if kind is not Unregistered:
        assert not isinstance(keras.models.load_model(tmp_path / "model.keras").optimizer, CombiningMixin)


def test_a_model_without_an_optimizer_is_loaded_as_it_is(tmp_path: Path) -> None:
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(tmp_path / "model.keras")
    assert getattr(hvd.load_model(tmp_path / "model.keras"), "optimizer", None) is None


def built() -> Any:
    optimizer = sgd()
    optimizer.build([keras.Variable(np.ones(3, np.float32))])
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hvd.DistributedOptimizer("sgd"), "optimizer is a str: expected one of keras.optimizers"),
        (lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd())), "combines gradients already"),
        (
            lambda: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(sgd()))),
            "combines gradients already",
        ),
        (lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Max), "op is 'max': expected Average, Sum or Adasum"),
        (
            lambda: hvd.DistributedOptimizer(sgd(), compression="fp16"),
            "compression is 'fp16': expected Compression.none",
        ),
        (lambda: hvd.DistributedOptimizer(sgd(), process_set=[0]), r"process_set is \[0\]: expected a ProcessSet"),
        (lambda: hvd.DistributedOptimizer(sgd(), group=2), "unknown settings group: expected some of average_aggreg"),
        (lambda: hvd.DistributedOptimizer(sgd(), num_groups=-1), "num_groups is -1: expected 0"),
        (lambda: hvd.DistributedOptimizer(sgd(), num_groups=1, groups=2), "both num_groups and groups are given"),
        (
            lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0),
            "backward_passes_per_step is 0: expected 1",
        ),
        (
            lambda: hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=2), backward_passes_per_step=4),
            "backward_passes_per_step is 4 and gradient_accumulation_steps of the optimizer 2: expected one",
        ),
        (lambda: hvd.DistributedOptimizer(built(), backward_passes_per_step=2), "that is built: expected a new one"),
        (
            lambda: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(sgd()), backward_passes_per_step=2),
            "backward_passes_per_step with a LossScaleOptimizer: expected 1",
        ),
        (
            lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0),
            "gradient_predivide_factor with op 'sum': expected op=Average",
        ),
        (lambda: hvd.DistributedOptimizer(sgd(), gradient_predivide_factor=0.0), "gradient_predivide_factor is 0.0"),
        (
            lambda: hvd.PartialDistributedOptimizer(sgd(), local_layers=[keras.layers.Dense(1)]),
            "expected layers that have their weights; build the model first",
        ),
        (
            lambda: hvd.DistributedGradientTape(None),
            "with the backend .*, which has no tape: expected tensorflow. DistributedOptimizer works",
        ),
        (lambda: hvd.allreduce(1.0, average=True, op=hvd.Sum), "average and op are both given"),
        (lambda: hvd.allreduce(1.0, op="median"), "op 'median': expected Average, Sum"),
        (lambda: hvd.allreduce(1.0), r"omnireduce is not initialised; call omnireduce\.init\(\) first"),
        (lambda: hvd.rank(), r"omnireduce is not initialised; call omnireduce\.init\(\) first"),
    ],
)
def test_what_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_steps_that_ranks_would_leave_out_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras scales the loss outside of the optimizer that combines gradients: that is refused."""
    optimizer = hvd.DistributedOptimizer(sgd(), process_set=hvd.ProcessSet([0, 1]))
    monkeypatch.setattr(keras.config, "dtype_policy", lambda: keras.DTypePolicy("mixed_float16"))
    weight = keras.Variable(np.ones(3, np.float32))
    with pytest.raises(UsageError, match=r"expected DistributedOptimizer\(keras.optimizers.LossScaleOptimizer"):
        optimizer.apply([keras.ops.ones(3)], [weight])


def test_half_precision_is_for_floats() -> None:
    for dtype, sent in (("float32", "float16"), ("float64", "float16"), ("float16", "float16"), ("int32", "int32")):
        array = np.arange(3).astype(dtype)
        half, context = hvd.Compression.fp16.compress(array)
        assert half.dtype == sent
        assert hvd.Compression.fp16.decompress(half, context).dtype == dtype
