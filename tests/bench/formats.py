"""Writing arrays in the formats that the programs read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from omnireduce.dtypes import Array

SUFFIXES = (".npy", ".npz", ".safetensors")
_SAFETENSORS_NAMES = dict(
    zip(
        ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"),
        ("F16", "BF16", "F32", "F64", "I8", "I16", "I32", "I64", "U8"),
        strict=True,
    )
)


def safetensors(arrays: dict[str, Array], *, padding: int = 0) -> bytes:
    """As the format's README has it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in arrays.items():
        begin = len(data)
        data += array.tobytes()
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [begin, len(data)],
        }
    text = json.dumps(header).encode() + b" " * padding
    return struct.pack("<Q", len(text)) + text + data


def save(path: Path | str, **arrays: Array) -> None:
    """Write the arrays in the format that the file's name says; an .npy file takes one."""
    path = Path(path)
    if path.suffix == ".npy":
        (array,) = arrays.values()
        np.save(path, array)
    elif path.suffix == ".npz":
        np.savez(path, **arrays)  # type: ignore[arg-type]
    else:
        path.write_bytes(safetensors(arrays))
