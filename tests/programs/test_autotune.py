"""Autotuning over real ranks: all ways are tried, all ranks choose alike, and what was found is remembered."""

from __future__ import annotations

import json
import logging
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job

from omnireduce import Communicator, UsageError
from omnireduce.kernels.compiling.jit import kernel_files
from omnireduce.programs import (
    AllReduce,
    Float32,
    Int32,
    Local,
    MatMul,
    Pipeline,
    Replicated,
    Sliced,
    Sliced_2,
    Summation,
    Tensor,
    Update,
    Variable,
    autotune,
)
from omnireduce.programs.library import schedules
from omnireduce.programs.tuning import Choice, Tuned, candidates, derived

RANKS = 2


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, but for the kernels."""
    kernel_files()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "omnireduce" / "programs"


def tuned(daemon: Daemon, program: Any, ranks: int = RANKS, **options: Any) -> list[Tuned]:
    options = {"sizes": [1000], "turns": 2, **options}
    return run_job(configured(daemon.addresses), ranks, lambda comm: autotune(program, comm, **options))


def plain(choice: Choice) -> tuple[Any, ...]:
    return choice.sizes, choice.schedule, choice.chunks, choice.on_shards, choice.ms


def test_every_way_is_tried_and_all_ranks_choose_alike(daemon: Daemon, cache: Path) -> None:
    result = tuned(daemon, "adam", sizes=[1000, {"N": 70}], cache=False)
    for choice in result[0].choices:
        assert set(choice.ms) == {"ar-c", "rs-c-ag", "fuse-rs-c-ag", "fuse-rs-c-ag, on shards"}
        best = min(choice.ms, key=choice.ms.__getitem__)
        assert best == choice.schedule + ", on shards" * choice.on_shards
        assert str(choice.pipeline) == str(schedules("adam")[choice.schedule])
        assert all(ms > 0 for ms in choice.ms.values())
    assert [choice.sizes for choice in result[0].choices] == [{"N": 1000}, {"N": 70}]
    for other in result[1:]:
        assert [plain(choice) for choice in other.choices] == [plain(choice) for choice in result[0].choices]
    assert not cache.exists()


def test_chunks_are_tried_and_groups_of_ranks(daemon: Daemon) -> None:
    [choice] = tuned(daemon, "model-parallel", chunks=(2, 3))[0].choices
    overlapped = "ol-mm-fuse-rs-c-ag"
    assert set(choice.ms) == {"mm-ar-c", "mm-rs-c-ag", f"{overlapped}, 2 chunks", f"{overlapped}, 3 chunks"}
    [choice] = tuned(daemon, "pipeline-parallel")[0].choices
    assert set(choice.ms) == {"ar-p2p-c", "rs-p2p-c-ag"}


def test_what_was_found_is_remembered(daemon: Daemon, cache: Path) -> None:
    first = tuned(daemon, "sgd")
    assert not any(each.is_recalled for each in first)
    [file] = cache.iterdir()
    again = tuned(daemon, "sgd")
    assert all(each.is_recalled for each in again)
    assert [plain(choice) for choice in again[1].choices] == [plain(choice) for choice in first[0].choices]
    assert not tuned(daemon, "sgd", ranks=3)[0].is_recalled
    assert not tuned(daemon, "sgd", sizes=[999])[0].is_recalled
    assert not tuned(daemon, "sgd", on_shards=False)[0].is_recalled
    assert len(list(cache.iterdir())) == 4
    assert file.exists()


@pytest.mark.parametrize("content", [b"", b"{", b'{"ms": 1}', b"\xff\xfe", b"null"])
def test_a_cache_that_is_broken_costs_a_warning(
    daemon: Daemon, cache: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    tuned(daemon, "sgd")
    [file] = cache.iterdir()
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING, "omnireduce"):
        assert not tuned(daemon, "sgd")[0].is_recalled
    assert f"{file}: not used: " in caplog.text
    assert tuned(daemon, "sgd")[0].is_recalled  # it has been written anew


def test_the_timings_of_another_case_are_not_used(
    daemon: Daemon, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tuned(daemon, "sgd")
    [file] = cache.iterdir()
    timings = json.loads(file.read_text())
    for change in ({"ms": [[1.0]]}, {"ms": [[None] * 4]}, {"case": timings["case"] | {"version": "9"}}):
        file.write_text(json.dumps(timings | change))
        with caplog.at_level(logging.WARNING, "omnireduce"):
            assert not tuned(daemon, "sgd")[0].is_recalled
        assert "it has the timings of another case" in caplog.text
        caplog.clear()


def test_a_cache_that_cannot_be_written_costs_a_warning(
    daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "omnireduce").write_text("a file")
    with caplog.at_level(logging.WARNING, "omnireduce"):
        assert len(tuned(daemon, "sgd")[0].choices) == 1
    assert "what was measured is not kept" in caplog.text


def test_a_user_without_a_home_measures_each_time(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container that runs as a user whom nothing knows."""
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # KeyError, as of an unknown user
    with caplog.at_level(logging.WARNING, "omnireduce"):
        assert not tuned(daemon, "sgd")[0].is_recalled
    assert "what was measured is not kept: this user has no home folder: set OMNIREDUCE_CACHE" in caplog.text


