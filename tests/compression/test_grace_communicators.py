"""GRACE's steps between real ranks: the same sums in memory and by shards, even of nothing, and after a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job
from transports import BY_SHARDS

from omnireduce import AbortedError, Communicator, UsageError
from omnireduce.compression import grace, grace_from_params
from omnireduce.compression.grace.params import COMMUNICATORS, COMPRESSORS
from omnireduce.core.dtypes import Array

SIZE, RANKS, STEPS = 3000, 3, 3
PAIRS = [(name, communicator) for name, kind in COMPRESSORS.items() for communicator in kind.communicators]
NO_SUMS = ("signsgd", "signum", "terngrad")  # votes, what follows a momentum; terngrad has a test of its own
DRAWN = [("qsgd", "aggregator")]
EXCHANGES = [BY_SHARDS, "transport.host_exchange=auto"]


def gradient(rank: int, step: int, size: int = SIZE) -> Array:
    """Whole numbers, so that sums are exact."""
    return np.random.default_rng([rank, step]).integers(-1000, 1001, size).astype(np.float32)


def steps_by(communicator: str, comm: Communicator, **params: Any) -> list[Array]:
    """Results of some steps: sums, no means."""
    grc = grace_from_params({"communicator": communicator, "memory": "residual", **params}, comm=comm)
    grc.compressor.average = False
    return [grc.step(gradient(comm.rank, step), "w") for step in range(STEPS)]


@pytest.mark.parametrize("setting", EXCHANGES)
@pytest.mark.parametrize(
    "params",
    [
        {"compressor": "topk", "compress_ratio": 0.01},
        {"compressor": "guarded_threshold", "threshold": 1e9},
        {"compressor": "threshold", "threshold": 900.0},
        {"compressor": "randomk", "compress_ratio": 0.1},
        {"compressor": "dgc", "compress_ratio": 0.05},
        {"compressor": "adaptive", "compress_ratio": 0.05},
        {"compressor": "none"},
        {"compressor": "signsgd", "memory": "none"},
        {"compressor": "signum", "memory": "none", "momentum": 0.5},
    ],
    ids=lambda each: each["compressor"],
)
def test_all_ways_give_the_same(daemon: Daemon, params: dict[str, Any], setting: str) -> None:
    names = COMPRESSORS[params["compressor"]].communicators

    def run(comm: Communicator) -> dict[str, list[Array]]:
        return {name: steps_by(name, comm, **params) for name in names}

    results = run_job(configured(daemon.addresses, setting), RANKS, run)
    expected = np.stack(results[0]["allgather"])
    assert expected.any()
    for result in results:
        for name in names:
            assert (np.stack(result[name]) == expected).all(), name


@pytest.mark.parametrize(("name", "communicator"), [pair for pair in PAIRS if pair[0] not in NO_SUMS])
def test_what_was_received_and_what_is_left_are_all_gradients(daemon: Daemon, name: str, communicator: str) -> None:
    """Over shared memory, where nothing is rounded but on the ranks. Sums of few bits each are exact to 1 in 10^5."""

    def run(comm: Communicator) -> tuple[Array, Array]:
        made: Any = grace_from_params(
            {"compressor": name, "memory": "residual", "communicator": communicator}, comm=comm
        )
        received = np.zeros((50, 60), np.float32)
        for step in range(STEPS):
            own = made.step(gradient(comm.rank, step).reshape(50, 60), "w")
            assert own.shape == (50, 60)
            received += own * (made.compressor.learning_rate if name == "efsignsgd" else 1)
        return received, made.memory.state_dict()["residuals"]["w"].reshape(50, 60)

    results = run_job(configured(daemon.addresses), 2, run)
    assert results[0][0].tobytes() == results[1][0].tobytes()
    everything = sum(gradient(rank, step).reshape(50, 60) for rank in range(2) for step in range(STEPS)) / 2
    assert np.abs(results[0][0] + (results[0][1] + results[1][1]) / 2 - everything).max() < 0.05


@pytest.mark.parametrize("communicator", COMPRESSORS["terngrad"].communicators)
def test_what_was_clipped_is_kept(daemon: Daemon, communicator: str) -> None:
    def run(comm: Communicator) -> tuple[Array, Array]:
        params = {"compressor": "terngrad", "memory": "residual", "communicator": communicator}
        made: Any = grace_from_params(params, comm=comm)
        x = np.zeros(1000, np.float32)
        x[comm.rank] = 1000
        return made.step(x, "w"), made.memory.state_dict()["residuals"]["w"]

    results = run_job(configured(daemon.addresses), 2, run)
    assert 0 < results[0][0].max() < 500
    assert np.allclose(results[0][0] + (results[0][1] + results[1][1]) / 2, [500, 500, *[0] * 998], atol=1e-3)


@pytest.mark.parametrize("communicator", COMMUNICATORS)
@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (0, 4)])
def test_gradients_of_little_or_nothing(daemon: Daemon, communicator: str, shape: tuple[int, ...]) -> None:
    def run(comm: Communicator) -> None:
        for name, kind in COMPRESSORS.items():
            if communicator in kind.communicators:
                made = grace_from_params({"compressor": name, "communicator": communicator}, comm=comm)
                assert made.step(np.ones(shape, np.float32), name).shape == shape

    run_job(configured(daemon.addresses, BY_SHARDS), 2, run)


@pytest.mark.parametrize("communicator", COMPRESSORS["threshold"].communicators)
def test_one_rank_or_none_has_anything_to_send(daemon: Daemon, communicator: str) -> None:
    def run(comm: Communicator) -> tuple[list[float], list[float]]:
        params = {"compressor": "threshold", "threshold": 10.0, "communicator": communicator}
        made = grace_from_params(params, comm=comm)
        some = np.full(100, 11.0 * comm.rank, np.float32)
        return made.step(some, "s").tolist(), made.step(np.ones(100, np.float32), "n").tolist()

    for some, none in run_job(configured(daemon.addresses, BY_SHARDS), 2, run):
        assert (some, none) == ([5.5] * 100, [0] * 100)


def test_the_cost_follows_the_union(daemon: Daemon) -> None:
    """All ranks select the same: of the aggregator each gets it once, of an all-gather once from each rank."""

    def run(comm: Communicator) -> list[int]:
        received = []
        for communicator in ("aggregator", "allgather"):
            params = {"compressor": "topk", "communicator": communicator, "compress_ratio": 0.01}
            made = grace_from_params(params, comm=comm)
            before = comm.statistics().received_bytes
            made.step(gradient(0, 0, 200_000), "w")
            received.append(comm.statistics().received_bytes - before)
        return received

    for aggregator, allgather in run_job(configured(daemon.addresses, BY_SHARDS), 4, run):
        assert aggregator < 2000 * 12 + 5000
        assert allgather > 4 * 2000 * 5


def test_a_codec_packs_on_the_wire(daemon: Daemon) -> None:
    def run(comm: Communicator) -> int:
        made = grace_from_params({"compressor": "signsgd"}, comm=comm)
        before = comm.statistics().sent_bytes
        made.step(gradient(0, 0, 100_000), "w")
        return comm.statistics().sent_bytes - before

    elements = 100_000
    for sent in run_job(configured(daemon.addresses, BY_SHARDS), 2, run):
        assert sent < elements / 8 * 1.5 + 2000


class Halves(grace.Compressor):
    """As a user writes it for GRACE, with arrays: the first half, as float64 and an empty tensor."""

    def __init__(self) -> None:
        super().__init__(average=True, tensors_size_are_same=False)

    def compress(self, tensor: Any, name: str) -> tuple[list[Any], Any]:
        return [tensor[: len(tensor) // 2].astype(np.float64), np.empty(0, np.int32)], (len(tensor), tensor.dtype)

    def decompress(self, tensors: Any, ctx: Any) -> Any:
        result = np.zeros(ctx[0], ctx[1])
        result[: len(tensors[0])] = tensors[0]
        return result


class Summable(Halves):
    communicators = (*Halves.communicators, "allreduce")


class Largest(Halves):
    def aggregate(self, tensors: Any) -> Any:
        return np.max(tensors, axis=0)


class Doubling(grace.Memory):
    """A user's own: it sends twice the gradient, and counts."""

    def __init__(self) -> None:
        self.updates: list[tuple[str, float]] = []

    def compensate(self, tensor: Any, name: str) -> Any:
        return 2 * tensor

    def update(self, tensor: Any, name: str, compressor: Any, tensor_compressed: Any, ctx: Any) -> None:
        self.updates.append((name, float(tensor[0])))


