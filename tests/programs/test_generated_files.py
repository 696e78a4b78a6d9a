"""Files that `codegen` writes: they run by themselves, give what programs mean, and look as formatters want it."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from local_cluster import MPIRUN, READY_S, ROOT, Daemon, configured, run_job
from random_programs import inputs_for, own_parts, programs, rewritten

from omnireduce import Communicator, UsageError
from omnireduce.core.dtypes import Array
from omnireduce.programs import (
    AllGather,
    AllReduce,
    Cast,
    Float16,
    Float32,
    Int32,
    Ite,
    Local,
    Norm,
    Pipeline,
    ReduceTensor,
    Replicated,
    Sliced,
    Summation,
    Tensor,
    Update,
    Variable,
)
from omnireduce.programs.library import PROGRAMS, schedules

needs_mpirun = pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")
ALL = [(program, schedule) for program in PROGRAMS for schedule in schedules(program)]
STEPS = 3  # CHECKED_STEPS of a file
LINE = re.compile(r"\{SZ: (\d+), Epochs: (\d+), ((?:\w+: \d+\.\d{3}, )+)Total: \d+\.\d{3}\}")


def started(file: Path, ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """The file under mpirun, to its end."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("OMNIREDUCE_", "HOROVOD_"))}
    return subprocess.run(
        [str(MPIRUN), "-n", str(ranks), sys.executable, str(file), *words],
        env=kept | {"PYTHONPATH": str(ROOT)}, cwd=file.parent, capture_output=True, text=True, check=False,
        timeout=READY_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def interpreted(pipeline: Pipeline, given: list[dict[str, Array]], ranks: int) -> dict[str, list[Array]]:
    """Results of the interpreter, step after step, with the inputs of all ranks."""
    names = {each.name for each in pipeline.inputs}
    kept: dict[str, Any] = {
        name: [each[name] for each in given if name in each] for name in names & set().union(*given)
    }
    sizes = {"T": 32, "K": 32, "H": 32} if "residual" in names else {"N": 1001}
    known = {size for each in pipeline.inputs for size in map(str, _size_names(each))}
    results: dict[str, list[Array]] = {}
    for step in range(1, STEPS + 1):
        numbers = {name: value for name, value in (("lr", 0.01), ("t", step)) if name in names}
        results = pipeline.interpret({**kept, **numbers, **{name: sizes[name] for name in known}}, ranks)
        kept |= {name[:-1]: arrays for name, arrays in results.items() if name[:-1] in kept}
    return results


def _size_names(each: Any) -> list[str]:
    return [size.name for size in each.type.shape if isinstance(size, Variable)]


def formatted(folder: Path) -> None:
    """Nothing is to be done for a formatter, at the width of this project nor at its own."""
    for width in ("120", "88"):
        command = [sys.executable, "-m", "ruff", "format", "--isolated", "--diff", "--line-length", width, str(folder)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


def test_files_are_formatted_and_have_nothing_unused(tmp_path: Path) -> None:
    for program, schedule in ALL:
        for target in ("omnireduce", "mpi4py"):
            path = tmp_path / f"{program}-{schedule}-{target}.py"
            schedules(program)[schedule].codegen(path, target=target, schedule=schedule)
            text = path.read_text()
            assert max(map(len, text.splitlines())) <= 120
            assert ("omnireduce as omni" in text) == (target == "omnireduce")
            assert not (target == "mpi4py" and re.search(r"import.* (numba|njit|omnireduce)", text))
    formatted(tmp_path)
    lint = ["check", "--isolated", "--select", "E,F,W,B,UP,C90,PIE,SIM,RUF", "--line-length", "120", str(tmp_path)]
    result = subprocess.run([sys.executable, "-m", "ruff", *lint], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@needs_mpirun
@pytest.mark.parametrize("target", ["omnireduce", "mpi4py"])
@pytest.mark.parametrize(("program", "schedule"), ALL)
def test_a_file_runs_by_itself(program: str, schedule: str, target: str, tmp_path: Path) -> None:
    """With what the interpreter gives, of steps that follow one another; bit by bit, but for LAMB."""
    pipeline, file = schedules(program)[schedule], tmp_path / "written.py"
    pipeline.codegen(file, target=target, schedule=schedule)
    world = 4 if schedule in ("rs-p2p-c-ag", "rs-c-ag") else 2
    result = started(file, world, "2", "--first", "10", "--last", "11", "--save", str(tmp_path))
    assert result.returncode == 0, result.stderr
    lines = [LINE.fullmatch(line) for line in result.stdout.splitlines()]
    assert all(lines), result.stdout
    elements = ["1024", "2025" if program.endswith("parallel") else "2048"]  # 45 * 45
    assert [line[1] for line in lines if line] == elements
    assert all(line[2] == "2" for line in lines if line)
    saved = [dict(np.load(tmp_path / f"rank{rank}.npz")) for rank in range(world)]
    ranks = world // pipeline.groups
    given = [{name[6:]: x for name, x in each.items() if name.startswith("given_")} for each in saved]
    expected = interpreted(pipeline, given, ranks)
    for name, output in zip(pipeline.output_names, pipeline.outputs, strict=True):
        first = (output.type.group or 0) * ranks
        for rank, wanted in enumerate(expected[name]):
            outcome = saved[first + rank][f"got_{name}"]
            if program == "lamb":
                np.testing.assert_allclose(outcome, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())
            else:
                np.testing.assert_array_equal(outcome, wanted)


@needs_mpirun
def test_a_file_finds_that_it_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    schedules("sgd")["ar-c"].codegen(file, target="mpi4py")
    text = file.read_text()
    assert text.count("w - lr * g1") == 2  # once in the code, once in its comment
    file.write_text(text.replace("w - lr * g1", "w + lr * g1", 1))
    result = started(file, 2, "--check")
    assert result.returncode == 1
    assert "rank 0 has ['w1'] wrong" in result.stderr
    assert result.stdout == ""


@needs_mpirun
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["0"], "expected epochs >= 1, 0 <= --first <= --last <= 40"),
        (["--size", "M=3"], "M=3: expected NAME=NUMBER, of ['T', 'K', 'H'], from 1 to 2**40"),
        (["--size", f"T={10**20}"], "expected NAME=NUMBER, of ['T', 'K', 'H'], from 1 to 2**40"),
        (["--save", "none"], "--save none: expected a folder to write to"),
        (["--first", "12", "--last", "11"], "expected epochs >= 1, 0 <= --first <= --last <= 40"),
    ],
)
def test_words_that_a_file_does_not_take(words: list[str], message: str, tmp_path: Path) -> None:
    file = tmp_path / "layer.py"
    schedules("model-parallel")["mm-ar-c"].codegen(file, target="mpi4py")
    result = started(file, 1, *words)
    assert result.returncode != 0
    assert message in result.stderr


