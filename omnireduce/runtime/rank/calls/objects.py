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

PLAIN_TYPES = "None, bool, numbers, str, bytes, tuples, lists, dicts, sets, dates and arrays"
ADVICE = "pass trust=True on every rank if all participants may run code in this process"
MAX_DEPTH = 64
MAX_EQUAL_HASHES = 64  # keys of a table with the same hash: their time grows with the square of their number
MAX_KEYS = 1 << 16  # keys of all tables, neither str nor bytes: a peer can choose slow hashes for them
MAX_INT_BITS = 63  # bits, without the sign
UNCHANGED_TYPES = (bool, float, str)
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

    `to_data` turns an object into simpler data for the message, `data_type` is the type that this data is decoded as,
    and `from_data` makes the object of it. `keys` gives the keys of a table, from the data of the table.
    """

    to_data: Callable[[Any], Any]
    data_type: Any
    from_data: Callable[[Any], object]
    keys: Callable[[list[Any]], Sequence[Any]] = lambda items: ()


class FrontObject:
    """Objects of a type that a front knows, such as tensors of torch: the name of the type, and the data of its
    codec."""


def add_codec(kind: type[Any], name: str, codec: ObjectCodec) -> None:
    """Let objects of this type travel. `name` is the name of the type, the same on all ranks. A rank that does not know
    it refuses such objects."""
    _FRONT_NAMES[kind], _FRONT_CODECS[name] = name, (Decoder(codec.data_type), codec)


def _front_from_data(x: list[Any]) -> object:
    name, data = x
    if name not in _FRONT_CODECS:
        raise ValueError(f"a {name}, which this rank does not know; import the same modules of omnireduce everywhere")
    decoder, codec = _FRONT_CODECS[name]
    return codec.from_data(decoder.decode(data))


def _set_codec(from_data: Callable[[list[Any]], object]) -> ObjectCodec:
    return ObjectCodec(iter, ITEMS, from_data, lambda items: items)


def _table_codec(from_data: Callable[[dict[Any, Any]], object]) -> ObjectCodec:
    return ObjectCodec(_flat_pairs, ITEMS, lambda items: from_data(_dict_of(items)), lambda items: items[::2])


def _flat_pairs(x: dict[Any, Any]) -> Iterable[object]:
    return (key_or_value for pair in x.items() for key_or_value in pair)


def _dict_of(x: list[Any]) -> dict[Any, Any]:
    return dict(zip(x[::2], x[1::2], strict=True))


def _array_to_data(x: Any) -> list[object]:
    array = np.asarray(x)
    if array.dtype.hasobject or array.dtype.names or array.dtype.itemsize == 0:
        raise UsageError(f"an array of {array.dtype} is no plain data; {ADVICE}")
    return [_dtype_text(array.dtype), array.shape, array.tobytes()]


def _dtype_text(dtype: np.dtype[Any]) -> str:
    try:
        return dtype.str if np.dtype(dtype.str) == dtype else dtype.name  # the str of bfloat16, "<V2", is ambiguous
    except TypeError:
        return dtype.name


def _scalar_to_data(x: Any) -> list[object]:
    if type(x) is not x.dtype.type or (x.dtype.kind in "SU" and np.asarray(x)[()] != x):
        raise UsageError(f"the {type(x).__name__} {x!r} is no plain data; {ADVICE}")  # subclasses; text ending in NUL
    return _array_to_data(x)


def _scalar_from_data(x: tuple[str, list[int], bytes]) -> object:
    if x[1]:
        raise ValueError(f"a scalar of shape {x[1]}")
    return _array_from_data(x)[()]


def _time_codec(kind: Any) -> ObjectCodec:
    return ObjectCodec(_time_to_data, tuple[_Date, _Fold], lambda x: kind.fromisoformat(x[0]).replace(fold=x[1]))


def _time_to_data(x: Any) -> list[object]:
    zone = x.tzinfo
    offset = None if type(zone) is not datetime.timezone else zone.utcoffset(None)
    is_plain = zone is None or (
        offset is not None and not offset.microseconds and repr(zone) == repr(datetime.timezone(offset))
    )
    if not is_plain:
        raise UsageError(f"{a_type(x)} with tzinfo {zone!r} is no plain data, its offset is; {ADVICE}")
    return [x.isoformat(), x.fold]


def _array_from_data(x: tuple[str, list[int], bytes]) -> Any:
    text, shape, data = x
    dtype = np.dtype(text)
    is_plain = dtype.itemsize > 0 and (dtype.kind not in "Mm" or np.datetime_data(dtype)[1] > 0)
    if not is_plain or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for an array of {dtype} {shape}")
    return np.frombuffer(data, dtype).reshape(shape).copy()


CODECS: dict[type[Any], ObjectCodec] = {  # the position is the number of the extension: add new types at the end
    int: ObjectCodec(hex, _Number, lambda x: int(x, 16)),
    bytes: ObjectCodec(bytes, bytes, bytes),
    list: ObjectCodec(iter, ITEMS, list),
    tuple: ObjectCodec(iter, ITEMS, tuple),
    set: _set_codec(set),
    frozenset: _set_codec(frozenset),
    dict: _table_codec(dict),
    bytearray: ObjectCodec(bytes, bytes, bytearray),
    complex: ObjectCodec(lambda x: [x.real, x.imag], tuple[float, float], lambda x: complex(*x)),
    decimal.Decimal: ObjectCodec(str, _Number, decimal.Decimal),
    datetime.date: ObjectCodec(str, _Date, datetime.date.fromisoformat),
    datetime.time: _time_codec(datetime.time),
    datetime.datetime: _time_codec(datetime.datetime),
    datetime.timedelta: ObjectCodec(
        lambda x: [x.days, x.seconds, x.microseconds], tuple[int, int, int], lambda x: datetime.timedelta(*x)
    ),
    np.ndarray: ObjectCodec(_array_to_data, _Array, _array_from_data),
    np.generic: ObjectCodec(_scalar_to_data, _Array, _scalar_from_data),
    collections.OrderedDict: _table_codec(collections.OrderedDict),
    collections.Counter: _table_codec(collections.Counter),
    FrontObject: ObjectCodec(list, tuple[_Name, bytes], _front_from_data),
}
_FRONT_NAMES = dict[type[Any], str]()  # the names of the types of fronts
_FRONT_CODECS = dict[str, tuple[Decoder[Any], ObjectCodec]]()  # the codecs of these types by name
_NUMBER = {kind: number for number, kind in enumerate(CODECS)}
_READERS = [(Decoder(codec.data_type), codec) for codec in CODECS.values()]
_MESSAGE_DECODER = Decoder(Leaf)


def to_bytes(x: object, trust: bool) -> bytes:
    """The bytes of `x`. Raises UsageError for an object that cannot be sent, or that other ranks could not read."""
    try:
        if trust:
            return pickle.dumps(x, pickle.HIGHEST_PROTOCOL)
        data = encode(_to_plain(x))
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
        text = f"the object of {sender} cannot be read: {shown(str(error)[:SHOWN])}"
        raise UsageError(text) from (error if trust else None)  # the error may hold all that the peer sent


def _to_plain(x: Any, depth: int = 0) -> object:
    """The data that msgpack encodes for `x`. Raises UsageError if `x` is no plain data."""
    kind = type(x)
    if x is None or kind in UNCHANGED_TYPES or (kind is int and x.bit_length() <= MAX_INT_BITS):
        return x
    kind = np.generic if isinstance(x, np.generic) else kind
    if kind in _FRONT_NAMES:
        x, kind = (_FRONT_NAMES[kind], encode(_FRONT_CODECS[_FRONT_NAMES[kind]][1].to_data(x))), FrontObject
    if kind not in CODECS:
        type_name = x.__qualname__ if callable(x) and hasattr(x, "__qualname__") else kind.__qualname__
        raise UsageError(f"{type_name} is no plain data, which is {PLAIN_TYPES}; {ADVICE}")
    if depth == MAX_DEPTH:
        raise UsageError(f"plain data is nested at most {MAX_DEPTH} deep; {ADVICE}")
    codec = CODECS[kind]
    data = codec.to_data(x)
    if codec.data_type is ITEMS:
        data = [_to_plain(part, depth + 1) for part in data]
    return Ext(_NUMBER[kind], encode(data))


class _Reader:
    """Makes an object of the data that `_to_plain` gave."""

    def __init__(self) -> None:
        self._keys_left = MAX_KEYS

    def read(self, data: bytes) -> object:
        """The object of these bytes. Raises ValueError, and the errors of the constructors of its parts."""
        return self._object_of(_MESSAGE_DECODER.decode(data), 0)

    def _object_of(self, x: Leaf, depth: int) -> object:
        if not isinstance(x, Ext):
            return x
        if not 0 <= x.code < len(_READERS):
            raise ValueError(
                f"an extension {x.code}, expected 0 to {len(_READERS) - 1}; install the same omnireduce everywhere"
            )
        if depth == MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        decoder, codec = _READERS[x.code]
        data = decoder.decode(x.data)
        del x  # its bytes were copied: else each level would keep a copy
        if codec.data_type is ITEMS:
            data.reverse()
            data = [self._object_of(data.pop(), depth + 1) for _ in range(len(data))]
            self._check(codec.keys(data))
        return codec.from_data(data)

    def _check(self, keys: Sequence[Any]) -> None:
        """Raise ValueError if a table of these keys could take too long."""
        # Python salts the hashes of str and bytes
        self._keys_left -= sum(type(key) not in (str, bytes) for key in keys)
        if self._keys_left < 0:
            raise ValueError(f"more than {MAX_KEYS} keys of dicts and sets that are neither str nor bytes")
        if len(keys) > MAX_EQUAL_HASHES:
            hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
            alike = np.unique(hashes, return_counts=True)[1].max()
            if alike > MAX_EQUAL_HASHES:
                raise ValueError(f"{alike} keys with the same hash; expected at most {MAX_EQUAL_HASHES}")
