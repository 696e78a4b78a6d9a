"""Optimizers of plain NumPy, whose gradients are averaged; and what a broadcast gives them."""

from __future__ import annotations

import signal
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job

from omnireduce import Communicator, UsageError
from omnireduce.core.dtypes import Array
from omnireduce.data_parallel import ArrayAdapter, DistributedOptimizer, Loader, broadcast_parameters

SIZE = 3
Pair = namedtuple("Pair", ["weight", "bias"])


class Descent:
    """Its step takes the gradients."""

    def __init__(self, params: Any) -> None:
        self.params, self.rate, self.taken = params, 0.5, None

    def step(self, gradients: Any) -> str:
        self.taken = gradients
        return "done"


class Parameter:
    """Its gradient is an attribute."""

    def __init__(self, values: Array) -> None:
        self.data, self.grad = values, None


class Momentum:
    """Its step takes nothing, and it keeps its state by parameter."""

    def __init__(self, params: list[Parameter], rate: float) -> None:
        self.params, self.rate, self.steps = params, rate, 0
        self.velocity: dict[Any, Array] = {}
        self.by_id: dict[int, list[Any]] = {}
        self.callback = lambda: None

    def step(self) -> None:
        self.steps += 1
        for param in self.params:
            if param.grad is not None:
                self.velocity[param] = 0.5 * self.velocity.get(param, 0) + param.grad
                self.by_id[id(param)] = [self.steps, (None, param.grad[:1].copy())]
                param.data -= self.rate * self.velocity[param]


def on_ranks(daemon: Daemon, run: Any, size: int = SIZE) -> list[Any]:
    return run_job(configured(daemon.addresses), size, run)


def ones(*shape: int, times: float = 1.0) -> Array:
    return np.full(shape, times, np.float32)


def test_gradients_come_back_in_the_structure_of_the_parameters(daemon: Daemon) -> None:
    def run(comm: Communicator) -> Any:
        params = {"layers": [Pair(ones(2, 2), ones(2)), Pair(ones(3), ones(1))], "scale": ones()}
        opt = DistributedOptimizer(Descent(params), comm=comm)
        gradients: dict[str, Any] = {"layers": [(ones(2, 2, times=comm.rank), None), (ones(3), None)]}
        if comm.rank == 1:
            gradients["scale"] = np.float32(6)  # a number of NumPy, as `sum` returns it
        assert opt.step(gradients) == "done"
        assert opt.taken["layers"][0][0] is gradients["layers"][0][0]
        return opt.taken

    for taken in on_ranks(daemon, run):
        first, second = taken["layers"]
        assert isinstance(first, Pair)
        assert (first.weight.tolist(), first.bias) == ([[1, 1], [1, 1]], None)
        assert (second.weight.tolist(), second.bias) == ([1, 1, 1], None)
        assert taken["scale"].shape == ()
        assert taken["scale"] == 2


def test_ranks_train_as_one_process_would(daemon: Daemon) -> None:
    """All numbers are small multiples of powers of two, so the sums are exact."""

    def run(comm: Communicator) -> list[bytes]:
        params = [Parameter(ones(4, times=comm.rank)), Parameter(ones(2, 3).T)]
        opt = DistributedOptimizer(Momentum(params, 0.25), comm=comm)
        broadcast_parameters(params, optimizer=opt, comm=comm)
        for step in range(4):
            params[0].grad = ones(4, times=comm.rank + 1 + step)
            params[1].grad = None if step == comm.rank else ones(2, 3, times=4.0).T  # not contiguous
            opt.step()
        assert opt.steps == 4
        return [param.data.tobytes() for param in params]

    one = [Parameter(ones(4, times=0)), Parameter(ones(2, 3).T)]
    opt = Momentum(one, 0.25)
    for step in range(4):
        one[0].grad = ones(4, times=1.5 + step)
        one[1].grad = ones(2, 3, times=2.0 if step < 2 else 4.0).T
        opt.step()
    assert on_ranks(daemon, run, 2) == [[each.data.tobytes() for each in one]] * 2


def test_ranks_count_by_their_samples(daemon: Daemon) -> None:
    """Five samples in one step: two on each of two ranks, and one on the last."""

    def run(comm: Communicator) -> float:
        loader = Loader(np.arange(5.0, dtype=np.float32), 5, rank=comm.rank, size=comm.size, shuffle=False)
        opt = DistributedOptimizer(Descent(ones(1)), loader=loader, comm=comm)
        for batch in loader:
            opt.step(np.array([batch.mean()], np.float32))
        return float(opt.taken[0])

    assert on_ranks(daemon, run) == pytest.approx([2.0] * SIZE)


