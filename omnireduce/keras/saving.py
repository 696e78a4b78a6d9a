"""Models that were saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras

from omnireduce.data_parallel.horovod_names import Compression, NoneCompressor
from omnireduce.keras.optimizer import DistributedOptimizer


def load_model(
    filepath: str | Path,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[NoneCompressor] = Compression.none,
) -> keras.Model:
    """The model of a file of Keras, whose optimizer combines gradients, with the state that was saved.

    `custom_optimizers`: classes of your own that it may have. `custom_objects`: others, by name. A model that was saved
    without an optimizer stays without. The arguments of `DistributedOptimizer` are not in the file: `compression` is
    given here, and passes that Keras accumulates are averaged. Raises what `keras.models.load_model` raises.
    """
    named_optimizers = {keras.saving.get_registered_name(kind): kind for kind in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**named_optimizers, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        DistributedOptimizer(optimizer, compression=compression)
    return model
