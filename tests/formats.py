"""Writing arrays in the formats that the programs read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from omnireduce.core.dtypes import Array

SUFFIXES = (".npy", ".npz", ".safetensors")
BITS = (8, 16, 32, 64)
_SAFETENSORS_NAMES = dict(
    zip(
        ("float16", "bfloat16", "float32", "float64", *(f"{sign}{bits}" for sign in ("int", "uint") for bits in BITS)),
        ("F16", "BF16", "F32", "F64", *(f"{sign}{bits}" for sign in "IU" for bits in BITS)),
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
