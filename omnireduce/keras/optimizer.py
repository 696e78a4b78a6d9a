"""Optimizers of Keras that combine their gradients with those of other ranks, in Horovod's words.

The optimizer stays the same object. It gets a class of its own, which derives from the class that it had. So it keeps
its state, and is saved as a plain optimizer is.

Keras clips gradients right before it applies them. There they are combined: after the passes of a step were added, and
before anything is done to them. So clipping and weight decay work as in one process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import keras
from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES

from omnireduce.data_parallel.horovod_names import Compression, NoneCompressor
from omnireduce.data_parallel.scaling import Average
from omnireduce.errors import UsageError, a_type
from omnireduce.keras.gradients import Settings
from omnireduce.keras.values import check_backend

NESTED = tuple(  # they hand gradients on to other optimizers
    getattr(keras.optimizers, name)
    for name in ("LossScaleOptimizer", "MultiOptimizer")
    if hasattr(keras.optimizers, name)
)


class CombiningMixin:
    """The part of an optimizer's class that combines gradients, with `_settings`. `_plain`: the class before that."""

    _settings: Settings
    _plain: Any
    _applied: Any = ()

    def _prefix(self) -> str:
        return self._settings.name or f"Distributed{type(self).__name__}"

    @classmethod
    def from_config(cls, config: Any, custom_objects: Any = None) -> Any:
        """An optimizer like it, which combines in the same way: see `keras.optimizers.Optimizer.from_config`."""
        options = {} if custom_objects is None else {"custom_objects": custom_objects}
        plain = cls._plain.from_config(config, **options)
        return wrap(plain, cls._settings)


class DirectMixin(CombiningMixin):
    """The part for an optimizer that applies gradients itself."""

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        object.__setattr__(self, "_applied", trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]
        object.__setattr__(self, "_applied", ())

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Combine gradients and apply them: see `keras.optimizers.Optimizer.apply`. None counts as zeros."""
        variables = self._trainable_variables if trainable_variables is None else trainable_variables  # type: ignore[attr-defined]
        variables = list(variables)
        if keras.config.dtype_policy().name == "mixed_float16" and self._settings.process_set.size() > 1:
            raise UsageError(
                "mixed_float16: ranks would skip different steps; expected "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), or mixed_bfloat16"
            )
        gradients = [
            keras.ops.zeros(variable.shape, variable.dtype) if gradient is None else gradient
            for gradient, variable in zip(grads, variables, strict=True)
        ]
        super().apply(gradients, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        passes, settings = self.gradient_accumulation_steps, self._settings  # type: ignore[attr-defined]

        def combine() -> list[Any]:
            gradients = settings.combine(self._prefix(), grads, self._applied)
            if settings.backward_passes_per_step == 1 or settings.average_aggregated_gradients:
                return gradients
            return [gradient * passes for gradient in gradients]  # Keras has divided them

        if passes:  # with JAX it clips after each pass, and takes what comes of the last one
            is_last = (self._iterations + 1) % passes == 0  # type: ignore[attr-defined]
            grads = keras.ops.cond(is_last, combine, lambda: list(grads))
        else:
            grads = combine()
        return super()._clip_gradients(grads)  # type: ignore[misc]


class NestedMixin(CombiningMixin):
    """The part for an optimizer that hands gradients on to other optimizers, which need the gradients of all ranks."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Combine gradients and apply them: see `keras.optimizers.Optimizer.apply`. None counts as zeros."""
        super().apply(self._combine(grads, trainable_variables), trainable_variables)  # type: ignore[misc]

    def _combine(self, grads: Any, variables: Any) -> list[Any]:
        variable_list = self._trainable_variables if variables is None else variables  # type: ignore[attr-defined]
        return self._settings.combine(self._prefix(), list(grads), list(variable_list))


