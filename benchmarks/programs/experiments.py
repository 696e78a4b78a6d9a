"""CoCoNet's experiments on this machine: programs in their schedules, as generated files under mpirun.

data-parallel      Adam and LAMB, over sizes               Figure10a, Figure10b
model-parallel     a layer whose weights are cut           Figure11
pipeline-parallel  a layer of which two groups do a part   Figure12

The variables of the environment are those of CoCoNet's experiments: NPROC, the number of processes, and MPI_ARGS, more
words for mpirun. `-x NAME=VALUE`, which Open MPI takes, is said to MPICH in its own words.
"""

from __future__ import annotations

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from benchmarks.contest.cases import MEMORY
from benchmarks.harness.carriers import CARRIED_BY
from benchmarks.harness.environments import ROOT
from benchmarks.harness.group import PeerError
from omnireduce.errors import UsageError
from omnireduce.programs.library import schedules
from omnireduce.support.extras import install
from omnireduce.support.files.output import make_folder, write_file

LINE = re.compile(r"\{SZ: (\d+), Epochs: (\d+), (.*)\}")
TOTAL = "Total"
BATCHES = (8, 16)
ON_SHARDS = "fuse-rs-c-ag"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Scale(NamedTuple):
    """Size of an experiment: elements from 2**first to 2**last; a sequence, and the width of a layer."""

    first: int
    last: int
    sequence: int
    hidden: int


SMALL, LARGE = Scale(10, 20, 32, 256), Scale(10, 24, 128, 1024)


class Run(NamedTuple):
    """A schedule of a program, and what its file is told. `case`: which of several sizes that are told."""

    program: str
    schedule: str
    case: str
    words: tuple[str, ...]


class Row(NamedTuple):
    """A row of the CSV: the time of a stage, or of all together. `ms`: per step, the median over the rounds of the
    median over the epochs of the slowest rank. `carried_by`: what carried its tensors, as the ranks have counted."""

    program: str
    schedule: str
    case: str
    ranks: int
    elements: int
    epochs: int
    rounds: int
    stage: str
    ms: float
    carried_by: str = ""


def runs_of(experiment: str, scale: Scale) -> list[Run]:
    """The runs of an experiment. Raises UsageError for an unknown one."""
    if experiment == "data-parallel":
        words = ("--first", str(scale.first), "--last", str(scale.last))
        return [Run(program, schedule, "", words) for program in ("adam", "lamb") for schedule in schedules(program)]
    if experiment not in EXPERIMENTS:
        raise UsageError(f"experiment {experiment!r}: expected one of {', '.join(EXPERIMENTS)}")
    sizes = [{"T": batch * scale.sequence, "H": scale.hidden, "K": 4 * scale.hidden} for batch in BATCHES]
    if experiment == "pipeline-parallel":
        sizes = [{name: size for name, size in dimensions.items() if name != "K"} for dimensions in sizes]
    runs = []
    for batch, dimensions in zip(BATCHES, sizes, strict=True):
        size_words = tuple(word for name, size in dimensions.items() for word in ("--size", f"{name}={size}"))
        runs += [Run(experiment, schedule, f"B={batch}", size_words) for schedule in schedules(experiment)]
    return runs


EXPERIMENTS = ("data-parallel", "model-parallel", "pipeline-parallel")


def processes(experiment: str) -> int:
    """NPROC, by default 2. Raises UsageError for something else than a number that the experiment can use."""
    text = os.environ.get("NPROC", "2")
    if not text.strip().isdecimal() or int(text) < 1:
        raise UsageError(f"NPROC is {text!r}: expected a number of processes, such as 2")
    if experiment == "pipeline-parallel" and int(text) % 2:
        raise UsageError(f"NPROC is {text}: expected an even number, for two groups of processes")
    return int(text)


def mpirun() -> list[str]:
    """mpirun with the words of MPI_ARGS. Raises UsageError where there is none, or the words are not those of a
    shell."""
    path = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if path is None:
        raise UsageError(f"there is no mpirun: {install('mpi4py', 'mpi')}")
    try:
        words = shlex.split(os.environ.get("MPI_ARGS", ""))
    except ValueError as error:
        raise UsageError(f"MPI_ARGS is {os.environ['MPI_ARGS']!r}: {error}") from None
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return [path, *(words if "Open MPI" in version or "OpenRTE" in version else translate_for_mpich(words))]


def translate_for_mpich(words: Sequence[str]) -> list[str]:
    """Open MPI's `-x NAME=VALUE` as MPICH says it, and nothing for `-x NAME`: MPICH hands on all that is set. Raises
    UsageError for an `-x` without a name."""
    translated, remaining = list[str](), iter(words)
    for word in remaining:
        if word != "-x":
            translated.append(word)
            continue
        name, has_value, value = next(remaining, "").partition("=")
        if not name:
            raise UsageError("MPI_ARGS ends with -x: expected -x NAME=VALUE")
        translated += ["-genv", name, value] if has_value else []
    return translated