@pytest.mark.parametrize("make", [grace.Allgather, grace.Broadcast, grace.Aggregator, grace.Allreduce])
def test_classes_of_the_users_own(daemon: Daemon, make: type[grace.Communicator]) -> None:
    def run(comm: Communicator) -> tuple[list[float], list[tuple[str, float]]]:
        memory = Doubling()
        made = make(Summable(), memory, comm.size, comm=comm)
        return made.step(np.full(4, comm.rank, np.float32), "w").tolist(), memory.updates

    results = run_job(configured(daemon.addresses, BY_SHARDS), 3, run)
    assert results == [([2, 2, 0, 0], [("w", 2.0 * rank)]) for rank in range(3)]


def test_what_does_not_go_with_classes_of_the_users_own(daemon: Daemon) -> None:
    def run(comm: Communicator) -> list[float]:
        with pytest.raises(UsageError, match="Halves with communicator 'allreduce': it goes with allgather"):
            grace.Allreduce(Halves(), grace.NoneMemory(), comm=comm)
        with pytest.raises(UsageError, match="Largest aggregates in its own way"):
            grace.Aggregator(Largest(), grace.NoneMemory(), comm=comm)
        with pytest.raises(UsageError, match="PowerSGDCompressor goes with the memories of omnireduce"):
            grace.Aggregator(grace.PowerSGDCompressor(), Doubling(), comm=comm)
        for make in (grace.Aggregator, grace.Allreduce):
            with pytest.raises(UsageError, match=r"Factors is a class of your own\. .* take PowerSGDCompressor, or"):
                make(Factors(), grace.PowerSGDMemory(), comm=comm)
        largest = grace.Allgather(Largest(), grace.NoneMemory(), comm=comm)
        largest.compressor.average = False
        values: list[float] = largest.step(np.full(4, comm.rank, np.float32), "w").tolist()
        return values

    assert run_job(configured(daemon.addresses, BY_SHARDS), 2, run) == [[1, 1, 0, 0]] * 2


