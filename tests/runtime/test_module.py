"""The functions of `omnireduce` itself, which work on one global communicator, and `connect`."""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_cluster import ROOT, Daemon, Ranks, unique_job

import omnireduce as omni
from omnireduce.runtime.rank import engine, global_communicator
from omnireduce.runtime.rank.communicator import Communicator

ADD = "'A collective' in CONTRIBUTING.md"
CALLS: list[Callable[[], object]] = [
    lambda: omni.allreduce(np.ones(2)),
    lambda: omni.allreduce_async(np.ones(2)),
    lambda: omni.allreduce_rows(np.arange(1), np.ones((1, 2)), 2),
    lambda: omni.allreduce([np.ones(2)]),
    lambda: omni.allreduce_tables([]),
    lambda: omni.broadcast(np.ones(2)),
    lambda: omni.allgather(np.ones(2)),
    lambda: omni.reduce_scatter(np.ones(2)),
    lambda: omni.reduce(np.ones(2)),
    lambda: omni.gather(np.ones(2)),
    lambda: omni.scatter(np.ones(2), np.ones((1, 2))),
    lambda: omni.alltoall(np.ones((1, 2))),
    lambda: omni.allgather_ragged(np.ones(2)),
    lambda: omni.broadcast_object("x"),
    lambda: omni.allgather_object("x"),
    omni.barrier,
    omni.rank,
    omni.size,
    omni.local_rank,
    omni.local_size,
    omni.local_first,
]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher, no configuration, and no communicator afterwards."""
    for name in ("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SLURM_STEP_ID", "OMNIREDUCE_CONFIG", "OMNIREDUCE_CLUSTER_AGGREGATORS", "OMNIREDUCE_CLUSTER_JOB"):
        monkeypatch.delenv(name, raising=False)
    yield
    omni.shutdown()


def assert_not_initialised() -> None:
    for call in CALLS:
        with pytest.raises(omni.UsageError, match=r"not initialised; call omnireduce\.init\(\) first"):
            call()


def test_one_aggregator_needs_no_list(daemon: Daemon) -> None:
    with omni.connect(aggregators=daemon.addresses[0], job=unique_job(), rank=0, size=1) as comm:
        assert comm.config.cluster.aggregators == (daemon.addresses[0],)


def test_everything_on_the_global_communicator(daemon: Daemon) -> None:
    comm = omni.init(aggregators=daemon.addresses, job=unique_job(), rank=0, size=1)
    assert (omni.rank(), omni.size(), comm.shards) == (0, 1, 3)
    assert omni.allreduce(np.ones(2)).tolist() == [1.0, 1.0]
    assert omni.allreduce(np.ones(2), out=np.zeros(2), op="mean", name="x", block_size=8).tolist() == [1.0, 1.0]
    assert omni.allreduce_async(np.ones(2), name="y").wait(30).tolist() == [1.0, 1.0]
    assert omni.broadcast(np.ones(2), 0).tolist() == [1.0, 1.0]
    assert omni.allgather(np.ones(2)).tolist() == [[1.0, 1.0]]
    assert omni.reduce_scatter(np.ones(2), op="max").tolist() == [1.0, 1.0]
    assert omni.allreduce_rows(np.array([1, 1]), np.ones((2, 1)), 2)[1].tolist() == [[2.0]]
    omni.barrier()
    assert comm.statistics().collectives == 8


def _forms(name: str) -> tuple[str, str]:
    return name.removesuffix("_async"), f"{name.removesuffix('_async')}_async"


def collectives() -> set[str]:
    """The methods that have a form ending in _async, those forms, and `refuse`; not those that run a program."""
    names = {name for name in vars(Communicator) if not name.startswith(("_", "fused_"))}
    return {form for name in names for form in _forms(name) if f"{name}_async" in names} | {"refuse"}


def test_every_method_is_a_function() -> None:
    """Its arguments and its text are those of the method, so that `help(omnireduce.allreduce)` says what it does."""
    methods = {name: getattr(Communicator, name) for name in collectives()}
    missing = sorted(set(methods) - set(omni.__all__))
    assert not missing, (
        f"{missing}: {ADD} makes functions of them, too, in global_communicator.py and omnireduce/__init__.py"
    )
    for name, method in methods.items():
        parameters = list(inspect.signature(method).parameters.values())[1:]
        function = getattr(omni, name)
        assert list(inspect.signature(function).parameters.values()) == parameters
        assert inspect.getdoc(function) == inspect.getdoc(method) != ""
        assert pickle.loads(pickle.dumps(function)) is function


def test_both_forms_of_every_collective(daemon: Daemon) -> None:
    """The job has one rank: its contribution is the whole result."""
    omni.init(aggregators=daemon.addresses, job=unique_job(), rank=0, size=1)
    x = np.arange(3.0)
    table = np.arange(2), np.ones((2, 2)), 4
    calls: dict[str, tuple[tuple[Any, ...], Any]] = {
        "allreduce": ((x,), x), "reduce": ((x,), x), "reduce_scatter": ((x,), x), "allreduce_rows": (table, table[:2]),
        "broadcast": ((x,), x), "allgather": ((x,), [x]), "gather": ((x,), [x]), "scatter": ((x.copy(), x[None]), x),
        "alltoall": ((x[None],), [x]), "allgather_ragged": ((x,), [x]), "broadcast_object": (("x",), "x"),
        "allgather_object": (("x",), ["x"]), "barrier": ((), None), "allreduce_tables": (([table],), [table[:2]]),
        "allreduce_rows_into": ((np.ones((4, 2)), *table[:2]), np.repeat([1.0, 0.0], 4).reshape(4, 2)),
    }  # fmt: skip
    untried = {_forms(name)[0] for name in collectives()} - {"refuse", *calls}
    assert not untried, f"{untried}: {ADD} gives each a row above"
    for name, (arguments, expected) in calls.items():
        handle = getattr(omni, f"{name}_async")(*arguments, name="a")
        for result in (handle.wait(30), getattr(omni, name)(*arguments)):
            if name == "allreduce_tables":
                assert all(map(np.array_equal, result[0], expected[0]))
            elif isinstance(expected, tuple | list) and name != "allgather_object":
                assert all(map(np.array_equal, result, expected)), name
            else:
                assert np.array_equal(result, expected), name


def test_before_init_and_after_shutdown(daemon: Daemon) -> None:
    assert_not_initialised()
    omni.shutdown()  # nothing to do
    omni.init(aggregators=daemon.addresses, job=unique_job(), rank=0, size=1)
    omni.shutdown()
    omni.shutdown()
    assert_not_initialised()


def test_with_init_leaves_nothing_behind(daemon: Daemon) -> None:
    for _ in range(2):
        with omni.init(aggregators=",".join(daemon.addresses), job=unique_job(), rank=0, size=1) as comm:
            assert omni.is_initialized()
            assert (omni.allreduce(np.ones(2)).tolist(), comm.shards) == ([1.0, 1.0], 3)
        assert_not_initialised()
        assert not omni.is_initialized()
        assert global_communicator._global is None  # else it would keep its memory


def test_a_communicator_that_was_is_no_reason_to_forget_the_one_that_is(daemon: Daemon) -> None:
    first = omni.init(aggregators=daemon.addresses, job=unique_job(), rank=0, size=1)
    omni.shutdown()
    second = omni.init(aggregators=daemon.addresses, job=unique_job(), rank=0, size=1)
    first.shutdown()
    assert global_communicator._global is second


def test_init_twice(daemon: Daemon) -> None:
    first = omni.init(aggregators=daemon.addresses, job=unique_job(), rank=0, size=1)
    with pytest.raises(omni.UsageError, match=r"initialised already; call omnireduce\.shutdown\(\) first"):
        omni.init(aggregators=daemon.addresses, job=unique_job(), rank=0, size=1)
    assert first.allreduce(np.ones(1)).tolist() == [1.0]
    omni.shutdown()
    omni.init(aggregators=daemon.addresses, job=unique_job(), rank=0, size=1)


@pytest.fixture
def untouched_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook of a new process. An earlier test may have left one that calls ours, as `init_process_group` does."""
    monkeypatch.setattr(engine._process, "_replaced_hook", None)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


