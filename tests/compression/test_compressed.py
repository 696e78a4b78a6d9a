"""Gradients of which a part is sent, on real daemons: sums of what each rank has sent, and little else travels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job
from transports import BY_SHARDS

from omnireduce import AbortedError, Communicator, UsageError
from omnireduce.compression import (
    BlockTopK,
    Compression,
    DgcMomentum,
    GuardedThreshold,
    RandomK,
    Residual,
    Selector,
    Threshold,
    TopK,
    compressed_sums,
)
from omnireduce.core.dtypes import Array

SIZE, RANKS, STEPS = 20_001, 3, 4
EXCHANGES = [BY_SHARDS, "transport.host_exchange=auto"]


def gradient(rank: int, step: int) -> Array:
    """Whole numbers, so that sums are exact."""
    return np.random.default_rng([rank, step]).integers(-1000, 1001, SIZE).astype(np.float32)


@pytest.mark.parametrize("setting", EXCHANGES)
@pytest.mark.parametrize(
    "make",
    [
        lambda: Compression(TopK(0.01), Residual()),
        lambda: Compression(TopK(0.5), Residual()),
        lambda: Compression(TopK(0.01), Residual(), codec="bf16"),
        lambda: Compression(TopK(0.5), Residual(), codec="fp16"),
        lambda: Compression(RandomK(0.02), Residual(), codec="bf16"),
        lambda: Compression(BlockTopK(0.1), Residual()),
        lambda: Compression(RandomK(0.02), Residual()),
        lambda: Compression(Threshold(900), Residual()),
        lambda: Compression(GuardedThreshold(1e9, 0.01), Residual()),
        lambda: Compression(memory=Residual()),
        lambda: Compression(memory=Residual(), codec="int8"),
        lambda: Compression(BlockTopK(0.3), Residual(), codec="int8"),
        lambda: Compression(BlockTopK(0.3), DgcMomentum(0.0), codec="int8"),
    ],
    ids=[
        "few",
        "many",
        "few in bf16",
        "many in fp16",
        "random in bf16",
        "blocks",
        "random",
        "threshold",
        "guarded",
        "all",
        "int8",
        "int8 blocks",
        "DGC",
    ],
)
def test_all_that_was_received_and_what_is_left_are_all_gradients(
    daemon: Daemon, make: Callable[[], Compression], setting: str
) -> None:
    codec = make().codec

    def run(comm: Communicator) -> tuple[Array, Array]:
        compression = make()
        received = np.zeros(SIZE, np.float32)
        for step in range(STEPS):
            x = gradient(comm.rank, step)
            assert compression.allreduce(comm, x, name="w", op="sum") is x
            received += x
        state = compression.memory.state_dict()
        return received, state.get("residuals", state.get("sums", {}))["w"]

    results = run_job(configured(daemon.addresses, setting), RANKS, run)
    received = results[0][0]
    assert all((each == received).all() for each, _ in results)
    everything = sum(gradient(rank, step) for rank in range(RANKS) for step in range(STEPS))
    rounded = 3000 / 64 if codec else 0  # error of the sum, which each step encodes once more
    assert np.abs(received + sum(left for _, left in results) - everything).max() <= STEPS * rounded


def test_the_cost_follows_the_union(daemon: Daemon) -> None:
    """All ranks select the same elements: each gets them once, and not once of each rank."""

    def run(comm: Communicator) -> tuple[int, int]:
        x = np.tile(gradient(0, 0), 10)
        before = comm.statistics()
        Compression(TopK(0.01)).allreduce(comm, x, name="w")
        after = comm.statistics()
        return after.sent_bytes - before.sent_bytes, after.received_bytes - before.received_bytes

    for sent, received in run_job(configured(daemon.addresses, BY_SHARDS), RANKS, run):
        assert max(sent, received) <= 2001 * 5.4 + 2000


@pytest.mark.parametrize(("together", "codec"), [(False, "none"), (True, "none"), (False, "bf16"), (True, "bf16")])
def test_elements_travel_with_numbers_or_in_blocks_whichever_is_less(
    daemon: Daemon, together: bool, codec: str
) -> None:
    """A thousand of 256,000: those of four blocks, or every 256th."""

    def run(comm: Communicator) -> tuple[int, Array]:
        x = np.zeros(256_000, np.float32)
        x[slice(0, 1024) if together else slice(0, None, 250)] = 2
        before = comm.statistics().sent_bytes
        Compression(TopK(0.004), codec=codec).allreduce(comm, x, name="w", op="sum")
        return comm.statistics().sent_bytes - before, x

    value_bytes = 2 if codec == "bf16" else 4
    for sent, x in run_job(configured(daemon.addresses, BY_SHARDS), 2, run):
        assert set(x) == {0.0, 4.0}
        by_number, in_blocks = 1024 * (value_bytes + 2), 1024 * value_bytes
        assert sent < (in_blocks if together else by_number) + 1000


def test_what_elements_cost_decides_for_some_steps(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements close together go in blocks, those far apart by their numbers. All sums are right."""
    monkeypatch.setattr(compressed_sums, "DECIDE_EVERY", 2)

    def run(comm: Communicator) -> list[bool]:
        compression, by_number = Compression(Threshold(1.0)), []
        for together in (True, False, False, True, True):
            x = np.zeros(256_000, np.float32)
            x[slice(0, 2048, 2) if together else slice(0, None, 250)] = 2
            before, expected = comm.statistics().sent_bytes, 2 * x
            compression.allreduce(comm, x, name="w", op="sum")
            assert x.tobytes() == expected.tobytes()
            sent, blocks = comm.statistics().sent_bytes - before, 8 if together else 1000
            by_number.append(abs(sent - 1024 * 5) < abs(sent - blocks * 1024))
        return by_number

    for by_number in run_job(configured(daemon.addresses, BY_SHARDS), 2, run):
        assert by_number == [False, False, True, True, False]


