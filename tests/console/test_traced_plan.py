"""`omnireduce plan --trace` with traces of real jobs, whose blocks are known, and with made up ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner, Result
from local_cluster import Daemon, configured, run_job
from transports import TRANSPORTS, over

from omnireduce import Communicator
from omnireduce.console.commands import main
from omnireduce.console.plan.traced_jobs import MOST_SIZES, Size, combine_small_sizes, read_reduced
from omnireduce.errors import UsageError
from omnireduce.runtime.tracing.trace import OF_TENSOR, Origin, Recorder, SpanKind
from omnireduce.support.config import Trace

BLOCK, RANKS, STEPS = 256, 2, 3
FEW, MANY = 40, 700  # blocks of two tensors
MS = 1_000_000


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def mask(blocks: int, rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([blocks, rank, step]).random(blocks) < 0.3


def tensor(blocks: int, rank: int, step: int) -> np.ndarray:
    """Its last block is short."""
    return np.repeat(mask(blocks, rank, step), BLOCK)[:-5].astype(np.float32)


def train(comm: Communicator) -> None:
    """Steps as a training has them, with two tensors under way together, and what is no all-reduce of a tensor."""
    comm.broadcast(np.ones(1000, np.float32), root=0)
    for step in range(STEPS):
        handle = comm.allreduce_async(tensor(MANY, comm.rank, step))
        small = tensor(FEW, comm.rank, step)
        comm.allreduce(small, out=np.empty_like(small), op="mean")
        handle.wait()
        comm.allreduce_rows(np.arange(comm.rank, 50), np.ones((50 - comm.rank, 4), np.float32), n_rows=100)
    comm.barrier()


@pytest.fixture(scope="module", params=TRANSPORTS)
def traced(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("traced")
    with Daemon(2) as daemon:
        config = configured(daemon.addresses, f"trace.folder={folder}", *over(str(request.param)))
        run_job(config, RANKS, train, job="training")
    return folder


def test_a_trace_says_which_tensors_a_job_has_reduced(traced: Path) -> None:
    result = read_reduced(traced)
    assert (result.job, result.ranks, result.all_reduces, result.others) == (
        "training",
        RANKS,
        2 * STEPS,
        1 + STEPS + 1,
    )
    assert [(size.times, size.nbytes, size.blocks, size.block_bytes) for size in result.sizes] == [
        (STEPS, (blocks * BLOCK - 5) * 4, blocks, BLOCK * 4) for blocks in (MANY, FEW)
    ]
    for size in result.sizes:
        masks = np.array([[mask(size.blocks, *at) for at in product([rank], range(STEPS))] for rank in range(RANKS)])
        assert size.density == pytest.approx(masks.mean(), abs=1e-12)
        assert size.union_density == pytest.approx(masks.any(axis=0).mean(), abs=1e-12)
    assert result.measured_s > 0


def test_the_plan_of_a_training(traced: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = run("--trace", str(traced), "--ranks", "16", "--hosts", "8", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert "of all its 6 all-reduces of tensors together" in result.output
    assert "which are not planned (rows, broadcasts, barriers and such): 5" in result.output
    rows = [line.split()[0:3:2] for line in result.output.splitlines() if line.split()[:1] == [str(STEPS)]]
    assert rows == [[str(STEPS), str(MANY)], [str(STEPS), str(FEW)]]
    assert f"ms on {RANKS} ranks\n" in result.output
    assert "[cluster]\naggregators = [" in result.output
    assert "block_size" not in result.output
    report = json.loads(out.read_text())
    assert report["trace"]["sizes"] == [size._asdict() for size in read_reduced(traced).sizes]
    assert sum(plan["best"] for plan in report["plans"]) == 1
    assert report["density"] < report["union_density"]


def test_a_trace_and_a_tensor_that_is_drawn_cost_the_same(tmp_path: Path) -> None:
    """The trace has one tensor, whose blocks are at random places."""
    write(tmp_path, [[Told(1_024_000, 1000, 100, 190)]] * 2)
    arguments = ["--ranks", "4", "--shards", "2", "--cores", "64", "--link-gbps", "0.1", "--json"]
    inputs = ["--trace", str(tmp_path)], ["--elements", "256000", "--density", "0.1"]
    seconds = []
    for name, given in zip(("traced", "drawn"), inputs, strict=True):
        assert run(*given, *arguments, str(tmp_path / name)).exit_code == 0
        seconds.append([plan["seconds"] for plan in json.loads((tmp_path / name).read_text())["plans"]])
    assert seconds[0] == pytest.approx(seconds[1], rel=0.1)


# traces that are made up


class Told(NamedTuple):
    """A collective as the trace of a rank has it; without `blocks` it is none of a tensor."""

    nbytes: int
    blocks: int | None
    own: int = 0
    union: int = 0


def write(folder: Path, ranks: Sequence[Sequence[Told]], job: str = "made", size: int | None = None) -> None:
    """A trace of each rank, in which each collective takes a millisecond and begins a millisecond after the one before
    has ended."""
    made = []
    for number, collectives in enumerate(ranks):
        origin = Origin(job=job, kind="rank", number=number, ranks=size or len(ranks), shards=1)
        made.append(recorder := Recorder(Trace(folder=str(folder), events=500), origin))
        for at, collective in enumerate(collectives):
            start, end = 2 * at * MS, (2 * at + 1) * MS
            if collective.blocks is not None:
                details = collective.blocks, 1024, collective.own, collective.union
                for what, detail in zip(OF_TENSOR, details, strict=True):
                    recorder.add(what, end, end, detail=detail)
            recorder.add(SpanKind.COLLECTIVE, start, end, detail=collective.nbytes)
    for recorder in made:
        recorder.write()


TENSOR, OTHER = Told(10_240, 10, 2, 4), Told(77, None)


def test_collectives_of_a_size_count_together(tmp_path: Path) -> None:
    large = Told(30_720, 30, 15, 15)
    rank = [OTHER, TENSOR, large, TENSOR._replace(own=4, union=6), OTHER]
    write(tmp_path, [rank, [Told(99, None), *rank[1:3], TENSOR._replace(own=2, union=6), OTHER]])
    result = read_reduced(tmp_path)
    assert result.sizes == [Size(1, 30_720, 30, 1024, 0.5, 0.5), Size(2, 10_240, 10, 1024, 0.25, 0.5)]
    assert (result.others, result.kinds, result.missed) == (2, 2, 0)
    assert result.measured_s == pytest.approx(3e-3)  # for all tensors


def test_what_only_some_ranks_have_recorded_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, [[TENSOR, TENSOR, OTHER], [TENSOR]])
    assert (read_reduced(tmp_path).all_reduces, read_reduced(tmp_path).others) == (1, 0)


def test_an_empty_tensor_is_one(tmp_path: Path) -> None:
    write(tmp_path, [[Told(0, 0)], [Told(0, 0)]])
    assert read_reduced(tmp_path).sizes == [Size(1, 0, 0, 1024, 0.0, 0.0)]
    result = run("--trace", str(tmp_path))
    assert result.exit_code == 0, result.output


def test_a_trace_that_was_full_is_said(tmp_path: Path) -> None:
    write(tmp_path, [[TENSOR] * 101] * 2)
    result = run("--trace", str(tmp_path))
    assert "of all its 100 all-reduces" in result.output
    assert "the traces were full and miss 10 spans: the job had more; raise trace.events" in result.output


def test_many_sizes_become_few(tmp_path: Path) -> None:
    many = [Told(at * 1024, at, at // 2, at) for at in range(1, MOST_SIZES + 6)]
    write(tmp_path, [many] * 2)
    result = read_reduced(tmp_path)
    assert (len(result.sizes), result.kinds) == (MOST_SIZES, len(many))
    assert result.all_reduces == len(many)
    assert sum(size.times * size.nbytes for size in result.sizes) == sum(each.nbytes for each in many)
    last = result.sizes[-1]
    assert (last.times, last.nbytes, last.blocks, last.block_bytes) == (6, 3584, 4, 1024)  # 1 to 6 blocks
    assert (last.density, last.union_density) == pytest.approx((9 / 21, 1))
    assert "the last row stands for the 6 sizes with the fewest bytes" in run("--trace", str(tmp_path)).output
    assert combine_small_sizes(result.sizes, MOST_SIZES) == result.sizes


def test_few_sizes_keep_what_is_sent() -> None:
    """A block is sent whole, also that of a tensor that does not fill it."""
    small = [Size(1, nbytes, 1, 1024, 1.0, 1.0) for nbytes in (4, 8)]
    assert combine_small_sizes([Size(1, 4096, 4, 1024, 1.0, 1.0), *small], 2)[1:] == [Size(2, 6, 1, 1024, 1.0, 1.0)]
    empty = [Size(1, 0, 0, block_bytes, 0.0, 0.0) for block_bytes in (512, 1024)]
    assert combine_small_sizes([Size(1, 4096, 4, 1024, 1.0, 1.0), *empty], 2) == [Size(1, 4096, 4, 1024, 1.0, 1.0)]


def error(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    return result.output


def test_folders_that_hold_no_whole_job_are_refused(tmp_path: Path) -> None:
    empty, partial, two, strange = (tmp_path / name for name in ("empty", "partial", "two", "strange"))
    for folder in (empty, partial, two, strange):
        folder.mkdir()
    assert f"{empty}: no traces; set trace.folder" in error("--trace", str(empty))
    assert f"{tmp_path / 'nowhere'}: no traces" in error("--trace", str(tmp_path / "nowhere"))
    write(partial, [[TENSOR]], size=3)
    message = error("--trace", str(partial))
    assert (
        "expected a trace of each of the 3 ranks of job 'made', got none of rank 1, rank 2; set trace.folder" in message
    )
    for job in ("one", "other"):
        write(two, [[TENSOR], [TENSOR]], job)
    assert "traces of several jobs, choose one with --job: one, other" in error("--trace", str(two))
    assert run("--trace", str(two), "--job", "other").exit_code == 0
    assert "no traces of job 'third'" in error("--trace", str(two), "--job", "third")
    (strange / "x.npz").write_bytes(b"PK")
    assert "x.npz: expected a trace" in error("--trace", str(strange))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[TENSOR]], "job 'made' has 1 rank; expected 2 or more"),
        ([[OTHER], [OTHER]], "expected all-reduces of tensors, got none among the 1 collectives of job 'made'"),
        ([[], []], "got none among the 0 collectives"),
        ([[TENSOR], [OTHER]], "rank 0 and rank 1 do not fit together: collective 0 is not the same"),
        ([[TENSOR, TENSOR], [TENSOR, TENSOR._replace(nbytes=10_239)]], "collective 1 is not the same"),
        ([[TENSOR], [TENSOR._replace(blocks=11)]], "collective 0 is not the same"),
        (
            [[TENSOR], [TENSOR._replace(own=11)]],
            "the trace of rank 1 of job 'made' cannot be true: expected tensors of up",
        ),
        ([[TENSOR], [TENSOR._replace(own=-2)]], "got TENSOR 10, BLOCK 1024, OWN -2, UNION 4"),
        ([[Told(1 << 60, 1 << 50)]] * 2, "rank 0 of job 'made' cannot be true"),
    ],
)
def test_traces_that_say_too_little_are_refused(tmp_path: Path, ranks: list[list[Told]], message: str) -> None:
    write(tmp_path, ranks)
    assert message in error("--trace", str(tmp_path))
    with pytest.raises(UsageError):
        read_reduced(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "t", "g.npy"], "g.npy with --trace: expected files or a trace; leave one of them out"),
        (["--trace", "t", "--density", "0.1"], "--density with --trace, which says that already"),
        (["--trace", "t", "--block-size", "256"], "--block-size with --trace, which says that already"),
        (["--job", "one"], "--job one without --trace: expected the folder that has traces of this job"),
    ],
)
def test_two_inputs_at_a_time_are_refused(arguments: list[str], message: str) -> None:
    assert message in error(*arguments)
