"""The traces of one job side by side, on one clock: paired messages, and the work of each rank and shard over time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.runtime.tracing.trace import LIVE, SUFFIX, Origin, SpanKind, read_trace
from omnireduce.support.files.paths import user_path

Pairs = tuple[Array, Array]  # the times when messages or credits left their sender, and when they had arrived


@dataclass(frozen=True)
class Lane:
    """The trace of one rank or shard. `spans`: of dtype `SPAN`, nanoseconds on a clock that all lanes share."""

    origin: Origin
    spans: Array

    def of(self, kind: SpanKind, peer: int | None = None) -> Array:
        """The lane's spans of one kind, only those with `peer` if it is given, in the order in which they were
        recorded."""
        spans: Array = self.spans[self.spans["what"] == kind]
        return spans if peer is None else spans[spans["peer"] == peer]

    @property
    def known_until(self) -> float:
        """The time when the lane stopped recording because its trace was full; infinity if it never was."""
        return float(self.spans["end"][-1]) if self.origin.missed else np.inf


def read_lanes(folder: str | Path, job: str | None = None) -> list[Lane]:
    """The traces of one job, ranks first.

    If all lanes are of one host, their times are on its monotonic clock. Otherwise they become the Unix time of the
    first lane's host: see `clocks`. Raises UsageError when there are no traces, when they are of several runs, and when
    they are of several jobs and `job` is None.
    """
    traces = read_traces(folder)
    jobs = sorted({origin.job for origin, _ in traces})
    if not jobs or (job is not None and job not in jobs):
        raise UsageError(
            f"{folder}: no traces{f' of job {job!r}' if job else ''}; set trace.folder for daemon and workers"
        )
    if job is None and len(jobs) > 1:
        raise UsageError(f"{folder}: traces of several jobs, choose one with --job: {', '.join(jobs)}")
    lanes = [Lane(origin, spans) for origin, spans in traces if origin.job == (job or jobs[0])]
    lanes.sort(key=lambda lane: (lane.origin.kind, lane.origin.number))
    _check_one_run([lane.origin for lane in lanes])
    return on_one_clock(lanes, clocks(lanes))


def read_traces(folder: str | Path) -> list[tuple[Origin, Array]]:
    """All traces in `folder`, with traces that are still recorded, and traces of killed processes. Raises UsageError
    for a file that cannot be read."""
    paths = {path.with_suffix(""): path for ending in (SUFFIX, LIVE) for path in user_path(folder).glob(f"*{ending}")}
    traces = []
    for _, path in sorted(paths.items()):
        try:
            traces.append(read_trace(path))
        except UsageError:
            if path.suffix != LIVE or path.exists():
                raise
            traces.append(read_trace(path.with_suffix(SUFFIX)))  # the trace is complete by now
    return traces


def _check_one_run(origins: Sequence[Origin]) -> None:
    """Raise UsageError unless all traces were recorded at the same time: an older run may have left some."""
    latest = max(origins, key=lambda origin: origin.began_ns + origin.epoch_ns)
    for origin in origins:
        if origin.ended_ns + origin.epoch_ns < latest.began_ns + latest.epoch_ns:
            raise UsageError(
                f"the traces of {origin} and {latest} are of different runs of job '{origin.job}'; "
                "take an empty folder for each run"
            )


def on_one_clock(lanes: list[Lane], shifts: Mapping[str, int]) -> list[Lane]:
    """The lanes with shifted times: see `clocks`."""
    for lane in lanes:
        lane.spans["start"] += shifts[lane.origin.boot]
        lane.spans["end"] += shifts[lane.origin.boot]
    return lanes


def clocks(lanes: Sequence[Lane]) -> dict[str, int]:
    """The shift of each host's times, by its boot, in nanoseconds: 0 if there is only one host.

    With several hosts, all times are on the clock of the first lane's host, in Unix time. The other clocks are set by
    the messages and credits between hosts. The fastest of them are taken to need the same time in both directions, as
    in NTP (RFC 5905). A host that exchanged none keeps its own Unix time.
    """
    shifts: dict[str, int] = {}
    for lane in lanes:
        shifts.setdefault(lane.origin.boot, lane.origin.epoch_ns)
    if len(shifts) <= 1:
        return dict.fromkeys(shifts, 0)
    aligned, has_aligned = list(shifts)[:1], True
    while has_aligned:
        has_aligned = False
        for first, second in itertools.product(list(aligned), shifts.keys() - aligned):
            out, back = (_fastest(lanes, *direction, shifts) for direction in ((first, second), (second, first)))
            if out is not None and back is not None and second not in aligned:
                shifts[second] -= (out - back) // 2
                aligned.append(second)
                has_aligned = True
    return shifts


def _fastest(lanes: Sequence[Lane], source: str, target: str, shifts: Mapping[str, int]) -> int | None:
    """The shortest time that a message or credit took from one host to the other, by their own clocks."""
    times = []
    for sender, receiver in itertools.product(lanes, lanes):
        from_to = sender.origin, receiver.origin
        if [origin.boot for origin in from_to] != [source, target] or len({origin.job for origin in from_to}) > 1:
            continue
        if sender.origin.kind == receiver.origin.kind:
            continue
        for out, into in ((SpanKind.MESSAGE_OUT, SpanKind.MESSAGE_IN), (SpanKind.CREDIT_OUT, SpanKind.CREDIT_IN)):
            left, arrived = pairs(sender, receiver, out, into)
            if left.size:
                times.append(int((arrived - left).min()) + shifts[target] - shifts[source])
    return min(times, default=None)


def missing(lanes: Sequence[Lane]) -> list[str]:
    """The ranks and shards of the job that left no trace."""
    origin, present = lanes[0].origin, {str(lane.origin) for lane in lanes}
    expected = [*(f"rank {i}" for i in range(origin.ranks)), *(f"shard {i}" for i in range(origin.shards))]
    return [name for name in expected if name not in present]


def pairs(sender: Lane, receiver: Lane, out: SpanKind, into: SpanKind) -> Pairs:
    """The times when each message or credit of `sender` left, and when it had arrived at `receiver`. Links keep their
    order.

    Raises UsageError when the two traces do not fit together.
    """
    left, arrived = sender.of(out, receiver.origin.number), receiver.of(into, sender.origin.number)
    count = min(left.size, arrived.size)
    left, arrived = left[:count], arrived[:count]
    if np.any(left["detail"] != arrived["detail"]):
        raise UsageError(f"the traces of {sender.origin} and {receiver.origin} do not fit together: not of one run")
    return left["start"], arrived["end"]


def arrivals(lane: Lane, lanes: Sequence[Lane]) -> Pairs:
    """The times when each message or credit to `lane` from lanes on its host left, and when it had arrived; in order
    of arrival."""
    all_pairs: list[Pairs] = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    for peer in lanes:
        if peer.origin.kind != lane.origin.kind and peer.origin.boot == lane.origin.boot:
            all_pairs.append(pairs(peer, lane, SpanKind.MESSAGE_OUT, SpanKind.MESSAGE_IN))
            all_pairs.append(pairs(peer, lane, SpanKind.CREDIT_OUT, SpanKind.CREDIT_IN))
    left, arrived = (np.concatenate([times[side] for times in all_pairs]) for side in (0, 1))
    order = np.argsort(arrived, kind="stable")
    return left[order], arrived[order]


def wake_ups(lane: Lane, lanes: Sequence[Lane]) -> Array:
    """The last part of every wait that an arrival ended, as spans of kind WAIT.

    Such a span begins when the first message or credit that arrived had left its sender, or when the wait began if that
    was later. It ends when the wait returned.
    """
    waits = lane.of(SpanKind.WAIT)
    left, arrived = arrivals(lane, lanes)
    after = np.searchsorted(waits["end"], arrived, "right") - 1  # the last wait that had ended then
    first = np.full(waits.size, np.iinfo(np.int64).max)
    np.minimum.at(first, after[after >= 0], left[after >= 0])
    waits["start"] = np.maximum(waits["start"], first)
    return waits[waits["start"] < waits["end"]]


def exclusive(layers: Sequence[Array]) -> tuple[Array, Array]:
    """Cut time so that every moment belongs to the first layer that covers it.

    Returns the cutting points (n,), ascending, and the total time of each layer up to each of them (layers, n).
    """
    edges = np.unique(np.concatenate([layer[side] for layer in layers for side in ("start", "end")]))
    owner = np.full(max(0, edges.size - 1), -1)
    for number, layer in reversed(list(enumerate(layers))):
        begun = np.searchsorted(np.sort(layer["start"]), edges[:-1], "right")
        over = np.searchsorted(np.sort(layer["end"]), edges[:-1], "right")
        owner[begun > over] = number
    lengths = np.diff(edges)
    totals = np.zeros((len(layers), edges.size))
    for number in range(len(layers)):
        np.cumsum(np.where(owner == number, lengths, 0), out=totals[number, 1:])
    return edges, totals


def windows(lanes: Sequence[Lane]) -> dict[str, tuple[Array, Array]]:
    """The times in which each collective was under way, by lane: begin and end of all, in order, without overlap.

    On a rank a collective is under way from its submission, or from the end of the one before, to its completion. On a
    shard it is under way while it is on any rank. Only collectives that all lanes recorded to their end count. Raises
    UsageError if a rank recorded none.
    """
    ranks = [lane for lane in lanes if lane.origin.kind == "rank"]
    count = min((lane.of(SpanKind.COLLECTIVE).size for lane in ranks), default=0)
    if count == 0:
        raise UsageError("no collective was recorded; was the job traced on daemon and workers, and did it run one?")
    by_lane = {}
    for lane in ranks:
        collectives = lane.of(SpanKind.COLLECTIVE)[:count]
        by_lane[str(lane.origin)] = without_overlap(collectives["start"], collectives["end"]), collectives["end"]
    begins = np.min([begin for begin, _ in by_lane.values()], axis=0)
    ends = np.max([end for _, end in by_lane.values()], axis=0)
    for lane in lanes:
        if lane.origin.kind == "shard":
            by_lane[str(lane.origin)] = without_overlap(begins, ends), ends
    whole = int(np.searchsorted(ends, min(lane.known_until for lane in lanes), "right"))
    return {name: (begin[:whole], end[:whole]) for name, (begin, end) in by_lane.items()}


def without_overlap(begins: Array, ends: Array) -> Array:
    """The begins of collectives in order, each no earlier than the end of the collective before."""
    previous_ends: Array = np.concatenate((begins[:1], ends[:-1]))
    return np.maximum(begins, previous_ends, out=previous_ends)


def sizes(lanes: Sequence[Lane]) -> Array:
    """The bytes of each collective's tensor, in order."""
    by_rank: list[Array] = [lane.of(SpanKind.COLLECTIVE)["detail"] for lane in lanes if lane.origin.kind == "rank"]
    return min(by_rank, key=len)
