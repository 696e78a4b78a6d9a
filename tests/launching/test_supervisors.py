"""Supervisors behind a program in place of ssh: what they say before they speak, and when they say nothing."""

from __future__ import annotations

import fcntl
import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launches import SUM, lines, python, run

from omnireduce.launch.connection import (
    CHUNK,
    MAGIC,
    MOST_BYTES,
    MOST_NOISE,
    STDOUT,
    Ended,
    Frames,
    Output,
    decode_news,
    frame,
)
from omnireduce.launch.supervisor import Supervisor

HERE = 'for word; do shift; [ "$word" = -- ] && break; done; shift; exec sh -c "$*"'


def fake_ssh(folder: Path, text: str) -> list[str]:
    """Options for a program that gets the arguments of ssh."""
    path = folder / "ssh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return ["--ssh", str(path)]


def test_what_a_shell_says_first_does_not_count(tmp_path: Path) -> None:
    ssh = fake_ssh(tmp_path, f"echo Welcome to this host; echo and beware >&2; {HERE}")
    result = run("-H", "localhost:1,other:1", *ssh, *python(SUM))
    assert result.returncode == 0, result.stderr
    assert lines(result.stdout) == ["[0]<stdout>:0/2 3 0/1", "[1]<stdout>:1/2 3 0/1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exec sleep 1000", "Error: host other: ssh: no answer within --start-timeout 0.5 s"),
        ("echo locked out >&2; exit 255", "Error: host other: ssh: locked out"),
        ("exit 127", "Error: host other: ssh: it ended at once; does it have Python and omnireduce at the same place"),
        (f"head -c {MOST_NOISE + 100} /dev/zero", "Error: host other: ssh: it ended at once"),
    ],
)
def test_a_host_that_does_not_answer_is_named(tmp_path: Path, text: str, message: str) -> None:
    timeout = "0.5" if "sleep" in text else "30"
    result = run("-H", "other:1", "--start-timeout", timeout, "--grace-period", "0", *fake_ssh(tmp_path, text), "true")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(message)


NOISE = st.binary(max_size=50) | st.integers(0, len(MAGIC) - 1).map(lambda size: MAGIC[:size])  # and a part of it


@given(st.lists(st.binary(max_size=300)), NOISE, st.data())
def test_messages_come_out_as_they_went_in(payloads: list[bytes], noise: bytes, data: st.DataObject) -> None:
    sent = [Output(number, 1, payload) for number, payload in enumerate(payloads)] + [Ended(0, -9)]
    stream = noise + MAGIC + b"".join(map(frame, sent))
    frames, frames_read, at = Frames(MOST_BYTES, magic=True), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, 400))
        frames_read += [decode_news(message) for message in frames.feed(stream[at : at + size])]
        at += size
    assert frames_read == sent


def test_nonsense_is_no_message() -> None:
    with pytest.raises(ValueError, match="expected at most"):
        list(Frames(MOST_BYTES).feed((MOST_BYTES + 1).to_bytes(4, "big")))
    with pytest.raises(ValueError, match="not from a supervisor"):
        list(Frames(MOST_BYTES, magic=True).feed(bytes(MOST_NOISE + 1)))
    with pytest.raises(ValueError, match="Expected"):
        decode_news(b"\x01")


def test_a_pipe_that_others_keep_full_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of a rank may write for ever, after the rank has ended."""
    reader, writer = os.pipe()
    os.write(writer, bytes(CHUNK))
    pieces = itertools.count()

    def pass_on(_: Supervisor, __: object, descriptor: int) -> int:
        assert next(pieces) < 1000, "it has been read for ever"
        return os.write(writer, os.read(descriptor, CHUNK))

    monkeypatch.setattr(Supervisor, "_pass_on", pass_on)
    Supervisor._drain(Supervisor.__new__(Supervisor), SimpleNamespace(streams={reader: STDOUT}))  # type: ignore[arg-type]
    assert next(pieces) * CHUNK >= fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ)
    os.close(reader)
    os.close(writer)