class Sparser(grace.TopKCompressor):
    """One of ours, changed by a user: it halves what it sends."""

    def encode(self, x: Array, ctx: Any) -> Any:
        values, gaps = super().encode(x, ctx)
        return [values / 2, gaps]


class Factors(grace.PowerSGDCompressor):
    """As ours. The service does not know that."""


class Votes(grace.SignSGDCompressor):
    """It aggregates as ours does."""


def test_a_class_that_derives_from_ours_does_what_it_says(daemon: Daemon) -> None:
    def run(comm: Communicator) -> list[list[float]]:
        ways = (grace.Aggregator, grace.Allgather)
        x = np.array([-1, 4, 1, 8 + 8 * comm.rank], np.float32)
        results = [make(Sparser(0.25), grace.ResidualMemory(), comm=comm).step(x, "w").tolist() for make in ways]
        return [*results, *(make(Votes(), grace.NoneMemory(), comm=comm).step(x, "w").tolist() for make in ways)]

    expected = [[0, 0, 0, 6]] * 2 + [[-1, 1, 1, 1]] * 2
    assert run_job(configured(daemon.addresses, BY_SHARDS), 2, run) == [expected] * 2


class Gathered(grace.Communicator):
    """A user's own communicator, as for GRACE."""

    def send_receive(self, tensors: Any, name: str, ctx: Any) -> Any:
        parts = self.comm.allgather_object([np.asarray(tensor) for tensor in tensors], name=name)
        return self.compressor.aggregate([self.compressor.decompress(part, ctx) for part in parts]) / self.world_size


@pytest.mark.parametrize("name", ["natural", "qsgd", "terngrad"])
def test_a_seed_that_the_service_would_not_take(daemon: Daemon, name: str) -> None:
    """It draws from that of the configuration. With another communicator the seed counts."""

    def run(comm: Communicator) -> Array:
        params = {"compressor": name, "seed": 1}
        with pytest.raises(UsageError, match=r"with seed 1 and communicator 'aggregator': .* protocol\.codec_seed"):
            grace_from_params(params, comm=comm)
        seeds = [grace_from_params({**params, "seed": seed, "communicator": "allgather"}, comm=comm) for seed in (0, 1)]
        one, other = (made.step(gradient(0, 0), "w") for made in seeds)
        assert (one != other).any()
        result: Array = grace_from_params({"compressor": name}, comm=comm).step(gradient(0, 0), "w")
        return result

    ways = [(BY_SHARDS, f"protocol.codec_seed={seed}") for seed in (0, 1)]
    one, other = (run_job(configured(daemon.addresses, *each), 1, run)[0] for each in ways)
    assert (one != other).any()


def test_what_is_seeded_without_a_codec_goes_to_the_service(daemon: Daemon) -> None:
    """randomk, dgc and powersgd draw by themselves; qsgd with other levels is decompressed before."""

    def run(comm: Communicator) -> None:
        for params in (
            {"compressor": "randomk"}, {"compressor": "dgc"}, {"compressor": "powersgd", "compress_rank": 2},
            {"compressor": "qsgd", "quantum_num": 7},
        ):  # fmt: skip
            one, other = (
                grace_from_params({**params, "seed": seed}, comm=comm).step(gradient(0, 0).reshape(50, 60), "w")
                for seed in (0, 1)
            )
            assert (one != other).any(), params

    run_job(configured(daemon.addresses), 1, run)


