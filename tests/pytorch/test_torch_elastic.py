"""Horovod's elastic words: ranks die and come, and no sample is lost or taken twice."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from elastic_ranks import Ranks, until
from hypothesis import given
from hypothesis import strategies as st
from local_cluster import ROOT, WAIT_S, Daemon

import omnireduce.torch as hvd
from omnireduce import AbortedError
from omnireduce.data_parallel.horovod_names import Compression
from omnireduce.data_parallel.sampling import Sampling
from omnireduce.data_parallel.scaling import Scaling
from omnireduce.data_parallel.session import ProcessSet
from omnireduce.torch.gradient_hooks import ReductionSettings

SCRIPT = str(ROOT / "examples" / "torch_elastic.py")


def all_were_taken_once(line: str) -> None:
    """In each epoch."""
    match = re.search(r"taken ([0-9]+) to ([0-9]+) times in ([0-9]+) epochs", line)
    assert match is not None, line
    assert match[1] == match[2] == match[3], line


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as result:
        yield result


@pytest.mark.parametrize("victim", [0, 1])
def test_no_sample_is_lost_or_taken_twice(daemon: Daemon, stack: ExitStack, victim: int) -> None:
    ranks = Ranks(daemon, stack, 3, 1, SCRIPT, "--ranks", "3")
    processes = [ranks.start(rank) for rank in range(3)]
    until(processes[victim], "epoch 1, batch 2")
    processes[victim].signal(signal.SIGKILL)
    others = [process for rank, process in enumerate(processes) if rank != victim]
    until(others[0], "of 2 goes on in epoch")
    processes[victim] = ranks.start(victim)
    until(processes[victim], "of 3 goes on in epoch")
    for process in processes:
        all_were_taken_once(until(process, "is done"))
        assert process.wait() == 0, process.log


def test_too_few_survivors_wait_for_others(daemon: Daemon, stack: ExitStack) -> None:
    ranks = Ranks(daemon, stack, 2, 2, SCRIPT, "--ranks", "2")
    processes = [ranks.start(rank) for rank in range(2)]
    until(processes[1], "epoch 1, batch 2")
    processes[1].signal(signal.SIGKILL)
    processes[1] = ranks.start(1)
    for process in processes:
        all_were_taken_once(until(process, "is done"))


SETS = """
import os, signal, sys, torch
import omnireduce.torch as hvd

@hvd.elastic.run
def train(state):
    some = hvd.add_process_set([0, 2])
    print(f"rank {hvd.rank()} of {hvd.size()} goes on", flush=True)
    while state.step < 20:
        if state.step == 5 and "dies" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        if hvd.rank() in (0, 2):
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="some", process_set=some).tolist() == [2, 2]
        state.step += 1
        state.commit()

hvd.init()
train(hvd.elastic.TorchState(step=0))
print("is done", flush=True)
hvd.shutdown()
"""


def test_sets_of_ranks_are_made_anew_with_one_that_came_back(daemon: Daemon, stack: ExitStack) -> None:
    """The rank that came back has made fewer process sets than the others."""
    ranks = Ranks(daemon, stack, 3, 3, "-c", SETS)
    processes = [ranks.start(rank, *(["dies"] if rank == 2 else [])) for rank in range(3)]
    assert processes[2].wait(4 * WAIT_S) == -signal.SIGKILL
    processes[2] = ranks.start(2)
    for process in processes:
        until(process, "is done")
        assert process.wait() == 0, process.log


FAILS_TO_KEEP = """
import omnireduce.torch as hvd
from omnireduce import AbortedError

class State(hvd.elastic.ObjectState):
    fails = False

    def save(self):
        if self.fails:
            raise AbortedError("rank 1", "has died")
        super().save()

hvd.init()
state = State(step=0)
if hvd.rank() == 1:
    state.step = 7
    state.commit()
else:
    state.check_host_updates()
    state.fails = True
try:
    state.sync()
except AbortedError:
    state.fails = False
    state.restore()
state.sync()
print("step", state.step, flush=True)
hvd.shutdown()
"""


def test_who_could_not_keep_a_state_does_not_give_it_to_others(daemon: Daemon, stack: ExitStack) -> None:
    ranks = Ranks(daemon, stack, 2, 2, "-c", FAILS_TO_KEEP)
    for each in [ranks.start(rank) for rank in range(2)]:
        assert until(each, "step") == "step 7"
        assert each.wait() == 0, each.log


class Aborted(torch.optim.SGD):
    """An optimizer whose state cannot be fetched, as one on the shards once the job has failed."""

    fails = False

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise AbortedError("rank 1", "has died")
        return super().state_dict()


def test_a_state_that_cannot_be_kept_leaves_the_one_before_as_it_was() -> None:
    """The number of a step, its weights and its optimizer belong to the same commit."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = Aborted(model.parameters(), lr=1.0)
    state = hvd.elastic.TorchState(model, optimizer, step=1)
    torch.nn.init.ones_(model.weight)
    state.step, optimizer.fails = 2, True
    with pytest.raises(AbortedError, match="rank 1: has died"):
        state.save()
    optimizer.fails = False
    state.restore()
    assert (state.step, model.weight.item()) == (1, 0.0)


def test_a_mean_that_is_divided_in_parts_is_one_of_the_ranks_that_there_are_now() -> None:
    ranks = ProcessSet(range(3))
    way = ReductionSettings(Scaling(), 2.0, Compression.none, False, ranks)
    assert way.scaling == ("sum", 1 / 2, 2 / 3)
    ranks.ranks = [0, 1]
    assert way.scaling == ("sum", 1 / 2, 2 / 2)


@given(
    total=st.integers(0, 30),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    pads=st.booleans(),
    data=st.data(),
)
def test_samples_are_dealt_out_once(total: int, sizes: list[int], pads: bool, data: st.DataObject) -> None:
    """Ranks change several times within an epoch, each time after a commit and some samples that are lost."""
    state = {"epoch": 3, "processed_indices": list[int]()}
    taken: list[int] = []
    for size in [*sizes, 1]:
        ranks = [Sampling(total, pads=pads) for _ in range(size)]
        for rank, each in enumerate(ranks):
            each.load_state_dict(state)
            each.deal(rank, size)
        lengths = {len(each.indices) for each in ranks}
        assert len(lengths) == 1 if pads else max(lengths) - min(lengths) <= 1
        done = data.draw(st.integers(0, max(lengths)))
        for each in ranks:
            each.record(each.indices[:done])
            taken += each.indices[:done]
        untold = np.any([each.unreported() for each in ranks], axis=0)
        for each in ranks:
            each.take_reported(untold)
            assert not each.unreported().any()
        state = ranks[-1].state_dict()
        ranks[-1].record(each.indices[done:])
    assert len(taken) == len(set(taken)) or pads
    assert set(taken) <= set(range(total))
    assert state["processed_indices"] == sorted(set(taken))