def test_ranks_with_other_costs_decide_alike(daemon: Daemon) -> None:
    """One has its elements close together, the other far apart."""

    def run(comm: Communicator) -> list[Array]:
        compression, sums = Compression(Threshold(1.0)), []
        for _ in range(3):
            x = np.zeros(256_000, np.float32)
            x[slice(0, 2048, 2) if comm.rank else slice(0, None, 250)] = 2
            sums.append(compression.allreduce(comm, x, name="w", op="sum"))
        return sums

    for x in (each for sums in run_job(configured(daemon.addresses, BY_SHARDS), 2, run) for each in sums):
        assert x.sum() == 2 * 2 * 1024
        assert x[0] == 4


@pytest.mark.parametrize("setting", EXCHANGES)
@pytest.mark.parametrize("ratio", [0.001, 0.02, 0.3])
def test_both_ways_give_the_same_sums(
    daemon: Daemon, setting: str, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(comm: Communicator) -> Array:
        return Compression(TopK(ratio)).allreduce(comm, gradient(comm.rank, 0), name="w", op="sum")

    config = configured(daemon.addresses, setting)
    chosen = run_job(config, 2, run)
    for work_bytes in (-6, 1 << 30):  # always by number, always in blocks
        monkeypatch.setattr(compressed_sums, "WORK_BYTES", work_bytes)
        monkeypatch.setattr(compressed_sums, "WORK_BYTES_IN_MEMORY", work_bytes)
        assert [result.tobytes() for result in run_job(config, 2, run)] == [each.tobytes() for each in chosen]


@pytest.mark.parametrize("make", [lambda: TopK(0.9), lambda: TopK(0.01), lambda: RandomK(0.1)])
def test_a_codec_for_elements_with_blocks_too_large_for_codecs(daemon: Daemon, make: Callable[[], Selector]) -> None:
    def run(comm: Communicator) -> Array:
        return Compression(make(), codec="bf16").allreduce(comm, np.ones(SIZE, np.float32), name="w", op="sum")

    for x in run_job(configured(daemon.addresses, BY_SHARDS, "protocol.block_size=32768"), 2, run):
        assert 0 < np.count_nonzero(x) <= 0.9 * SIZE
        assert set(x) == {0.0, 2.0}


def test_a_mean_of_a_matrix(daemon: Daemon) -> None:
    def run(comm: Communicator) -> Array:
        return Compression(TopK(1.0)).allreduce(comm, np.full((3, 5), comm.rank, np.float32), name="w")

    for x in run_job(configured(daemon.addresses), 3, run):
        assert x.tolist() == [[1.0] * 5] * 3


def test_gradients_of_nothing(daemon: Daemon) -> None:
    """Nothing is above the threshold, on one rank or on all."""

    def run(comm: Communicator) -> tuple[Array, Array]:
        compression = Compression(Threshold(10.0))
        some = np.full(100, 11.0 * comm.rank, np.float32)
        none = np.ones(100, np.float32)
        empty = np.empty(0, np.float32)
        assert compression.allreduce(comm, empty, name="empty", op="sum").size == 0
        return compression.allreduce(comm, some, name="s", op="sum"), compression.allreduce(comm, none, name="n")

    for some, none in run_job(configured(daemon.addresses, BY_SHARDS), 2, run):
        assert set(some) == {11.0}
        assert set(none) == {0.0}


def test_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="codec 'int8' with TopK: single elements travel as float32, bf16 or fp16"):
        Compression(TopK(), codec="int8")
    Compression(BlockTopK(), codec="int8")
    Compression(codec="int8")
    with pytest.raises(UsageError, match="codec 'int9': expected none"):
        Compression(codec="int9")
    with pytest.raises(UsageError, match="codec is an int; expected a str"):
        Compression(codec=8)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="block_size 32768: expected at most 16384 with a codec"):
        Compression(BlockTopK(0.5, 1 << 15), codec="int8")
    with pytest.raises(UsageError, match="expected a Selector and a Memory, or None"):
        Compression(Residual())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "x" * 181, "a\nb", 3, None])
