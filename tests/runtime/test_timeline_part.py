"""A rank's part of the timeline: lines, in order, that are there as soon as they are noted."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from omnireduce.runtime.tracing.timeline import MAX_LINE_BYTES, OFF, QUEUE, Timeline
from omnireduce.runtime.tracing.timeline_reader import lines_of, read_parts
from omnireduce.runtime.tracing.trace import Origin

ORIGIN = Origin(job="made up", kind="rank", number=1, ranks=2, shards=1)


def lines(part: Timeline) -> list[list[Any]]:
    return [json.loads(line) for line in part.path.read_text().splitlines()[1:]]


def test_what_is_noted_is_there_at_once(tmp_path: Path) -> None:
    part = Timeline(tmp_path, ORIGIN, 100)
    part.begin("w", "ALLREDUCE")
    part.end("w", "ALLREDUCE", bytes=np.int64(12), shape=(3,), dtype=np.dtype("f4"))
    part.cycle()  # not asked for
    assert [(line[0], *line[2:]) for line in lines(part)] == [
        ("B", "w", "ALLREDUCE", {}),
        ("E", "w", "ALLREDUCE", {"bytes": 12, "shape": [3], "dtype": "float32"}),
    ]
    part.close()
    part.close()
    part.begin("w", QUEUE)  # too late, and harmless
    assert lines(part)[-1][0] == "L"


def test_a_part_is_bounded(tmp_path: Path) -> None:
    part = Timeline(tmp_path, ORIGIN, 3, marks_cycles=True)
    part.begin("w" * 10_000, QUEUE, long="x" * 10_000)
    for _ in range(5):
        part.cycle()
    part.close()
    assert [line[0] for line in lines(part)] == ["B", "C", "C", "L"]
    assert lines(part)[-1][2] == 3
    assert all(len(line) <= MAX_LINE_BYTES for line in part.path.read_bytes().splitlines())


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    part = Timeline(tmp_path, ORIGIN, 100)
    part.begin("w", QUEUE)
    with part.path.open("a") as file:
        file.write('["B", 5\n[["B"], 5]\n[{}, 5]\n[null, 5]\n["?", 5]\n["B", "5"]\n7\n["B", 5, "w"]\n')
    part.end("w", QUEUE)
    part.close()
    [read] = read_parts(tmp_path)
    assert [line[0] for line in lines_of(read)] == ["B", "E", "L"]


def test_threads_may_note_at_the_same_time(tmp_path: Path) -> None:
    part = Timeline(tmp_path, ORIGIN, 10_000)
    threads = [
        threading.Thread(target=lambda: [part.begin(threading.current_thread().name, QUEUE) for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = lines(part)
    assert len(results) == 2000
    assert [result[1] for result in results] == sorted(result[1] for result in results)


def test_a_part_may_begin_anew_while_it_is_read(tmp_path: Path) -> None:
    """As where a rank starts a timeline of the same name again, and another rank still merges the first one."""
    part = Timeline(tmp_path, ORIGIN, 100)
    for _ in range(9):
        part.begin("w", "ALLREDUCE")
    part.close()
    [before] = read_parts(tmp_path)
    assert len(list(lines_of(before))) == 10
    again = Timeline(tmp_path, ORIGIN, 100)
    again.begin("v", QUEUE)
    assert [line[2:] for line in lines_of(before)] == [["v", "QUEUE", {}]]
    again.close()


def test_a_full_disk_ends_a_part(tmp_path: Path, caplog: Any) -> None:
    part = Timeline(tmp_path, ORIGIN, 100)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, part._file)
    os.close(full)
    part.begin("w", QUEUE)
    part.begin("w", QUEUE)
    part.close()
    assert caplog.text.count("the timeline cannot be written: No space left on device") == 2


def test_off_does_nothing() -> None:
    OFF.begin("w", QUEUE, bytes=1)
    OFF.end("w", QUEUE)
    OFF.cycle()
    assert not OFF.is_on
