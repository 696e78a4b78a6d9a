"""Horovod's names over a real aggregator, in processes."""

from __future__ import annotations

import inspect

import pytest
from local_cluster import Daemon
from scenarios import play

import omnireduce.torch as hvd

SCENARIOS = (
    "reductions", "moves", "gradients_of_collectives", "sets_of_ranks", "optimizers", "parameters_without_a_gradient",
    "parameters_in_groups", "sparse_gradients", "sparse_gradients_of_some_ranks", "a_sparse_gradient_of_one_rank",
    "optimizers_one_after_another", "a_parameter_that_thaws", "samples_between_commits",
    "states_of_optimizers", "uneven_batches", "batch_norm", "any_order", "one_that_differs",
    "gradients_of_groups", "gradients_of_gradients", "forms_of_groups", "roundings", "callable_sparse_handles",
    "ranks_outside_of_a_set", "tensors_in_objects", "parameters_without_names", "timelines_one_after_another",
    "process_sets_at_the_start", "what_is_no_tensor", "a_gradient_that_is_changed_while_it_is_combined",
    "one_that_ends",
)  # fmt: skip
REFUSALS = (
    "every_name_is_here",
    "what_one_rank_refuses",
    "a_gradient_that_cannot_be_combined",
    "a_state_that_cannot_be_sent",
    "a_batch_that_cannot_be_normalised",
    "a_set_that_cannot_be",
)


NAMES = """
Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min ProcessSet Product Sum SyncBatchNorm
add_process_set allgather allgather_async allgather_object allreduce allreduce_ allreduce_async allreduce_async_
alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_ broadcast_object
broadcast_optimizer_state broadcast_parameters ccl_built check_extension cross_rank cross_size cuda_built ddl_built
elastic global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce
grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async
init is_initialized join local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built poll rank
reducescatter reducescatter_async remove_process_set rocm_built shutdown size sparse_allreduce_async start_timeline
stop_timeline synchronize
"""  # names of horovod.torch 0.28.1
CALLS = {  # arguments that programs give by position
    "allreduce": "tensor average name compression op prescale_factor postscale_factor process_set",
    "allreduce_": "tensor average name op prescale_factor postscale_factor process_set",
    "grouped_allreduce": "tensors average name compression op prescale_factor postscale_factor process_set",
    "grouped_allreduce_": "tensors average name op prescale_factor postscale_factor process_set",
    "grouped_allreduce_async": "tensors average name op prescale_factor postscale_factor process_set",
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name process_set",
    "grouped_allgather": "tensors name process_set",
    "grouped_allgather_async": "tensors name process_set",
    "broadcast": "tensor root_rank name process_set",
    "alltoall": "tensor splits name process_set",
    "reducescatter": "tensor name compression op process_set prescale_factor postscale_factor",
    "reducescatter_async": "tensor name op process_set prescale_factor postscale_factor",
    "grouped_reducescatter": "tensors name compression op process_set prescale_factor postscale_factor",
    "grouped_reducescatter_async": "tensors name op process_set prescale_factor postscale_factor",
    "broadcast_object": "obj root_rank name process_set",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "DistributedOptimizer": "optimizer named_parameters compression backward_passes_per_step op "
    "gradient_predivide_factor num_groups groups sparse_as_dense process_set",
}


def test_horovods_names_are_there() -> None:
    assert set(NAMES.split()) <= set(hvd.__all__)
    assert all(hasattr(hvd, each) for each in hvd.__all__)
    hvd.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(hvd.HorovodInternalError):
        raise hvd.HorovodInternalError
    assert str(hvd.HorovodInternalError("simulated")) == "simulated"


@pytest.mark.parametrize("name", CALLS)
def test_arguments_stand_where_horovod_has_them(name: str) -> None:
    names = list(inspect.signature(getattr(hvd, name)).parameters)
    expected = CALLS[name].split()
    assert names[: len(expected)] == expected


def test_what_one_rank_refuses_is_an_error_on_all(daemon: Daemon) -> None:
    play(daemon, "refusing_worker.py", 3, REFUSALS)


def test_ranks_get_what_horovod_would_give(daemon: Daemon) -> None:
    play(daemon, "horovod_worker.py", 3, SCENARIOS)
