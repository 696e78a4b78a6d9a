"""Optimizers on the shards: what they keep is read, kept in files and restored."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job

from omnireduce import AbortedError, Communicator, ElasticState, RefusedError, UsageError, run_elastic
from omnireduce.core.dtypes import Array
from omnireduce.optimizers.rules import Adagrad, Adam, AdamW, Lamb, RowAdagrad, Rule, Sgd
from omnireduce.optimizers.saved_state import Save, SavedParts, key_of, publish_part, share_of, write_part
from omnireduce.optimizers.sharded import ShardedOptimizer

LAZY = [Sgd(lr=0.5, momentum=0.5, lazy=True), Adam(lazy=True), AdamW(lazy=True, weight_decay=0.1)]
RULES = [Sgd(lr=0.5, momentum=0.5), Adagrad(), Adam(), AdamW(lazy=True), Lamb()]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as result:
        yield result


def params() -> dict[str, Array]:
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("w", (600, 400)), ("b", (7,)))}


def gradients(rank: int, step: int) -> dict[str, Array]:
    rng = np.random.default_rng([rank, step])
    return {"w": rng.standard_normal((600, 400)).astype(np.float32), "b": np.full(7, rank, np.float32)}


def same(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return all((one[name].view(np.uint32) == other[name].view(np.uint32)).all() for name in one)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_training_goes_on_from_what_was_kept(daemon: Daemon, rule: Rule) -> None:
    """Four steps are the same as two steps, a new optimizer that has the state of the first one, and two steps."""

    def run(comm: Communicator) -> tuple[dict[str, Array], dict[str, Array], dict[str, Any]]:
        whole, parted = params(), params()
        with ShardedOptimizer(whole, rule, comm=comm) as optimizer:
            for step in range(4):
                optimizer.step(gradients(comm.rank, step))
        with ShardedOptimizer(parted, rule, comm=comm, name="first") as optimizer:
            for step in range(2):
                optimizer.step(gradients(comm.rank, step))
            state = optimizer.state_dict(root=1)
        if comm.rank != 1:
            parted = {name: np.zeros_like(x) for name, x in parted.items()}
        with ShardedOptimizer(parted, rule, comm=comm, name="second") as optimizer:
            optimizer.load_state_dict(state, root=1)
            for step in range(2, 4):
                optimizer.step(gradients(comm.rank, step))
            assert optimizer.steps == 4
        return whole, parted, state

    outcomes = run_job(configured(daemon.addresses), 3, run)
    for rank, (whole, parted, state) in enumerate(outcomes):
        assert same(whole, outcomes[0][0])
        assert same(whole, parted)
        assert (state != {}) == (rank == 1)
    assert {name: x.shape for name, x in outcomes[1][2]["state"]["w"].items()} == dict.fromkeys(
        rule.columns, (600, 400)
    )


@pytest.mark.parametrize("readers", [1, 3])
def test_files_are_read_by_any_number_of_ranks(daemon: Daemon, tmp_path: Path, readers: int) -> None:
    """Two ranks write; a table has one number for each row."""

    def optimizer(comm: Communicator) -> ShardedOptimizer:
        weights = params() | {"t": np.zeros((31, 5), np.float32)}
        return ShardedOptimizer(weights, Adam(lr=0.1), tables=["t"], comm=comm)

    def write(comm: Communicator) -> dict[str, Any]:
        with optimizer(comm) as made:
            for step in range(2):
                rows = np.arange(comm.rank, 31), np.ones((31 - comm.rank, 5), np.float32)
                made.step(gradients(comm.rank, step) | {"t": rows})
            made.save(tmp_path / "state")
            return made.state_dict(None)

    def read(comm: Communicator) -> tuple[int, dict[str, Any]]:
        with optimizer(comm) as made:
            made.load(tmp_path / "state")
            return made.steps, made.state_dict(None)

    config = configured(daemon.addresses)
    expected = run_job(config, 2, write)[0]
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["part-0-of-2.npz", "part-1-of-2.npz"]
    for steps, restored in run_job(config, readers, read):
        assert steps == 2
        for name, kept in expected["state"].items():
            assert same(kept, restored["state"][name])


def test_files_that_are_no_state_are_told(tmp_path: Path) -> None:
    values, shapes = {key_of("w", "sum"): np.ones(10, np.float32)}, {"w": {"sum": (10,)}}

    def save(rank: int, size: int, *, number: int = 7, folder: Path = tmp_path) -> None:
        made = Save(number, 3, rank, size)
        write_part(folder, made, {key: share_of(x, rank, size) for key, x in values.items()})
        publish_part(folder, made)

    for rank in range(2):
        save(rank, 2)
    assert SavedParts(tmp_path, shapes).steps == 3
    with pytest.raises(UsageError, match="has a state in 2 parts; expected an empty folder"):
        save(0, 3)
    for other, message in (
        ({"w": {"sum": (11,)}}, "no sum of w with 6 numbers"),
        ({"v": {"sum": (10,)}}, "no sum of v"),
    ):
        with pytest.raises(UsageError, match=message):
            SavedParts(tmp_path, other)
    save(1, 2, number=8)
    with pytest.raises(UsageError, match=r"parts of 2 saves, after \[3, 3\] steps: the last one has not ended"):
        SavedParts(tmp_path, shapes)
    (tmp_path / "part-1-of-2.npz").write_bytes(b"PK")
    with pytest.raises(UsageError, match="is no part of this state"):
        SavedParts(tmp_path, shapes)
    (tmp_path / "part-1-of-2.npz").unlink()
    with pytest.raises(UsageError, match="has no whole state"):
        SavedParts(tmp_path, shapes)
    with pytest.raises(UsageError, match="No such file"):
        SavedParts(tmp_path / "nowhere", shapes)
    with pytest.raises(UsageError, match="cannot be written"):
        save(0, 2, folder=tmp_path / "part-0-of-2.npz")


@pytest.mark.parametrize("part", ["empty", "one array", "no steps", "steps before the first"])
def test_a_file_may_hold_anything(tmp_path: Path, part: str) -> None:
    file, shapes = tmp_path / "part-0-of-1.npz", {"w": {"sum": (10,)}}
    whole = {key_of("w", "sum"): np.ones(10, np.float32)}
    if part == "empty":
        file.touch()
    elif part == "one array":
        with file.open("wb") as opened:
            np.save(opened, np.ones(3))
    else:
        np.savez(file, **whole, **({} if part == "no steps" else {"step": np.array(-1)}))
    with pytest.raises(UsageError, match=r"part-0-of-1\.npz is no part of this state: "):
        SavedParts(tmp_path, shapes)


def test_a_part_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "part-0-of-1.npz").mkdir()
    write_part(tmp_path, Save(7, 3, 0, 1), {key_of("w", "sum"): np.ones(10, np.float32)})
    with pytest.raises(UsageError, match="cannot be written"):
        publish_part(tmp_path, Save(7, 3, 0, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["part-0-of-1.npz"]


def test_a_save_that_fails_on_one_rank_leaves_the_one_before(daemon: Daemon, tmp_path: Path) -> None:
    """As where the disk of one rank is full."""
    blocked = tmp_path / ".part-1.npz"

    def run(comm: Communicator) -> tuple[dict[str, Any], dict[str, Any]]:
        with ShardedOptimizer(params(), Adam(), comm=comm) as optimizer:
            optimizer.step(gradients(comm.rank, 0))
            optimizer.save(tmp_path)
            before = optimizer.state_dict(None)
            optimizer.step(gradients(comm.rank, 1))
            if comm.rank == 1:
                blocked.mkdir()
            with pytest.raises(UsageError, match="cannot be written"):
                optimizer.save(tmp_path)
            optimizer.load(tmp_path)
            return before, optimizer.state_dict(None)

    for before, restored in run_job(configured(daemon.addresses), 2, run):
        assert restored["step"] == before["step"] == 1
        assert all(same(before["state"][name], restored["state"][name]) for name in before["state"])
    names = ["part-0-of-2.npz", "part-1-of-2.npz"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [blocked.name, *names]


def test_all_ranks_hear_what_one_cannot_do(daemon: Daemon, tmp_path: Path) -> None:
    """A wrong state on the root, a gradient that does not fit, a folder that is a file; then all go on."""
    (tmp_path / "file").touch()

    def run(comm: Communicator) -> Array:
        large = [np.zeros(200_000, np.float32), np.zeros(200_000, np.float32)]
        with ShardedOptimizer(large, Sgd(lr=0.5), comm=comm) as optimizer:
            with pytest.raises(UsageError, match="the state is a dict; expected what state_dict has returned"):
                optimizer.load_state_dict({"x": 1} if comm.rank == 1 else None, root=1)
            with pytest.raises(UsageError, match="cannot be written"):
                optimizer.save(tmp_path / ("file" if comm.rank == 2 else "folder"))
            one = np.ones(200_000, np.float32)
            with pytest.raises(UsageError, match="the gradient of 1 is float64"):
                optimizer.step([one, np.ones(200_000)])
            assert optimizer.steps == 0
            optimizer.step([one, one])
            return np.concatenate(large)

    assert all((result == -0.5).all() for result in run_job(configured(daemon.addresses), 3, run))


def test_rows_keep_their_number(daemon: Daemon) -> None:
    def run(comm: Communicator) -> tuple[Array, Array]:
        table = {"t": np.zeros((100, 6), np.float32)}
        with ShardedOptimizer(table, RowAdagrad(lr=1.0, eps=0.0), tables=["t"], comm=comm) as optimizer:
            optimizer.step({"t": (np.array([3, 3, comm.rank]), np.full((3, 6), 2, np.float32))})
            state = optimizer.state_dict(None)
            optimizer.load_state_dict(state)
            again = optimizer.state_dict(None)
            assert (again["state"]["t"]["sum"] == state["state"]["t"]["sum"]).all()
            return table["t"], state["state"]["t"]["sum"]

    for table, kept in run_job(configured(daemon.addresses), 2, run):
        expected = np.zeros(100, np.float32)
        expected[3], expected[:2] = 16, 1
        assert (kept == expected).all()
        assert (table[[0, 1, 3]] == -1).all()
        assert not table[4:].any()


def test_a_job_that_was_formed_anew_goes_on_from_the_last_commit(daemon: Daemon) -> None:
    rule = Adam(lr=0.01)

    def run(comm: Communicator) -> tuple[dict[str, Array], dict[str, Array]]:
        expected, own = params(), params()
        with ShardedOptimizer(expected, rule, comm=comm, name="expected") as optimizer:
            for step in range(3):
                optimizer.step(gradients(comm.rank, step))
        optimizer = ShardedOptimizer(own, rule, comm=comm)
        optimizer.step(gradients(comm.rank, 0))
        optimizer.commit()
        kept = {name: x.copy() for name, x in own.items()}
        optimizer.step(gradients(comm.rank, 7))
        comm.reform()
        with pytest.raises(UsageError, match="the job was formed anew"):
            optimizer.step(gradients(comm.rank, 1))
        for name, x in kept.items():
            own[name][...] = x
        optimizer.restore()
        for step in (1, 2):
            optimizer.step(gradients(comm.rank, step))
        optimizer.close()
        return expected, own

    config = configured(daemon.addresses, "elastic.enabled=true", "elastic.min_ranks=3", "elastic.last_call_s=0.1")
    for expected, own in run_job(config, 3, run):
        assert same(expected, own)


def test_optimizers_without_names_live_side_by_side(daemon: Daemon) -> None:
    """They step by turns, one begins anew, and the job is formed anew."""

    def run(comm: Communicator) -> list[Array]:
        weights = [np.zeros(1000, np.float32) for _ in range(3)]
        optimizers = [ShardedOptimizer([weight], Sgd(lr=1.0), comm=comm) for weight in weights]
        for _ in range(2):
            for at, optimizer in enumerate(optimizers):
                optimizer.step([np.full(1000, at + 1, np.float32)])
        optimizers[1].close()
        optimizers[1].step([np.ones(1000, np.float32)])
        comm.reform()
        for at in (2, 0, 1):
            optimizers[at].restore()
        ends = [optimizer.begin_step([np.ones(1000, np.float32)]) for optimizer in optimizers]
        for end in reversed(ends):
            end()
        for optimizer in optimizers:
            optimizer.close()
        return weights

    config = configured(daemon.addresses, "elastic.enabled=true", "elastic.min_ranks=2", "elastic.last_call_s=0.1")
    for weights in run_job(config, 2, run):
        assert [set(weight.tolist()) for weight in weights] == [{-3.0}, {-6.0}, {-7.0}]


def test_a_training_outlives_a_shard(stack: ExitStack) -> None:
    """A shard is killed after the third step; its successor gets the state of the last commit, and the weights."""
    daemon, killed = stack.enter_context(Daemon(2)), threading.Event()

    def run(comm: Communicator) -> tuple[int, Array]:
        weights = np.zeros(200_000, np.float32)
        state = ElasticState(comm, {"weights": weights})
        optimizer = ShardedOptimizer([weights], Sgd(lr=0.5, momentum=0.5), comm=comm)

        def train(source: int) -> None:
            optimizer.restore(source)
            while state.step < 8:
                optimizer.step([np.ones(200_000, np.float32)])
                state.step += 1
                if state.step == 3 and comm.rank == 0 and not killed.is_set():
                    os.kill(daemon.shard_pids[1], signal.SIGKILL)
                    killed.set()
                optimizer.commit()
                state.commit()

        run_elastic(comm, state, train)
        optimizer.close()
        return comm.generation, weights

    config = configured(daemon.addresses, "elastic.enabled=true", "elastic.min_ranks=2", "elastic.last_call_s=0.1")
    weight = momentum = 0.0
    for _ in range(8):
        momentum = momentum / 2 + 1
        weight -= momentum / 2
    for generation, weights in run_job(config, 2, run):
        assert killed.is_set()
        assert generation > 1
        assert (weights == weight).all()


def test_a_step_that_failed_is_made_again(daemon: Daemon) -> None:
    """One rank has another learning rate, and so ends the job of the optimizer; that of the ranks goes on."""
    rule = Sgd(lr=0.5, momentum=0.5)

    def run(comm: Communicator) -> Array:
        weights = np.zeros(3000, np.float32)
        with ShardedOptimizer([weights], rule, comm=comm) as optimizer:
            optimizer.step([np.ones(3000, np.float32)])
            optimizer.commit()
            kept = weights.copy()
            optimizer.rule = Sgd(lr=0.5 + comm.rank, momentum=0.5)
            with pytest.raises(AbortedError):
                optimizer.step([np.ones(3000, np.float32)])
            optimizer.rule, weights[:] = rule, kept
            optimizer.restore()
            optimizer.step([np.ones(3000, np.float32)])
            return weights

    for weights in run_job(configured(daemon.addresses), 3, run):
        assert (weights == -0.5 - 0.75).all()


def test_weights_that_a_program_has_changed_go_to_the_shards(daemon: Daemon) -> None:
    """And the momentum stays: 1, then 1.5."""

    def run(comm: Communicator) -> Array:
        weights = np.zeros(1000, np.float32)
        with ShardedOptimizer([weights], Sgd(lr=1.0, momentum=0.5), comm=comm) as optimizer:
            optimizer.step([np.ones(1000, np.float32)])
            weights[:] = 8 + comm.rank
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step([np.ones(1000, np.float32)])
        return weights

    assert all((result == 6.5).all() for result in run_job(configured(daemon.addresses), 2, run))


@pytest.mark.parametrize("size", [1000, 200_000])
def test_a_gradient_may_lie_in_weights(daemon: Daemon, size: int) -> None:
    """Each of two parameters is the gradient of the other, as in a product. The gradient of a table is its own rows."""

    def run(comm: Communicator) -> list[Array]:
        weights = {"a": np.full(size, 2, np.float32), "b": np.full(size, 3, np.float32)}
        weights["t"] = np.full((size, 2), 4, np.float32)
        with ShardedOptimizer(weights, Sgd(lr=0.5), tables=["t"], comm=comm) as optimizer:
            own = np.arange(1, 3), weights["t"][1:3]
            optimizer.step({"a": weights["b"], "b": weights["a"], "t": own})
        return [weights["a"], weights["b"], weights["t"]]

    expected = np.full((size, 2), 4, np.float32)
    expected[1:3] = 2
    for a, b, t in run_job(configured(daemon.addresses), 2, run):
        assert (a == 0.5).all()
        assert (b == 2).all()
        assert (t == expected).all()


@pytest.mark.parametrize("rule", [Sgd(lr=0.5), Adagrad(), *LAZY], ids=lambda rule: type(rule).__name__)
def test_what_is_zero_on_all_ranks_stays_as_it_is(daemon: Daemon, rule: Rule) -> None:
    """Weights and what is kept for them, after a step in which they had a gradient."""

    def run(comm: Communicator) -> bool:
        weights = np.ones(4000, np.float32)
        gradient = np.full(4000, comm.rank + 1, np.float32)
        with ShardedOptimizer([weights], rule, comm=comm) as optimizer:
            optimizer.step([gradient])
            before, kept = weights.copy(), optimizer.state_dict(None)["state"]["0"]
            gradient[2000:] = 0
            optimizer.step([gradient])
            after = optimizer.state_dict(None)["state"]["0"]
        stays = [(weights, before), *((after[what], kept[what]) for what in kept)]
        return all((x[2048:] == y[2048:]).all() and (x[:2000] != y[:2000]).all() for x, y in stays)

    assert run_job(configured(daemon.addresses), 2, run) == [True] * 2


def test_the_learning_rate_may_change(daemon: Daemon) -> None:
    def run(comm: Communicator) -> Array:
        weights = np.zeros(1000, np.float32)
        with ShardedOptimizer([weights], Sgd(lr=1.0), comm=comm) as optimizer:
            optimizer.step([np.ones(1000, np.float32)])
            optimizer.rule = Sgd(lr=0.5)
            optimizer.step([np.ones(1000, np.float32) if comm.rank else None])
            with pytest.raises(UsageError, match="rule is an Adam; expected a Sgd"):
                optimizer.rule = Adam()
        return weights

    assert all((result == -1.25).all() for result in run_job(configured(daemon.addresses), 2, run))


def test_shards_without_room_refuse(daemon: Daemon) -> None:
    def run(comm: Communicator) -> str:
        comm.barrier()
        optimizer = ShardedOptimizer([np.zeros(1 << 22, np.float32)], Adam(), comm=comm)
        with pytest.raises(RefusedError) as caught:
            optimizer.step([np.zeros(1 << 22, np.float32)])
        return str(caught.value)

    with Daemon(1, "aggregator.max_job_bytes=16777216", "aggregator.max_bytes=33554432") as small:
        for text in run_job(configured(small.addresses), 2, run):
            assert "bytes of slots and state; aggregator.max_job_bytes is 16777216: raise it on the aggregator" in text
