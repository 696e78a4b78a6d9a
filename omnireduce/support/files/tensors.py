"""Arrays in .npy, .npz and .safetensors files, mapped if the format allows it, never unpickled.

The safetensors format (huggingface/safetensors, README, "Format"): 8 bytes with the length of the header,
little-endian; the header, a JSON object that gives each tensor's dtype, shape and place [begin, end) in the rest of the
file; then the tensors, without holes. Every number in the header is checked before it is used.
"""

from __future__ import annotations

import math
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np

from omnireduce.core.dtypes import ELEMENT_TYPES, Array
from omnireduce.errors import OmniReduceError, UsageError
from omnireduce.support.files.paths import user_path, without_waiting

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_SAFETENSORS_DTYPES: dict[str, Any] = {  # such as "BF16" of bfloat16
    **{
        name.replace("float", "F").replace("uint", "U").replace("int", "I").upper(): element.dtype
        for name, element in ELEMENT_TYPES.items()
    },
    "BOOL": np.bool_,
    "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


class FileError(UsageError):
    """A file whose content does not match its name, or cannot be read; the message names the file and the reason."""


class Tensor(NamedTuple):
    """An array of a file: its name there, its shape, and its elements in C order, (elements,)."""

    name: str
    shape: tuple[int, ...]
    values: Array


def read_tensors(path: str | Path, name: str | None = None) -> Iterator[Tensor]:
    """Yield the arrays of a file one by one, in its order, or only the array with this `name`.

    Raises FileError, possibly after some arrays.
    """
    path = user_path(path)
    readers = {".npy": _read_npy, ".npz": _read_npz, ".safetensors": _read_safetensors}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise FileError(f"{path}: expected a file name that ends in {', '.join(readers)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd but readable headers
            yield from reader(path, name)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from None
    except MemoryError:
        raise FileError(f"{path}: too large for this machine's memory") from None
    except OmniReduceError:
        raise
    except Exception as error:  # the parsers of NumPy, zipfile and zlib raise many kinds for a corrupt file
        reason = " ".join(str(error).split())[:200]
        raise FileError(f"{path}: cannot be read: {reason or type(error).__name__}") from None


def _read_npy(path: Path, name: str | None) -> Iterator[Tensor]:
    with open(path, "rb", opener=without_waiting) as file:
        if file.read(6) != b"\x93NUMPY":
            raise FileError(f"{path}: is not an .npy file, whatever its name says")
    if name in (None, path.stem):
        yield _tensor(path.stem, np.load(path, mmap_mode="r", allow_pickle=False))


def _read_npz(path: Path, name: str | None) -> Iterator[Tensor]:
    with open(path, "rb", opener=without_waiting) as file:
        if not zipfile.is_zipfile(file):
            raise FileError(f"{path}: is not an .npz file, whatever its name says")
        file.seek(0)
        with np.load(file, allow_pickle=False) as archive:
            for member in archive.files:
                if name not in (None, member):
                    continue
                array = archive[member]
                if not isinstance(array, np.ndarray):
                    raise FileError(f"{path}: its member {member!r} is not an array")
                yield _tensor(member, array)


def _tensor(name: str, array: Array) -> Tensor:
    if array.dtype == np.dtype("V2"):  # NumPy writes bfloat16 so: its format has no name for it
        array = array.view(ml_dtypes.bfloat16)
    return Tensor(name, array.shape, array.reshape(-1))


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


def _read_safetensors(path: Path, name: str | None) -> Iterator[Tensor]:
    entries, start = _safetensors_header(path)
    data = np.memmap(path, np.uint8, mode="r", offset=0)[start:]
    expected_begin = 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin != expected_begin or end < begin or end > data.size:
            raise FileError(
                f"{path}: tensor {key!r} is at bytes {begin} to {end} of {data.size}, expected it at {expected_begin}"
            )
        dtype = _SAFETENSORS_DTYPES.get(entry.dtype)
        if dtype is None:
            raise FileError(f"{path}: tensor {key!r} is of the unknown dtype {entry.dtype[:40]!r}")
        nbytes = math.prod(entry.shape) * np.dtype(dtype).itemsize
        if nbytes != end - begin:
            shape = f"{entry.dtype}{entry.shape}"[:80]
            raise FileError(f"{path}: tensor {key!r} has {end - begin} bytes, expected {nbytes} for {shape}")
        if name in (None, key):
            yield Tensor(key, tuple(entry.shape), data[begin:end].view(dtype))
        expected_begin = end
    if expected_begin != data.size:
        raise FileError(f"{path}: {data.size - expected_begin} bytes behind the last tensor")


def _safetensors_header(path: Path) -> tuple[dict[str, _Entry], int]:
    """The tensors' entries by name, and the place in the file where their data starts."""
    with open(path, "rb", opener=without_waiting) as file:
        size = path.stat().st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise FileError(f"{path}: is {size} bytes long, which its header does not fit into")
        header = file.read(length)
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise FileError(f"{path}: malformed header: {error}") from None
    return entries, 8 + length
