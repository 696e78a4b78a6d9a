"""Reading .npy, .npz and .safetensors: what is written comes back, what is damaged is refused in one line."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from formats import safetensors, save
from hypothesis import given, settings
from hypothesis import strategies as st

from omnireduce.core.dtypes import Array
from omnireduce.support.files.tensors import FileError, read_tensors

ARRAYS: dict[str, Array] = {
    "weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.arange(5).astype(ml_dtypes.bfloat16),
    "small": np.array([1, -2, 3], np.int8),
    "empty": np.zeros((0, 3), np.float64),
    "scalar": np.array(7, np.int64),
}


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def check_equal(path: Path, arrays: dict[str, Array]) -> None:
    results = {tensor.name: tensor for tensor in read_tensors(path)}
    assert set(results) == set(arrays)
    for name, array in arrays.items():
        assert results[name].shape == array.shape
        assert results[name].values.dtype == array.dtype
        assert np.array_equal(results[name].values, array.reshape(-1))


@pytest.mark.parametrize("name", list(ARRAYS))
def test_npy(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.npy"
    np.save(path, ARRAYS[name])
    check_equal(path, {name: ARRAYS[name]})


def test_npy_in_fortran_order_comes_in_c_order(tmp_path: Path) -> None:
    path = tmp_path / "weight.npy"
    np.save(path, np.asfortranarray(ARRAYS["weight"]))
    check_equal(path, {"weight": ARRAYS["weight"]})


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_one_array_by_name(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    save(path, **ARRAYS)
    (result,) = read_tensors(path, "small")
    assert result.values.tolist() == [1, -2, 3]
    assert list(read_tensors(path, "none")) == []


def test_npy_is_mapped_not_read(tmp_path: Path) -> None:
    path = tmp_path / "weight.npy"
    np.save(path, ARRAYS["weight"])
    assert isinstance(next(read_tensors(path)).values.base, np.memmap)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path: Path, save: Any) -> None:
    path = tmp_path / "model.npz"
    save(path, **ARRAYS)
    check_equal(path, ARRAYS)


@pytest.mark.parametrize("padding", [0, 1, 7])
def test_safetensors(tmp_path: Path, padding: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors(ARRAYS, padding=padding))
    check_equal(path, ARRAYS)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is 0 bytes long"),
        (b"\x05\0\0\0", "is 4 bytes long"),
        (struct.pack("<Q", 2**63) + b"{}", "which its header does not fit into"),
        (with_header(b"nonsense"), "malformed header"),
        (with_header(b"\xff\xfe"), "malformed header"),
        (with_header(b"[" * 100_000), "malformed header"),
        (with_header({"a": {"dtype": "F32"}}), "malformed header"),
        (with_header({"a": entry(shape=[-2])}, bytes(8)), "malformed header"),
        (with_header({"a": entry(offsets=[0, 8, 9])}, bytes(8)), "malformed header"),
        (with_header({"a": entry(shape=[2.5])}, bytes(8)), "malformed header"),
        (with_header({"a": entry(dtype="F4")}, bytes(8)), "'a' is of the unknown dtype 'F4'"),
        (with_header({"a": entry(shape=[3])}, bytes(8)), "has 8 bytes, expected 12"),
        (with_header({"a": entry(shape=[2**62, 2**62])}, bytes(8)), "has 8 bytes, expected"),
        (with_header({"a": entry()}, bytes(4)), "is at bytes 0 to 8 of 4"),
        (with_header({"a": entry(offsets=[8, 0])}, bytes(8)), "is at bytes 8 to 0 of 8"),
        (with_header({"a": entry(offsets=[4, 12])}, bytes(12)), "is at bytes 4 to 12 of 12, expected it at 0"),
        (with_header({"a": entry(), "b": entry()}, bytes(16)), "'b' is at bytes 0 to 8 of 16, expected it at 8"),
        (with_header({"a": entry()}, bytes(9)), "1 bytes behind the last tensor"),
    ],
)
def test_damaged_safetensors(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(content)
    check_refused(path, reason)


def check_refused(path: Path, reason: str = "") -> None:
    with pytest.raises(FileError) as caught:
        list(read_tensors(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < len(str(path)) + 400
    assert reason in message


@pytest.mark.parametrize("name", ["junk.npy", "junk.npz", "pickle.npy"])
def test_not_what_the_name_says(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x80\x04\x95\x01\x00")
    check_refused(path, f"is not an {path.suffix} file")


def test_objects_are_not_unpickled(tmp_path: Path) -> None:
    for name, write in (("objects.npy", np.save), ("objects.npz", np.savez)):
        write(tmp_path / name, np.array([{}, None], object), allow_pickle=True)  # type: ignore[operator]
        check_refused(tmp_path / name, "bject")


def test_no_such_file_and_unknown_kinds(tmp_path: Path) -> None:
    for name in ("none.npy", "none.npz", "none.safetensors"):
        check_refused(tmp_path / name, "No such file")
    check_refused(tmp_path / "model.pt", "expected a file name that ends in .npy, .npz, .safetensors")
    (tmp_path / "folder.npy").mkdir()
    check_refused(tmp_path / "folder.npy", "directory")


def saved(folder: Path, kind: str) -> bytes:
    path = folder / f"good.{kind}"
    if kind == "npy":
        np.save(path, ARRAYS["weight"])
    elif kind == "npz":
        np.savez_compressed(path, **ARRAYS)
    else:
        path.write_bytes(safetensors(ARRAYS))
    return path.read_bytes()


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors"])
def test_damage_anywhere_is_refused_or_harmless(kind: str, tmp_path: Path) -> None:
    """A file with any byte changed, or cut anywhere, gives arrays or one FileError, no other exception."""
    good = saved(tmp_path, kind)
    path = tmp_path / f"damaged.{kind}"

    @settings(max_examples=150, deadline=None)
    @given(st.integers(0, len(good) - 1), st.integers(0, 255), st.booleans())
    def damage(at: int, value: int, cut: bool) -> None:
        content = good[:at] if cut else good[:at] + bytes([value]) + good[at + 1 :]
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        message = ""
        try:
            for tensor in read_tensors(path):
                assert tensor.values.ndim == 1
        except FileError as error:
            message = str(error)
        assert "\n" not in message

    damage()
