"""Result files are whole or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from omnireduce.errors import UsageError
from omnireduce.support.files.output import check_writable, make_folder, write_file, write_json, write_npy


def test_json_replaces_a_file_or_leaves_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("old")
    write_json(b"[1]", path)
    assert json.loads(path.read_text()) == [1]
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UsageError, match=r"gone.rows\.json: cannot be written: No such file"):
        write_json(b"[]", tmp_path / "gone" / "rows.json")


def test_npy_comes_back_with_its_shape(tmp_path: Path) -> None:
    path, array = tmp_path / "gradient.npy", np.arange(12, dtype=np.float32).reshape(3, 4)
    write_npy(array, path)
    assert np.array_equal(np.load(path), array)
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "gradient.npy"
    path.write_text("old")
    with pytest.raises(ValueError, match="allow_pickle"):
        write_npy(np.array([{}], object), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_check_writable(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    check_writable(path)
    assert not path.exists()
    with pytest.raises(UsageError, match="is a directory"):
        check_writable(tmp_path)
    with pytest.raises(UsageError, match="there is no folder"):
        check_writable(tmp_path / "none" / "rows.json")


def test_make_folder(tmp_path: Path) -> None:
    assert make_folder(tmp_path / "a" / "b") == make_folder(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="cannot be made a folder"):
            make_folder(wrong)


def test_a_device_stays_a_device() -> None:
    check_writable("/dev/null")
    write_file(b"gone", "/dev/null")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(UsageError, match="/dev/full: cannot be written: No space left on device"):
        write_file(b"much", "/dev/full")
    assert Path("/dev/full").is_char_device()


def test_a_pipe_is_written_where_somebody_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(UsageError, match="pipe: cannot be written: No such device or address"):
        write_file(b"nobody", path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_file(b"something", path)
    assert os.read(reader, 100) == b"something"
    os.close(reader)
    assert path.is_fifo()