class LossScaleMixin(NestedMixin):
    """The part for an optimizer that looks for infinities first: all ranks must see the same."""

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Combine gradients and apply them: see `keras.optimizers.Optimizer.stateless_apply`."""
        combined = self._combine(grads, self._trainable_variables)  # type: ignore[attr-defined]
        return super().stateless_apply(optimizer_variables, combined, trainable_variables)  # type: ignore[misc]


def DistributedOptimizer(  # noqa: N802  Horovod's name
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    compression: type[NoneCompressor] = Compression.none,
    op: Any = Average,
    **more: Any,
) -> keras.optimizers.Optimizer:
    """Let `optimizer` combine the gradients of all ranks before it applies them, and return it. Compile the model then.

    `name`: before the names of its gradients, on all ranks the same; by default that of its class. Ranks whose
    optimizers are of one class need none. `compression`: Compression.none or fp16. `op`: Average, Sum or Adasum.
    Also, by name:

    - `backward_passes_per_step`: how many passes are added before they are combined and applied. Their gradients are
      added; with `average_aggregated_gradients` they are averaged. It is `gradient_accumulation_steps` of Keras.
    - `gradient_predivide_factor`: of an average, divide by it before the sum, and by the rest after that.
    - `num_groups`, or `groups`: a number, or lists of variables. Gradients of a group are combined together.
    - `process_set`: the ranks that combine. The others apply their own gradients.
    - `sparse_as_dense`: for TensorFlow, turn gradients of some rows into dense ones. Elsewhere they are dense.

    Raises UsageError for what cannot be, and for an optimizer that combines already. A step raises it where ranks
    differ, and otherwise what has ended the job; from a compiled step an error of the backend, whose text has it.
    """
    return wrap(optimizer, Settings(name=name, compression=compression, op=op, **check_settings(more)))


def PartialDistributedOptimizer(  # noqa: N802  Horovod's name
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    local_layers: Any = (),
    scale_local_gradients: bool = True,
    **more: Any,
) -> keras.optimizers.Optimizer:
    """`DistributedOptimizer`, but gradients of the weights of `local_layers` (a layer, or several) stay on their rank.

    They are divided by the number of ranks, unless `scale_local_gradients` is False. The layers have their weights
    already: build the model first. Raises UsageError for a layer without weights.
    """
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers)
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer) or not layer.trainable_weights:
            raise UsageError(
                f"local_layers has {layer!r}: expected layers that have their weights; build the model first"
            )
    local = frozenset(id(weight) for layer in layers for weight in layer.trainable_weights)
    settings = Settings(name=name, local=local, scale_local_gradients=scale_local_gradients, **check_settings(more))
    return wrap(optimizer, settings)


def check_settings(more: Mapping[str, Any]) -> dict[str, Any]:
    """The settings. Raises UsageError for unknown ones."""
    expected = {name for name in Settings.__dataclass_fields__ if name not in ("local", "scale_local_gradients")}
    unknown = sorted(set(more) - expected)
    if unknown:
        raise UsageError(f"unknown settings {', '.join(unknown)}: expected some of {', '.join(sorted(expected))}")
    return dict(more)


def wrap(optimizer: Any, settings: Settings) -> Any:
    """The optimizer, whose class combines gradients from now on."""
    check_backend()
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(f"optimizer is {a_type(optimizer)}: expected one of keras.optimizers")
    if any(isinstance(candidate, CombiningMixin) for candidate in (optimizer, *_inner(optimizer))):
        raise UsageError("the optimizer combines gradients already: expected one that was not given here before")
    if isinstance(optimizer, NESTED):
        if settings.backward_passes_per_step > 1:
            raise UsageError(
                f"backward_passes_per_step with {a_type(optimizer)}: expected 1; give the optimizer inside "
                "gradient_accumulation_steps"
            )
        scales = type(optimizer).__name__ == "LossScaleOptimizer"
        mixin: type[CombiningMixin] = LossScaleMixin if scales else NestedMixin
    else:
        _accumulate(optimizer, settings.backward_passes_per_step)
        mixin = DirectMixin
    object.__setattr__(optimizer, "__class__", _class_of(type(optimizer), mixin, settings))
    return optimizer


def _accumulate(optimizer: Any, passes: int) -> None:
    """Let the optimizer add up the gradients of so many passes."""
    current_passes = optimizer.gradient_accumulation_steps
    if passes == 1 or current_passes == passes:
        return
    if current_passes:
        raise UsageError(
            f"backward_passes_per_step is {passes} and gradient_accumulation_steps of the optimizer {current_passes}: "
            "expected one"
        )
    if optimizer.built:
        raise UsageError("backward_passes_per_step for an optimizer that is built: expected a new one")
    optimizer.gradient_accumulation_steps = passes


def _inner(optimizer: Any) -> Collection[Any]:
    inner_optimizers = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "_inner_optimizers", ())]
    return [inner for inner in inner_optimizers if inner is not None]


def _class_of(base: type, mixin: type[CombiningMixin], settings: Settings) -> type:
    """A class that is saved, and shown, as its base."""
    attributes = {
        "_settings": settings,
        "_plain": base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    new_class = type(base.__name__, (mixin, base), attributes)
    if base in GLOBAL_CUSTOM_NAMES:  # a user's optimizer that has registered a name
        GLOBAL_CUSTOM_NAMES[new_class] = GLOBAL_CUSTOM_NAMES[base]
    return new_class
