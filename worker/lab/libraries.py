"""The libraries that the exercises compare: what each calls a message, a reduction and a barrier.

Tensors are float32 arrays of one dimension; every reduction is a sum in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from omnireduce.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.extras import install
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.environment import Launch


class Messages(NamedTuple):
    """`send(x, peer)` and `receive(x, peer)` return when `x` is on its way, or there."""

    send: Callable[[Array, int], object]
    receive: Callable[[Array, int], object]


class Library(NamedTuple):
    """`messages`: those between two ranks; None where a library has none. `reduce(x)` is for rank 0; `allreduce(x)` for
    all."""

    name: str
    messages: Messages | None
    reduce: Callable[[Array], object]
    allreduce: Callable[[Array], object]
    barrier: Callable[[], object]


def service(comm: Communicator) -> Library:
    """omnireduce itself: it sums, and has no messages between two ranks."""
    return Library("omnireduce", None, comm.reduce, comm.allreduce, comm.barrier)


def gloo(launch: Launch) -> Library:
    """torch.distributed with gloo. Raises UsageError where torch is not installed, or does not know where to meet."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        raise UsageError(f"torch is not installed here; `make torch`, or {install('torch', 'torch')}") from None
    from omnireduce.torch.launch import tell_torch

    tell_torch()
    torch.set_num_threads(1)
    if launch.size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        try:
            dist.init_process_group("gloo")
        except ValueError as error:  # a variable is not set
            advice = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or start this with torchrun"
            raise UsageError(f"gloo: {error}; {advice}") from None
    tensor: Callable[[Array], Any] = torch.from_numpy
    return Library(
        "gloo",
        Messages(lambda x, peer: dist.send(tensor(x), peer), lambda x, peer: dist.recv(tensor(x), peer)),
        lambda x: dist.reduce(tensor(x), 0),
        lambda x: dist.all_reduce(tensor(x)),
        dist.barrier,
    )


def mpi(launch: Launch) -> Library:
    """mpi4py. Raises UsageError where it is not installed, or where no mpirun started these ranks."""
    try:
        from mpi4py import MPI
    except ImportError:
        raise UsageError(f"mpi4py is not installed here; {install('mpi4py', 'mpi')}") from None
    world: Any = MPI.COMM_WORLD
    if world.Get_size() != launch.size:
        raise UsageError(f"MPI has {world.Get_size()} ranks here, the launch {launch.size}: start it with mpirun")
    place: Any = MPI.IN_PLACE
    return Library(
        "mpi4py",
        Messages(lambda x, peer: world.Send(x, peer), lambda x, peer: world.Recv(x, peer)),
        lambda x: world.Reduce(place if launch.rank == 0 else x, x if launch.rank == 0 else None),
        lambda x: world.Allreduce(place, x),
        world.Barrier,
    )
