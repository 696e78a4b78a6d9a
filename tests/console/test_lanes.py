"""Traces side by side: who had each moment, what a wake-up is, and what the table and the timeline show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from local_cluster import Daemon, configured, run_job
from transports import MEMORY, over

from omnireduce import Communicator
from omnireduce.console.trace import ACTIVITIES, break_down
from omnireduce.errors import UsageError
from omnireduce.runtime.tracing.aligned_traces import Lane, clocks, exclusive, pairs, read_lanes, wake_ups
from omnireduce.runtime.tracing.merged_timeline import chrome_trace
from omnireduce.runtime.tracing.trace import OF_TENSOR, SPAN, Origin, Recorder, SpanKind
from omnireduce.support.config import Trace
from omnireduce.support.printing import TABLE_WIDTH
from omnireduce.worker.cli import main

Span = tuple[SpanKind, int, int, int, int]  # kind, peer, detail, start, end
MS = 1_000_000


def lane(kind: Any, number: int, *spans: Span, ranks: int = 1, shards: int = 1, missed: int = 0) -> Lane:
    origin = Origin(job="made up", kind=kind, number=number, ranks=ranks, shards=shards, boot="here", missed=missed)
    return Lane(origin, np.array(list(spans), SPAN))


def layer(spans: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.array([(SpanKind.WAIT, -1, 0, start, start + length) for start, length in spans], SPAN)


def on_host(boot: str, epoch_ns: int, kind: Any, *spans: Span) -> Lane:
    origin = Origin(job="made up", kind=kind, number=0, ranks=1, shards=1, boot=boot, epoch_ns=epoch_ns)
    return Lane(origin, np.array(list(spans), SPAN))


@pytest.mark.parametrize("wrong_ms", [-3000, 0, 7])
def test_hosts_whose_clocks_differ_are_set_by_their_messages(wrong_ms: int) -> None:
    """Messages take 2 ms and more in each direction. The shard's clock began 100 ms later; its Unix time is wrong."""
    rank = on_host(
        "a", 10**18, "rank",
        (SpanKind.MESSAGE_OUT, 0, 7, 1 * MS, 1 * MS), (SpanKind.MESSAGE_IN, 0, 9, 12 * MS, 12 * MS),
        (SpanKind.MESSAGE_OUT, 0, 8, 20 * MS, 20 * MS),
    )  # fmt: skip
    shard = on_host(
        "b", 10**18 + (100 + wrong_ms) * MS, "shard",
        (SpanKind.MESSAGE_IN, 0, 7, (5 - 100) * MS, (5 - 100) * MS), (SpanKind.MESSAGE_OUT, 0, 9, -90 * MS, -90 * MS),
        (SpanKind.MESSAGE_IN, 0, 8, (22 - 100) * MS, (22 - 100) * MS),
    )  # fmt: skip
    assert clocks([rank, shard]) == {"a": 10**18, "b": 10**18 + 100 * MS}
    assert clocks([rank]) == {"a": 0}
    silent = on_host("c", 5, "shard")
    assert clocks([rank, silent]) == {"a": 10**18, "c": 5}


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), max_size=6)


@given(st.lists(SPANS, min_size=1, max_size=4).filter(lambda layers: any(layers)))
def test_every_moment_belongs_to_the_first_layer_that_covers_it(layers: list[list[tuple[int, int]]]) -> None:
    edges, totals = exclusive([layer(spans) for spans in layers])
    owners = [
        next((n for n, spans in enumerate(layers) if any(at <= moment < at + size for at, size in spans)), None)
        for moment in range(60)
    ]
    for number, total in enumerate(totals):
        for edge, until in zip(edges, total, strict=True):
            assert until == owners[:edge].count(number)