def test_a_communicator_of_the_users_own(daemon: Daemon) -> None:
    def run(comm: Communicator) -> list[float]:
        made = Gathered(grace.TopKCompressor(0.5), grace.ResidualMemory(), comm.size, comm=comm)
        values: list[float] = made.step(np.array([1, 4 + comm.rank], np.float32), "w").tolist()
        return values

    assert run_job(configured(daemon.addresses, BY_SHARDS), 3, run) == [[0, 5]] * 3


@pytest.mark.parametrize("communicator", COMPRESSORS["efsignsgd"].communicators)
def test_the_memory_of_signs_keeps_the_rest_of_a_small_step(daemon: Daemon, communicator: str) -> None:
    """lr times the received gradients, plus the rest in memory, is lr times all gradients."""
    lr = 0.25

    def run(comm: Communicator) -> tuple[Array, Array]:
        params = {"compressor": "efsignsgd", "memory": "efsignsgd", "communicator": communicator, "lr": lr}
        made: Any = grace_from_params(params, comm=comm)
        received = np.sum([made.step(gradient(comm.rank, step), "w") for step in range(STEPS)], axis=0)
        return received, made.memory.state_dict()["residuals"]["w"]

    results = run_job(configured(daemon.addresses), 2, run)
    everything = sum(gradient(rank, step) for rank in range(2) for step in range(STEPS)) / 2
    left = (results[0][1] + results[1][1]) / 2
    assert np.abs(results[0][0] * lr + left - everything * lr).max() < 0.01


@pytest.mark.parametrize("name", ["topk", "signum", "natural", "randomk"])
@pytest.mark.parametrize("communicator", ["allgather", "aggregator"])
def test_a_step_that_was_aborted_can_be_made_again(daemon: Daemon, communicator: str, name: str) -> None:
    """Rank 1 leaves before the second step; rank 0 then makes that step alone, as one that was alone throughout."""
    parts = [(COMPRESSORS[name](), grace.ResidualMemory()) for _ in range(2)]
    config = configured(daemon.addresses, BY_SHARDS)

    def made(comm: Communicator, which: int) -> grace.Communicator:
        return COMMUNICATORS[communicator](*parts[which], comm=comm)

    def run(comm: Communicator) -> None:
        own = made(comm, 0) if comm.rank == 0 else COMMUNICATORS[communicator](
            COMPRESSORS[name](), grace.ResidualMemory(), comm=comm
        )  # fmt: skip
        own.step(gradient(0, 0), "w")
        if comm.rank == 0:
            with pytest.raises(AbortedError):
                own.step(gradient(0, 1), "w")

    run_job(config, 2, run)
    run_job(config, 1, lambda comm: made(comm, 1).step(gradient(0, 0), "w"))
    one, other = (memory.state_dict()["residuals"]["w"] for _, memory in parts)
    assert (one == other).all()
    results = [run_job(config, 1, lambda comm, i=i: made(comm, i).step(gradient(0, 1), "w"))[0] for i in range(2)]
    assert (results[0] == results[1]).all()


@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_what_is_forgotten_begins_anew(daemon: Daemon, communicator: str) -> None:
    """Memories, momenta of compressors and factors begin anew. Random numbers on the service go on."""
    names = ["topk", "signum", "powersgd", "qsgd"]

    def run(comm: Communicator) -> None:
        for name in [each for each in names if (each, communicator) in PAIRS and (each, communicator) not in DRAWN]:
            made = grace_from_params(
                {"compressor": name, "memory": "residual", "communicator": communicator}, comm=comm
            )
            found = []
            for _ in range(2):
                found += [made.step(gradient(comm.rank, step).reshape(50, 60), "w").tobytes() for step in range(STEPS)]
                made.forget(["w", "v"])
            assert len(set(found)) == STEPS, name
            assert found[:STEPS] == found[STEPS:], name

    run_job(configured(daemon.addresses), 2, run)


def test_the_line_that_says_it(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    def run(comm: Communicator) -> None:
        made = grace_from_params({"compressor": "topk", "communicator": "allgather"}, comm=comm)
        for step in range(2):
            made.step(gradient(0, step), "w")

    with caplog.at_level("DEBUG", logger="omnireduce"):
        run_job(configured(daemon.addresses), 1, run)
    messages = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "grace"]
    assert messages == ["==Debug== grace is called: TopKCompressor, NoneMemory, Allgather"]


def test_the_hook_is_of_another_part(monkeypatch: pytest.MonkeyPatch, daemon: Daemon) -> None:
    monkeypatch.setattr(grace.Communicator, "hook_of_torch", None)

    def run(comm: Communicator) -> Callable[..., Any]:
        return grace_from_params({}, comm=comm).hook

    with pytest.raises(UsageError, match=r"part of omnireduce\.torch: import it first"):
        run_job(configured(daemon.addresses), 1, run)
