"""Python objects as bytes, and back.

Objects of peers are read as plain data: msgpack, where no part refers to another one, so that what is read is about as
large as its bytes. Tuples, sets, dates, arrays and the like are extensions of it. A pickle could say them, but may make
its reader call anything. So it is read only by callers that trust all who take part.
"""

from __future__ import annotations

import datetime
import decimal
import math
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from msgspec.msgpack import Ext, decode, encode

from omnireduce.errors import UsageError

SAID = "None, bool, numbers, str, bytes, tuples, lists, dicts, sets, dates and arrays"
ADVICE = "pass trust=True on every rank if all that take part may run code in this process"
AS_THEY_ARE = (bool, float, str, bytes)
LONGEST_INT = 63  # bits, beside the sign


class _Form(NamedTuple):
    """How objects of one type are said, in what msgpack has, and made again."""

    said: Callable[[Any], object]
    made: Callable[[Any], object]


def _flattened(x: dict[Any, Any]) -> list[object]:
    return [_lowered(each) for pair in x.items() for each in pair]


def _paired(x: list[Any]) -> dict[Any, Any]:
    return dict(zip(x[::2], x[1::2], strict=True))


def _array_said(x: Any) -> list[object]:
    array = np.asarray(x)
    if array.dtype.hasobject or array.dtype.names or array.dtype.subdtype:
        raise UsageError(f"an array of {array.dtype} is no plain data; {ADVICE}")
    text = array.dtype.str
    text = text if np.dtype(text) == array.dtype else array.dtype.name  # of bfloat16, "<V2" is not all
    return [text, list(array.shape), array.tobytes()]


def _array_made(x: Any) -> Any:
    text, shape, data = x
    dtype = np.dtype(str(text))
    if dtype.hasobject or dtype.itemsize == 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for an array of {dtype} {shape}")
    return np.frombuffer(data, dtype).reshape(shape).copy()


FORMS: dict[type[Any], _Form] = {  # the number of a form is its place: new ones come last
    int: _Form(hex, lambda x: int(x, 16)),
    tuple: _Form(lambda x: [*map(_lowered, x)], tuple),
    set: _Form(lambda x: [*map(_lowered, x)], set),
    frozenset: _Form(lambda x: [*map(_lowered, x)], frozenset),
    dict: _Form(_flattened, _paired),
    bytearray: _Form(bytes, lambda x: bytearray(x[:])),
    complex: _Form(lambda x: [x.real, x.imag], lambda x: complex(*x)),
    decimal.Decimal: _Form(str, decimal.Decimal),
    datetime.date: _Form(str, datetime.date.fromisoformat),
    datetime.time: _Form(str, datetime.time.fromisoformat),
    datetime.datetime: _Form(str, datetime.datetime.fromisoformat),
    datetime.timedelta: _Form(
        lambda x: [x.days, x.seconds, x.microseconds], lambda x: datetime.timedelta(x[0], x[1], x[2])
    ),
    np.ndarray: _Form(_array_said, _array_made),
    np.generic: _Form(_array_said, lambda x: _array_made(x)[()]),
}
_NUMBER = {each: number for number, each in enumerate(FORMS)}
_MADE = [form.made for form in FORMS.values()]


def to_bytes(x: object, trust: bool) -> bytes:
    """Raises UsageError for what cannot be sent, and for what the others would not read."""
    try:
        return pickle.dumps(x, pickle.HIGHEST_PROTOCOL) if trust else encode(_lowered(x))
    except UsageError:
        raise
    except Exception as error:  # any: an object says itself how it is pickled
        raise UsageError(f"the {type(x).__name__} cannot be sent: {error}") from error


def from_bytes(data: bytes, trust: bool, sender: str) -> object:
    """Raises UsageError for bytes that are no object."""
    try:
        return pickle.loads(data) if trust else decode(data, ext_hook=_made)
    except Exception as error:  # any: constructors raise what they like, pickles even more
        raise UsageError(f"the object of {sender} cannot be read: {error}") from error


def _lowered(x: Any) -> object:
    """What msgpack has for `x`."""
    kind = type(x)
    if x is None or kind in AS_THEY_ARE or (kind is int and x.bit_length() <= LONGEST_INT):
        return x
    if kind is list:
        return [*map(_lowered, x)]
    kind = np.generic if isinstance(x, np.generic) else kind
    if kind not in FORMS:
        what = x.__qualname__ if callable(x) and hasattr(x, "__qualname__") else kind.__qualname__
        raise UsageError(f"{what} is no plain data, which is {SAID}; {ADVICE}")
    return Ext(_NUMBER[kind], encode(FORMS[kind].said(x)))


def _made(code: int, data: memoryview) -> object:
    if not 0 <= code < len(_MADE):
        raise ValueError(f"an extension {code}, expected 0 to {len(_MADE) - 1}; install the same omnireduce everywhere")
    return _MADE[code](decode(data, ext_hook=_made))