ONE_EXCHANGE = (
    lane(
        "rank", 0,
        (SpanKind.PACK, 0, 7, 1 * MS, 3 * MS),
        (SpanKind.MESSAGE_OUT, 0, 99, 3 * MS, 3 * MS),
        (SpanKind.SEND, 0, 0, 3 * MS, 4 * MS),
        (SpanKind.WAIT, -1, 0, 4 * MS, 12 * MS),
        (SpanKind.RECEIVE, 0, 0, 12 * MS, 13 * MS),
        (SpanKind.CREDIT_IN, 0, 2, 13 * MS, 13 * MS),
        (SpanKind.MESSAGE_IN, 0, 50, 13 * MS, 13 * MS),
        (SpanKind.SCATTER, -1, 7, 14 * MS, 16 * MS),
        *((what, -1, 7, 17 * MS, 17 * MS) for what in OF_TENSOR),
        (SpanKind.COLLECTIVE, -1, 4096, 0, 17 * MS),
    ),
    lane(
        "shard", 0,
        (SpanKind.WAIT, -1, 0, -5 * MS, 5 * MS),
        (SpanKind.RECEIVE, 0, 0, 5 * MS, 6 * MS),
        (SpanKind.MESSAGE_IN, 0, 99, 6 * MS, 6 * MS),
        (SpanKind.MERGE, -1, 7, 6 * MS, 8 * MS),
        (SpanKind.CREDIT_OUT, 0, 2, 9 * MS, 9 * MS),
        (SpanKind.MESSAGE_OUT, 0, 50, 9 * MS, 9 * MS),
        (SpanKind.SEND, 0, 0, 9 * MS, 10 * MS),
        (SpanKind.WAIT, -1, 0, 11 * MS, 30 * MS),
    ),
)  # fmt: skip


def test_a_wake_up_is_the_end_of_a_wait_that_something_ended() -> None:
    rank, shard = ONE_EXCHANGE
    assert wake_ups(rank, ONE_EXCHANGE)[["start", "end"]].tolist() == [(9 * MS, 12 * MS)]
    assert wake_ups(shard, ONE_EXCHANGE)[["start", "end"]].tolist() == [(3 * MS, 5 * MS)]


def test_what_was_there_before_the_wait_takes_all_of_it() -> None:
    rank, shard = ONE_EXCHANGE
    late = lane("shard", 0, (SpanKind.WAIT, -1, 0, 4 * MS, 5 * MS), *shard.spans.tolist()[1:])
    assert wake_ups(late, (rank, late))[["start", "end"]].tolist() == [(4 * MS, 5 * MS)]


def test_the_rows_of_one_exchange() -> None:
    breakdown = break_down(ONE_EXCHANGE)
    assert (breakdown.nbytes, breakdown.count, breakdown.recorded, breakdown.begin, breakdown.end) == (
        4096,
        1,
        1,
        0,
        17 * MS,
    )
    rank, shard = breakdown.rows
    assert (rank.lane, rank.whole_ms, rank.wake_ups, rank.wake_up_us) == ("rank 0", 17.0, 1, 3000)
    nothing = dict.fromkeys(ACTIVITIES, 0)
    expected = {"pack": 2, "scatter": 2, "send": 1, "receive": 1, "wake-up": 3, "wait": 5, "other": 3}
    assert rank.ms == nothing | expected
    expected = {"merge": 2, "send": 1, "receive": 1, "wake-up": 2, "wait": 9, "other": 2}
    assert (shard.whole_ms, shard.ms) == (17.0, nothing | expected)


def test_collectives_that_a_full_trace_cut_do_not_count() -> None:
    rank, shard = ONE_EXCHANGE
    again = [(*span[:3], span[3] + 20 * MS, span[4] + 20 * MS) for span in rank.spans.tolist()]
    rank = lane("rank", 0, *rank.spans.tolist(), *again)
    assert break_down((rank, shard)).count == 2
    cut = lane("shard", 0, *shard.spans.tolist(), missed=3)
    assert break_down((rank, cut)).count == 1
    with pytest.raises(
        UsageError, match="no complete collective is left after the first 1: the trace has 1 of one size"
    ):
        break_down((rank, cut), skip=1)


def test_traces_that_do_not_fit_together_are_refused() -> None:
    rank, _ = ONE_EXCHANGE
    other = lane("shard", 0, (SpanKind.MESSAGE_IN, 0, 98, 6 * MS, 6 * MS))
    with pytest.raises(UsageError, match="the traces of rank 0 and shard 0 do not fit together"):
        pairs(rank, other, SpanKind.MESSAGE_OUT, SpanKind.MESSAGE_IN)


