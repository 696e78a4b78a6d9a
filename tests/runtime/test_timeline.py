"""The timeline of real jobs: one file of all ranks and shards, tensor by tensor, in Horovod's words."""

from __future__ import annotations

import json
import logging
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from local_cluster import SETTLE, WAIT_S, Daemon, configured, run_job, unique_job
from pictured import Timeline, queued
from transports import KINDS, MEMORY, over

from omnireduce import AbortedError, Communicator, ConfigError, UsageError, load_config
from omnireduce.__main__ import main
from omnireduce.runtime.rank import profiler
from omnireduce.runtime.tracing.merged_timeline import merge
from omnireduce.runtime.tracing.timeline import OFF

STEPS = 3
NESTED = ["QUEUE", "MEMCPY_IN_FUSION_BUFFER", "OMNIREDUCE_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"]
LANES = {"rank 0", "rank 1", "shard 0", "shard 1"}


def steps(comm: Communicator) -> None:
    for step in range(STEPS):
        queued(comm, "w", step)
        comm.allreduce(np.ones(1000, np.float32), name="plain")


@pytest.mark.parametrize("kind", [*KINDS, MEMORY])
def test_one_file_has_all_ranks_and_shards(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "timeline.json"
    with Daemon(2, f"trace.timeline={path}") as daemon:
        run_job(configured(daemon.addresses, f"trace.timeline={path}", *over(kind)), 2, steps)
    timeline = Timeline(path)
    assert LANES | {"w", "plain"} == set(timeline.processes.values())
    for rank in ("rank 0", "rank 1"):
        assert [span.name for span in timeline.rows["w", rank]] == ["NEGOTIATE_ALLREDUCE", *NESTED, "ALLREDUCE"] * STEPS
        for span in timeline.rows["w", rank]:
            if span.name == "ALLREDUCE":
                assert span.args | {"step": 0} == {"dtype": "float32", "shape": [4096], "bytes": 16384, "step": 0}
            if span.name == "OMNIREDUCE_ALLREDUCE":
                own_blocks = int(rank[-1]) + 1
                counts = {key: span.args[key] for key in ("bytes", "blocks", "nonzero_blocks", "union_blocks")}
                assert counts == {"bytes": 16384, "blocks": 16, "nonzero_blocks": own_blocks, "union_blocks": 2}
        assert [span.name for span in timeline.rows["plain", rank]] == ["OMNIREDUCE_ALLREDUCE", "ALLREDUCE"] * STEPS
        assert timeline.ticks[rank, "collectives"]
    if kind != MEMORY:
        assert any(timeline.ticks[shard, "work"] for shard in ("shard 0", "shard 1"))
    assert_ticks(timeline)
    assert not [event for event in timeline.events if event["name"] == "CYCLE_START"]


def assert_ticks(found: Timeline) -> None:
    """Each negotiation shows when each rank was ready, which all saw on the same clock: a barrier lies between."""
    for rank in ("rank 0", "rank 1"):
        spans = [span for span in found.rows["w", rank] if span.name == "NEGOTIATE_ALLREDUCE"]
        for span in spans:
            ready = [tick.name for tick in found.ticks["w", rank] if span.begin <= tick.begin <= span.end]
            assert sorted(ready) == ["0", "1"]
    both = [found.rows["w", rank] for rank in ("rank 0", "rank 1")]
    for one, other in zip(*both, strict=True):
        if one.name in ("NEGOTIATE_ALLREDUCE", "OMNIREDUCE_ALLREDUCE"):
            assert max(one.begin, other.begin) <= min(one.end, other.end)


def test_cycles_are_marked_where_that_is_wanted(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    run_job(configured(daemon.addresses, f"trace.timeline={path}", "trace.timeline_cycles=true"), 2, steps)
    cycles = [event for event in Timeline(path).events if event["name"] == "CYCLE_START"]
    assert sorted((event["ph"], event["s"]) for event in cycles) == [("i", "g")] * STEPS + [("i", "p")] * STEPS


def test_a_daemon_leaves_its_part_in_its_own_folder(tmp_path: Path) -> None:
    """Workers and daemon agree on a folder; the file is elsewhere."""
    path, folder = tmp_path / "timeline.json", tmp_path / "traces"
    with Daemon(2, f"trace.folder={folder}") as daemon:
        run_job(configured(daemon.addresses, f"trace.folder={folder}", f"trace.timeline={path}"), 2, steps)
    assert set(Timeline(path).processes.values()) > LANES
    assert not (tmp_path / "timeline.json.parts").exists()


def test_collectives_at_the_same_time_have_rows_of_their_own(daemon: Daemon, tmp_path: Path) -> None:
    """Rank 1 starts none until rank 0 has started all."""
    path, all_started = tmp_path / "timeline.json", threading.Event()

    def run(comm: Communicator) -> None:
        assert comm.rank == 0 or all_started.wait(WAIT_S)
        arrays = [np.ones(100_000, np.float32) for _ in range(4)]
        handles = [comm.allreduce_async(array) for array in arrays]
        all_started.set()
        for handle in handles:
            handle.wait()

    run_job(configured(daemon.addresses, f"trace.timeline={path}"), 2, run)
    rows = {row: spans for row, spans in Timeline(path).rows.items() if row[0].startswith("allreduce float32")}
    assert sum(len(spans) for spans in rows.values()) == 2 * 4 * 2
    assert {row[1] for row in rows} >= {"rank 0", "rank 1", "rank 0, 2", "rank 0, 4"}


def test_urgent_ones_are_in_it(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    run_job(configured(daemon.addresses, f"trace.timeline={path}", "protocol.urgent_bytes=8192"), 2, steps)
    timeline = Timeline(path)
    assert len(timeline.rows["plain", "rank 0"]) == 2 * STEPS
    assert "rank 1 of urgent" in timeline.processes.values()


def test_what_belongs_together_is_in_one_picture(daemon: Daemon, tmp_path: Path) -> None:
    """A second communicator of the same rank, as a queue has one."""
    path, job = tmp_path / "timeline.json", unique_job()
    config = configured(daemon.addresses, f"trace.profile={tmp_path}")

    def run(comm: Communicator) -> None:
        with Communicator(config, rank=comm.rank, size=2, job=f"{job}+queue.1") as second:
            second._profiler.follow(comm._profiler)
            comm.start_timeline(path)
            queued(second, "w", 0)
            comm.stop_timeline()
            assert second.timeline is OFF
        comm.barrier()

    run_job(config, 2, run, job)
    timeline = Timeline(path)
    assert [span.name for span in timeline.rows["w", "rank 1 of queue.1"]] == [
        "NEGOTIATE_ALLREDUCE",
        *NESTED,
        "ALLREDUCE",
    ]
    assert sorted(each.name for each in tmp_path.glob("*profile*")) == ["omnireduce_profile.0", "omnireduce_profile.1"]
    text = (tmp_path / "omnireduce_profile.0").read_text()
    assert re.search(r"^Allreduce +1 +16384\.0 ", text, re.MULTILINE)
    assert re.search(r"^Barrier +2 ", text, re.MULTILINE)


def test_an_aborted_job_has_its_timeline(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"

    def run(comm: Communicator) -> None:
        comm.timeline.begin("w", "ALLREDUCE")
        with pytest.raises(AbortedError):
            comm.allreduce(np.ones(10 + comm.rank), name="differs")

    run_job(configured(daemon.addresses, f"trace.timeline={path}"), 2, run)
    timeline = Timeline(path)
    assert all(span.args["failed"] for span in timeline.rows["differs", "rank 0"])
    assert [span.args for span in timeline.rows["w", "rank 1"]] == [{"unfinished": True}]


def test_a_timeline_is_begun_and_ended_during_a_run(daemon: Daemon, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.json" for number in range(2)]

    def run(comm: Communicator) -> None:
        comm.allreduce(np.ones(10), name="before")
        for path in paths:
            comm.start_timeline(path, mark_cycles=True)
            with pytest.raises(UsageError, match="is being recorded; call stop_timeline first"):
                comm.start_timeline(path)
            queued(comm, "w", 0)
            comm.allreduce(np.ones(100, np.float32), name="plain")
            comm.stop_timeline()
            comm.stop_timeline()
            assert comm.timeline is OFF
        comm.allreduce(np.ones(10), name="after")

    run_job(configured(daemon.addresses, "trace.timeline=DYNAMIC"), 2, run)
    for path in paths:
        timeline = Timeline(path)
        assert {"rank 0", "rank 1", "w", "plain"} == set(timeline.processes.values())
        for rank in range(2):
            [span] = [each for each in timeline.rows["w", f"rank {rank}"] if each.name == "OMNIREDUCE_ALLREDUCE"]
            assert span.args["nonzero_blocks"] == rank + 1
            assert timeline.ticks[f"rank {rank}", "collectives"]
    assert not (tmp_path / "DYNAMIC").exists()


def test_the_last_to_stop_writes_all(daemon: Daemon, tmp_path: Path) -> None:
    """Rank 0 is the first to stop."""
    path = tmp_path / "timeline.json"

    def run(comm: Communicator) -> None:
        comm.start_timeline(path)
        if comm.rank == 0:
            comm.stop_timeline()
        comm.barrier(name="stopped")
        comm.timeline.begin("late", "ALLREDUCE")
        comm.timeline.end("late", "ALLREDUCE")
        comm.stop_timeline()

    run_job(configured(daemon.addresses), 2, run)
    assert [span.name for span in Timeline(path).rows["late", "rank 1"]] == ["ALLREDUCE"]


def test_no_timeline_after_the_end(daemon: Daemon, tmp_path: Path) -> None:
    with Communicator(configured(daemon.addresses), rank=0, size=1, job=unique_job()) as comm:
        assert comm.timeline is OFF
    with pytest.raises(UsageError, match="this rank is in no job now"):
        comm.start_timeline(tmp_path / "timeline.json")


def test_the_file_grows_while_the_job_runs(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "REFRESH_S", 0.01)
    path = tmp_path / "timeline.json"
    config = configured(daemon.addresses, f"trace.timeline={path}")
    with Communicator(config, rank=0, size=1, job=unique_job()) as comm:
        assert "rank 0" in Timeline(path).processes.values()
        comm.allreduce(np.ones(10), name="w")
        while ("w", "rank 0") not in Timeline(path).rows:
            comm.barrier()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "is a directory, expected a file name"),
        (lambda path: None, "there is no folder"),
    ],
)
def test_a_path_that_cannot_be_is_one_error_at_the_start(
    daemon: Daemon, tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / ("folder" if "directory" in message else "none/timeline.json")
    make(path)
    with pytest.raises(ConfigError, match=f"^trace.timeline: {path}: {message}"):
        Communicator(configured(["127.0.0.1:1"], f"trace.timeline={path}"), rank=0, size=1)
    with (
        Communicator(configured(daemon.addresses), rank=0, size=1, job=unique_job()) as comm,
        pytest.raises(UsageError, match=message),
    ):
        comm.start_timeline(path)


def test_horovods_variables() -> None:
    settings = load_config(environ={"HOROVOD_TIMELINE": "/f.json", "HOROVOD_TIMELINE_MARK_CYCLES": "1"}).trace
    assert (settings.timeline, settings.timeline_cycles) == ("/f.json", True)
    settings = load_config(environ={"HOROVOD_TIMELINE": "/f.json", "OMNIREDUCE_TRACE_TIMELINE": "/own.json"}).trace
    assert (settings.timeline, settings.timeline_cycles) == ("/own.json", False)


def test_the_command_makes_the_timeline_anew(daemon: Daemon, tmp_path: Path) -> None:
    path, again = tmp_path / "timeline.json", tmp_path / "again.json"
    run_job(configured(daemon.addresses, f"trace.timeline={path}"), 2, steps)
    result = CliRunner().invoke(main, ["trace", f"{path}.parts", "--timeline", str(again)])
    assert result.exit_code == 0, result.output
    assert result.output == f"{again}: rank 0, rank 1; {len(json.loads(again.read_text()))} events\n"
    assert Timeline(again).rows == Timeline(path).rows
    result = CliRunner().invoke(main, ["trace", str(tmp_path), "--timeline", str(again)])
    assert result.exit_code != 0
    assert "no traces; set trace.timeline for workers" in str(result.exception) + result.output


def test_an_older_run_is_left_out(daemon: Daemon, tmp_path: Path) -> None:
    path, job = tmp_path / "timeline.json", unique_job()
    config = configured(daemon.addresses, f"trace.timeline={path}")
    run_job(config, 3, steps, job)
    run_job(config, 2, steps, job)
    assert {"rank 0", "rank 1", "w", "plain"} == set(Timeline(path).processes.values())


def test_a_job_that_is_formed_anew_goes_on_with_both(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    overrides = ["elastic.enabled=true", SETTLE, f"trace.timeline={path}", f"trace.profile={tmp_path}"]

    def run(comm: Communicator) -> None:
        comm.allreduce(np.ones(10), name="before")
        comm.reform(min_ranks=2)
        comm.allreduce(np.ones(10), name="after")

    run_job(configured(daemon.addresses, *overrides), 2, run)
    timeline = Timeline(path)
    for rank in range(2):
        assert len(timeline.rows["after", f"rank {rank}"]) == 2
        profile = (tmp_path / f"omnireduce_profile.{rank}").read_text()
        assert re.search(r"^Allreduce +2 +80\.0 ", profile, re.MULTILINE)


def test_a_rank_that_starts_its_own_aggregator_has_it_in_its_timeline(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with Communicator(load_config(overrides=[f"trace.timeline={path}"], environ={}), rank=0, size=1) as comm:
        comm.allreduce(np.ones(10), name="w")
    assert {"rank 0", "shard 0", "w"} == set(Timeline(path).processes.values())


def test_a_folder_that_vanishes_costs_the_timeline_only(
    daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "folder" / "timeline.json"
    path.parent.mkdir()
    config = configured(daemon.addresses, f"trace.timeline={path}", f"trace.profile={path.parent}")
    with Communicator(config, rank=0, size=1, job=unique_job()) as comm:
        shutil.rmtree(path.parent)
        comm.allreduce(np.ones(10), name="w")
    assert "the timeline cannot be written" in caplog.text
    assert "the profile cannot be written" in caplog.text


def test_a_full_part_says_so(daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "timeline.json"
    caplog.set_level(logging.ERROR)
    run_job(configured(daemon.addresses, f"trace.timeline={path}", "trace.events=20"), 2, steps)
    made = merge(f"{path}.parts", path)
    assert made.missed > 0
    Timeline(path)
