"""TensorFlow's gradient tape, whose gradients are combined with those of other ranks."""

from __future__ import annotations

from typing import Any

import keras

from omnireduce.data_parallel.horovod_names import Compression, NoneCompressor
from omnireduce.data_parallel.scaling import Average
from omnireduce.errors import UsageError
from omnireduce.keras.gradients import Settings
from omnireduce.keras.optimizer import check_settings


class Tape:
    """A tape that combines gradients. Its other attributes are those of TensorFlow's tape."""

    def __init__(self, tape: Any, settings: Settings) -> None:
        self._tape, self._settings = tape, settings

    def __enter__(self) -> Tape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None) -> Any:
        """The gradients of `target`, combined: one for each of the `sources`, a list of variables or one variable. One
        that is None counts as zeros. Raises UsageError where ranks differ, and otherwise what has ended the job."""
        is_list = isinstance(sources, list | tuple)
        source_list = list(sources) if is_list else [sources]
        values = [source.value if isinstance(source, keras.Variable) else source for source in source_list]
        gradients = self._tape.gradient(target, values, output_gradients)
        combined = self._settings.combine(self._settings.name or "DistributedGradientTape", gradients, source_list)
        return combined if is_list else combined[0]


def DistributedGradientTape(  # noqa: N802  Horovod's name
    gradtape: Any,
    compression: type[NoneCompressor] = Compression.none,
    op: Any = Average,
    **more: Any,
) -> Any:
    """Let the gradients of a `tf.GradientTape` be combined with those of other ranks: a tape.

    `more`: what `DistributedOptimizer` takes by name, but for passes. Raises UsageError for other backends than
    TensorFlow, which have no tape, and for what cannot be.
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise UsageError(
            f"DistributedGradientTape with the backend {backend}, which has no tape: expected tensorflow. "
            "DistributedOptimizer works with every backend"
        )
    settings = Settings(compression=compression, op=op, **check_settings(more))
    if settings.backward_passes_per_step != 1:
        raise UsageError("backward_passes_per_step of a tape: expected 1. DistributedOptimizer has more")
    return Tape(gradtape, settings)
