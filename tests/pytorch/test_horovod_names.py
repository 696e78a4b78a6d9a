"""Horovod's names over a real aggregator, in processes."""

from __future__ import annotations

from local_cluster import Daemon
from scenarios import play

SCENARIOS = (
    "reductions", "moves", "gradients_of_collectives", "sets_of_ranks", "optimizers", "parameters_without_a_gradient",
    "parameters_in_groups", "sparse_gradients", "sparse_gradients_of_some_ranks", "a_sparse_gradient_of_one_rank",
    "optimizers_one_after_another", "a_parameter_that_thaws", "samples_between_commits",
    "states_of_optimizers", "uneven_batches", "batch_norm", "any_order", "one_that_differs",
    "one_that_ends",
)  # fmt: skip


def test_ranks_get_what_horovod_would_give(daemon: Daemon) -> None:
    play(daemon, "horovod_worker.py", 3, SCENARIOS)
