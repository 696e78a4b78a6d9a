"""Codecs by name: those that are built in, and classes of a user's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np

from omnireduce.errors import UsageError
from omnireduce.kernels.codecs.base import Codec
from omnireduce.kernels.codecs.half import Half
from omnireduce.kernels.codecs.int8 import Int8
from omnireduce.kernels.codecs.means import SignMeans
from omnireduce.kernels.codecs.natural import Natural
from omnireduce.kernels.codecs.qsgd import Qsgd
from omnireduce.kernels.codecs.sign import Sign
from omnireduce.kernels.codecs.ternary import Ternary
from omnireduce.support.load_by_name import load_named

Codecs = Mapping[str, Codec]
NONE = "none"  # the name for float32 as it is
BUILT_IN: Codecs = {
    "bf16": Half(brain=True),
    "fp16": Half(brain=False),
    "int8": Int8(),
    "natural": Natural(),
    "onebit": SignMeans(apart=True),
    "qsgd": Qsgd(),
    "scaled_sign": SignMeans(apart=False),
    "sign": Sign(),
    "ternary": Ternary(),
}


def with_own(names: Iterable[str]) -> Codecs:
    """The built-in codecs and those of these `names`, each "module:Class". Raises UsageError."""
    return {**BUILT_IN, **{name: codec_named(name) for name in names}}


@lru_cache(64)
def codec_named(name: str) -> Codec:
    """The codec with this name, or of this "module:Class", ready for use. Raises UsageError."""
    if name in BUILT_IN:
        _try_out(BUILT_IN[name])
        return BUILT_IN[name]
    codec_class = load_named(name, f"the codec '{name}'", f"{', '.join((NONE, *BUILT_IN))}, or module:Class")
    if not (isinstance(codec_class, type) and issubclass(codec_class, Codec)):
        raise UsageError(
            f"the codec '{name}' is a {codec_class!r}; expected a class that derives from omnireduce.Codec"
        )
    try:
        codec: Codec = codec_class()
        _try_out(codec)
        return codec
    except Exception as error:
        raise UsageError(f"the codec '{name}' cannot be used: {type(error).__name__}: {error}") from error


def _try_out(codec: Codec) -> None:
    """Call each method once: what is compiled at its first call is not compiled in the middle of a collective."""
    values, where = np.zeros((1, 8), np.float32), np.zeros(1, np.int64)
    encoded = np.zeros((1, codec.block_bytes(8)), np.uint8)
    keys = np.zeros(1, np.uint64)
    codec.encode(values, encoded, keys)
    codec.encode_at(values, where, encoded, keys)
    codec.add(encoded, where, values)
    codec.decode(encoded, values)
    codec.place(encoded, where, values)
    codec.sum(encoded.reshape(-1), where.reshape(1, 1), values)