def measure(experiment: str, results: Path, *, scale: Scale, epochs: int, rounds: int) -> list[Row]:
    """Run an experiment, and write its CSV to `results`. The schedules take turns, `rounds` times. Raises UsageError
    where the environment says what cannot be, PeerError where a program fails."""
    runs, ranks = runs_of(experiment, scale), processes(experiment)
    make_folder(results)
    start = [*mpirun(), "-n", str(ranks), sys.executable]
    times: dict[tuple[Run, int, str], list[float]] = {}
    carriers: dict[Run, set[str]] = {run: set() for run in runs}
    with tempfile.TemporaryDirectory(prefix="omnireduce-experiment-") as folder:
        for run in runs:
            file = _file(run, folder)
            schedules(run.program)[run.schedule].codegen(file, schedule=run.schedule)
        for _ in range(rounds):
            for run in runs:
                program = ["-m", "benchmarks.harness.carriers", str(_file(run, folder))]
                output, errors = _output([*start, *program, str(epochs), *run.words], run)
                carriers[run].update(CARRIED_BY.findall(errors))
                if run.schedule == ON_SHARDS and carriers[run] == {MEMORY}:
                    raise PeerError(
                        f"{run.program}, {run.schedule}", "sent nothing to a shard: memory carried all tensors"
                    )
                for elements, stage, ms in parse_output(output, run):
                    times.setdefault((run, elements, stage), []).append(ms)
    rows = [
        Row(*run[:3], ranks, elements, epochs, rounds, stage, float(np.median(ms)), ", ".join(sorted(carriers[run])))
        for (run, elements, stage), ms in times.items()
    ]
    write_rows(rows, results / f"{experiment}.csv")
    return rows


def _file(run: Run, folder: str) -> Path:
    return Path(folder) / f"{run.program}-{run.schedule}.py"


def _output(command: Sequence[str], run: Run) -> tuple[str, str]:
    """The output of a program, and its standard error. Raises PeerError with its last words where it fails."""
    environ = {**dict.fromkeys(THREADS, "1"), **os.environ}  # ranks share the processors
    environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    process = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if process.returncode:
        lines = [line for line in (process.stderr + process.stdout).splitlines() if line.strip()] or ["nothing"]
        raise PeerError(f"{run.program}, {run.schedule}", f"ended with status {process.returncode}: {lines[-1]}")
    return process.stdout, process.stderr


def parse_output(text: str, run: Run) -> Iterator[tuple[int, str, float]]:
    """The elements and each stage with its milliseconds, of each line of a program. Raises UsageError where there is
    no line: words for mpirun may change them."""
    lines = [match for line in text.splitlines() if (match := LINE.fullmatch(line.strip()))]
    if not lines:
        first_line = next(filter(str.strip, text.splitlines()), "nothing")
        raise UsageError(
            f"{run.program}, {run.schedule}: expected lines such as {{SZ: 1024, ...}}, it printed {first_line}"
        )
    for match in lines:
        for part in match[3].split(", "):
            stage, _, ms = part.partition(": ")
            yield int(match[1]), stage, float(ms)


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write a CSV, all or nothing."""
    lines = [Row._fields, *([*row[:-2], f"{row.ms:.4f}", row.carried_by] for row in rows)]
    write_file("".join(",".join(map(str, line)) + "\n" for line in lines).encode(), path)


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV. Raises UsageError where there is none, or it is another one."""
    try:
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
        rows = [
            Row(
                program=line["program"],
                schedule=line["schedule"],
                case=line["case"],
                ranks=int(line["ranks"]),
                elements=int(line["elements"]),
                epochs=int(line["epochs"]),
                rounds=int(line["rounds"]),
                stage=line["stage"],
                ms=float(line["ms"]),
                carried_by=line["carried_by"],
            )
            for line in lines
        ]
        if not rows:
            raise ValueError("it has no rows")
        return rows
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise UsageError(f"{path}: is no table of an experiment: {error}") from None


@click.command(help="Run an experiment of CoCoNet, and write its CSV and its figures to the folder RESULTS.")
@click.argument("experiment", metavar=f"[{'|'.join(EXPERIMENTS)}]")
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--epochs", type=click.IntRange(1), default=10, show_default=True, help="Steps of each size.")
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True, help="In which the schedules take turns."
)
@click.option("--first", type=click.IntRange(1, 30), help="Of data-parallel: from 2**FIRST elements on.  [default: 10]")
@click.option("--last", type=click.IntRange(1, 30), help="Of data-parallel: up to 2**LAST elements.  [default: 20]")
@click.option("--sequence", type=click.IntRange(1), help="Tokens of a sequence, in the other ones.  [default: 32]")
@click.option("--hidden", type=click.IntRange(1), help="The width of a layer there.  [default: 256]")
@click.option("--large", is_flag=True, help="Up to 2**24 elements, sequences of 128, layers of 1024.")
@click.option("--draw-only", is_flag=True, help="Draw what an earlier run has written.")
def programs(
    experiment: str, results: Path, epochs: int, rounds: int, large: bool, draw_only: bool, **sizes: int | None
) -> None:
    try:
        from benchmarks.programs.figures import draw
    except ImportError as error:
        raise click.ClickException(f"{error}: {install('matplotlib', 'plot')}") from error
    scale = (LARGE if large else SMALL)._replace(**{name: size for name, size in sizes.items() if size is not None})
    if scale.first > scale.last:
        raise UsageError(f"--first {scale.first} --last {scale.last}: expected --first <= --last")
    runs_of(experiment, scale)
    table = results / f"{experiment}.csv"
    if not draw_only:
        measure(experiment, results, scale=scale, epochs=epochs, rounds=rounds)
    for path in [table, *draw(read_rows(table), results)]:
        click.echo(path)
