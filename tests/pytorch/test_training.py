"""Training with unchanged code: the same parameters on all ranks, and as with gloo; errors that name who failed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cluster_checks import FAILURE_S
from groups import needs_gpu
from local_cluster import ROOT, WAIT_S, Daemon, Process

from omnireduce.runtime.tracing.trace import SpanKind, read_trace

FOLDER = ROOT / "tests" / "pytorch"
PLAIN = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}


@contextlib.contextmanager
def started(commands: Sequence[Sequence[str]], **environ: str) -> Iterator[list[Process]]:
    """Ranks as processes; they are gone at the end."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(Process(sys.executable, *command, environ=PLAIN | environ, from_scratch=True))
            for command in commands
        ]


def lines(rank: Process, timeout_s: float = 4 * WAIT_S) -> list[str]:
    """All that a rank prints until it ends."""
    results, deadline = [], time.monotonic() + timeout_s
    while (line := rank._lines.next(deadline)) not in (None, "closed"):
        results.append(line or "")
    assert line is not None, f"still under way after {results[-1:]}\n{rank.log}"
    return results


@pytest.mark.parametrize(
    ("size", "debug", "device"),
    [
        (2, "OFF", "cpu"),
        pytest.param(3, "DETAIL", "cpu", marks=pytest.mark.slow),
        pytest.param(2, "OFF", "cuda", marks=needs_gpu),
    ],
)
def test_models_are_the_same_on_all_ranks_and_as_with_gloo(tmp_path: Path, size: int, debug: str, device: str) -> None:
    """With two ranks there is one order of sums, so gloo's parameters have the same bits."""
    script = str(FOLDER / "training_worker.py")
    commands = [[script, f"file://{tmp_path}/init", str(rank), str(size), device] for rank in range(size)]
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # or results on a GPU differ from run to run
    if device == "cpu":  # powerSGD_hook fails where a model is not on the GPU that is there
        environ = {"CUDA_VISIBLE_DEVICES": ""}
    with started(commands, TORCH_DISTRIBUTED_DEBUG=debug, **environ) as ranks:
        first, *others = [[json.loads(line) for line in lines(rank)] for rank in ranks]
        assert [rank.wait() for rank in ranks] == [0] * size, ranks[0].log
    assert first.pop() == {"way": "left"}
    assert len(first) == 20
    for way in first:
        assert len(way["omnireduce"]) == 16, way
        assert size > 2 or way["omnireduce"] == way["gloo"], way
    assert all(other[:-1] == first for other in others)


@pytest.mark.slow
def test_a_rank_that_dies_in_the_backward_pass_is_named(tmp_path: Path) -> None:
    who = ["--init", f"file://{tmp_path}/init", "--size", "3", "--dies", "1", "2"]
    with started([[str(FOLDER / "failing_worker.py"), *who, "--rank", str(rank)] for rank in range(3)]) as ranks:
        for rank in (0, 2):
            first, *error = lines(ranks[rank])
            assert first == "trains"
            assert error[0].startswith("RuntimeError: ")
            assert "omnireduce: rank 1 (" in error[0]
            assert ranks[rank].wait() == 0
        assert ranks[1].wait() == -signal.SIGKILL


@pytest.mark.slow
def test_an_aggregator_that_dies_in_training_is_named(tmp_path: Path) -> None:
    with Daemon(1) as daemon:
        address = daemon.addresses[0]
        who = ["--init", f"file://{tmp_path}/init", "--size", "2"]
        commands = [[str(FOLDER / "failing_worker.py"), *who, "--rank", str(rank)] for rank in range(2)]
        with started(commands, OMNIREDUCE_CLUSTER_AGGREGATORS=address) as ranks:
            for rank in ranks:
                assert rank._lines.next(time.monotonic() + 4 * WAIT_S) == "trains", rank.log
            killed = time.monotonic()
            os.kill(daemon.shard_pids[0], signal.SIGKILL)
            for rank in ranks:
                error, *_ = lines(rank)
                assert error.startswith("RuntimeError: ")
                assert f"omnireduce: aggregator {address}: " in error
            assert time.monotonic() - killed < FAILURE_S + WAIT_S


@pytest.mark.slow
def test_gradients_are_combined_while_others_are_computed(tmp_path: Path) -> None:
    """In each step at least one collective is over before the last gradient is computed, as traces show."""
    script, traces = str(FOLDER / "overlapping_worker.py"), tmp_path / "traces"
    commands = [[script, f"file://{tmp_path}/init", str(rank), "2"] for rank in range(2)]
    with started(commands, OMNIREDUCE_TRACE_FOLDER=str(traces)) as ranks:
        steps = [json.loads(lines(rank)[-1]) for rank in ranks]
        assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].log
    for steps_of_rank, path in zip(steps, sorted(traces.glob("*-rank?.npz")), strict=True):
        _, spans = read_trace(path)
        collectives = spans[spans["what"] == SpanKind.COLLECTIVE]
        assert len(steps_of_rank) == 4
        for began, computed in steps_of_rank:
            within = (collectives["start"] >= began) & (collectives["end"] <= computed)
            assert within.any(), (began, computed, collectives)
