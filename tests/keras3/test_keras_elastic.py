"""Trainings with Keras that go on from their last commit: on one rank, and on ranks that die and come back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack

import keras
import numpy as np
import pytest
from elastic_ranks import Ranks, until
from local_cluster import ROOT, Daemon, configured, unique_job

import omnireduce as omni
import omnireduce.keras as hvd
from omnireduce import AbortedError, UsageError
from omnireduce.errors import NewcomersError
from omnireduce.keras import values

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


@pytest.fixture
def model(daemon: Daemon) -> Iterator[keras.Model]:
    with omni.init(configured(daemon.addresses), job=unique_job("alone"), rank=0, size=1):
        found = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        found.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5)), loss=lambda y, x: x)
        yield found
        hvd.shutdown()


def weight(model: keras.Model) -> float:
    return float(model.get_weights()[0][0, 0])


@pytest.mark.parametrize("starts_at", [True, False], ids=["initial_epoch", "fewer epochs"])
@pytest.mark.parametrize("commits_first", [True, False], ids=["commits first", "commits last"])
def test_a_training_goes_on_from_the_last_commit(model: keras.Model, commits_first: bool, starts_at: bool) -> None:
    """It fails twice in the second epoch: in its second batch, and in the one after that."""
    ones, failures, begins = np.ones((4, 1), np.float32), [(1, 1), (1, 2)], list[tuple[int, int]]()
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    class Failing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if (state.epoch, state.batch) in failures:
                failures.remove((state.epoch, state.batch))
                raise AbortedError("rank 1", "gone")

    updates = hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state)
    commits = hvd.elastic.CommitStateCallback(state)
    callbacks = [Failing(), commits, *updates] if commits_first else [Failing(), *updates, commits]

    @hvd.elastic.run
    def train(state: hvd.elastic.KerasState) -> int:
        begins.append((state.epoch, state.batch))
        while state.epoch < 3:
            left, last = ones[state.batch :], 3 if state.batch == 0 else state.epoch + 1
            which = {"initial_epoch": state.epoch, "epochs": last} if starts_at else {"epochs": last - state.epoch}
            model.fit(left, left, batch_size=1, verbose=0, shuffle=False, callbacks=callbacks, **which)
        return state.epoch

    assert train(state) == 3
    assert begins == [(0, 0), (1, 1), (1, 2)]
    expected, gathered = 0.0, 0.0
    for _ in range(3 * len(ones)):
        gathered = 0.5 * gathered - 1
        expected += gathered
    assert weight(model) == expected


@pytest.mark.parametrize(("backend", "victim"), [("torch", 0), ("jax", 1)])
def test_no_step_is_lost_or_done_twice(daemon: Daemon, backend: str, victim: int) -> None:
    """The victim dies when the other has begun a step, which is compiled with JAX."""
    pytest.importorskip(backend, reason=f"no {backend} here; `make torch` and `make keras` install torch and jax")
    worker = str(ROOT / "tests" / "keras3" / "elastic_worker.py")
    with ExitStack() as stack:
        ranks = Ranks(daemon, stack, 2, 1, worker, KERAS_BACKEND=backend)
        processes = [ranks.start(rank, *(["dies"] if rank == victim else [])) for rank in range(2)]
        survivor = processes[1 - victim]
        assert "epoch 0, batch 3" in until(survivor, "of 1 goes on")
        processes[victim] = ranks.start(victim)
        for each in (survivor, processes[victim]):
            line = until(each, "of 2 is done")
            match = re.search(r"weight -([0-9]+) after ([0-9]+) epochs of 4 batches", line)
            assert match is not None, line
            assert int(match[1]) == 4 * int(match[2]), line
            assert each.wait() == 0, each.log


def test_several_batches_may_end_at_once() -> None:
    """With `steps_per_execution` Keras says so after the last of them."""
    state = hvd.elastic.ObjectState(batch=0)
    commits = list[int]()
    state.commit = lambda: commits.append(state.batch)  # type: ignore[method-assign]
    updates, commit = hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.CommitStateCallback(state, 3)
    for each in (updates, commit):
        each.on_train_begin()
        each.on_epoch_begin(0)
    for batch in (1, 3, 5, 7):
        commit.on_train_batch_begin(batch - 1)
        for each in (commit, updates):
            each.on_train_batch_end(batch)
    assert state.batch == 8
    assert commits == [4, 6]


def test_only_what_a_step_shows_is_the_hosts() -> None:
    usage_error = UsageError("'t' differs between ranks")
    for error, expected in (
        (RuntimeError(f"in a callback: {usage_error}"), usage_error),
        (KeyError("a mistake"), None),
        (NewcomersError(str(usage_error)), None),
    ):
        values._failures[:] = [usage_error]
        assert values.raised_by_host(error) is expected
        assert not values._failures


def test_what_cannot_be(model: keras.Model) -> None:
    with pytest.raises(UsageError, match="the model has no optimizer; compile it first"):
        hvd.elastic.KerasState(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
    bare = keras.Sequential([keras.layers.Dense(1)])
    bare.compile("sgd")
    with pytest.raises(UsageError, match="the model is not built"):
        hvd.elastic.KerasState(bare)
    with pytest.raises(UsageError, match="batches_per_commit 0: expected 1 or more"):
        hvd.elastic.CommitStateCallback(hvd.elastic.KerasState(model), 0)
