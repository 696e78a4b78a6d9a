"""Means of gradients, some of which are missing on some ranks, over a real aggregator."""

from __future__ import annotations

import signal
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from local_cluster import WAIT_S, Daemon, Process, configured, run_job

from omnireduce import Communicator, UsageError
from omnireduce.core.dtypes import Array
from omnireduce.data_parallel.averaging import COPIED_BYTES, Averaging, Part

LARGE = COPIED_BYTES // 4 + 1  # elements of a gradient that travels on its own
SHAPES = (3,), (2, 5), (), (LARGE,), (700,), (0, 4)
PARTS = [Part(np.dtype(np.float32), shape) for shape in SHAPES]
NAMES = [f"p{at}" for at in range(len(SHAPES))]
RANKS = 2
Step = tuple[tuple[bool, ...], ...]  # by rank, which gradients it has

has = st.tuples(*[st.booleans()] * len(SHAPES))
steps = st.lists(st.one_of(st.tuples(*[has] * RANKS), has.map(lambda each: (each,) * RANKS)), min_size=1, max_size=6)
NONE, ALL, FIRST = (False,) * len(SHAPES), (True,) * len(SHAPES), (True, *[False] * (len(SHAPES) - 1))


def gradient(rank: int, step: int, at: int) -> Array:
    return np.full(SHAPES[at], 4.0 * (rank + 1) + step + at, np.float32)


def expected(step: int, having: Step) -> list[Array | None]:
    results: list[Array | None] = []
    for at in range(len(SHAPES)):
        some = [gradient(rank, step, at) for rank, each in enumerate(having) if each[at]]
        results.append(sum(some[1:], some[0]) / np.float32(RANKS) if some else None)
    return results


@given(steps)
@settings(max_examples=25)
@example([(ALL, ALL), (NONE, ALL), (NONE, ALL), (NONE, NONE), (ALL, NONE), (ALL, ALL)])
@example([(NONE, NONE), (NONE, NONE), (FIRST, NONE)])
@example([(FIRST, ALL), (ALL, FIRST), (FIRST, ALL), (ALL, FIRST)])
def test_any_of_the_gradients_may_be_missing(daemon: Daemon, had: list[Step]) -> None:
    def run(comm: Communicator) -> list[list[Array | None]]:
        averaging, results = Averaging(NAMES, PARTS), []
        for step, having in enumerate(had):
            gradients = [gradient(comm.rank, step, at) if each else None for at, each in enumerate(having[comm.rank])]
            results.append(averaging.average(gradients, comm))
        return results

    for result in run_job(configured(daemon.addresses), RANKS, run):
        for step, (means, having) in enumerate(zip(result, had, strict=True)):
            for mine, each in zip(means, expected(step, having), strict=True):
                assert (mine is None) == (each is None)
                assert mine is None or (mine.shape == each.shape and (mine == each).all())


def test_ranks_agree_once_as_long_as_nothing_changes(daemon: Daemon) -> None:
    """Each rank may lack another gradient. A step has one exchange for small gradients, and one for large ones."""

    def run(comm: Communicator) -> list[int]:
        averaging, collectives = Averaging(NAMES, PARTS), []
        for step in range(8):
            lacks = comm.rank if step < 6 else 2
            gradients = [None if at == lacks else gradient(comm.rank, step, at) for at in range(len(SHAPES))]
            before = comm.statistics().collectives
            averaging.average(gradients, comm)
            collectives.append(comm.statistics().collectives - before)
        return collectives

    for collectives in run_job(configured(daemon.addresses), RANKS, run):
        assert collectives[0] > 3
        assert collectives[1:] == [2] * 5 + [3, 2]  # in step 6 all ranks lack another gradient than before


def test_gradients_are_averaged_in_their_memory(daemon: Daemon) -> None:
    def run(comm: Communicator) -> list[bool]:
        gradients = [gradient(comm.rank, 0, at) for at in range(len(SHAPES))]
        result = Averaging(NAMES, PARTS).average(gradients, comm)
        return [mine is each for mine, each in zip(gradients, result, strict=True)]

    assert run_job(configured(daemon.addresses), RANKS, run) == [[True] * len(SHAPES)] * RANKS