N = Variable(Int32, "N")


def momentum() -> Pipeline:
    g, w = Tensor(Float32, N, Local, "g"), Tensor(Float32, N, Replicated, "w")
    m, rate = Tensor(Float32, N, Replicated, "m"), Variable(Float32, "rate")
    total = AllReduce(Summation, g)
    m1 = Update(m, 0.5 * m + total)
    w1 = Update(w, w - rate * m1)
    return Pipeline("momentum", [g, w, m, rate], [w1, m1])


def test_schedules_follow_from_a_pipeline(daemon: Daemon) -> None:
    """With their results: those of the pipeline as it was written."""
    pipeline = momentum()
    result = derived(pipeline)
    assert list(result) == ["as-written", "rs-c-ag", "fuse-rs-c-ag"]
    [m] = [each for each in result["fuse-rs-c-ag"].inputs if each.name == "m"]
    assert m.type.layout is Sliced
    labels = [candidate.label for candidate in candidates(pipeline)]
    assert labels == ["as-written", "rs-c-ag", "fuse-rs-c-ag", "fuse-rs-c-ag, on shards"]
    values: dict[str, Any] = {"g": [np.full(5, rank, np.float32) for rank in range(2)], "w": np.ones(5, np.float32)}
    whole, rate = np.ones(5, np.float32), {"rate": 0.5}
    expected = pipeline.interpret({**values, "m": whole, **rate}, 2)["w1"]
    for name in ("rs-c-ag", "fuse-rs-c-ag"):
        cut = result[name].interpret({**values, "m": [whole[:3], whole[3:]], **rate}, 2)["w1"]
        np.testing.assert_array_equal(cut, expected)
    assert set(tuned(daemon, pipeline)[0].choices[0].ms) == set(labels)


def test_a_product_is_overlapped_where_that_is_legal() -> None:
    x, y = Tensor(Float32, (N, 4), Sliced_2, "x"), Tensor(Float32, (4, N), Sliced, "y")
    product = MatMul(x, y)
    total = AllReduce(Summation, product)
    result = derived(Pipeline("product", [x, y], [total]))
    assert list(result) == ["as-written", "ol"]


def test_values_of_ones_own(daemon: Daemon) -> None:
    """They are asked for of every way and size."""
    calls: list[tuple[str, int]] = []

    def values(pipeline: Pipeline, comm: Communicator, sizes: Mapping[str, int]) -> dict[str, Any]:
        if comm.rank == 0:
            calls.append((str(pipeline), sizes["N"]))
        return {"g": np.ones(sizes["N"], np.float32), "w": np.ones(sizes["N"], np.float32), "lr": 0.5}

    tuned(daemon, {"only": schedules("sgd")["ar-c"]}, sizes=[10, 20], values=values, on_shards=False)
    assert [size for _, size in calls] == [10, 20]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"program": "sdg"}, "program 'sdg': expected one of sgd"),
        ({"program": ["sgd"]}, "got list; expected a program's name, a Pipeline, or several by name"),
        ({"program": {}}, "no schedules: expected one at least"),
        ({"program": 5}, "got int; expected a program's name, a Pipeline, or several by name"),
        ({"sizes": []}, "sizes is []: expected a list"),
        ({"sizes": [0]}, "size 0: expected a number of elements"),
        ({"sizes": [{"M": 3}]}, "sizes {'M': 3}: expected those of N"),
        ({"turns": 0}, "turns is 0: expected an int from 1 on"),
        ({"sizes": {"N": 3}}, "sizes is {'N': 3}: expected a list"),
        ({"sizes": ["N"]}, "size 'N': expected a number of elements"),
        ({"sizes": [{"N": 0}]}, "N is 0: expected a size, an int from 1 on"),
        ({"program": "model-parallel", "chunks": [1]}, "chunks is [1]: expected a list of ints from 2 to 1024"),
        ({"program": "model-parallel", "chunks": 4}, "chunks is 4: expected a list of ints from 2 to 1024"),
        ({"program": "model-parallel", "chunks": []}, "chunks is []: expected a list of ints from 2 to 1024"),
    ],
)
def test_what_cannot_be_tuned(daemon: Daemon, options: dict[str, Any], message: str) -> None:
    program = options.pop("program", "sgd")
    with pytest.raises(UsageError) as raised:
        tuned(daemon, program, ranks=1, **options)
    assert message in str(raised.value)