def test_a_gradient_of_two_parameters_is_counted_once(daemon: Daemon) -> None:
    """Two ranks have two samples, and one has one: they count 1.2, 1.2 and 0.6 times, and all together three times."""

    def run(comm: Communicator) -> list[float]:
        params = [Parameter(ones(3)), Parameter(ones(3))]
        loader = Loader(np.arange(5), 5, rank=comm.rank, size=comm.size, shuffle=False)
        opt = DistributedOptimizer(Momentum(params, 1.0), loader=loader, comm=comm)
        for _ in loader:
            params[0].grad = params[1].grad = ones(3, times=5.0)
            opt.average_gradients()
        return [float(param.grad[0]) for param in params]

    assert on_ranks(daemon, run) == [pytest.approx([5.0, 5.0])] * SIZE


def test_a_broadcast_gives_all_that_the_root_has(daemon: Daemon) -> None:
    """The others have not made a step, or another number of steps."""

    def run(comm: Communicator) -> Any:
        params = [Parameter(ones(3, times=comm.rank)), Parameter(ones(2, times=comm.rank))]
        opt = Momentum(params, rate=1.0 / (1 + comm.rank))
        kept, callback = opt.velocity, opt.callback
        for _ in range(comm.rank):
            params[1].grad = ones(2)
            opt.step()
        statistics = Parameter(np.array([comm.rank, -0.0, np.nan]))
        model = SimpleNamespace(parameters=lambda: params, buffers=lambda: iter([statistics]))
        broadcast_parameters(model, root_rank=2, optimizer=opt, comm=comm)
        assert (opt.params is params, opt.velocity is kept, opt.callback is callback) == (True, True, True)
        [(key, [steps, (nothing, values)])] = opt.by_id.items()
        assert (key, nothing) == (id(params[1]), None)
        velocity = {params.index(name): values.tolist() for name, values in opt.velocity.items()}
        data = [param.data.tobytes() for param in (*params, statistics)]
        return data, opt.rate, opt.steps, velocity, steps, values.tolist()

    results = on_ranks(daemon, run)
    assert [result[1:] for result in results] == [(1 / 3, 2, {1: [1.5, 1.5]}, 2, [1.0])] * SIZE
    assert results[0] == results[1] == results[2]


def test_what_is_no_plain_data_of_a_state_stays(daemon: Daemon) -> None:
    """Numbers of NumPy and arrays of bfloat16 travel."""

    def run(comm: Communicator) -> Any:
        opt, mark = Descent(ones(2)), object()
        opt.scale, opt.offset = np.float16(comm.rank), np.int8(comm.rank)
        opt.short = ones(2, times=comm.rank).astype("bfloat16")
        opt.kind = signal.Signals(comm.rank + 1)
        opt.of_objects, opt.by_mark = np.array([opt, comm.rank]), {(mark, 1): comm.rank}
        opt.by_pair, opt.text = {("a", 1): comm.rank}, np.str_(comm.rank)
        broadcast_parameters(opt.params, root_rank=1, optimizer=opt, comm=comm)
        assert (type(opt.scale), type(opt.offset), opt.short.dtype) == (np.float16, np.int8, "bfloat16")
        assert (opt.kind, opt.of_objects[1], opt.by_mark) == (comm.rank + 1, comm.rank, {(mark, 1): comm.rank})
        assert (type(opt.text), opt.text) == (np.str_, str(comm.rank))
        return opt.scale, opt.offset, opt.short.tolist(), opt.by_pair

    assert on_ranks(daemon, run) == [(1, 1, [1, 1], {("a", 1): 1})] * SIZE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": 0.25}, "'rate' differs between ranks: rank 0 has 0.5, rank 2 has 0.25; expected the same on all"),
        ({"betas": (0.9, 0.99)}, "'betas' differs between ranks: rank 0 has nothing, rank 2 has (0.9, 0.99); expected"),
    ],
)
def test_optimizers_with_other_numbers_are_told_before_weights_drift_apart(
    daemon: Daemon, change: dict[str, Any], message: str
) -> None:
    """Their numbers count as they are at the first step. What else they hold may differ."""

    def run(comm: Communicator) -> str:
        opt = Descent([np.ones(3, np.float32)])
        distributed = DistributedOptimizer(opt, comm=comm)
        vars(opt).update({"seconds": float(comm.rank)}, **(change if comm.rank == 2 else {}))
        with pytest.raises(UsageError) as raised:
            distributed.step([np.ones(3, np.float32)])
        assert opt.taken is None
        vars(opt).pop("betas", None)
        opt.rate = 1 if comm.rank == 2 else 1.0
        distributed.step([np.ones(3, np.float32)])
        return str(raised.value)

    assert all(each.startswith(message) for each in on_ranks(daemon, run))