def test_the_timeline_of_one_exchange() -> None:
    events = json.loads(chrome_trace(ONE_EXCHANGE))["traceEvents"]
    spans = [(e["pid"], e["name"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"]
    assert (1, "pack", 6000, 2000, {"shard": 0, "blocks": 7}) in spans
    assert (1, "wake-up", 14000, 3000, {}) in spans
    assert (1, "collective", 5000, 17000, {"bytes": 4096}) in spans
    assert (2, "merge", 11000, 2000, {"blocks": 7}) in spans
    assert (2, "wait", 0, 10000, {}) in spans
    assert len(spans) == 7 + 6
    arrows = sorted((e["id"], e["ph"], e["pid"], e["ts"]) for e in events if e["ph"] in "sf")
    assert arrows == [(0, "f", 2, 10999.875), (0, "s", 1, 8000), (1, "f", 1, 17999.875), (1, "s", 2, 14000)]
    cut = json.loads(chrome_trace(ONE_EXCHANGE, 2 * MS, 5 * MS))["traceEvents"]
    results = {(e["pid"], e["name"], e["ts"], e["dur"]) for e in cut if e["ph"] == "X"}
    assert {(1, "pack", 0, 1000), (1, "wait", 2000, 1000), (2, "wait", 0, 3000), (2, "wake-up", 1000, 2000)} < results


def recorded(folder: Path, job: str = "one", kind: Any = "rank", number: int = 0) -> Recorder:
    recorder = Recorder(
        Trace(folder=str(folder), events=9), Origin(job=job, kind=kind, number=number, ranks=2, shards=1)
    )
    recorder.add(SpanKind.COLLECTIVE, 1, 2, detail=8)
    return recorder


def test_folders_that_hold_no_one_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no traces; set trace"):
        read_lanes(tmp_path / "nowhere")
    first = recorded(tmp_path)
    first.write()
    assert [str(each.origin) for each in read_lanes(tmp_path)] == ["rank 0"]
    recorded(tmp_path, number=1).write()  # began when the first had ended
    with pytest.raises(UsageError, match="rank 0 and rank 1 are of different runs of job 'one'; take an empty folder"):
        read_lanes(tmp_path)
    first.write()
    assert len(read_lanes(tmp_path)) == 2
    recorded(tmp_path, "two").write()
    with pytest.raises(UsageError, match="traces of several jobs, choose one with --job: one, two"):
        read_lanes(tmp_path)
    assert len(read_lanes(tmp_path, "two")) == 1
    (tmp_path / "x.npz").write_bytes(b"PK")
    with pytest.raises(UsageError, match=r"x\.npz: expected a trace"):
        read_lanes(tmp_path)


ORIGIN = Origin(job="one", kind="rank", number=0, ranks=1, shards=1)


def origin_with(**changed: object) -> np.ndarray:
    """As a file has it, with values that no recorder writes."""
    return np.array(json.dumps(json.loads(msgspec.json.encode(ORIGIN)) | changed))


@pytest.mark.parametrize(
    ("origin", "spans", "message"),
    [
        (origin_with(), np.zeros((2, 2), SPAN), "expected spans of"),
        (origin_with(), np.zeros((), SPAN), "expected spans of"),
        (origin_with(), np.zeros(2, np.int64), "expected spans of .*, got int64"),
        (origin_with(ranks=0), np.zeros(2, SPAN), "expected a trace"),
        (origin_with(ranks=1 << 40), np.zeros(2, SPAN), "expected a trace"),
        (origin_with(number=-4), np.zeros(2, SPAN), "expected a trace"),
        (origin_with(epoch_ns=1 << 63), np.zeros(2, SPAN), "expected a trace"),
        (origin_with(missed=-1), np.zeros(2, SPAN), "expected a trace"),
    ],
)
def test_a_trace_that_no_recorder_has_written_is_refused(
    tmp_path: Path, origin: np.ndarray, spans: np.ndarray, message: str
) -> None:
    np.savez(tmp_path / "one-rank0.npz", origin=origin, spans=spans)
    with pytest.raises(UsageError, match=f"one-rank0.npz: {message}"):
        read_lanes(tmp_path)


def test_an_array_under_the_name_of_a_trace_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(tmp_path / "one-rank0.npz")
    with pytest.raises(UsageError, match="expected a trace"):
        read_lanes(tmp_path)


IN_MEMORY = ["stage", "combine", "collect"]
MESSAGES = ["pack", "scatter", "merge", "send", "receive"]


@pytest.fixture(scope="module", params=["shm", MEMORY])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, transport: str) -> Path:
    """The traces of a job whose collectives overlap: two in the background at a time."""

    def run(comm: Communicator) -> None:
        tensors = [np.ones(300_000, np.float32) for _ in range(6)]
        for one, other in zip(tensors[::2], tensors[1::2], strict=True):
            handles = [comm.allreduce_async(each) for each in (one, other)]
            for handle in handles:
                handle.wait()
        comm.barrier()

    folder = tmp_path_factory.mktemp("traced")
    with Daemon(2, f"trace.folder={folder}") as daemon:
        run_job(configured(daemon.addresses, f"trace.folder={folder}", *over(transport)), 2, run, job="overlapping")
    return folder


def test_activities_add_up_when_collectives_overlap(traced: Path) -> None:
    breakdown = break_down(read_lanes(traced), skip=5)  # only one collective is left, so that each median is its value
    assert (breakdown.nbytes, breakdown.count, breakdown.recorded) == (1_200_000, 1, 7)
    for row in breakdown.rows:
        assert set(row.ms) == set(ACTIVITIES)
        assert min(row.ms.values()) >= 0
        assert sum(row.ms.values()) == pytest.approx(row.whole_ms)


def test_spans_nest_on_every_track(traced: Path) -> None:
    """As viewers want it: of two spans on a track one holds the other, or they do not meet."""
    events = json.loads(chrome_trace(read_lanes(traced)))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 1", "shard 0", "shard 1"]
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            start, length = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
            tracks.setdefault((event["pid"], event["tid"]), []).append((start, -length))
    assert {pid for pid, _ in tracks} == {1, 2, 3, 4}
    for spans in tracks.values():
        open_until: list[int] = []
        for start, length in sorted(spans):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or start - length <= open_until[-1]
            open_until.append(start - length)


def test_the_command_shows_a_table_and_writes_a_timeline(traced: Path, tmp_path: Path, transport: str) -> None:
    path = tmp_path / "trace.json"
    result = CliRunner().invoke(main, ["trace", str(traced), "--output", str(path)])
    assert result.exit_code == 0, result.output
    heading, columns, *rows = result.output.splitlines()
    assert heading.startswith("job 'overlapping', 2 ranks, 2 shards; 6 collectives of 1.2M bytes, of 7 recorded")
    first, *others = columns.split()
    assert (first, others[-3:]) == ("whole", ["wakes", "us", "each"])
    work = IN_MEMORY if transport == MEMORY else MESSAGES  # beside them what every lane does
    assert set(work) <= set(others) <= {*work, "scatter", "send", "receive", "wake-up", "wait", "other", *others[-3:]}
    assert max(len(line.rstrip()) for line in result.output.splitlines()) <= TABLE_WIDTH
    assert [row.split()[:2] for row in rows[:4]] == [["rank", "0"], ["rank", "1"], ["shard", "0"], ["shard", "1"]]
    timeline = json.loads(path.read_text())
    assert timeline["otherData"]["job"] == "overlapping"
    assert set(work) <= {event["name"] for event in timeline["traceEvents"]}
    result = CliRunner().invoke(main, ["trace", str(tmp_path)])
    assert (result.exit_code, result.output) == (
        2, f"Error: {tmp_path}: no traces; set trace.folder for daemon and workers\n"
    )  # fmt: skip


def test_the_command_says_what_is_missing(traced: Path, tmp_path: Path) -> None:
    (tmp_path / "overlapping-rank0.npz").write_bytes((traced / "overlapping-rank0.npz").read_bytes())
    result = CliRunner().invoke(main, ["trace", str(tmp_path)])
    assert result.exit_code == 0
    assert "no trace of rank 1, shard 0, shard 1: is trace.folder set there?" in result.output