@needs_mpirun
def test_sizes_can_be_given(tmp_path: Path) -> None:
    """Output of a program to which all sizes are given has one line."""
    file = tmp_path / "layer.py"
    schedules("model-parallel")["mm-rs-c-ag"].codegen(file, target="mpi4py")
    words = [word for text in ("T=6", "K=5", "H=3") for word in ("--size", text)]
    result = started(file, 2, "1", *words)
    assert result.returncode == 0, result.stderr
    [line] = result.stdout.splitlines()
    assert line.startswith("{SZ: 18, Epochs: 1, MatMul: ")


@needs_mpirun
def test_a_job_that_cannot_be_divided(tmp_path: Path) -> None:
    file = tmp_path / "layer.py"
    schedules("pipeline-parallel")["ar-p2p-c"].codegen(file, target="mpi4py")
    result = started(file, 3, "--check")
    assert result.returncode == 1
    assert "3 ranks: expected 2 groups of at least 1" in result.stderr


def loaded(file: Path) -> ModuleType:
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@settings(max_examples=10, phases=(Phase.explicit, Phase.reuse, Phase.generate), deadline=None)
@given(st.data(), st.lists(programs(), min_size=4, max_size=4))
def test_random_programs_do_what_the_interpreter_says(
    daemon: Daemon, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, pipelines: list[Pipeline]
) -> None:
    """Bit by bit: what ranks do, and what the files say is meant. Of both targets they are formatted."""
    folder = tmp_path_factory.mktemp("random")
    modules = []
    for at, before in enumerate(pipelines):
        after, _ = rewritten(data.draw, before)
        factor = {each.name: 2 for each in after.inputs if each.name == "k"}
        after.codegen(folder / f"mpi{at}.py", target="mpi4py")
        after.codegen(folder / f"ranks{at}.py", numbers=factor)
        modules.append((after, loaded(folder / f"ranks{at}.py")))
    formatted(folder)

    for pipeline, module in modules:
        ranks = 4 // pipeline.groups
        results = run_job(configured(daemon.addresses), 4, functools.partial(run_on_rank, pipeline, module))
        expected = pipeline.interpret(values_for(pipeline, ranks), ranks)
        for name, output in zip(pipeline.output_names, pipeline.outputs, strict=True):
            first = (output.type.group or 0) * ranks
            for rank, wanted in enumerate(expected[name]):
                np.testing.assert_array_equal(results[first + rank][name], wanted, err_msg=f"{name}\n{pipeline}")


def values_for(pipeline: Pipeline, ranks: int) -> dict[str, Any]:
    return inputs_for(pipeline, 1, ranks) | ({"k": 2} if any(each.name == "k" for each in pipeline.inputs) else {})


def run_on_rank(pipeline: Pipeline, module: ModuleType, comm: Communicator) -> dict[str, Array]:
    ranks = comm.size // pipeline.groups
    group, rank = divmod(comm.rank, ranks)
    sizes = {name: {"T": 7, "H": 5}[name] for name in module.SIZES}
    arguments = own_parts(values_for(pipeline, ranks), rank)
    tensors = {name: arguments[name] if kind.group == group else None for name, kind in module.TENSORS.items()}
    job = module.Job(comm)
    result: dict[str, Array] = module.run_steps(job, sizes, tensors, 1)
    if pipeline.groups > 1:
        job.close()
    meant = {name: x for name, x in values_for(pipeline, ranks).items() if name in module.TENSORS}
    for name, kind in module.TENSORS.items():  # whole, as the file's own oracle takes them
        if kind.layout != "Local":
            parts = meant[name]
            axis = {"Sliced": 0, "Sliced_2": len(kind.shape) - 1}.get(kind.layout)
            meant[name] = parts[0].copy() if axis is None else np.concatenate(parts, axis)
    expected = module.expected(ranks, **meant, **module.numbers(1), **sizes)
    for name, x in result.items():
        part = module.own_part(job, module.OUTPUTS[name], expected[name])
        np.testing.assert_array_equal(x, part)
    return result