@pytest.mark.parametrize("codec", ["sign", "qsgd", "int8"])
def test_a_mark_is_seen_through_a_codec(daemon: Daemon, codec: str) -> None:
    """Between hosts a codec may change numbers, but none drops a mark."""
    settings = f"protocol.codec={codec}", "transport.host_exchange=off"

    def run(comm: Communicator) -> list[int]:
        averaging, results = Averaging(NAMES[:2], PARTS[:2]), []
        for step in range(4):
            gradients = [
                gradient(comm.rank, step, 0),
                None if step == 2 and comm.rank else gradient(comm.rank, step, 1),
            ]
            before = comm.statistics().collectives
            averaging.average(gradients, comm)
            results.append(comm.statistics().collectives - before)
        return results

    for collectives in run_job(configured(daemon.addresses, *settings), RANKS, run):
        assert collectives[1:] == [1, 2, 2]  # ranks agree anew when one lacks a gradient, and when it has it again


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_types_of_numbers(daemon: Daemon, dtype: type) -> None:
    """The sum of two of these numbers is too large for float16, but their mean is not."""
    largest = 60000.0 if dtype is np.float16 else 2.0**100

    def run(comm: Communicator) -> list[Array | None]:
        parts = [Part(np.dtype(dtype), (5,)), Part(np.dtype(np.float32), (3,))]
        gradients = [np.full(5, largest, dtype), np.full(3, comm.rank, np.float32)]
        return Averaging(["a", "b"], parts).average(gradients, comm)

    for first, second in run_job(configured(daemon.addresses), RANKS, run):
        assert first is not None
        assert (first.dtype, first.tolist()) == (dtype, np.full(5, largest, dtype).tolist())
        assert second is not None
        assert second.tolist() == [0.5] * 3


def test_ranks_with_other_parameters_or_terms_are_told_so(daemon: Daemon) -> None:
    def run(comm: Communicator) -> list[str]:
        others, errors = [Part(np.dtype(np.float32), (3,)), Part(np.dtype(np.float32), (4 + comm.rank,))], []
        for parts, loader in ((others, "none"), (PARTS[:2], "none" if comm.rank else "given")):
            with pytest.raises(UsageError) as raised:
                Averaging(["a", "b"], parts, lambda loader=loader: [("loader", loader)]).average([None, None], comm)
            errors.append(str(raised.value))
        return errors

    expected = [
        "'b' differs between ranks: rank 0 has float32[4], rank 1 has float32[5]; expected the same on all ranks",
        "'loader' differs between ranks: rank 0 has given, rank 1 has none; expected the same on all ranks",
    ]
    assert run_job(configured(daemon.addresses), RANKS, run) == [expected] * RANKS


DIES = """
import os, signal, sys
import numpy as np
from omnireduce import AbortedError, data_parallel as ddp
rank, size = ddp.init()
class Optimizer:
    params = [np.zeros(3, np.float32)]
    def step(self, gradients):
        pass
opt = ddp.DistributedOptimizer(Optimizer())
for step in range(1000):
    if (rank, step) == (1, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        opt.step([np.ones(3, np.float32) if step % 2 else None])
    except AbortedError as error:
        print(step, error.culprit.split()[:2], flush=True)
        sys.exit(5)
"""


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_steps_of_the_others(daemon: Daemon) -> None:
    environ = {
        "OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(daemon.addresses), "WORLD_SIZE": "3",
        "TORCHELASTIC_RUN_ID": "dies",
    }  # fmt: skip
    processes = [Process(sys.executable, "-c", DIES, environ=environ | {"RANK": str(rank)}) for rank in range(3)]
    try:
        for each in (processes[0], processes[2]):
            assert each.line() == "3 ['rank', '1']"
        assert [process.wait(WAIT_S) for process in processes] == [5, -signal.SIGKILL, 5]
    finally:
        for each in processes:
            each.close()
