"""One timeline of all ranks and shards, in the form of Chrome's traces, made from their files in a folder.

In the timeline each rank and shard is a process that shows its work. Each tensor is a process, too, as in Horovod's
timeline, with a row for each rank. All times are on the clock of one host (see `aligned_traces.clocks`).
"""

from __future__ import annotations

import itertools
import os
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.runtime.tracing import timeline_reader
from omnireduce.runtime.tracing.aligned_traces import (
    Lane,
    clocks,
    on_one_clock,
    pairs,
    read_traces,
    wake_ups,
    without_overlap,
)
from omnireduce.runtime.tracing.timeline import CYCLE, NEGOTIATE
from omnireduce.runtime.tracing.timeline_reader import Part, read_parts
from omnireduce.runtime.tracing.trace import WORK, Origin, SpanKind
from omnireduce.support.files.output import write_chunks

COLLECTIVES, WORKING, WAITING = TRACKS = ("collectives", "work", "waits")
BLOCKS = (
    SpanKind.PACK,
    SpanKind.SCATTER,
    SpanKind.MERGE,
    SpanKind.STAGE,
    SpanKind.COMBINE,
    SpanKind.SHOW,
    SpanKind.COLLECT,
)
DETAILS = {SpanKind.COLLECTIVE: "bytes"} | dict.fromkeys(BLOCKS, "blocks")
MANY = 1 << 14  # spans that are made tuples at once
ARROWS = 1 << 32  # numbers of arrows for each job: more than it has messages
Event = dict[str, Any]


def chrome_trace(lanes: Sequence[Lane], begin: int | None = None, end: int | None = None) -> bytes:
    """The lanes as JSON, from `begin` to `end` (nanoseconds on their clock; None: all). Time 0 is `begin`."""
    low = min(int(lane.spans["start"].min()) for lane in lanes) if begin is None else begin
    high = max(int(lane.spans["end"].max()) for lane in lanes) if end is None else end
    events = list(lane_events(lanes, low, high))
    summary = {"job": lanes[0].origin.job, "missed": {str(lane.origin): lane.origin.missed for lane in lanes}}
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": summary})


def lane_events(
    lanes: Sequence[Lane], low: int, high: int, numbers: Mapping[str, int] | None = None, suffix: str = ""
) -> Iterator[Event]:
    """The events of the lanes of one job from `low` to `high`, nanoseconds on their clock; time 0 is `low`. Each lane
    becomes the process with its number in `numbers` (None: counted from 1). `suffix` follows its name."""
    if numbers is None:
        numbers = {str(lane.origin): number for number, lane in enumerate(lanes, 1)}
    for lane in lanes:
        number = numbers[str(lane.origin)]
        yield from process_events(number, f"{lane.origin}{suffix}")
        for track in TRACKS:
            yield thread_event(number, _thread(number, track), track)
        yield from _lane_events(number, lane, lanes, low, high)
    yield from _messages(lanes, numbers, low, high)


def process_events(number: int, name: str) -> Iterator[Event]:
    """The events that give a process its name and its place."""
    names = {"process_name": {"name": name}, "process_sort_index": {"sort_index": number}}
    yield from ({"ph": "M", "name": event_name, "pid": number, "args": value} for event_name, value in names.items())


def thread_event(process: int, thread: int, name: str) -> Event:
    """The event that gives a thread its name."""
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}


def _lane_events(number: int, lane: Lane, lanes: Sequence[Lane], low: int, high: int) -> Iterator[Event]:
    peer = "shard" if lane.origin.kind == "rank" else "rank"
    collectives = lane.of(SpanKind.COLLECTIVE)
    collectives["start"] = without_overlap(collectives["start"], collectives["end"])
    layers = [("", COLLECTIVES, collectives), ("", WAITING, lane.of(SpanKind.WAIT))]
    layers += [("wake-up", WAITING, wake_ups(lane, lanes)), *(("", WORKING, lane.of(kind)) for kind in WORK)]
    for name, track, spans in layers:
        location = {"ph": "X", "pid": number, "tid": _thread(number, track)}
        for kind, target, detail, start, end in _tuples_of(_within(spans, low, high)):
            args = ({} if target < 0 else {peer: target}) | ({DETAILS[kind]: detail} if kind in DETAILS else {})
            begin = microseconds(start - low)
            times = {"ts": begin, "dur": microseconds(end - low) - begin}
            yield location | {"name": name or SpanKind(kind).name.lower(), "args": args} | times


def _thread(lane: int, track: str) -> int:
    return len(TRACKS) * lane + TRACKS.index(track)


def _tuples_of(spans: Array) -> Iterator[Any]:
    """The spans as tuples, MANY at a time, to save memory."""
    for at in range(0, len(spans), MANY):
        yield from spans[at : at + MANY].tolist()


def microseconds(nanoseconds: int) -> float:
    """Microseconds in eighths, which are exact in binary. So spans that touch do not overlap in viewers that calculate
    in floats."""
    return nanoseconds // 125 / 8