def test_models_that_differ_are_told_on_all_ranks(daemon: Daemon) -> None:
    def run(comm: Communicator) -> list[str]:
        results = []
        for model, root, optimizer in (
            ({"w": ones(2), **({"b": ones(1)} if comm.rank else {})}, 0, None),
            ({"w": ones(2) if comm.rank != 1 else np.ones(2)}, 0, None),
            (ones(2), int(comm.rank > 1), None),
            (ones(2), 0, Descent(ones(2)) if comm.rank else None),
            ([], 0, None),
            (ones(2), -1, None),
            (np.array([None]), 0, None),
        ):
            with pytest.raises(UsageError) as raised:
                broadcast_parameters(model, root, optimizer=optimizer, comm=comm)
            results.append(str(raised.value))
        return results

    expected = [
        "'['b']' differs between ranks: rank 0 has nothing, rank 1 has float32[1]; expected the same on all ranks",
        "'['w']' differs between ranks: rank 0 has float32[2], rank 1 has float64[2]; expected the same on all ranks",
        "'root_rank' differs between ranks: rank 0 has 0, rank 2 has 1; expected the same on all ranks",
        "'optimizer' differs between ranks: rank 0 has none, rank 1 has Descent; expected the same on all ranks",
        "the model, a list, has no parameters: expected one or more",
        "root_rank -1: expected 0 to 2",
        "an array of objects cannot be broadcast: expected arrays of numbers",
    ]
    assert on_ranks(daemon, run) == [expected] * SIZE


@pytest.mark.parametrize(
    ("opt", "message"),
    [
        (ones(2), r"opt is an ndarray, which has no step\(\): expected an optimizer"),
        (SimpleNamespace(step=lambda: None), "the optimizer has no parameters: expected one or more"),
        (Descent([]), "the optimizer has no parameters"),
        (Descent(["w"]), r"\[0\] is a str: expected arrays, lists, tuples or dicts of them"),
    ],
)
def test_what_is_no_optimizer(daemon: Daemon, opt: Any, message: str) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=message):
            DistributedOptimizer(opt, comm=comm)

    on_ranks(daemon, run, 1)


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ([ones(2)], r"gradients is a list of 1: expected a list of 2, as the parameters are"),
        ({"w": ones(2)}, r"gradients is a dict with the keys \['w'\]: expected a list of 2"),
        (
            [{"v": ones(2)}, None],
            r"gradients\[0\] is a dict with the keys \['v'\]: expected a dict with the keys \['w'\]",
        ),
        ([{"w": ones(3)}, None], r"the gradient of '\[0\]\['w'\]' is \[3\]: expected \[2\]"),
        ([{"w": 1.5}, None], r"the gradient of '\[0\]\['w'\]' is a float: expected a tensor or None"),
    ],
)
def test_gradients_that_do_not_fit(daemon: Daemon, gradients: Any, message: str) -> None:
    def run(comm: Communicator) -> None:
        opt = DistributedOptimizer(Descent([{"w": ones(2)}, ones(1)]), comm=comm)
        with pytest.raises(UsageError, match=message):
            opt.step(gradients)

    on_ranks(daemon, run, 1)


def test_what_a_step_cannot_do(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        opt = DistributedOptimizer(Descent(ones(2)), comm=comm)
        with pytest.raises(UsageError, match=r"'parameter' is an array, which has no gradient: expected step\(gradien"):
            opt.step()
        with pytest.raises(UsageError, match="step got 2 arguments: expected the gradients as one"):
            opt.step(ones(2), ones(2))
        with pytest.raises(UsageError, match="averages gradients already"):
            DistributedOptimizer(opt, comm=comm)
        twice = ones(2)
        with pytest.raises(UsageError, match="an array comes twice in the parameters"):
            DistributedOptimizer(Descent([twice, twice]), comm=comm).step([ones(2), ones(2)])
        with pytest.raises(AttributeError, match="nothing"):
            opt.nothing  # noqa: B018  it is looked for in the optimizer inside
        with pytest.raises(UsageError, match="optimizer is an object: expected an object that keeps its state"):
            broadcast_parameters(ones(2), optimizer=object(), comm=comm)

    on_ranks(daemon, run, 1)


def test_an_array_that_is_read_only_takes_no_values() -> None:
    values = ones(2)
    values.flags.writeable = False
    with pytest.raises(UsageError, match=r"an array float32\[2\] is read-only: expected parameters to write"):
        ArrayAdapter().write(values, ones(2))


def test_before_init_there_is_no_job() -> None:
    for call in (lambda: DistributedOptimizer(Descent(ones(2))), lambda: broadcast_parameters(ones(2))):
        with pytest.raises(UsageError, match="omnireduce is not initialised; call omnireduce"):
            call()
