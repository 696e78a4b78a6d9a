"""One timeline of all ranks and shards, in the form of Chrome's traces, made from their files in a folder.

Each rank and shard is a process that shows its work. Each tensor is a process, as in Horovod's timeline, with a row for
each rank. All times are on one clock: that of the host or, with several hosts, of one of them (see `lanes.clocks`).
"""

from __future__ import annotations

import itertools
import os
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from omnireduce.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.files.output import write_chunks
from omnireduce.runtime.tracing import parts as part_files
from omnireduce.runtime.tracing.chrome import TRACKS, lane_events, microseconds, process_events, thread_event
from omnireduce.runtime.tracing.lanes import Lane, clocks, on_one_clock, read_traces
from omnireduce.runtime.tracing.parts import Part, read_parts
from omnireduce.runtime.tracing.timeline import CYCLE
from omnireduce.runtime.tracing.trace import Origin

Chrome = dict[str, Any]
Who = tuple[str, str, int]  # job, kind and number
_NEGOTIATE = "NEGOTIATE_"
_one_at_a_time = threading.RLock()  # ranks of one process write to the same file


def _forget() -> None:
    """In a forked child: a thread of the parent may have had the lock."""
    global _one_at_a_time
    _one_at_a_time = threading.RLock()


os.register_at_fork(after_in_child=_forget)


class Merged(NamedTuple):
    """Summary of a timeline: the ranks and shards, how many events it has, and how many are missing because the room
    for them was full."""

    who: list[str]
    events: int
    missed: int


def merge(folder: str | Path, output: str | Path, job: str | None = None) -> Merged:
    """Write the timeline of the latest run in `folder` to `output`, all or nothing.

    A run is what was recorded at the same time. `job`: only this one, and those whose names begin with its name, such
    as its urgent channel. Raises UsageError where there is nothing, and when a file cannot be read or written.
    """
    with _one_at_a_time:
        run = _read(folder, job)
        counted = itertools.count()
        write_chunks(_json(event for event, _ in zip(_events(run), counted, strict=False)), output)
        missed = sum(lane.origin.missed for lane in run.lanes)
        missed += sum(part.missed for part in run.parts)
        return Merged([run.name(who) for who in run.numbers], next(counted), missed)


class _Run:
    """The files of one run. `numbers`: of the process of each rank and shard, in order. `shift`: added to the times of
    an origin."""

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
        began = min(origins, key=lambda origin: origin.began_ns + self.shift(origin))
        self.low = began.began_ns + self.shift(began)
        self.epoch_us = (began.began_ns + began.epoch_ns) // 1000

    def shift(self, origin: Origin) -> int:
        return self._shifts[origin.boot]

    def name(self, who: Who) -> str:
        return f"{who[1]} {who[2]}{self.suffix(who[0])}"

    def suffix(self, job: str) -> str:
        """What follows the names of ranks and shards of other jobs than the first: those that this one has made begin
        with its name."""
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
        what = f" of job {job!r}" if job else ""
        raise UsageError(f"{folder}: no traces{what}; set trace.timeline for workers, and trace.folder for daemons")
    latest = _latest([origin for origin, _ in recordings])
    kept = [(origin, what) for origin, what in recordings if origin.began_ns + origin.epoch_ns >= latest]
    return _Run(
        [Lane(origin, what) for origin, what in kept if not isinstance(what, Part)],
        [what for _, what in kept if isinstance(what, Part)],
    )


def _latest(origins: Iterable[Origin]) -> int:
    """When the latest run began, in Unix time: nothing that was recorded before went on until then."""
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
        self._first_thread = (len(TRACKS) + 1) * (len(run.numbers) + 1)  # behind those of ranks and shards
        self._ready: defaultdict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)

    def events(self) -> Iterator[Chrome]:
        for part in self._run.parts:
            self._note_ready(part)
        for part in self._run.parts:
            yield from self._rows(part)

    def _note_ready(self, part: Part) -> None:
        """Who was ready for which tensor when. A rank that begins to negotiate is."""
        me, shift = str(part.origin.number), self._run.shift(part.origin)
        said, begun = set[str](), list[tuple[str, int]]()
        for event in part_files.events_of(part):
            if event.phase == "R":
                self._ready[part.origin.job, event.tensor].append((event.at + shift, event.name))
                said |= {event.tensor} if event.name == me else set()
            elif event.phase == "B" and event.name.startswith(_NEGOTIATE):
                begun.append((event.tensor, event.at + shift))
        for tensor, at in begun:
            if tensor not in said:
                self._ready[part.origin.job, tensor].append((at, me))
        for ticks in self._ready.values():
            ticks.sort()

    def _rows(self, part: Part) -> Iterator[Chrome]:
        who, run = _who(part.origin), self._run
        shift, begun, ended = run.shift(part.origin), dict[str, int](), dict[str, int]()
        for tensor, slot, phase, name, at, details in part_files.events_of(part):
            time = at + shift
            if phase == "C":
                yield self._cycle(who, time)
            if phase not in "BE":
                continue
            place = yield from self._place(tensor, slot, who)
            if name.startswith(_NEGOTIATE) and phase == "B":
                begun[tensor] = time
            elif name.startswith(_NEGOTIATE):
                for ready, rank in self._ticks(who[0], tensor, ended.get(tensor, 0), time):
                    tick = microseconds(max(ready, begun[tensor]) - run.low)
                    yield {"ph": "X", "name": rank, **place, "ts": tick, "dur": 0}
                ended[tensor] = time
            args = {"args": details} if details else {}
            yield {"ph": phase, "name": name, **place, "ts": microseconds(time - run.low), **args}

    def _ticks(self, job: str, tensor: str, after: int, until: int) -> Sequence[tuple[int, str]]:
        """When each rank was ready, the last time in that span."""
        all_times = self._ready[job, tensor]
        begin, end = (bisect_right(all_times, at, key=lambda tick: tick[0]) for at in (after, until))
        latest = {rank: at for at, rank in all_times[begin:end]}
        return sorted((at, rank) for rank, at in latest.items())

    def _cycle(self, who: Who, at: int) -> Chrome:
        number = self._run.numbers[who]
        scope = "g" if who[2] == 0 else "p"  # of rank 0 a line through all rows
        thread = len(TRACKS) * number
        return {
            "ph": "i",
            "name": CYCLE,
            "s": scope,
            "pid": number,
            "tid": thread,
            "ts": microseconds(at - self._run.low),
        }

    def _place(self, tensor: str, slot: int, who: Who) -> Generator[Chrome, None, dict[str, int]]:
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