def _within(spans: Array, low: int, high: int) -> Array:
    """The parts of the spans that lie between two times."""
    clipped = spans[(spans["end"] > low) & (spans["start"] < high)]
    clipped["start"], clipped["end"] = np.maximum(clipped["start"], low), np.minimum(clipped["end"], high)
    return clipped


def _messages(lanes: Sequence[Lane], numbers: Mapping[str, int], low: int, high: int) -> Iterator[Event]:
    """An arrow for each message, from the span that sent it to the span that received it."""
    arrows = itertools.count(ARROWS * (min(numbers.values(), default=1) - 1))
    for sender, receiver in itertools.permutations(lanes, 2):
        i, j = numbers[str(sender.origin)], numbers[str(receiver.origin)]
        if sender.origin.kind == receiver.origin.kind or sender.origin.boot != receiver.origin.boot:
            continue
        left, arrived = pairs(sender, receiver, SpanKind.MESSAGE_OUT, SpanKind.MESSAGE_IN)
        inside = (left >= low) & (arrived <= high)
        for start, end in zip(left[inside].tolist(), arrived[inside].tolist(), strict=True):
            arrow = {"name": "message", "cat": "message", "id": next(arrows)}
            yield arrow | {"ph": "s", "pid": i, "tid": _thread(i, WORKING), "ts": microseconds(start - low)}
            ending = {"ph": "f", "bp": "e", "pid": j, "tid": _thread(j, WORKING)}
            yield arrow | ending | {"ts": microseconds(end - 1 - low)}  # before the end of the span


Chrome = dict[str, Any]
Who = tuple[str, str, int]  # job, kind and number
_one_at_a_time = threading.RLock()  # ranks of one process write to the same file


def _forget() -> None:
    """In a forked child: a thread of the parent may have had the lock."""
    global _one_at_a_time
    _one_at_a_time = threading.RLock()


os.register_at_fork(after_in_child=_forget)


class Merged(NamedTuple):
    """Summary of a timeline: the ranks and shards, the number of events, and the number of events that are missing
    because a file was full."""

    who: list[str]
    events: int
    missed: int


def merge(folder: str | Path, output: str | Path, job: str | None = None) -> Merged:
    """Write the timeline of the latest run in `folder` to `output`, all or nothing.

    Traces that were recorded at the same time are of one run. `job`: only this job, and jobs whose names begin with its
    name, such as its urgent channel. Raises UsageError when there are no traces, and when a file cannot be read or
    written.
    """
    with _one_at_a_time:
        run = _read(folder, job)
        counted = itertools.count()
        write_chunks(_json(event for event, _ in zip(_events(run), counted, strict=False)), output)
        missed = sum(lane.origin.missed for lane in run.lanes)
        missed += sum(part.missed for part in run.parts)
        return Merged([run.name(who) for who in run.numbers], next(counted), missed)


class _Run:
    """The files of one run. `numbers`: the process number of each rank and shard, in order. `shift` gives the number to
    add to the times of an origin."""

    def __init__(self, lanes: list[Lane], parts: list[Part]) -> None:
        origins = [*(lane.origin for lane in lanes), *(part.origin for part in parts)]
        self.lanes, self.parts = lanes, parts
        self.job = min(origins, key=lambda origin: origin.began_ns + origin.epoch_ns).job
        everybody = {_who(origin) for origin in origins}
        order = sorted(everybody, key=lambda who: (who[0] != self.job, *who))
        self.numbers = {who: number for number, who in enumerate(order, 1)}
        self._shifts = {origin.boot: origin.epoch_ns for origin in origins}
        if len(self._shifts) == 1:
            self._shifts = dict.fromkeys(self._shifts, 0)
        elif len(of_lanes := clocks(lanes)) > 1:
            self._shifts |= of_lanes
        on_one_clock(lanes, self._shifts)
        first = min(origins, key=lambda origin: origin.began_ns + self.shift(origin))
        self.low = first.began_ns + self.shift(first)
        self.epoch_us = (first.began_ns + first.epoch_ns) // 1000

    def shift(self, origin: Origin) -> int:
        return self._shifts[origin.boot]

    def name(self, who: Who) -> str:
        return f"{who[1]} {who[2]}{self.suffix(who[0])}"

    def suffix(self, job: str) -> str:
        """The text behind the names of ranks and shards that belong to another job than the first. The name of a job
        that the first job has made begins with its name, which is left out."""
        return "" if job == self.job else f" of {job.removeprefix(f'{self.job}+')}"


def _who(origin: Origin) -> Who:
    return origin.job, origin.kind, origin.number


def _read(folder: str | Path, job: str | None) -> _Run:
    recordings: list[tuple[Origin, Array | Part]] = [
        *read_traces(folder),
        *((part.origin, part) for part in read_parts(folder)),
    ]
    if job is not None:
        recordings = [recording for recording in recordings if recording[0].job.startswith(job)]
    if not recordings:
        content = f" of job {job!r}" if job else ""
        raise UsageError(f"{folder}: no traces{content}; set trace.timeline for workers, and trace.folder for daemons")
    latest = _latest([origin for origin, _ in recordings])
    recordings_of_run = [
        (origin, content) for origin, content in recordings if origin.began_ns + origin.epoch_ns >= latest
    ]
    return _Run(
        [Lane(origin, content) for origin, content in recordings_of_run if not isinstance(content, Part)],
        [content for _, content in recordings_of_run if isinstance(content, Part)],
    )