@pytest.mark.usefixtures("untouched_hook")
def test_the_hook_for_exceptions_is_that_of_before_when_the_last_communicator_is_closed(daemon: Daemon) -> None:
    before = sys.excepthook
    with omni.init(aggregators=daemon.addresses, job=unique_job(), rank=0, size=1):
        during = sys.excepthook
        assert during is not before
        with omni.connect(aggregators=daemon.addresses, job=unique_job(), rank=0, size=1):
            assert sys.excepthook is during
        assert sys.excepthook is during
    assert sys.excepthook is before


@pytest.mark.usefixtures("untouched_hook")
def test_a_hook_for_exceptions_that_came_later_stays(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may call ours, which then shows the exception as before. The next communicator does not go on top of it."""
    shown: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *about: shown.append(about[1]))
    with omni.init(aggregators=daemon.addresses, job=unique_job(), rank=0, size=1):
        ours = sys.excepthook
        monkeypatch.setattr(sys, "excepthook", lambda *about: ours(*about))
        theirs = sys.excepthook
    assert sys.excepthook is theirs
    with omni.init(aggregators=daemon.addresses, job=unique_job(), rank=0, size=1):
        assert sys.excepthook is theirs
    error = ValueError("x")
    theirs(ValueError, error, None)
    assert shown == [error]


def test_a_failed_init_leaves_nothing_behind(daemon: Daemon) -> None:
    with pytest.raises(omni.UsageError, match="got rank 0 and no size, expected both or neither"):
        omni.init(aggregators=daemon.addresses, rank=0)
    with pytest.raises(omni.ConfigError, match=r"argument: cluster\.aggregators"):
        omni.init(aggregators=["no port"], rank=0, size=1)
    assert_not_initialised()
    omni.init(aggregators=daemon.addresses, job=unique_job(), rank=0, size=1)


def test_the_configuration_by_path_object_or_environment(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"[cluster]\naggregators = {daemon.addresses}\n[protocol]\nblock_size = 64\n")
    monkeypatch.setenv("OMNIREDUCE_CONFIG", str(path))
    for config in (path, str(path), omni.load_config(path), None):
        with omni.connect(config, job=unique_job(), rank=0, size=1) as comm:
            assert comm.shards == 3
            assert comm.config.protocol.block_size == 64


def test_rank_and_size_from_a_launcher(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "PMI_JOBID": unique_job()}.items():
        monkeypatch.setenv(name, value)
    comm = omni.init(aggregators=daemon.addresses)
    assert (comm.rank, comm.size, comm.local_size) == (0, 1, None)
    with pytest.raises(omni.UsageError, match="how many workers this host has is not known"):
        omni.local_size()
    omni.shutdown()
    monkeypatch.setenv("MPI_LOCALNRANKS", "1")
    omni.init(aggregators=daemon.addresses)
    assert (omni.local_rank(), omni.local_size()) == (0, 1)


def test_a_local_rank_that_nobody_said_is_an_error(daemon: Daemon) -> None:
    comm = omni.init(aggregators=daemon.addresses, job=unique_job(), rank=0, size=1)
    assert (comm.local_rank, comm.local_size) == (None, None)
    with pytest.raises(omni.UsageError, match="this worker's number on its host is not known: no launcher"):
        omni.local_rank()


def test_connect_uses_no_global_state(daemon: Daemon) -> None:
    job = unique_job()

    def run(rank: int) -> list[float]:
        with omni.connect(aggregators=daemon.addresses, job=job, rank=rank, size=2) as comm:
            return comm.allreduce(np.ones(2)).tolist()

    assert Ranks(2, run).results() == [[2.0, 2.0]] * 2
    assert_not_initialised()


def test_an_aggregator_that_is_not_there() -> None:
    config = omni.load_config(overrides=["cluster.join_timeout_s=0.1"], environ={})
    with pytest.raises(
        omni.TransportError, match=r"cannot reach aggregator 127\.0\.0\.1:1: .*is `omnireduce aggregator`"
    ):
        omni.connect(config, aggregators=["127.0.0.1:1"], rank=0, size=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "read"),
    [("no loss\n\x1b[2J" + 1000 * "x", r"no loss .x1b\[2Jx{100,200}"), ("file \udcff", r"file .+udcff")],
)
def test_who_is_left_reads_what_ended_the_other(daemon: Daemon, text: str, read: str) -> None:
    """Without a `with` block, and whatever the text of the exception is."""
    job = unique_job("raises")
    code = (
        "import numpy as np, omnireduce as omni\n"
        f"omni.init(aggregators={daemon.addresses}, job={job!r}, rank=1, size=2)\n"
        f"raise ValueError({text!r})\n"
    )
    with (
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL) as other,
        pytest.raises(omni.AbortedError, match=rf"rank 1 .*: '?left because of ValueError: {read}'?$"),
        omni.connect(aggregators=daemon.addresses, job=job, rank=0, size=2) as comm,  # may hear of it at once
    ):
        comm.barrier()
    assert other.returncode == 1


def test_an_exception_that_was_shown_long_ago_does_not_end_the_job(daemon: Daemon) -> None:
    job = unique_job("ends")
    code = (
        "import sys, omnireduce as omni\n"
        "sys.last_value = ValueError('caught and shown')\n"
        f"omni.init(aggregators={daemon.addresses}, job={job!r}, rank=1, size=2)\n"
    )
    with (
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as other,
        omni.connect(aggregators=daemon.addresses, job=job, rank=0, size=2) as comm,
        pytest.raises(omni.AbortedError, match="had shut down when"),
    ):
        comm.barrier()
    assert other.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "omni.shutdown()", "raise SystemExit(3)", "1 / 0"])
def test_a_program_that_ends_leaves_its_job(daemon: Daemon, end: str) -> None:
    """With or without shutdown; collectives nobody waits for do not keep it, and its status is its own."""
    job = unique_job("ends")
    code = (
        "import numpy as np, omnireduce as omni\n"
        f"omni.init(aggregators={daemon.addresses}, job={job!r}, rank=0, size=1)\n"
        "omni.allreduce_async(np.ones(1000))\n"
        f"{end}\n"
    )
    for _ in range(2):  # the job's name is free again
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert result.returncode == {"raise SystemExit(3)": 3, "1 / 0": 1}.get(end, 0), result.stderr
        assert ("ZeroDivisionError" in result.stderr) == (end == "1 / 0")
        assert not result.stdout


def test_every_name_is_the_one_that_type_checkers_read() -> None:
    """The package's names are loaded from a table, and its imports are for type checkers: the two agree."""
    source = Path(omni.__file__).read_text("utf-8")
    declared = {
        alias.name: node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("omnireduce.")
        for alias in node.names
    }
    assert sorted(declared) == sorted(omni.__all__) == sorted(set(omni.__all__) & set(dir(omni)))
    for name, module in declared.items():
        assert getattr(omni, name) is getattr(import_module(str(module)), name)


def test_a_star_import_has_all_names() -> None:
    code = "from omnireduce import *\nimport omnireduce\nassert set(omnireduce.__all__) <= set(globals())"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'omnireduce' has no attribute 'all_reduce'"):
        omni.all_reduce  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(omni, "_global")


def test_what_it_makes_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(omni.Config())) == omni.Config()
    assert pickle.loads(pickle.dumps(omni.Statistics)) is omni.Statistics