def test_wrong_names_change_nothing(daemon: Daemon, name: object) -> None:
    def run(comm: Communicator) -> None:
        compression = Compression(TopK(0.5), Residual())
        with pytest.raises(UsageError, match="expected a printable text of 1 to 160 characters"):
            compression.allreduce(comm, np.ones(4, np.float32), name=name)  # type: ignore[arg-type]
        assert compression.memory.state_dict() == {"residuals": {}}

    run_job(configured(daemon.addresses), 1, run)


@pytest.mark.parametrize(
    "make",
    [lambda: Compression(TopK(0.5), Residual()), lambda: Compression(memory=Residual(), codec="int8")],
    ids=["top-k", "int8"],
)
def test_a_step_that_was_aborted_leaves_the_memory_as_it_was(daemon: Daemon, make: Callable[[], Compression]) -> None:
    """Rank 1 leaves before the second step; rank 0 then makes that step alone."""
    compression, alone = make(), make()
    config = configured(daemon.addresses, BY_SHARDS)

    def run(comm: Communicator) -> None:
        own = compression if comm.rank == 0 else make()
        own.allreduce(comm, gradient(comm.rank, 0), name="w")
        if comm.rank == 0:
            with pytest.raises(AbortedError):
                own.allreduce(comm, gradient(0, 1), name="w")

    run_job(config, 2, run)
    run_job(config, 1, lambda comm: alone.allreduce(comm, gradient(0, 0), name="w"))
    before, expected = (each.memory.state_dict()["residuals"]["w"] for each in (compression, alone))
    assert (before == expected).all()
    for each in (compression, alone):
        run_job(config, 1, partial(each.allreduce, gradient=gradient(0, 1), name="w"))
    before, expected = (each.memory.state_dict()["residuals"]["w"] for each in (compression, alone))
    assert (before == expected).all()


def test_ranks_that_draw_in_different_steps_are_told(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        compression = Compression(RandomK(0.1))
        compression._steps["w"], compression._formation = comm.rank, comm.formation
        with pytest.raises(AbortedError, match="submitted different collectives"):
            compression.allreduce(comm, gradient(0, 0), name="w")

    run_job(configured(daemon.addresses, BY_SHARDS), 2, run)