def _latest(origins: Iterable[Origin]) -> int:
    """The begin of the latest run, in Unix time: all traces of earlier runs ended before."""
    begins, until = 0, -1
    for began, ended in sorted(
        (origin.began_ns + origin.epoch_ns, origin.ended_ns + origin.epoch_ns) for origin in origins
    ):
        if began > until:
            begins = began
        until = max(until, ended)
    return begins


def _json(events: Iterable[Chrome]) -> Iterator[bytes]:
    encode = msgspec.json.Encoder().encode
    comma = b"[\n"
    for event in events:
        yield comma + encode(event)
        comma = b",\n"
    yield b"\n]\n"


def _events(run: _Run) -> Iterator[Chrome]:
    yield {"ph": "M", "name": "start_time", "pid": 1, "args": {"start_time_since_epoch_in_micros": run.epoch_us}}
    jobs: defaultdict[str, list[Lane]] = defaultdict(list)
    for lane in run.lanes:
        jobs[lane.origin.job].append(lane)
    for job, lanes in jobs.items():
        high = max(int(lane.spans["end"].max(initial=run.low)) for lane in lanes)
        numbers = {str(lane.origin): run.numbers[_who(lane.origin)] for lane in lanes}
        yield from lane_events(lanes, run.low, high, numbers, run.suffix(job))
    with_lanes = {_who(lane.origin) for lane in run.lanes}
    for who, number in run.numbers.items():
        if who not in with_lanes:
            yield from process_events(number, run.name(who))
    yield from _Tensors(run).events()


class _Tensors:
    """The rows of tensors."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[str, int, Who], int] = {}
        self._first_thread = (len(TRACKS) + 1) * (len(run.numbers) + 1)  # behind the threads of ranks and shards
        self._ready: defaultdict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)

    def events(self) -> Iterator[Chrome]:
        for part in self._run.parts:
            self._note_ready(part)
        for ticks in self._ready.values():
            ticks.sort()
        for part in self._run.parts:
            yield from self._rows(part)

    def _note_ready(self, part: Part) -> None:
        """Note when this rank was ready for which tensor: when it began to negotiate."""
        origin, shift = part.origin, self._run.shift(part.origin)
        for event in timeline_reader.events_of(part):
            if event.phase == "B" and event.name.startswith(NEGOTIATE):
                self._ready[origin.job, event.tensor].append((event.at + shift, str(origin.number)))

    def _rows(self, part: Part) -> Iterator[Chrome]:
        who, run = _who(part.origin), self._run
        shift, begun, ended = run.shift(part.origin), dict[str, int](), dict[str, int]()
        for tensor, slot, phase, name, at, details in timeline_reader.events_of(part):
            time = at + shift
            if phase == "C":
                yield self._cycle(who, time)
                continue
            row = yield from self._row_of(tensor, slot, who)
            if name.startswith(NEGOTIATE) and phase == "B":
                begun[tensor] = time
            elif name.startswith(NEGOTIATE):
                for ready, rank in self._ticks(who[0], tensor, ended.get(tensor, 0), time):
                    tick = microseconds(max(ready, begun[tensor]) - run.low)
                    yield {"ph": "X", "name": rank, **row, "ts": tick, "dur": 0}
                ended[tensor] = time
            args = {"args": details} if details else {}
            yield {"ph": phase, "name": name, **row, "ts": microseconds(time - run.low), **args}

    def _ticks(self, job: str, tensor: str, after: int, until: int) -> Sequence[tuple[int, str]]:
        """The last time in a span when each rank became ready."""
        all_times = self._ready[job, tensor]
        begin, end = (bisect_right(all_times, at, key=lambda tick: tick[0]) for at in (after, until))
        latest = {rank: at for at, rank in all_times[begin:end]}
        return sorted((at, rank) for rank, at in latest.items())

    def _cycle(self, who: Who, at: int) -> Chrome:
        number = self._run.numbers[who]
        scope = "g" if who[2] == 0 else "p"  # a cycle of rank 0 is a line through all rows
        thread = len(TRACKS) * number
        return {
            "ph": "i",
            "name": CYCLE,
            "s": scope,
            "pid": number,
            "tid": thread,
            "ts": microseconds(at - self._run.low),
        }

    def _row_of(self, tensor: str, slot: int, who: Who) -> Generator[Chrome, None, dict[str, int]]:
        """Give names to process and thread, if they are new; return both."""
        process = self._processes.get(tensor)
        if process is None:
            process = self._processes[tensor] = len(self._run.numbers) + len(self._processes) + 1
            yield from process_events(process, tensor)
        thread = self._threads.get((tensor, slot, who))
        if thread is None:
            thread = self._threads[tensor, slot, who] = self._first_thread + len(self._threads)
            name = self._run.name(who) + (f", {slot + 1}" if slot else "")
            yield thread_event(process, thread, name)
        return {"pid": process, "tid": thread}
