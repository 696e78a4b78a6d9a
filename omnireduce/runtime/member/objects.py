"""Python objects as bytes, and back.

Objects of peers are read as plain data: msgpack, where no part refers to another one, so that what is read is about as
large as its bytes. What msgpack itself has is used for single values only. Lists, dicts, dates, arrays and the like are
extensions, each of which is read as the one type that it is made of. A pickle could say them, but may make its reader
call anything. So it is read only by callers that trust all who take part.
"""

from __future__ import annotations

import datetime
import decimal
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta
from msgspec.msgpack import Decoder, Ext, encode

from omnireduce.errors import UsageError
from omnireduce.wire.blocks import MAX_ELEMENTS
from omnireduce.wire.words import SHOWN, shown

SAID = "None, bool, numbers, str, bytes, tuples, lists, dicts, sets, dates and arrays"
ADVICE = "pass trust=True on every rank if all that take part may run code in this process"
DEEPEST = 64
MOST_OF_ONE_HASH = 64  # keys of a table, which takes time that grows with the square of their number
LONGEST_INT = 63  # bits, beside the sign
AS_THEY_ARE = (bool, float, str)
Leaf = None | bool | int | float | str | Ext
ITEMS = list[Leaf]
_Array = tuple[
    Annotated[str, Meta(max_length=40)],  # the dtype
    Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_ELEMENTS)]], Meta(max_length=64)],  # the shape
    bytes,
]


class _Form(NamedTuple):
    """How objects of one type travel: what is `said` of one, as what that is `read`, and how it is `made` again."""

    said: Callable[[Any], object]
    read: Any
    made: Callable[[Any], object]


def _container(made: Callable[[list[Any]], object], items: Callable[[Any], Iterable[Any]] = iter) -> _Form:
    return _Form(items, ITEMS, made)


def _pairs(x: dict[Any, Any]) -> Iterable[object]:
    return (each for pair in x.items() for each in pair)


def _paired(x: list[Any]) -> dict[Any, Any]:
    return dict(zip(_spread(x[::2]), x[1::2], strict=True))


def _spread(keys: Sequence[Any]) -> Sequence[Any]:
    """`keys` themselves. Raises ValueError when a table of them would take too long."""
    hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
    alike = np.unique(hashes, return_counts=True)[1].max(initial=0)
    if alike > MOST_OF_ONE_HASH:
        raise ValueError(f"{alike} keys of one hash; expected at most {MOST_OF_ONE_HASH}")
    return keys


def _array_said(x: Any) -> list[object]:
    array = np.asarray(x)
    if array.dtype.hasobject or array.dtype.names or array.dtype.itemsize == 0:
        raise UsageError(f"an array of {array.dtype} is no plain data; {ADVICE}")
    text = array.dtype.str
    text = text if np.dtype(text) == array.dtype else array.dtype.name  # of bfloat16, "<V2" is not all
    return [text, array.shape, array.tobytes()]


def _array_made(x: tuple[str, list[int], bytes]) -> Any:
    text, shape, data = x
    dtype = np.dtype(text)
    is_plain = not (dtype.hasobject or dtype.names or dtype.subdtype) and dtype.itemsize > 0
    if not is_plain or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for an array of {dtype} {shape}")
    return np.frombuffer(data, dtype).reshape(shape).copy()


FORMS: dict[type[Any], _Form] = {  # the number of a form is its place: new ones come last
    int: _Form(hex, str, lambda x: int(x, 16)),
    bytes: _Form(bytes, bytes, bytes),
    list: _container(list),
    tuple: _container(tuple),
    set: _container(lambda x: set(_spread(x))),
    frozenset: _container(lambda x: frozenset(_spread(x))),
    dict: _container(_paired, _pairs),
    bytearray: _Form(bytes, bytes, bytearray),
    complex: _Form(lambda x: [x.real, x.imag], tuple[float, float], lambda x: complex(*x)),
    decimal.Decimal: _Form(str, str, decimal.Decimal),
    datetime.date: _Form(str, str, datetime.date.fromisoformat),
    datetime.time: _Form(str, str, datetime.time.fromisoformat),
    datetime.datetime: _Form(str, str, datetime.datetime.fromisoformat),
    datetime.timedelta: _Form(
        lambda x: [x.days, x.seconds, x.microseconds], tuple[int, int, int], lambda x: datetime.timedelta(*x)
    ),
    np.ndarray: _Form(_array_said, _Array, _array_made),
    np.generic: _Form(_array_said, _Array, lambda x: _array_made(x)[()]),
}
_NUMBER = {each: number for number, each in enumerate(FORMS)}
_READERS = [(Decoder(form.read), form) for form in FORMS.values()]
_WHOLE = Decoder(Leaf)


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
        return pickle.loads(data) if trust else _raised(_WHOLE.decode(data))
    except Exception as error:  # any: constructors raise what they like, pickles even more
        raise UsageError(f"the object of {sender} cannot be read: {shown(str(error)[:SHOWN])}") from error


def _lowered(x: Any, depth: int = 0) -> object:
    """What msgpack has for `x`."""
    kind = type(x)
    if x is None or kind in AS_THEY_ARE or (kind is int and x.bit_length() <= LONGEST_INT):
        return x
    kind = np.generic if isinstance(x, np.generic) else kind
    if kind not in FORMS:
        what = x.__qualname__ if callable(x) and hasattr(x, "__qualname__") else kind.__qualname__
        raise UsageError(f"{what} is no plain data, which is {SAID}; {ADVICE}")
    if depth == DEEPEST:
        raise UsageError(f"plain data is nested at most {DEEPEST} deep; {ADVICE}")
    form = FORMS[kind]
    said = form.said(x)
    if form.read is ITEMS:
        said = [_lowered(each, depth + 1) for each in said]  # type: ignore[attr-defined]
    return Ext(_NUMBER[kind], encode(said))


def _raised(x: Leaf, depth: int = 0) -> object:
    """The object that `_lowered` has made `x` of."""
    if not isinstance(x, Ext):
        return x
    if not 0 <= x.code < len(_READERS):
        raise ValueError(
            f"an extension {x.code}, expected 0 to {len(_READERS) - 1}; install the same omnireduce everywhere"
        )
    if depth == DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} deep")
    decoder, form = _READERS[x.code]
    said = decoder.decode(x.data)
    del x  # its bytes were copied: else there would be one copy for each level
    if form.read is ITEMS:
        said.reverse()
        said = [_raised(said.pop(), depth + 1) for _ in range(len(said))]
    return form.made(said)
