"""Torch's optimizers whose state lives on the shards, in processes."""

from __future__ import annotations

import signal
from contextlib import ExitStack

import pytest
from elastic_ranks import Ranks, until
from local_cluster import ROOT, Daemon
from scenarios import play

ELASTIC = str(ROOT / "tests" / "pytorch" / "sharded_elastic.py")
SCENARIOS = (
    "groups_with_rules_of_their_own", "a_schedule_and_a_closure", "states_like_those_of_torch",
    "a_state_without_some_parameters", "weights_of_another_rank", "rows_by_adagrad", "wrong_use",
    "groups_that_are_clipped_together", "a_clip_before_the_step_is_warned_of", "two_without_names",
    "one_that_loads_a_state",
)  # fmt: skip


def test_shards_update_the_parameters_of_torch(daemon: Daemon) -> None:
    play(daemon, "sharded_worker.py", 3, SCENARIOS)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_training_outlives_its_ranks(daemon: Daemon, victim: int) -> None:
    """A rank is killed, the others go on from the last commit; it comes back, and they go on from where they are."""
    with ExitStack() as stack:
        ranks = Ranks(daemon, stack, 3, 1, ELASTIC, "3", "12")
        processes = [ranks.start(rank) for rank in range(3)]
        until(processes[victim], ": step 5")
        processes[victim].signal(signal.SIGKILL)
        others = [process for rank, process in enumerate(processes) if rank != victim]
        until(others[0], "of 2 goes on at step")
        processes[victim] = ranks.start(victim)
        until(processes[victim], "of 3 goes on at step")
        for process in processes:
            assert "weights right: True" in until(process, "is done after")
            assert process.wait() == 0, process.log
