"""Traces in the Chrome trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

Format: "Trace Event Format", Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Every lane is a process with three tracks, because a wait in one thread and work in another may overlap.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from omnireduce.bench.breakdown import WORK
from omnireduce.bench.lanes import Lane, apart, pairs, wake_ups
from omnireduce.dtypes import Array
from omnireduce.runtime.trace import What

TRACKS = COLLECTIVES, WORKING, WAITING = range(3)
TRACK_NAMES = ("collectives", "work", "waits")
DETAILS = {What.COLLECTIVE: "bytes", What.PACK: "blocks", What.SCATTER: "blocks", What.MERGE: "blocks"}
Event = dict[str, Any]


def chrome_trace(lanes: Sequence[Lane], begin: int | None = None, end: int | None = None) -> bytes:
    """The lanes as JSON, from `begin` to `end` (nanoseconds on their clock; None: all). Time 0 is `begin`."""
    low = min(int(lane.spans["start"].min()) for lane in lanes) if begin is None else begin
    high = max(int(lane.spans["end"].max()) for lane in lanes) if end is None else end
    events = [event for number, lane in enumerate(lanes) for event in _lane(number, lane, lanes, low, high)]
    events += _messages(lanes, low, high)
    about = {"job": lanes[0].origin.job, "missed": {str(each.origin): each.origin.missed for each in lanes}}
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})


def _lane(number: int, lane: Lane, lanes: Sequence[Lane], low: int, high: int) -> Iterator[Event]:
    names = {"process_name": {"name": str(lane.origin)}, "process_sort_index": {"sort_index": number}}
    yield from ({"ph": "M", "name": name, "pid": number, "args": value} for name, value in names.items())
    for track, name in zip(TRACKS, TRACK_NAMES, strict=True):
        yield {"ph": "M", "name": "thread_name", "pid": number, "tid": track, "args": {"name": name}}
    peer = "shard" if lane.origin.kind == "rank" else "rank"
    collectives = lane.of(What.COLLECTIVE)
    collectives["start"] = apart(collectives["start"], collectives["end"])
    shown = [("", COLLECTIVES, collectives), ("", WAITING, lane.of(What.WAIT))]
    shown += [("wake-up", WAITING, wake_ups(lane, lanes)), *(("", WORKING, lane.of(what)) for what in WORK)]
    for name, track, spans in shown:
        for what, to, detail, start, end in _within(spans, low, high).tolist():
            event = {"ph": "X", "name": name or What(what).name.lower(), "pid": number, "tid": track}
            args = {DETAILS[what]: detail} if what in DETAILS else {}
            event["args"] = args if to < 0 else {peer: to} | args
            yield event | {"ts": (start - low) / 1e3, "dur": (end - start) / 1e3}


def _within(spans: Array, low: int, high: int) -> Array:
    """What of the spans lies between two times."""
    found = spans[(spans["end"] > low) & (spans["start"] < high)]
    found["start"], found["end"] = np.maximum(found["start"], low), np.minimum(found["end"], high)
    return found


def _messages(lanes: Sequence[Lane], low: int, high: int) -> Iterator[Event]:
    """An arrow for each message."""
    number = 0
    for (i, sender), (j, receiver) in itertools.permutations(enumerate(lanes), 2):
        if sender.origin.kind == receiver.origin.kind or sender.origin.boot != receiver.origin.boot:
            continue
        for left, there in zip(*pairs(sender, receiver, What.MESSAGE_OUT, What.MESSAGE_IN), strict=True):
            if low <= left and there <= high:
                arrow = {"name": "message", "cat": "message", "id": number, "tid": WORKING}
                yield arrow | {"ph": "s", "pid": i, "ts": (int(left) - low) / 1e3}
                yield arrow | {
                    "ph": "f",
                    "bp": "e",
                    "pid": j,
                    "ts": (int(there) - 1 - low) / 1e3,
                }  # in its receive span
                number += 1
