"""Fused all-reduces on real shards, against the interpreter of the language."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job

from omnireduce import Communicator, UsageError
from omnireduce.core.dtypes import Array
from omnireduce.programs import (
    AllReduce,
    Dropout,
    Float32,
    Int32,
    Ite,
    Local,
    Maximum,
    Norm,
    Pipeline,
    ReduceTensor,
    Replicated,
    Sqrt,
    Summation,
    Tensor,
    Update,
    Variable,
)
from omnireduce.programs.layouts import bounds
from omnireduce.programs.library import schedules
from omnireduce.programs.lowering import lowered
from omnireduce.programs.shard_runner import runs_on_shards
from omnireduce.programs.stages import in_order

SIZE, STEPS, N = 3, 4, 100_001
KEPT = {"sgd": [], "adam": ["m", "v"], "lamb": ["m", "v"]}


def gradient(rank: int, step: int) -> Array:
    """Whole numbers, and zeros in half of the blocks: the sums of ranks are exact in any order."""
    rng = np.random.default_rng([rank, step])
    x = rng.integers(-4, 5, N).astype(np.float32)
    return x * np.repeat(rng.random(-(-N // 256)) < 0.5, 256)[:N]


def numbers(name: str, step: int) -> dict[str, Any]:
    return {"lr": 0.01} if name == "sgd" else {"lr": 0.01, "t": step + 1}


def interpreted(name: str) -> dict[str, Array]:
    """Parameters after all steps of a schedule, by a single process."""
    pipeline = schedules(name)["ar-c"]
    kept = {"w": np.linspace(-1, 1, N, dtype=np.float32)} | {each: np.zeros(N, np.float32) for each in KEPT[name]}
    for step in range(STEPS):
        each = {"g": [gradient(rank, step) for rank in range(SIZE)]}
        values = {**each, **{key: [x] * SIZE for key, x in kept.items()}, **numbers(name, step)}
        result = pipeline.interpret(values, SIZE)
        kept = {key: result[f"{key}1"][0] for key in kept}
    return kept


@pytest.mark.parametrize("name", ["sgd", "adam", "lamb"])
def test_optimizers_run_on_shards(daemon: Daemon, name: str) -> None:
    """Bit for bit where no norms are; those of shards are sums in another order."""
    pipeline = schedules(name)["fuse-rs-c-ag"]

    def run(comm: Communicator) -> dict[str, Array]:
        start, stop = bounds(N, comm.rank, comm.size)
        w = np.linspace(-1, 1, N, dtype=np.float32)
        state = {each: np.zeros(stop - start, np.float32) for each in KEPT[name]}
        with pipeline.on_shards(comm, {"w": w, **state, "N": N}) as running:
            for step in range(STEPS):
                result = running.run({"g": gradient(comm.rank, step), **numbers(name, step)})
                assert result["w1"] is w
            return {"w": w, **{each: running.tensor(each) for each in KEPT[name]}}

    expected = interpreted(name)
    for rank, result in enumerate(run_job(configured(daemon.addresses), SIZE, run)):
        for key, wanted in expected.items():
            part = wanted if key == "w" else wanted[slice(*bounds(N, rank, SIZE))]
            if name == "lamb":
                np.testing.assert_allclose(result[key], part, rtol=1e-6, atol=1e-7)
            else:
                np.testing.assert_array_equal(result[key], part)


def written(formula: Any) -> Pipeline:
    """A program with two tensors on the shards, which `formula(g, w, m, a)` updates."""
    size, a = Variable(Int32, "N"), Variable(Float32, "a")
    g = Tensor(Float32, size, Local, "g")
    w, m = (Tensor(Float32, size, Replicated, name) for name in ("w", "m"))
    g1 = AllReduce(Summation, g)
    weights, kept = formula(g1, w, m, a)
    w1, m1 = Update(w, weights), Update(m, kept)
    used = [g, w, m, *([a] if any(a is each for each in in_order([w1, m1])) else [])]
    pipeline = Pipeline("written", used, [w1, m1]).split(g1).reorder([w1, m1], g1)
    return pipeline.as_slice([m]).fuse_into([pipeline["g1_rs"], w1, m1])


FORMULAS: dict[str, Any] = {
    "numbers on both sides": lambda g, w, m, a: ((1 - w) / 3 + 2 / (g * g + 1), a - m / (2 - g * g)),
    "the same twice": lambda g, w, m, a: (w + w * w + (g + g), (g - g) - m / (w * w + 1)),
    "a choice": lambda g, w, m, a: (Ite(g > m, w, m), Ite(g < 0.5, 1.0, w)),
    "a comparison with a number": lambda g, w, m, a: (Ite(a > g, w - g, w + g), m * g),
    "old values": lambda g, w, m, a: (m + g, g * 0.5 + w),
    "a long way": lambda g, w, m, a: (Sqrt((g - w) * (g + w) * (g + m) + 900) - (w - m) * (m - g), m * a + g * a),
    "mixed": lambda g, w, m, a: (w * a + g * 0.25, m * 0.5 + g * 2),
    "nothing of something": lambda g, w, m, a: (w + (0.5 * g - 0.5 * g), m + ((half := 0.5 * g) - half)),
    "from a number": lambda g, w, m, a: (w - a * g, a * m + g),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_give_the_same_bits(daemon: Daemon, name: str) -> None:
    pipeline = written(FORMULAS[name])
    uses_a = any(each.name == "a" for each in pipeline.inputs)

    def values(rank: int, step: int) -> dict[str, Any]:
        return {"g": gradient(rank, step)} | ({"a": 0.75} if uses_a else {})

    def run(comm: Communicator) -> tuple[Array, Array]:
        start, stop = bounds(N, comm.rank, comm.size)
        w, m = np.linspace(0, 1, N, dtype=np.float32), np.linspace(-2, 3, N, dtype=np.float32)
        with pipeline.on_shards(comm, {"w": w, "m": m[start:stop].copy(), "N": N}) as running:
            for step in range(2):
                running.run(values(comm.rank, step))
            return w, running.tensor("m")

    w, m = np.linspace(0, 1, N, dtype=np.float32), np.linspace(-2, 3, N, dtype=np.float32)
    for step in range(2):
        parts = [m[slice(*bounds(N, rank, SIZE))] for rank in range(SIZE)]
        given = {"g": [gradient(rank, step) for rank in range(SIZE)], "w": [w] * SIZE, "m": parts, "N": N}
        given |= {"a": 0.75} if uses_a else {}
        result = pipeline.interpret(given, SIZE)
        w, m = result["w1"][0], np.concatenate(result["m1"])
    for rank, (weights, kept) in enumerate(run_job(configured(daemon.addresses), SIZE, run)):
        np.testing.assert_array_equal(weights, w)
        np.testing.assert_array_equal(kept, m[slice(*bounds(N, rank, SIZE))])


def test_numbers_of_whole_tensors_come_back(daemon: Daemon) -> None:
    """A sum, and a norm that the update uses: the gradient is clipped to a length."""
    size = Variable(Int32, "N")
    g, w = Tensor(Float32, size, Local, "g"), Tensor(Float32, size, Replicated, "w")
    g1 = AllReduce(Summation, g)
    length, total = Norm(g1), ReduceTensor(Summation, g1)
    clipped = g1 * Ite(length > 2.0, 2.0 / length, 1.0)
    w1 = Update(w, w - clipped)
    pipeline = Pipeline("clipped", [g, w], [w1, length, total]).split(g1).reorder([w1, length, total], g1)
    pipeline = pipeline.fuse_into(["g1_rs", w1, length, total])

    def run(comm: Communicator) -> tuple[Array, float, float]:
        w = np.zeros(N, np.float32)
        with pipeline.on_shards(comm, {"w": w}) as running:
            result = running.run({"g": gradient(comm.rank, 0)})
            return w, float(result["length"]), float(result["total"])

    whole = np.sum([gradient(rank, 0) for rank in range(SIZE)], axis=0, dtype=np.float64)
    for w_found, length_found, total_found in run_job(configured(daemon.addresses), SIZE, run):
        assert total_found == whole.sum()
        assert length_found == pytest.approx(np.linalg.norm(whole), rel=1e-6)
        np.testing.assert_allclose(w_found, -whole * 2 / np.linalg.norm(whole), rtol=1e-5, atol=1e-7)


def test_the_sum_itself_may_be_kept(daemon: Daemon) -> None:
    """Beside a norm, so that it is needed in a later exchange, too."""
    size = Variable(Int32, "N")
    g = Tensor(Float32, size, Local, "g")
    w, m = (Tensor(Float32, size, Replicated, name) for name in ("w", "m"))
    g1 = AllReduce(Summation, g)
    w1, m1 = Update(w, (w - g1) / (1.0 + Norm(g1))), Update(m, g1)
    pipeline = Pipeline("kept sum", [g, w, m], [w1, m1]).split(g1).reorder([w1, m1], g1)
    pipeline = pipeline.as_slice([m]).fuse_into(["g1_rs", w1, m1])

    def run(comm: Communicator) -> tuple[Array, Array]:
        start, stop = bounds(N, comm.rank, comm.size)
        w, m = np.zeros(N, np.float32), np.zeros(stop - start, np.float32)
        with pipeline.on_shards(comm, {"w": w, "m": m, "N": N}) as running:
            with pytest.raises(UsageError, match="there is a group 'kept-sum' already: give another name"):
                pipeline.on_shards(comm, {"w": w, "m": m, "N": N})
            running.run({"g": gradient(comm.rank, 0)})
            return w, running.tensor("m")

    whole = np.sum([gradient(rank, 0) for rank in range(SIZE)], axis=0, dtype=np.float64)
    for rank, (weights, kept) in enumerate(run_job(configured(daemon.addresses), SIZE, run)):
        np.testing.assert_array_equal(kept, whole[slice(*bounds(N, rank, SIZE))])
        np.testing.assert_allclose(weights, -whole / (1 + np.linalg.norm(whole)), rtol=1e-6)


def test_a_program_that_keeps_nothing(daemon: Daemon) -> None:
    size = Variable(Int32, "N")
    g = Tensor(Float32, size, Local, "g")
    g1 = AllReduce(Summation, g)
    doubled = g1 + g1
    pipeline = Pipeline("doubled", [g], [doubled]).split(g1).reorder([doubled], g1)
    pipeline = pipeline.fuse_into(["g1_rs", doubled, "doubled_ag"])

    def run(comm: Communicator) -> Array:
        with pipeline.on_shards(comm, {"N": N}) as running:
            [result] = running.run({"g": gradient(comm.rank, 0)}).values()
            return result

    whole = np.sum([gradient(rank, 0) for rank in range(SIZE)], axis=0, dtype=np.float64)
    for result in run_job(configured(daemon.addresses), SIZE, run):
        np.testing.assert_array_equal(result, 2 * whole)


def test_lazy_leaves_blocks_of_zeros_as_they_are(daemon: Daemon) -> None:
    pipeline = written(lambda g, w, m, a: (w + g + 1.0, m + g + 1.0))

    def run(comm: Communicator) -> tuple[Array, Array]:
        w, m = np.zeros(N, np.float32), np.zeros(N, np.float32)
        with pipeline.on_shards(comm, {"w": w, "m": m, "N": N}, lazy=True) as running:
            running.run({"g": gradient(5, 0)})
            return w, running.tensor("m")

    g = gradient(5, 0)
    there = np.repeat(np.add.reduceat(g != 0, range(0, N, 256)) > 0, 256)[:N]
    [(weights, kept)] = run_job(configured(daemon.addresses), 1, run)
    np.testing.assert_array_equal(weights, np.where(there, g + 1, 0))
    np.testing.assert_array_equal(kept, weights)


def test_programs_that_shards_cannot_run_are_told(daemon: Daemon) -> None:
    size, a = Variable(Int32, "N"), Variable(Float32, "a")
    g, w = Tensor(Float32, size, Local, "g"), Tensor(Float32, size, Replicated, "w")

    def fused(value: Any, reduction: Any = Summation) -> Pipeline:
        g1 = AllReduce(reduction, g)
        w1 = Update(w, value(g1))
        pipeline = Pipeline("wrong", [g, w], [w1]).split(g1).reorder([w1], g1)
        return pipeline.fuse_into(["g1_rs", w1])

    def run(comm: Communicator) -> None:
        arrays = {"w": np.zeros(1000, np.float32)}
        g1 = AllReduce(Summation, g)
        w1 = Update(w, w - a * g1)
        plain = Pipeline("plain", [g, w, a], [w1])
        for pipeline, message in (
            (plain, "has 0 fused all-reduces; expected one: fuse_into makes it"),
            (fused(lambda g1: w + Dropout(g1, 0.5, seed=1)), "shards have no instruction for it"),
            (fused(lambda g1: w + Ite(g1 >= 0, g1, w)), "shards have no instruction for >="),
            (fused(lambda g1: w + g1, Maximum), "does not reduce by Summation"),
        ):
            with pytest.raises(UsageError, match=message):
                pipeline.on_shards(comm, arrays)
        right = fused(lambda g1: w + g1)
        long = fused(lambda g1: functools.reduce(lambda x, n: x * (g1 + n / 32), range(20), w))
        with pytest.raises(UsageError, match="wrong needs 20 numbers in one exchange; shards take 16: make"):
            long.on_shards(comm, arrays)
        with pytest.raises(UsageError, match="wrong on shards takes no 'v'; expected N, w"):
            right.on_shards(comm, arrays | {"v": arrays["w"]})
        clipped = fused(lambda g1: w - g1 / Norm(g1))
        with pytest.raises(UsageError, match="wrong cannot be lazy: it has norms, or updates no tensor"):
            clipped.on_shards(comm, arrays, lazy=True)
        with pytest.raises(UsageError, match="no value for w"):
            right.on_shards(comm, {"N": 1000})
        with right.on_shards(comm, arrays) as running:
            with pytest.raises(UsageError, match="a run of wrong takes no 'lr'; expected g"):
                running.run({"g": np.zeros(1000, np.float32), "lr": 1.0})
            with pytest.raises(UsageError, match="a run of wrong got values as a list; expected a dict, by name"):
                running.run([1.0])  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="no value for g"):
                running.run({})
            with pytest.raises(UsageError, match="the shards keep no 'v'; they keep w"):
                running.tensor("v")

    run_job(configured(daemon.addresses), 1, run)


def test_a_number_may_come_as_an_array_and_a_result_go_to_two_tensors(daemon: Daemon) -> None:
    size = Variable(Int32, "N")
    g, rate = Tensor(Float32, size, Local, "g"), Tensor(Float32, (), Replicated, "rate")
    w, u = (Tensor(Float32, size, Replicated, name) for name in ("w", "u"))
    g1 = AllReduce(Summation, g)
    new = w - rate * g1
    w1, u1 = Update(w, new), Update(u, new)
    pipeline = Pipeline("two", [g, w, u, rate], [w1, u1]).split(g1).reorder([w1, u1], g1).fuse_into(["g1_rs", w1, u1])

    def run(comm: Communicator) -> tuple[Array, Array]:
        w, u = np.ones(1000, np.float32), np.zeros(1000, np.float32)
        with pipeline.on_shards(comm, {"w": w, "u": u}) as running:
            result = running.run({"g": np.full(1000, comm.rank, np.float32), "rate": np.array(0.5, np.float32)})
            assert result["w1"] is w
            assert result["u1"] is u
            np.testing.assert_array_equal(running.tensor("u"), w)
        return w, u

    for both in run_job(configured(daemon.addresses), SIZE, run):
        np.testing.assert_array_equal(both, np.full((2, 1000), 1 - 0.5 * sum(range(SIZE))))


SIZED, RATE = Variable(Int32, "N"), Tensor(Float32, (), Local, "rate")
G, W, OWN = (Tensor(Float32, SIZED, layout, name) for layout, name in ((Local, "g"), (Replicated, "w"), (Local, "own")))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([AllReduce(Summation, RATE) * 2], r"AllReduce\(Summation, rate\) is done outside of the fused all-reduce"),
        ([Update(RATE, RATE + 1)], r"Update\(rate, rate \+ 1\) is done outside of the fused all-reduce"),
        ([Norm(G)], r"Norm\(g\): shards add up what they have; g is not there"),
        ([Norm(RATE)], r"Norm\(rate\): shards add up what they have; rate is not there"),
        ([Norm(OWN)], "own is Local: shards keep one tensor, not one for each rank"),
    ],
)
def test_what_differs_between_ranks_is_refused(more: list[Any], message: str) -> None:
    """Beside a fused all-reduce that shards can run."""
    g1 = AllReduce(Summation, G)
    w1 = Update(W, W - g1)
    outputs = [w1, *more]
    used = [each for each in (G, W, RATE, OWN) if each in in_order(outputs)]
    pipeline = Pipeline("beside", used, outputs).split(g1).reorder([w1], g1).fuse_into(["g1_rs", w1])
    with pytest.raises(UsageError, match=message):
        lowered(pipeline)
    assert not runs_on_shards(pipeline)


@pytest.mark.parametrize("of_update", [False, True])
def test_a_number_of_the_result_is_refused(of_update: bool) -> None:
    """Shards have no place for the result itself. Random programs found that this was no UsageError."""
    size = Variable(Int32, "N")
    g, w = Tensor(Float32, size, Local, "g"), Tensor(Float32, size, Replicated, "w")
    total = AllReduce(Summation, g)
    w1 = Update(w, w - total)
    norm = Norm(w1 if of_update else total)
    outputs = [w1, norm] if of_update else [norm]
    pipeline = Pipeline("norms", [g, w][: len(outputs)], outputs).split(total)
    stages = ["total_rs", "total"]
    if of_update:
        pipeline, stages = pipeline.reorder([w1], total), ["total_rs", "w1"]
    with pytest.raises(UsageError, match="a result of the exchange: use what it is made of"):
        lowered(pipeline.fuse_into([*stages]))
