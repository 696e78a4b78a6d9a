"""Python objects as bytes, and back.

A pickle may make its reader call anything. So it is read as plain data, in which only the types of this module stand,
unless the caller trusts all who take part. Arrays travel as their dtype, shape and bytes: NumPy's own pickles run code
that was not written for bytes of strangers.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import io
import math
import pickle
from typing import Any

import numpy as np

from omnireduce.errors import UsageError

PROTOCOL = 5
PLAIN = {  # beside None, bool, int, float, str, bytes, tuple, list, dict, set and frozenset, which a pickle just says
    f"{each.__module__}.{each.__qualname__}": each
    for each in (
        bytearray, complex, range, slice, set, frozenset, collections.OrderedDict, collections.deque,
        datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone,
        decimal.Decimal, fractions.Fraction,
    )
}  # fmt: skip
SAID = "None, bool, numbers, str, bytes, tuples, lists, dicts, sets, dates and arrays"
ADVICE = "pass trust=True on every rank if all that take part may run code in this process"


def to_bytes(x: object, trust: bool) -> bytes:
    """Raises UsageError for what cannot be pickled, and for what the others would not read."""
    file = io.BytesIO()
    try:
        (pickle.Pickler if trust else _PlainPickler)(file, PROTOCOL).dump(x)
    except UsageError:
        raise
    except Exception as error:  # any: what is pickled says itself how
        raise UsageError(f"the {type(x).__name__} cannot be sent: {error}") from error
    return file.getvalue()


def from_bytes(data: bytes, trust: bool, sender: str) -> object:
    """Raises UsageError for bytes that are no object, or another than may be read."""
    try:
        return (pickle.Unpickler if trust else _PlainUnpickler)(io.BytesIO(data)).load()
    except Exception as error:  # any: a pickle can make its reader raise what it likes
        raise UsageError(f"the object of {sender} cannot be read: {error}") from error


class _PlainPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> object:
        if isinstance(obj, np.ndarray | np.generic) and type(obj) is not np.ma.MaskedArray:
            array = np.asarray(obj)
            if array.dtype.hasobject or array.dtype.names or array.dtype.subdtype:
                raise UsageError(f"an array of {array.dtype} cannot be sent as plain data; {ADVICE}")
            text = array.dtype.str
            text = text if np.dtype(text) == array.dtype else array.dtype.name  # of bfloat16, "<V2" is not all
            return isinstance(obj, np.generic), text, array.shape, array.tobytes()
        return None

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in PLAIN.values() or any(obj is each for each in PLAIN.values()):
            return NotImplemented
        what = obj.__qualname__ if isinstance(obj, type) or callable(obj) else type(obj).__qualname__
        raise UsageError(f"{what} is no plain data, which is {SAID}; {ADVICE}")


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = PLAIN.get(f"{module}.{name}")
        if found is None:
            raise UsageError(f"it has a {module}.{name}, which is no plain data; {ADVICE}")
        return found

    def persistent_load(self, pid: Any) -> object:
        is_scalar, dtype, shape, data = pid
        kind = np.dtype(str(dtype))
        if kind.hasobject or kind.itemsize == 0 or math.prod(shape) * kind.itemsize != len(data):
            raise UsageError(f"it has {len(data)} bytes for an array of {kind} {shape}")
        array = np.frombuffer(data, kind).reshape(shape).copy()
        return array[()] if is_scalar else array
