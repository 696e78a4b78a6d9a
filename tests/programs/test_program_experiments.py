"""CoCoNet's experiments, small, as users run them: `python -m benchmarks programs`."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from local_cluster import MPIRUN, ROOT, WAIT_S

from benchmarks.programs.experiments import Row, Run, parse_output, read_rows, translate_for_mpich, write_rows
from benchmarks.programs.figures import draw, speedups
from omnireduce import UsageError
from omnireduce.programs.library import schedules

needs_mpirun = pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")


def experiment(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: text for name, text in os.environ.items() if name not in ("NPROC", "MPI_ARGS")}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", "programs", *words], cwd=ROOT, env=kept | environ, capture_output=True,
        text=True, check=False, timeout=4 * WAIT_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def made(results: Path, *names: str) -> None:
    """All figures are there, and say what they show."""
    for name in names:
        assert (results / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert "</svg>" in (results / f"{name}.svg").read_text()


@needs_mpirun
def test_data_parallel(tmp_path: Path) -> None:
    """With the words of CoCoNet's tutorial, which are Open MPI's."""
    results = tmp_path / "results"
    words = ["--epochs", "1", "--rounds", "1", "--first", "4", "--last", "5"]
    result = experiment(
        "data-parallel", str(results), *words, NPROC="2", MPI_ARGS="-x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=10000"
    )
    assert result.returncode == 0, result.stderr
    made(results, "Figure10a", "Figure10b")
    rows = list(csv.DictReader((results / "data-parallel.csv").read_text().splitlines()))
    totals = [(row["program"], row["schedule"], row["elements"]) for row in rows if row["stage"] == "Total"]
    assert totals == [(p, s, n) for p in ("adam", "lamb") for s in schedules("adam") for n in ("16", "32")]
    stages = {row["stage"] for row in rows if row["program"] == "adam"}
    assert stages == {"AllReduce", "Compute", "Update", "ReduceScatter", "AllGather", "FusedAllReduce", "Total"}
    assert {row["ranks"] for row in rows} == {"2"}
    assert {row["carried_by"] for row in rows} <= {"memory", "shm", "memory+shm"}
    assert all(float(row["ms"]) >= 0 for row in rows)
    svg = (results / "Figure10a.svg").read_text()
    assert "fuse-rs-c-ag, on the shards" in svg
    before = (results / "Figure10b.pdf").read_bytes()
    assert experiment("data-parallel", str(results), "--draw-only").returncode == 0
    assert (results / "Figure10b.pdf").read_bytes() == before  # same rows, same files


@needs_mpirun
@pytest.mark.parametrize(("name", "figure"), [("model-parallel", "Figure11"), ("pipeline-parallel", "Figure12")])
def test_layers(name: str, figure: str, tmp_path: Path) -> None:
    words = ["--epochs", "1", "--rounds", "1", "--sequence", "1", "--hidden", "3"]
    result = experiment(name, str(tmp_path), *words)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        str(tmp_path / each) for each in (f"{name}.csv", f"{figure}.pdf", f"{figure}.svg")
    ]
    made(tmp_path, figure)
    totals = [row for row in read_rows(tmp_path / f"{name}.csv") if row.stage == "Total"]
    expected = [(case, schedule) for case in ("B=8", "B=16") for schedule in schedules(name)]
    assert [(row.case, row.schedule) for row in totals] == expected
    assert {row.elements for row in totals} == {8 * 3, 16 * 3}


@pytest.mark.parametrize(
    ("words", "environ", "message"),
    [
        (
            ("data", "RESULTS"),
            {},
            "experiment 'data': expected one of data-parallel, model-parallel, pipeline-parallel",
        ),
        (("data-parallel", "RESULTS"), {"NPROC": "two"}, "NPROC is 'two': expected a number of processes, such as 2"),
        (("data-parallel", "RESULTS"), {"NPROC": "0"}, "NPROC is '0': expected a number of processes, such as 2"),
        (
            ("pipeline-parallel", "RESULTS"),
            {"NPROC": "3"},
            "NPROC is 3: expected an even number, for two groups of processes",
        ),
        (("data-parallel", "RESULTS"), {"MPI_ARGS": "'"}, 'MPI_ARGS is "\'": No closing quotation'),
        (("data-parallel", "RESULTS"), {"MPI_ARGS": "-x"}, "MPI_ARGS ends with -x: expected -x NAME=VALUE"),
        (("data-parallel", "/proc/results"), {}, "/proc/results: cannot be made a folder: No such file or directory"),
        (
            ("data-parallel", "RESULTS", "--first", "9", "--last", "8"),
            {},
            "--first 9 --last 8: expected --first <= --last",
        ),
        (
            ("data-parallel", "RESULTS", "--draw-only"),
            {},
            "data-parallel.csv: cannot be read: No such file or directory",
        ),
    ],
)
@needs_mpirun
def test_what_cannot_be_is_one_line(
    words: tuple[str, ...], environ: dict[str, str], message: str, tmp_path: Path
) -> None:
    result = experiment(*[str(tmp_path) if word == "RESULTS" else word for word in words], **environ)
    assert result.returncode in (1, 2)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr


@needs_mpirun
def test_a_program_that_fails_is_named(tmp_path: Path) -> None:
    """Here mpirun starts nothing, because it does not know a word."""
    result = experiment("model-parallel", str(tmp_path), MPI_ARGS="--no-such-word")
    assert result.returncode == 1
    assert "model-parallel, mm-ar-c ended with status " in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_words_of_open_mpi() -> None:
    assert translate_for_mpich(["-x", "A=b=c", "--hosts", "x", "-x", "PATH", "-x", "HOME"]) == [
        "-genv", "A", "b=c", "--hosts", "x",
    ]  # fmt: skip


def test_lines_of_programs() -> None:
    text = "something else\n{SZ: 16, Epochs: 3, AllReduce: 0.120, Total: 0.125}\n"
    run = Run("sgd", "ar-c", "", ())
    assert list(parse_output(text, run)) == [(16, "AllReduce", 0.12), (16, "Total", 0.125)]
    with pytest.raises(UsageError, match=r"sgd, ar-c: expected lines such as {SZ: 1024, ...}, it printed \[1,0\]<out>"):
        list(parse_output(text.replace("{", "[1,0]<out>:{").replace("something else", ""), run))
    with pytest.raises(UsageError, match="it printed nothing"):
        list(parse_output("", run))


def row(schedule: str, elements: int, ms: float) -> Row:
    return Row("adam", schedule, "", 2, elements, 1, 1, "Total", ms)


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = [row("ar-c", 16, 0.5), row("rs-c-ag", 16, 0.25)]
    write_rows(rows, tmp_path / "x.csv")
    assert read_rows(tmp_path / "x.csv") == rows
    assert speedups(rows)["rs-c-ag"] == {("", 16): 2.0}
    (tmp_path / "x.csv").write_text("program,schedule\nadam,ar-c\n")
    with pytest.raises(UsageError, match="is no table of an experiment"):
        read_rows(tmp_path / "x.csv")
    write_rows([], tmp_path / "x.csv")
    with pytest.raises(UsageError, match="is no table of an experiment: it has no rows"):
        read_rows(tmp_path / "x.csv")


def test_a_case_that_the_first_schedule_lacks_is_drawn(tmp_path: Path) -> None:
    rows = [
        Row("model-parallel", schedule, case, 2, 24, 1, 1, "Total", 0.5)
        for schedule, case in (("mm-ar-c", "B=8"), ("mm-rs-c-ag", "B=8"), ("mm-rs-c-ag", "B=16"))
    ]
    assert draw(rows, tmp_path) == [tmp_path / "Figure11.pdf", tmp_path / "Figure11.svg"]
    assert (tmp_path / "Figure11.svg").read_text().count("1.00x") == 2


def test_figures_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "Figure10a.pdf").mkdir()
    with pytest.raises(UsageError, match=r"Figure10a.pdf: cannot be written: Is a directory"):
        draw([row("ar-c", 16, 0.5)], tmp_path)
