"""Programs on real ranks: all schedules of all programs, what runs promise, and what they refuse."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_cluster import WAIT_S, Daemon, configured, eventually, run_job
from pictured import Timeline
from random_programs import cut

from omnireduce import AbortedError, Communicator, RefusedError, UsageError
from omnireduce.core.dtypes import Array
from omnireduce.programs import (
    AllGather,
    AllReduce,
    Bool,
    Broadcast,
    Cast,
    Float16,
    Float32,
    Int32,
    Int64,
    Local,
    MatMul,
    Maximum,
    Norm,
    Pipeline,
    ReduceScatter,
    Replicated,
    Send,
    Sliced,
    Sliced_2,
    Summation,
    Tensor,
    Update,
    Variable,
)
from omnireduce.programs.communication import Recv
from omnireduce.programs.library import schedules
from omnireduce.programs.rank_groups import resources_of

RANKS, SIZE, STEPS = 3, 1000, 3
N = Variable(Int32, "N")
g, w, m = (Tensor(Float32, N, each, name) for each, name in ((Local, "g"), (Replicated, "w"), (Replicated, "m")))


def gradient(rank: int, step: int) -> Array:
    return np.random.default_rng([rank, step]).standard_normal(SIZE).astype(np.float32)


def part_of_rank(pipeline: Pipeline, name: str, comm: Communicator, whole: Array) -> Array:
    tensor = next(each for each in pipeline.inputs if each.name == name)
    return cut(whole, tensor.type.layout, comm.size)[comm.rank] if tensor.type.layout.is_sliced else whole.copy()


def train(pipeline: Pipeline, comm: Communicator) -> Array:
    """The weights after some steps, in place."""
    names = {each.name for each in pipeline.inputs}
    values: dict[str, Any] = {"lr": 0.1, "w": np.linspace(-1, 1, SIZE, dtype=np.float32)}
    values |= {name: part_of_rank(pipeline, name, comm, np.zeros(SIZE, np.float32)) for name in names & {"m", "v"}}
    kept = values["w"]
    for step in range(1, STEPS + 1):
        values |= {"g": gradient(comm.rank, step)} | ({"t": step} if "t" in names else {})
        result = pipeline.run(comm, values)
        assert result["w1"] is kept
    return kept


def interpreted(pipeline: Pipeline) -> Array:
    names = {each.name for each in pipeline.inputs}
    values: dict[str, Any] = {"lr": 0.1, "w": np.linspace(-1, 1, SIZE, dtype=np.float32)}
    values |= {name: np.zeros(SIZE, np.float32) for name in names & {"m", "v"}}
    for step in range(1, STEPS + 1):
        values |= {"g": [gradient(rank, step) for rank in range(RANKS)]} | ({"t": step} if "t" in names else {})
        outcome = pipeline.interpret(values, RANKS)
        values |= {name: outcome[f"{name}1"][0] for name in names & {"w", "m", "v"}}
    result: Array = values["w"]
    return result


@pytest.mark.parametrize("name", ["sgd", "adam", "lamb"])
def test_optimizers_do_on_ranks_what_they_mean(daemon: Daemon, name: str) -> None:
    """With 1000 elements for three ranks: parts differ in size. SGD and Adam to the last bit."""
    expected = interpreted(schedules(name)["ar-c"])
    results = run_job(
        configured(daemon.addresses),
        RANKS,
        lambda comm: [train(schedule, comm) for schedule in schedules(name).values()],
    )
    for weights in (each for of_rank in results for each in of_rank):
        if name == "lamb":  # its norms are added up in another order
            np.testing.assert_allclose(weights, expected, rtol=1e-6, atol=1e-7)
        else:
            np.testing.assert_array_equal(weights, expected)


def test_a_layer_does_on_ranks_what_it_means(daemon: Daemon) -> None:
    rng = np.random.default_rng(1)
    shapes = {"x": (50, 40), "weight": (40, 30), "bias": (30,), "residual": (50, 30)}
    whole = {name: rng.integers(-4, 5, shape).astype(np.float32) for name, shape in shapes.items()}
    [expected] = schedules("model-parallel")["mm-ar-c"].interpret(
        {**whole, "x": [whole["x"]], "weight": [whole["weight"]], "K": 40, "t": 1}, 1
    )["out"]

    def run(comm: Communicator) -> list[Array]:
        results = []
        for schedule in schedules("model-parallel").values():
            values = {name: part_of_rank(schedule, name, comm, array) for name, array in whole.items()}
            results.append(schedule.run(comm, {**values, "K": 40, "t": 1})["out"])
        return results

    for result in run_job(configured(daemon.addresses), RANKS, run):
        assert len(result) == 3
        for each in result:
            np.testing.assert_array_equal(each, expected)


def test_groups_of_ranks_send_to_one_another(daemon: Daemon) -> None:
    """Two groups of two. The second one gets the result; each rank sends all of the sum, or its part."""
    rng = np.random.default_rng(1)
    partial = [rng.integers(-4, 5, (400, 30)).astype(np.float32) for _ in range(2)]
    bias, residual = np.arange(30, dtype=np.float32), np.ones((400, 30), np.float32)
    expected = schedules("pipeline-parallel")["ar-p2p-c"].interpret(
        {"partial": partial, "bias": bias, "residual": residual, "t": 1}, 2
    )["out"][0]

    def run(comm: Communicator) -> tuple[list[dict[str, Array]], list[int]]:
        results, sent = [], [0]
        for schedule in schedules("pipeline-parallel").values():
            if comm.rank < 2:
                values: dict[str, Any] = {"partial": partial[comm.rank]}
            else:
                values = {"bias": bias, "residual": residual}
            results.append(schedule.run(comm, {**values, "t": 1}))
            sent.append(resources_of(comm).pair(comm, 2, 0, 1).statistics().sent_bytes)
        return results, np.diff(sent).tolist()

    # messages, not memory that ranks share: only those are counted as they are
    outcomes = run_job(configured(daemon.addresses, "transport.host_exchange=off"), 4, run)
    for rank, (results, (whole, part)) in enumerate(outcomes):
        assert [sorted(result) for result in results] == [["out"] * (rank >= 2)] * 2
        for result in results:
            if rank >= 2:
                np.testing.assert_array_equal(result["out"], expected)
        if rank < 2:
            assert partial[0].nbytes < whole < 1.2 * partial[0].nbytes
            assert 0.4 < part / whole < 0.6


def test_groups_that_send_both_ways_do_not_wait_for_one_another(daemon: Daemon) -> None:
    near, far = Tensor(Float32, N, Local, "near"), Tensor(Float32, N, Local, "far", group=1)
    there, back = Send(near, to=1), Send(far, to=0)
    first, second = Recv(there) + far, Recv(back) - near
    pipeline = Pipeline("both", [near, far], [first, second])

    def run(comm: Communicator) -> dict[str, Array]:
        array = np.full(5, comm.rank + 1, np.float32)
        return pipeline.run(comm, {"far" if comm.rank else "near": array})

    one, other = run_job(configured(daemon.addresses), 2, run)
    np.testing.assert_array_equal(one["second"], [1] * 5)
    np.testing.assert_array_equal(other["first"], [3] * 5)


def test_a_rank_that_refuses_the_first_run_is_named_to_the_rank_that_it_would_send_to(daemon: Daemon) -> None:
    """They have no communicator yet. At once, not after `cluster.join_timeout_s`, and the next run is sound."""
    near, far = Tensor(Float32, N, Local, "near"), Tensor(Float32, N, Local, "far", group=1)
    there, back = Send(near, to=1), Send(far, to=0)
    pipeline = Pipeline("both", [near, far], [Recv(there) + far, Recv(back) - near])

    def run(comm: Communicator) -> str:
        name = "far" if comm.rank else "near"
        with pytest.raises(RefusedError if comm.rank else UsageError) as caught:
            pipeline.run(comm, {name: np.ones(5, np.float32 if comm.rank else np.int64)})
        pipeline.run(comm, {name: np.ones(5, np.float32)})
        return str(caught.value)

    config = configured(daemon.addresses, f"cluster.join_timeout_s={100 * WAIT_S}")
    own, others = run_job(config, 2, run)
    assert "cannot start: rank 0 (host " in others
    assert others.endswith(f"has refused: {own}")


def test_what_is_sent_once_may_be_received_twice(daemon: Daemon) -> None:
    near, far = Tensor(Float32, N, Local, "near"), Tensor(Float32, N, Local, "far", group=1)
    sent = Send(near, to=1)
    first, second = Recv(sent) + far, Recv(sent) - far
    pipeline = Pipeline("twice", [near, far], [first, second])

    def run(comm: Communicator) -> dict[str, Array]:
        array = np.full(5, comm.rank + 1, np.float32)
        return pipeline.run(comm, {"far" if comm.rank else "near": array})

    _, result = run_job(configured(daemon.addresses), 2, run)
    np.testing.assert_array_equal(result["first"], [3] * 5)
    np.testing.assert_array_equal(result["second"], [-1] * 5)


def test_a_later_run_leaves_the_results_of_an_earlier_one_alone(daemon: Daemon) -> None:
    """The next run uses the arrays of intermediate values again, but no array that was returned."""
    lr, u = Variable(Float32, "lr"), Tensor(Float32, N, Replicated, "u")
    total = AllReduce(Summation, g)
    doubled = total * 2
    kept = doubled + lr
    w1, u1 = Update(w, w - total), Update(u, doubled)
    pipeline = Pipeline("later", [g, w, u, lr], [total, kept, w1, u1]).fuse([doubled, kept, w1, u1])

    def run(comm: Communicator) -> None:
        arrays = {name: np.zeros(5, np.float32) for name in ("w", "u")}
        first, second = (
            pipeline.run(comm, {**arrays, "g": np.full(5, step, np.float32), "lr": 0.5}) for step in (1.0, 10.0)
        )
        for outputs, step in ((first, 1), (second, 10)):
            np.testing.assert_array_equal(outputs["total"], [2 * step] * 5)
            np.testing.assert_array_equal(outputs["kept"], [4 * step + 0.5] * 5)
        np.testing.assert_array_equal(arrays["w"], [-22] * 5)
        np.testing.assert_array_equal(arrays["u"], [40] * 5)
        longer = {name: np.zeros(7, np.float32) for name in ("g", "w", "u")}
        np.testing.assert_array_equal(pipeline.run(comm, {**longer, "lr": 0.5})["kept"], [0.5] * 7)

    run_job(configured(daemon.addresses), 2, run)


def test_values_of_all_kinds_travel(daemon: Daemon) -> None:
    """Values of 16 bits, bools, numbers without a dimension, and slices of unequal size along the last dimension."""
    x = Tensor(Float16, (N, 7), Local, "x")
    total, largest = AllReduce(Summation, x), AllReduce(Maximum, Norm(x))
    positive = Broadcast(x > 0, root=1)
    c = Tensor(Int64, (4, 7), Sliced_2, "c")
    whole = AllGather(c)
    parts = Cast(Float32, ReduceScatter(Summation, x))
    pipeline = Pipeline("kinds", [x, c], [total, largest, positive, whole, parts])
    assert positive.type.dtype == Bool
    xs = [np.random.default_rng(rank).integers(-3, 4, (5, 7)).astype(np.float16) for rank in range(RANKS)]
    cs = cut(np.arange(28).reshape(4, 7), Sliced_2, RANKS)
    expected = pipeline.interpret({"x": xs, "c": cs}, RANKS)
    results = run_job(
        configured(daemon.addresses), RANKS, lambda comm: pipeline.run(comm, {"x": xs[comm.rank], "c": cs[comm.rank]})
    )
    for rank in range(RANKS):
        for name, arrays in expected.items():
            np.testing.assert_array_equal(results[rank][name], arrays[rank], err_msg=name)
            assert (results[rank][name].dtype, results[rank][name].shape) == (arrays[rank].dtype, arrays[rank].shape)


def test_a_pass_takes_many_pieces(daemon: Daemon) -> None:
    pipeline = schedules("adam")["ar-c"]
    size = 300_000
    rng = np.random.default_rng(1)
    arrays = {name: rng.random(size, np.float32) for name in ("g", "w", "m", "v")}
    expected = pipeline.interpret({**arrays, "g": [arrays["g"]], "lr": 0.1, "t": 2}, 1)
    given = {name: array.copy() for name, array in arrays.items()}
    run_job(configured(daemon.addresses), 1, lambda comm: pipeline.run(comm, {**given, "lr": 0.1, "t": 2}))
    for name in ("w", "m", "v"):
        np.testing.assert_array_equal(given[name], expected[f"{name}1"][0])


def test_tensors_may_change_places(daemon: Daemon) -> None:
    w1, m1 = Update(w, m), Update(m, w)
    pipeline = Pipeline("swap", [w, m], [w1, m1])
    one, other = np.zeros(3, np.float32), np.ones(3, np.float32)
    run_job(configured(daemon.addresses), 1, lambda comm: pipeline.run(comm, {"w": one, "m": other}))
    np.testing.assert_array_equal([one, other], [[1] * 3, [0] * 3])


def test_a_run_that_fails_changes_nothing(daemon: Daemon) -> None:
    m1 = Update(m, m + 1)
    w1 = Update(w, w - AllReduce(Summation, g))
    pipeline = Pipeline("p", [g, w, m], [m1, w1])

    def run(comm: Communicator) -> list[Array]:
        arrays = [np.ones(3, np.float32) for _ in range(3)]
        if comm.rank:
            with pytest.raises(AbortedError):
                comm.barrier(name="another collective")
        else:
            with pytest.raises(AbortedError):
                pipeline.run(comm, dict(zip(("g", "w", "m"), arrays, strict=True)))
        return arrays

    for arrays in run_job(configured(daemon.addresses), 2, run):
        np.testing.assert_array_equal(arrays, np.ones((3, 3)))


def momentum() -> Pipeline:
    lr = Variable(Float32, "lr")
    m1 = Update(m, 0.5 * m + AllReduce(Summation, g))
    w1 = Update(w, w - lr * m1)
    return Pipeline("momentum", [g, w, m, lr], [w1, m1])


def ones(**changed: Any) -> dict[str, Any]:
    arrays = {name: np.ones(4, np.float32) for name in ("g", "w", "m")}
    return {name: value for name, value in {**arrays, "lr": 0.5, **changed}.items() if value is not None}


def read_only() -> Array:
    array = np.ones(4, np.float32)
    array.flags.writeable = False
    return array


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "missing": (lambda: ones(m=None), r"no value for m: expected float32\[N\] Replicated"),
    "unknown": (lambda: ones(k=1), "momentum takes no 'k'; expected N, g, lr, m, w"),
    "no names": (lambda: [1, 2], "momentum got values as a list; expected a dict, by name"),
    "one array for two": (lambda: ones(w=(x := np.ones(4, np.float32)), m=x), "share memory, and the program updates"),
    "a number out of range": (lambda: ones(lr=1e300), r"lr is 1e\+300, which is out of the range of float32"),
    "a list": (lambda: ones(g=[1.0] * 4), r"g is a list; expected a numpy.ndarray, float32\[N\] Local"),
    "another type": (lambda: ones(g=np.ones(4)), r"g is an array of float64; expected float32\[N\] Local"),
    "another size": (lambda: ones(m=np.ones(5, np.float32)), "N is 5 in m, and 4 in g: expected one size"),
    "another dimension": (lambda: ones(m=np.ones((4, 1), np.float32)), r"m has the shape \[4, 1\]; expected \[4\]"),
    "a number that is none": (lambda: ones(lr="0.5"), "lr is '0.5', a str; expected a number: float32"),
    "a size that is none": (lambda: ones(N=0.5), "N is 0.5: expected a size, an int from 1 on"),
    "read-only": (lambda: ones(w=read_only()), "w is read-only, and the program updates it: pass a copy"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_values_that_do_not_fit_are_refused(daemon: Daemon, what: str) -> None:
    make, message = REFUSED[what]

    def run(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=message):
            momentum().run(comm, make())
        momentum().run(comm, ones())  # the job goes on

    run_job(configured(daemon.addresses), 1, run)


def test_parts_and_jobs_that_do_not_fit_are_refused(daemon: Daemon) -> None:
    s = Tensor(Float32, (N, 3), Sliced, "s")
    doubled = s * 2
    pipeline = Pipeline("p", [s], [doubled])
    far = Tensor(Float32, N, Local, "far", group=2)
    rooted = Broadcast(g, root=3)

    def run(comm: Communicator) -> None:
        with pytest.raises(UsageError, match="the size N follows from no whole array: give it as 'N'"):
            pipeline.run(comm, {"s": np.ones((2, 3), np.float32)})
        with pytest.raises(UsageError, match=rf"s has the shape \[4, 3\]; expected \[2, 3\], part {comm.rank} of 2 of"):
            pipeline.run(comm, {"s": np.ones((4, 3), np.float32), "N": 4})
        with pytest.raises(UsageError, match="2 ranks for 3 groups of at least 1: expected a multiple of 3"):
            Pipeline("p", [far], [far * 2]).run(comm, {})
        with pytest.raises(UsageError, match="2 ranks for 1 groups of at least 4: expected more"):
            Pipeline("p", [g], [rooted]).run(comm, {})

    run_job(configured(daemon.addresses), 2, run)


def test_a_timeline_shows_that_a_product_and_its_reduction_overlap(daemon: Daemon, tmp_path: Path) -> None:
    """Rank 1 begins when rank 0 has computed all: so what rank 0 reduces first lasts as long as its other chunks."""
    size = Variable(Int32, "H")
    x, weight = Tensor(Float32, (size, size), Sliced_2, "x"), Tensor(Float32, (size, size), Sliced, "weight")
    product = MatMul(x, weight)
    total = AllReduce(Summation, product)
    serial = Pipeline("layer", [x, weight], [total])
    rng = np.random.default_rng(1)
    xs, weights = (rng.integers(-2, 3, (200, 200)).astype(np.float32) for _ in range(2))

    def run(comm: Communicator) -> None:
        values = {"x": cut(xs, Sliced_2, 2)[comm.rank], "weight": cut(weights, Sliced, 2)[comm.rank], "H": 200}
        for name, pipeline, chunks in (("serial", serial, 1), ("overlapped", serial.overlap([product, total]), 4)):
            picture = tmp_path / f"{name}.json"
            comm.start_timeline(picture)
            if comm.rank:
                assert eventually(lambda picture=picture, chunks=chunks: computed(picture) == chunks)
            result = pipeline.run(comm, values)["total"]
            np.testing.assert_array_equal(result, xs @ weights)
            comm.stop_timeline()
            comm.barrier(name=name)

    run_job(configured(daemon.addresses), 2, run)
    assert overlapping(tmp_path / "serial.json") == 0
    assert overlapping(tmp_path / "overlapped.json") == 3


def computed(picture: Path) -> int:
    """Number of chunks that rank 0 has computed so far, from its part of the timeline."""
    events = "".join(path.read_text() for path in picture.parent.glob(f"{picture.name}.parts/*-rank0.events"))
    return len(re.findall(r'^\["E".*"MATMUL"', events, re.MULTILINE))


def overlapping(path: Path) -> int:
    """Number of chunks of a product that rank 0 computed while it reduced something."""
    spans = [span for (_, lane), row in Timeline(path).rows.items() if lane == "rank 0" for span in row]
    products, sums = ([span for span in spans if span.name == name] for name in ("MATMUL", "ALLREDUCE"))
    return sum(any(one.begin < other.end and other.begin < one.end for other in sums) for one in products)
