"""Python objects as bytes, and back.

Objects of peers are read as plain data, in msgpack, in which no part refers to another part. So an object takes less
than a hundred times the memory of its bytes. The types of msgpack itself are used for single values only. Lists, dicts,
dates, arrays and others are extensions, and the number of an extension gives the type. A pickle could express all this,
but it can make its reader call anything. So only callers that trust all participants read pickles.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta
from msgspec.msgpack import Decoder, Ext, encode

from omnireduce.core.wire.blocks import MAX_ELEMENTS
from omnireduce.core.wire.safe_text import SHOWN, shown
from omnireduce.errors import UsageError, a_type

SAID = "None, bool, numbers, str, bytes, tuples, lists, dicts, sets, dates and arrays"
ADVICE = "pass trust=True on every rank if all participants may run code in this process"
DEEPEST = 64
MOST_OF_ONE_HASH = 64  # keys of a table with the same hash: their time grows with the square of their number
MOST_KEYS = 1 << 16  # keys of all tables, neither str nor bytes: a peer can choose slow hashes for them
LONGEST_INT = 63  # bits, without the sign
AS_THEY_ARE = (bool, float, str)
Leaf = None | bool | int | float | str | Ext
ITEMS = list[Leaf]
_Name = Annotated[str, Meta(max_length=40)]
_Number = Annotated[str, Meta(max_length=4096)]  # its conversion takes time that grows with the square of the length
_Date = Annotated[str, Meta(max_length=64)]
_Fold = Annotated[int, Meta(ge=0, le=1)]
_DTYPE = r"^([<>|][biufcSUVMm][0-9]+(\[[0-9a-zA-Z]+\])?|(b?complex|b?float|u?int)[0-9][0-9a-z_]*)\Z"
_Array = tuple[
    Annotated[str, Meta(max_length=40, pattern=_DTYPE)],
    Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_ELEMENTS)]], Meta(max_length=64)],  # the shape
    bytes,
]


class ObjectCodec(NamedTuple):
    """Codec for objects of one type.

    `said` turns an object into simpler data for the message, `read` is the type that this data is decoded as, and
    `made` makes the object of it. `keys` gives the keys of a table, from the data of the table.
    """

    said: Callable[[Any], Any]
    read: Any
    made: Callable[[Any], object]
    keys: Callable[[list[Any]], Sequence[Any]] = lambda items: ()


class FrontObject:
    """Objects of a type that a front knows, such as tensors of torch: the name of the type, and the data of its
    codec."""


def add_form(kind: type[Any], name: str, form: ObjectCodec) -> None:
    """Let objects of this type travel. `name` is the name of the type, the same on all ranks. A rank that does not know
    it refuses such objects."""
    _NAMES[kind], _NAMED[name] = name, (Decoder(form.read), form)


def _of_front(x: list[Any]) -> object:
    name, data = x
    if name not in _NAMED:
        raise ValueError(f"a {name}, which this rank does not know; import the same modules of omnireduce everywhere")
    decoder, form = _NAMED[name]
    return form.made(decoder.decode(data))


def _set(made: Callable[[list[Any]], object]) -> ObjectCodec:
    return ObjectCodec(iter, ITEMS, made, lambda items: items)


def _table(made: Callable[[dict[Any, Any]], object]) -> ObjectCodec:
    return ObjectCodec(_pairs, ITEMS, lambda items: made(_paired(items)), lambda items: items[::2])


def _pairs(x: dict[Any, Any]) -> Iterable[object]:
    return (key_or_value for pair in x.items() for key_or_value in pair)


def _paired(x: list[Any]) -> dict[Any, Any]:
    return dict(zip(x[::2], x[1::2], strict=True))


def _array_said(x: Any) -> list[object]:
    array = np.asarray(x)
    if array.dtype.hasobject or array.dtype.names or array.dtype.itemsize == 0:
        raise UsageError(f"an array of {array.dtype} is no plain data; {ADVICE}")
    return [_dtype_said(array.dtype), array.shape, array.tobytes()]


def _dtype_said(dtype: np.dtype[Any]) -> str:
    try:
        return dtype.str if np.dtype(dtype.str) == dtype else dtype.name  # the str of bfloat16, "<V2", is ambiguous
    except TypeError:
        return dtype.name


def _scalar_said(x: Any) -> list[object]:
    if type(x) is not x.dtype.type or (x.dtype.kind in "SU" and np.asarray(x)[()] != x):
        raise UsageError(f"the {type(x).__name__} {x!r} is no plain data; {ADVICE}")  # subclasses; text ending in NUL
    return _array_said(x)


def _scalar_made(x: tuple[str, list[int], bytes]) -> object:
    if x[1]:
        raise ValueError(f"a scalar of shape {x[1]}")
    return _array_made(x)[()]


def _time(kind: Any) -> ObjectCodec:
    return ObjectCodec(_time_said, tuple[_Date, _Fold], lambda x: kind.fromisoformat(x[0]).replace(fold=x[1]))


def _time_said(x: Any) -> list[object]:
    zone = x.tzinfo
    offset = None if type(zone) is not datetime.timezone else zone.utcoffset(None)
    is_plain = zone is None or (
        offset is not None and not offset.microseconds and repr(zone) == repr(datetime.timezone(offset))
    )
    if not is_plain:
        raise UsageError(f"{a_type(x)} with tzinfo {zone!r} is no plain data, its offset is; {ADVICE}")
    return [x.isoformat(), x.fold]


def _array_made(x: tuple[str, list[int], bytes]) -> Any:
    text, shape, data = x
    dtype = np.dtype(text)
    is_plain = dtype.itemsize > 0 and (dtype.kind not in "Mm" or np.datetime_data(dtype)[1] > 0)
    if not is_plain or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for an array of {dtype} {shape}")
    return np.frombuffer(data, dtype).reshape(shape).copy()


FORMS: dict[type[Any], ObjectCodec] = {  # the position is the number of the extension: add new types at the end
    int: ObjectCodec(hex, _Number, lambda x: int(x, 16)),
    bytes: ObjectCodec(bytes, bytes, bytes),
    list: ObjectCodec(iter, ITEMS, list),
    tuple: ObjectCodec(iter, ITEMS, tuple),
    set: _set(set),
    frozenset: _set(frozenset),
    dict: _table(dict),
    bytearray: ObjectCodec(bytes, bytes, bytearray),
    complex: ObjectCodec(lambda x: [x.real, x.imag], tuple[float, float], lambda x: complex(*x)),
    decimal.Decimal: ObjectCodec(str, _Number, decimal.Decimal),
    datetime.date: ObjectCodec(str, _Date, datetime.date.fromisoformat),
    datetime.time: _time(datetime.time),
    datetime.datetime: _time(datetime.datetime),
    datetime.timedelta: ObjectCodec(
        lambda x: [x.days, x.seconds, x.microseconds], tuple[int, int, int], lambda x: datetime.timedelta(*x)
    ),
    np.ndarray: ObjectCodec(_array_said, _Array, _array_made),
    np.generic: ObjectCodec(_scalar_said, _Array, _scalar_made),
    collections.OrderedDict: _table(collections.OrderedDict),
    collections.Counter: _table(collections.Counter),
    FrontObject: ObjectCodec(list, tuple[_Name, bytes], _of_front),
}
_NAMES = dict[type[Any], str]()  # the names of the types of fronts
_NAMED = dict[str, tuple[Decoder[Any], ObjectCodec]]()  # the codecs of these types by name
_NUMBER = {kind: number for number, kind in enumerate(FORMS)}
_READERS = [(Decoder(form.read), form) for form in FORMS.values()]
_WHOLE = Decoder(Leaf)


def to_bytes(x: object, trust: bool) -> bytes:
    """The bytes of `x`. Raises UsageError for an object that cannot be sent, or that other ranks could not read."""
    try:
        if trust:
            return pickle.dumps(x, pickle.HIGHEST_PROTOCOL)
        data = encode(_lowered(x))
        _Reader().read(data)  # if this rank cannot read it, the others cannot either
        return data
    except UsageError:
        raise
    except Exception as error:  # an object defines how it is pickled, so the error may be of any type
        raise UsageError(f"the {type(x).__name__} cannot be sent: {error}") from error


def from_bytes(data: bytes, trust: bool, sender: str) -> object:
    """The object that `sender` made these bytes of. Raises UsageError for bytes that are no object."""
    try:
        return pickle.loads(data) if trust else _Reader().read(data)
    except Exception as error:  # constructors and pickles may raise errors of any type
        what = f"the object of {sender} cannot be read: {shown(str(error)[:SHOWN])}"
        raise UsageError(what) from (error if trust else None)  # the error may hold all that the peer sent


def _lowered(x: Any, depth: int = 0) -> object:
    """The data that msgpack encodes for `x`. Raises UsageError if `x` is no plain data."""
    kind = type(x)
    if x is None or kind in AS_THEY_ARE or (kind is int and x.bit_length() <= LONGEST_INT):
        return x
    kind = np.generic if isinstance(x, np.generic) else kind
    if kind in _NAMES:
        x, kind = (_NAMES[kind], encode(_NAMED[_NAMES[kind]][1].said(x))), FrontObject
    if kind not in FORMS:
        what = x.__qualname__ if callable(x) and hasattr(x, "__qualname__") else kind.__qualname__
        raise UsageError(f"{what} is no plain data, which is {SAID}; {ADVICE}")
    if depth == DEEPEST:
        raise UsageError(f"plain data is nested at most {DEEPEST} deep; {ADVICE}")
    form = FORMS[kind]
    said = form.said(x)
    if form.read is ITEMS:
        said = [_lowered(part, depth + 1) for part in said]
    return Ext(_NUMBER[kind], encode(said))


class _Reader:
    """Makes an object of the data that `_lowered` gave."""

    def __init__(self) -> None:
        self._keys_left = MOST_KEYS

    def read(self, data: bytes) -> object:
        """The object of these bytes. Raises ValueError, and the errors of the constructors of its parts."""
        return self._made(_WHOLE.decode(data), 0)

    def _made(self, x: Leaf, depth: int) -> object:
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
        del x  # its bytes were copied: else each level would keep a copy
        if form.read is ITEMS:
            said.reverse()
            said = [self._made(said.pop(), depth + 1) for _ in range(len(said))]
            self._check(form.keys(said))
        return form.made(said)

    def _check(self, keys: Sequence[Any]) -> None:
        """Raise ValueError if a table of these keys could take too long."""
        self._keys_left -= sum(
            type(key) not in (str, bytes) for key in keys
        )  # Python salts the hashes of str and bytes
        if self._keys_left < 0:
            raise ValueError(f"more than {MOST_KEYS} keys of dicts and sets that are neither str nor bytes")
        if len(keys) > MOST_OF_ONE_HASH:
            hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
            alike = np.unique(hashes, return_counts=True)[1].max()
            if alike > MOST_OF_ONE_HASH:
                raise ValueError(f"{alike} keys with the same hash; expected at most {MOST_OF_ONE_HASH}")
