"""Timelines as tests read them, and what a queue would note of a tensor."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from omnireduce import Communicator
from omnireduce.runtime.tracing.timeline import (
    EXCHANGE,
    MEMCPY_IN,
    MEMCPY_OUT,
    NEGOTIATE,
    QUEUE,
)

Json = dict[str, Any]


class Span(NamedTuple):
    """An activity: its name, begin and end in microseconds, and what is said about it."""

    name: str
    begin: float
    end: float
    args: Json


class Timeline:
    """A timeline that was read. Raises AssertionError when its events do not nest in each row, or have no names."""

    def __init__(self, path: Path) -> None:
        self.events: list[Json] = json.loads(path.read_text())
        names = [event for event in self.events if event["ph"] == "M" and "name" in event["args"]]
        self.processes = {name["pid"]: name["args"]["name"] for name in names if name["name"] == "process_name"}
        self.threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in names if e["name"] == "thread_name"}
        assert len({tid for _, tid in self.threads}) == len(self.threads)
        self.rows: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
        self.ticks: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
        self._read()

    def _read(self) -> None:
        open_spans: defaultdict[tuple[str, str], list[Json]] = defaultdict(list)
        for event in self.events:
            if event["ph"] not in "BEX":
                continue
            row = self.processes[event["pid"]], self.threads[event["pid"], event["tid"]]
            if event["ph"] == "B":
                open_spans[row].append(event)
            elif event["ph"] == "E":
                begun = open_spans[row].pop()
                assert begun["name"] == event["name"]
                assert begun["ts"] <= event["ts"]
                args = begun.get("args", {}) | event.get("args", {})
                self.rows[row].append(Span(event["name"], begun["ts"], event["ts"], args))
            else:
                span = Span(event["name"], event["ts"], event["ts"] + event["dur"], event.get("args", {}))
                self.ticks[row].append(span)
        assert not any(open_spans.values())


def queued(comm: Communicator, name: str, step: int) -> None:
    """Record the events of one tensor in a queue."""
    x = np.zeros(4096, np.float32)
    x[: 256 * (comm.rank + 1)] = 1
    timeline = comm.timeline
    timeline.cycle()
    timeline.begin(name, f"{NEGOTIATE}ALLREDUCE")
    comm.barrier(name="queue: round")
    timeline.end(name, f"{NEGOTIATE}ALLREDUCE")
    timeline.begin(name, "ALLREDUCE")
    timeline.begin(name, QUEUE)
    timeline.end(name, QUEUE)
    timeline.begin(name, MEMCPY_IN)
    buffer = x.copy()
    timeline.end(name, MEMCPY_IN)
    timeline.begin(name, EXCHANGE)
    comm.allreduce(buffer, name=f"queue: {name}")
    timeline.end(name, EXCHANGE)
    timeline.begin(name, MEMCPY_OUT)
    x[:] = buffer
    timeline.end(name, MEMCPY_OUT)
    timeline.end(name, "ALLREDUCE", dtype="float32", shape=x.shape, bytes=x.nbytes, step=step)