@pytest.mark.parametrize("target", ["omnireduce", "mpi4py"])
def test_names_that_a_file_needs_itself(target: str, daemon: Daemon, tmp_path: Path) -> None:
    """Names of Python, of the file, and of what it takes from libraries; a long formula; and values of all kinds."""
    np_, job = Variable(Int32, "np"), Variable(Float32, "job")
    lambda_ = Tensor(Float32, np_, Local, "lambda")
    part, float32 = Tensor(Float32, np_, Replicated, "part"), Tensor(Float32, np_, Replicated, "float32")
    reduce = AllReduce(Summation, lambda_)
    rank = Ite(reduce > 0, part * job + reduce * part * float32 + reduce * reduce * float32 * part, float32 - 1)
    norm = Norm(rank)
    ranks = ReduceTensor(Summation, part) / (norm + 1)
    main = Update(float32, rank * ranks)
    pipeline = Pipeline('a "name"\\', [lambda_, part, float32, job], [main, norm])
    cut = pipeline.split(reduce).reorder([main], reduce).fuse([rank])
    cut.codegen(tmp_path / "names.py", target=target, numbers={"job": 0.5})
    formatted(tmp_path)
    if target == "mpi4py":
        done = started(tmp_path / "names.py", 3, "--check") if MPIRUN else None
        assert done is None or done.returncode == 0, done and done.stderr
        return
    module = loaded(tmp_path / "names.py")
    run_job(configured(daemon.addresses), 3, lambda comm: module.compare(module.Job(comm), {}, None))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda pipeline, path: pipeline.codegen(path, target="cuda"), "target 'cuda': expected omnireduce or mpi4py"),
        (
            lambda pipeline, path: pipeline.codegen(path, numbers={"rate": 1}),
            "numbers: sgd has no Variable rate; it has lr",
        ),
        (
            lambda pipeline, path: pipeline.codegen(path, numbers=[0.1]),
            "numbers is a list; expected a dict, by the names",
        ),
        (
            lambda pipeline, path: pipeline.codegen(path, numbers={"lr": "fast"}),
            "lr is 'fast', a str; expected a number: float32",
        ),
        (lambda pipeline, path: pipeline.codegen(path.parent / "no" / "x.py"), "there is no folder"),
    ],
)
def test_what_cannot_be_written(make: Callable[[Pipeline, Path], None], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        make(schedules("sgd")["ar-c"], tmp_path / "x.py")
    assert not list(tmp_path.iterdir())


def test_numbers_that_are_not_written_as_python_says_them(tmp_path: Path) -> None:
    text = schedules("sgd")["ar-c"]
    for number, written in ((np.float64(0.25), "float32(0.25)"), (float("nan"), "float32(np.nan)"), (2, "float32(2)")):
        text.codegen(tmp_path / "sgd.py", numbers={"lr": number})
        assert f'return {{"lr": {written}}}' in (tmp_path / "sgd.py").read_text()


def halves() -> Pipeline:
    size = Variable(Int32, "N")
    g, w = Tensor(Float16, size, Local, "g"), Tensor(Float16, size, Sliced, "w")
    g1 = AllReduce(Summation, g)
    w1 = Update(w, w * 0.5 - g1)
    whole = AllGather(Cast(Float32, w1))
    return Pipeline("halves", [g, w], [w1, whole])


def test_halves_are_added_up_in_float32(daemon: Daemon, tmp_path: Path) -> None:
    halves().codegen(tmp_path / "halves.py")
    module = loaded(tmp_path / "halves.py")
    run_job(configured(daemon.addresses), 3, lambda comm: module.compare(module.Job(comm), {}, None))
    with pytest.raises(UsageError, match="values of float16, for which MPI has no type"):
        halves().codegen(tmp_path / "mpi.py", target="mpi4py")


def test_a_long_chain_is_written_in_parts(daemon: Daemon, tmp_path: Path) -> None:
    """Python would not nest it."""
    size = Variable(Int32, "N")
    g = Tensor(Float32, size, Local, "g")
    total = AllReduce(Summation, g)
    value = functools.reduce(lambda x, _: x * 0.5 + 1.0, range(300), total)
    pipeline = Pipeline("chain", [g], [value]).fuse([value])
    pipeline.codegen(tmp_path / "chain.py")
    formatted(tmp_path)
    module = loaded(tmp_path / "chain.py")
    run_job(configured(daemon.addresses), 2, lambda comm: module.compare(module.Job(comm), {}, None))
