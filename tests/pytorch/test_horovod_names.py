"""Horovod's names over a real aggregator, in processes."""

from __future__ import annotations

import sys
from contextlib import ExitStack

from local_cluster import ROOT, WAIT_S, Daemon, Process, unique_job

SCRIPT = str(ROOT / "tests" / "pytorch" / "horovod_worker.py")
SIZE = 3


SCENARIOS = (
    "reductions", "moves", "gradients_of_collectives", "sets_of_ranks", "optimizers", "parameters_without_a_gradient",
    "parameters_in_groups", "sparse_gradients", "sparse_gradients_of_some_ranks", "a_sparse_gradient_of_one_rank",
    "optimizers_one_after_another", "a_parameter_that_thaws", "samples_between_commits",
    "states_of_optimizers", "uneven_batches", "batch_norm", "any_order", "one_that_differs",
    "one_that_ends",
)  # fmt: skip


def test_ranks_get_what_horovod_would_give(daemon: Daemon) -> None:
    """One scenario after the other: the log of a rank ends with the one that failed."""
    job, environ = unique_job("names"), {"OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(daemon.addresses)}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Process(sys.executable, SCRIPT, str(rank), str(SIZE), job, *SCENARIOS, environ=environ))
            for rank in range(SIZE)
        ]
        for each in ranks:
            assert each.wait(2 * WAIT_S) == 0, each.log
