"""Traces in the Chrome trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

Format: "Trace Event Format", Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Every lane is a process with three threads. Spans of one thread have to nest, but a wait in one thread and work in
another may overlap. Numbers of processes and threads begin at 1, because some viewers take 0 for the idle process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from omnireduce.dtypes import Array
from omnireduce.runtime.tracing.lanes import Lane, apart, pairs, wake_ups
from omnireduce.runtime.tracing.trace import WORK, What

COLLECTIVES, WORKING, WAITING = TRACKS = ("collectives", "work", "waits")
BLOCKS = (What.PACK, What.SCATTER, What.MERGE, What.STAGE, What.COMBINE, What.SHOW, What.COLLECT)
DETAILS = {What.COLLECTIVE: "bytes"} | dict.fromkeys(BLOCKS, "blocks")
MANY = 1 << 14  # spans at once
ARROWS = 1 << 32  # more than the messages of one job
Event = dict[str, Any]


def chrome_trace(lanes: Sequence[Lane], begin: int | None = None, end: int | None = None) -> bytes:
    """The lanes as JSON, from `begin` to `end` (nanoseconds on their clock; None: all). Time 0 is `begin`."""
    low = min(int(lane.spans["start"].min()) for lane in lanes) if begin is None else begin
    high = max(int(lane.spans["end"].max()) for lane in lanes) if end is None else end
    events = list(lane_events(lanes, low, high))
    about = {"job": lanes[0].origin.job, "missed": {str(lane.origin): lane.origin.missed for lane in lanes}}
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})


def lane_events(
    lanes: Sequence[Lane], low: int, high: int, numbers: Mapping[str, int] | None = None, suffix: str = ""
) -> Iterator[Event]:
    """What the lanes of one job did from `low` to `high`, nanoseconds on their clock; time 0 is `low`. Each lane is the
    process of its number in `numbers` (None: they are counted from 1). `suffix` follows its name."""
    if numbers is None:
        numbers = {str(lane.origin): number for number, lane in enumerate(lanes, 1)}
    for lane in lanes:
        number = numbers[str(lane.origin)]
        yield from process_events(number, f"{lane.origin}{suffix}")
        for track in TRACKS:
            yield thread_event(number, _thread(number, track), track)
        yield from _lane(number, lane, lanes, low, high)
    yield from _messages(lanes, numbers, low, high)


def process_events(number: int, name: str) -> Iterator[Event]:
    """What gives a process its name and its place."""
    names = {"process_name": {"name": name}, "process_sort_index": {"sort_index": number}}
    yield from ({"ph": "M", "name": event_name, "pid": number, "args": value} for event_name, value in names.items())


def thread_event(process: int, thread: int, name: str) -> Event:
    """What gives a thread its name."""
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}


def _lane(number: int, lane: Lane, lanes: Sequence[Lane], low: int, high: int) -> Iterator[Event]:
    peer = "shard" if lane.origin.kind == "rank" else "rank"
    collectives = lane.of(What.COLLECTIVE)
    collectives["start"] = apart(collectives["start"], collectives["end"])
    shown = [("", COLLECTIVES, collectives), ("", WAITING, lane.of(What.WAIT))]
    shown += [("wake-up", WAITING, wake_ups(lane, lanes)), *(("", WORKING, lane.of(what)) for what in WORK)]
    for name, track, spans in shown:
        place = {"ph": "X", "pid": number, "tid": _thread(number, track)}
        for what, to, detail, start, end in _by_and_by(_within(spans, low, high)):
            args = ({} if to < 0 else {peer: to}) | ({DETAILS[what]: detail} if what in DETAILS else {})
            begin = microseconds(start - low)
            times = {"ts": begin, "dur": microseconds(end - low) - begin}
            yield place | {"name": name or What(what).name.lower(), "args": args} | times


def _thread(lane: int, track: str) -> int:
    return len(TRACKS) * lane + TRACKS.index(track)


def _by_and_by(spans: Array) -> Iterator[Any]:
    """The spans as tuples. Of a long trace they are not all there at the same time."""
    for at in range(0, len(spans), MANY):
        yield from spans[at : at + MANY].tolist()


def microseconds(nanoseconds: int) -> float:
    """Microseconds in eighths, which are exact in binary: viewers that calculate in floats see spans touch, not
    overlap."""
    return nanoseconds // 125 / 8


def _within(spans: Array, low: int, high: int) -> Array:
    """The parts of the spans that lie between two times."""
    clipped = spans[(spans["end"] > low) & (spans["start"] < high)]
    clipped["start"], clipped["end"] = np.maximum(clipped["start"], low), np.minimum(clipped["end"], high)
    return clipped


def _messages(lanes: Sequence[Lane], numbers: Mapping[str, int], low: int, high: int) -> Iterator[Event]:
    """An arrow for each message, from the span that sent it to the one that received it."""
    arrows = itertools.count(ARROWS * (min(numbers.values(), default=1) - 1))
    for sender, receiver in itertools.permutations(lanes, 2):
        i, j = numbers[str(sender.origin)], numbers[str(receiver.origin)]
        if sender.origin.kind == receiver.origin.kind or sender.origin.boot != receiver.origin.boot:
            continue
        left, there = pairs(sender, receiver, What.MESSAGE_OUT, What.MESSAGE_IN)
        inside = (left >= low) & (there <= high)
        for start, end in zip(left[inside].tolist(), there[inside].tolist(), strict=True):
            arrow = {"name": "message", "cat": "message", "id": next(arrows)}
            yield arrow | {"ph": "s", "pid": i, "tid": _thread(i, WORKING), "ts": microseconds(start - low)}
            ending = {"ph": "f", "bp": "e", "pid": j, "tid": _thread(j, WORKING)}
            yield arrow | ending | {"ts": microseconds(end - 1 - low)}  # before the end of that span
