"""Ranks that do not make the same of their gradients: all get one error, and it has both sides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job
from transports import BY_SHARDS

from omnireduce import AbortedError, Communicator
from omnireduce.compression import PowerSgd, grace, grace_from_params
from omnireduce.compression.gradient_checks import NAME_CHARACTERS

SIZE = 32
LONGEST = "n" * NAME_CHARACTERS
Params = dict[str, Any]
NATURAL, ONEBIT, QSGD = ({"compressor": name} for name in ("natural", "onebit", "qsgd"))
EFSIGNSGD, RANDOMK = {"compressor": "efsignsgd"}, {"compressor": "randomk"}


def errors_of(daemon: Daemon, setting: str, step: Any) -> list[str]:
    """Errors that two ranks get from a step."""

    def run(comm: Communicator) -> str:
        with pytest.raises(AbortedError) as caught:
            step(comm)
        return str(caught.value)

    return run_job(configured(daemon.addresses, setting), 2, run)


def expect_both(errors: list[str], *sides: str) -> None:
    for error in errors:
        assert "submitted different collectives" in error
        assert all(side in error for side in sides), error


@pytest.mark.parametrize("setting", [BY_SHARDS, "transport.host_exchange=auto"])
@pytest.mark.parametrize(
    ("communicator", "pair", "sides"),
    [
        ("allgather", (NATURAL, ONEBIT), ("NaturalCompressor(", "OneBitCompressor(")),
        ("allgather", (ONEBIT, EFSIGNSGD), ("OneBitCompressor(", "EFSignSGDCompressor(")),
        ("allgather", (QSGD, {**QSGD, "quantum_num": 10}), ("quantum_num=127", "quantum_num=10")),
        ("allgather", (RANDOMK, {**RANDOMK, "seed": 2}), ("seed=0", "seed=2")),
        ("broadcast", (RANDOMK, {**RANDOMK, "seed": 2}), ("seed=0", "seed=2")),
        ("allreduce", (RANDOMK, {**RANDOMK, "seed": 2}), (" at ",)),
        ("alltoall", (QSGD, NATURAL), ("QSGDCompressor(", "NaturalCompressor(")),
        ("aggregator", (EFSIGNSGD, {**EFSIGNSGD, "lr": 0.5}), ("learning_rate=0.1", "learning_rate=0.5")),
        ("aggregator", (QSGD | {"quantum_num": 7}, QSGD | {"quantum_num": 9}), ("quantum_num=7", "quantum_num=9")),
    ],
)
def test_ranks_with_other_compressors(
    daemon: Daemon, setting: str, communicator: str, pair: tuple[Params, Params], sides: tuple[str, ...]
) -> None:
    def step(comm: Communicator) -> None:
        made = grace_from_params({**pair[comm.rank], "communicator": communicator}, comm=comm)
        made.step(np.ones(SIZE, np.float32), "w")

    expect_both(errors_of(daemon, setting, step), *sides)


@pytest.mark.parametrize("communicator", ["allgather", "broadcast", "alltoall"])
def test_ranks_with_gradients_of_other_sizes(daemon: Daemon, communicator: str) -> None:
    """16 and 17 elements: on two ranks pieces of 8 and 9, and as many words of a codec."""

    def step(comm: Communicator) -> None:
        made = grace_from_params({**NATURAL, "communicator": communicator}, comm=comm)
        made.step(np.ones(16 + comm.rank, np.float32), "w")

    expect_both(errors_of(daemon, BY_SHARDS, step), "of 16 elements", "of 17 elements")


def test_a_rank_that_is_a_step_ahead(daemon: Daemon) -> None:
    """It draws other places."""

    def step(comm: Communicator) -> None:
        made = grace_from_params({**RANDOMK, "communicator": "allgather"}, comm=comm)
        if comm.rank:
            made.compressor.compress(np.ones(SIZE, np.float32), "w")
        made.step(np.ones(SIZE, np.float32), "w")

    expect_both(errors_of(daemon, BY_SHARDS, step), "at step 1", "at step 2")


class Negated(grace.Compressor):
    """A compressor of a user. Its attribute `kept` may differ from rank to rank."""

    def __init__(self, kept: int, average: bool = True) -> None:
        super().__init__(average)
        self.kept = kept

    def compress(self, tensor: Any, name: str) -> tuple[list[Any], None]:
        return [-tensor], None

    def decompress(self, tensors: Any, ctx: None) -> Any:
        return -tensors[0]


class Plain(Negated):
    def compress(self, tensor: Any, name: str) -> tuple[list[Any], None]:
        return [tensor], None


def test_classes_of_the_users_own(daemon: Daemon) -> None:
    def step(comm: Communicator) -> None:
        kind = Plain if comm.rank else Negated
        grace.Allgather(kind(0), grace.NoneMemory(), comm=comm).step(np.ones(4, np.float32), "w")

    expect_both(errors_of(daemon, BY_SHARDS, step), f"{__name__}.Negated", f"{__name__}.Plain")

    def one_average(comm: Communicator) -> None:
        """Each rank divides by itself."""
        made = grace.Allgather(Plain(0, average=comm.rank == 0), grace.NoneMemory(), comm=comm)
        made.step(np.ones(4, np.float32), "w")

    expect_both(errors_of(daemon, BY_SHARDS, one_average), "Plain(average=True)", "Plain(average=False)")

    def run(comm: Communicator) -> list[float]:
        made = grace.Allgather(Negated(comm.rank), grace.NoneMemory(), comm=comm)
        values: list[float] = made.step(np.full(2, comm.rank, np.float32), "w").tolist()
        return values

    assert run_job(configured(daemon.addresses, BY_SHARDS), 2, run) == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("name", ["w", LONGEST])
def test_factors_from_other_seeds(daemon: Daemon, name: str) -> None:
    def step(comm: Communicator) -> None:
        PowerSgd(seed=comm.rank).allreduce(comm, np.ones((20, 20), np.float32), name=name)

    expect_both(errors_of(daemon, BY_SHARDS, step), *(("seed=0", "seed=1") if name == "w" else ()))


@pytest.mark.parametrize("communicator", ["allgather", "broadcast", "aggregator"])
@pytest.mark.parametrize(
    "params", [QSGD, RANDOMK, {"compressor": "topk"}, EFSIGNSGD], ids=lambda each: each["compressor"]
)
def test_the_longest_name_leaves_room(daemon: Daemon, params: Params, communicator: str) -> None:
    def run(comm: Communicator) -> tuple[int, ...]:
        made = grace_from_params({**params, "communicator": communicator}, comm=comm)
        return np.shape(made.step(np.ones(SIZE, np.float32), LONGEST))

    assert run_job(configured(daemon.addresses, BY_SHARDS), 2, run) == [(SIZE,)] * 2
