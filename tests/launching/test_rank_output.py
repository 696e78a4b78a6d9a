"""Lines of output: whole, of one rank each, and bounded."""

from __future__ import annotations

import logging
import os
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnireduce import ConfigError
from omnireduce.launch.connection import STDERR, STDOUT
from omnireduce.launch.output import LINE, DescriptorSink, LineSplitter, PrefixedOutput


class Kept:
    """A sink that keeps all."""

    def __init__(self) -> None:
        self.data = b""

    def add(self, data: bytes) -> None:
        self.data += data


def collected(**options: object) -> tuple[PrefixedOutput, Kept, Kept]:
    out, err = Kept(), Kept()
    return PrefixedOutput({STDOUT: out, STDERR: err}, **options), out, err  # type: ignore[arg-type]


def test_lines_wait_for_their_end() -> None:
    output, out, err = collected()
    output.feed("0", STDOUT, b"one\ntw")
    output.feed("1", STDOUT, b"other\n")
    output.feed("0", STDERR, b"oh\n")
    output.feed("0", STDOUT, b"o\nrest")
    output.finish("0")
    assert out.data == b"[0]<stdout>:one\n[1]<stdout>:other\n[0]<stdout>:two\n[0]<stdout>:rest\n"
    assert err.data == b"[0]<stderr>:oh\n"


def test_times_stand_before_the_rank() -> None:
    output, out, _ = collected(timestamps=True)
    output.feed("3", STDOUT, b"x\n")
    assert re.fullmatch(rb"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\[3\]<stdout>:x\n", out.data)


def test_each_state_of_a_progress_bar_is_a_line() -> None:
    lines = LineSplitter()
    assert list(lines.feed(b"\r10%\r20%\r")) == [b"10%"]
    assert list(lines.feed(b"\ndone\r\n\n")) == [b"20%", b"done", b""]
    assert lines.rest() == b""


@given(st.text("ab\n", max_size=60).map(str.encode), st.data())
def test_lines_do_not_depend_on_pieces(text: bytes, data: st.DataObject) -> None:
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text))))})
    lines, received = LineSplitter(), []
    for start, end in pairwise(cuts):
        received += lines.feed(text[start:end])
    assert received == text.split(b"\n")[:-1]
    assert lines.rest() == text.split(b"\n")[-1]


def test_a_line_without_end_is_cut() -> None:
    lines = LineSplitter()
    results = list(lines.feed(b"x" * (3 * LINE + 5)))
    assert [len(result) for result in results] == [LINE] * 3
    assert list(lines.feed(b"y\n")) == [b"xxxxxy"]


def test_files_have_what_ranks_wrote_as_it_was(tmp_path: Path) -> None:
    output, _, _ = collected(folder=str(tmp_path / "outs"), ranks=11)
    output.feed("0", STDOUT, b"a\rb")
    output.feed("10", STDERR, b"\xff\n")
    output.close()
    assert (tmp_path / "outs/rank.00/stdout").read_bytes() == b"a\rb"
    assert (tmp_path / "outs/rank.10/stderr").read_bytes() == b"\xff\n"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--output-filename: .*cannot be written"):
        collected(folder=str(tmp_path / "file"), ranks=1)


def test_a_descriptor_that_takes_nothing_holds_nobody_up() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    sink = DescriptorSink(writer, limit_bytes=1000)
    data = b"z" * 200_000
    sink.add(data)
    assert sink.is_full
    taken = b""
    while sink.waits:
        sink.write_some()
        taken += os.read(reader, 1 << 20)
    assert taken == data
    os.close(reader)
    sink.add(b"more")
    sink.write_some()
    assert sink.is_broken
    assert not sink.waits
    os.close(writer)


def test_what_no_selector_waits_for_takes_at_once(tmp_path: Path) -> None:
    for path in (os.devnull, tmp_path / "file"):
        with open(path, "wb") as file:
            sink = DescriptorSink(file.fileno())
            assert sink.always_takes
            sink.add(b"x" * 100_000)
            assert not sink.waits
    assert (tmp_path / "file").read_bytes() == b"x" * 100_000


def test_a_full_disk_loses_output_and_ends_no_job(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        sink = DescriptorSink(file.fileno())
        sink.add(b"one\n")
        sink.add(b"two\n")
        assert not sink.waits
        assert not sink.is_broken
    for stream in ("stdout", "stderr"):
        (tmp_path / "rank.0").mkdir(exist_ok=True)
        (tmp_path / "rank.0" / stream).symlink_to("/dev/full")
    output, out, _ = collected(folder=str(tmp_path), ranks=1)
    output.feed("0", STDOUT, b"one\n")
    output.feed("0", STDOUT, b"two\n")
    output.close()
    assert out.data == b"[0]<stdout>:one\n[0]<stdout>:two\n"
    assert [record.__dict__["event"] for record in caplog.records] == ["output_lost", "output_lost"]
    assert all(record.levelno == logging.WARNING for record in caplog.records)
