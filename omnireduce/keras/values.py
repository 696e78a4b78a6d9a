"""Values of Keras and NumPy as arrays, and back, on each of the backends of Keras.

In a step that is compiled there are no values yet. There the program calls the host when it runs: with JAX by an
ordered callback, with TensorFlow by `tf.numpy_function`. So collectives come in the order of the program, on all
ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.errors import OmniReduceError, UsageError

BACKENDS = ("torch", "jax", "tensorflow")
ArrayFunction = Callable[[list[Array]], list[Array]]


def check_backend() -> str:
    """The backend of Keras. Raises UsageError for one that is not served."""
    backend = str(keras.backend.backend())
    if backend not in BACKENDS:
        raise UsageError(f"the backend of Keras is {backend}: expected {', '.join(BACKENDS)}; set KERAS_BACKEND")
    return backend


def array_of(value: Any) -> Array:
    """A contiguous copy of a tensor, a variable, an array or a number."""
    if isinstance(value, keras.Variable):
        value = value.value
    array = keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else value
    return np.array(array, order="C")


def convert_like(array: Array, value: Any) -> Any:
    """A tensor with the values of the array if `value` is a tensor or a variable; otherwise the array."""
    if keras.ops.is_tensor(value) or isinstance(value, keras.Variable):
        return keras.ops.convert_to_tensor(array)
    return array


def is_symbolic(value: Any) -> bool:
    """Whether it has no numbers yet: a step is being compiled."""
    if isinstance(value, keras.KerasTensor):
        return True
    match keras.backend.backend():
        case "jax":
            import jax

            return isinstance(value, jax.core.Tracer)
        case "tensorflow":
            import tensorflow as tf

            return bool(tf.is_symbolic_tensor(value))
    return False


def call_with_arrays(function: ArrayFunction, values: Sequence[Any]) -> list[Any]:
    """Call `function` with arrays of these values, which it may overwrite; return its arrays. They are as many, of the
    same shapes and dtypes.

    Returns tensors where the values are tensors. Also works in a step that is compiled. Raises what `function` raises;
    from a compiled step an error of the backend, whose text has it.
    """
    if any(is_symbolic(value) for value in values):
        return _call_at_run_time(function, values)
    arrays = function([array_of(value) for value in values])
    return [convert_like(array, value) for array, value in zip(arrays, values, strict=True)]


_failures: list[Exception] = []  # of calls of the host, the last one


def raised_by_host(error: BaseException) -> Exception | None:
    """The error that a call of the host has raised within a compiled step. `error`: that of the backend, which has only
    the text of it."""
    failure = _failures.pop() if _failures else None
    is_shown = failure is not None and not isinstance(error, OmniReduceError) and str(failure) in str(error)
    return failure if is_shown else None


def _call_at_run_time(function: ArrayFunction, values: Sequence[Any]) -> list[Any]:
    def host_call(*tensors: Any) -> list[Array]:
        try:
            return function([np.array(array) for array in tensors])
        except Exception as error:
            _failures[:] = [error]
            raise

    if check_backend() == "jax":
        import jax
        from jax.experimental import io_callback

        shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]
        return list(io_callback(host_call, shapes, *values, ordered=True))
    import tensorflow as tf

    results = tf.numpy_function(host_call, list(values), [value.dtype for value in values])
    for tensor, value in zip(results, values, strict=True):
        tensor.set_shape(value.shape)
    return list(results)
