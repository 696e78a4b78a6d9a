"""The global communicator of a process: `init` makes it, and functions of this module call its methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from omnireduce.errors import UsageError
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.launcher_detection import job_name, own_launch
from omnireduce.support.config import Config, load_config, override_config, split_list
from omnireduce.support.logs import show_debug_lines

P = ParamSpec("P")
T = TypeVar("T")
_global: Communicator | None = None


def connect(
    config: str | Path | Config | None = None,
    *,
    aggregators: str | Sequence[str] | None = None,
    job: str | None = None,
    rank: int | None = None,
    size: int | None = None,
) -> Communicator:
    """Join a job and return its communicator.

    `config`: a Config, a TOML file, or None for OMNIREDUCE_CONFIG or the defaults; `aggregators` ("host:port",
    several with commas between them, or a list) and `job` override it. `rank` and `size` come from the launcher unless
    given, both or neither. If `log.level` is debug, the log lines of this process go to standard error, unless the
    program's own logging takes them.

    Raises ConfigError, for example for a file that cannot be read; UsageError, for example if the launcher's variables
    make no sense, or speak of ranks without giving this process its rank. Raises the errors of `Communicator`, too.
    """
    settings = config if isinstance(config, Config) else load_config(config)
    changes: dict[str, object] = {}
    if aggregators is not None:
        changes["cluster.aggregators"] = split_list(aggregators)
    if job is not None:
        changes["cluster.job"] = job
    settings = override_config(settings, changes, source="argument")
    launch = own_launch(rank=rank, size=size)
    show_debug_lines(settings.log, rank=launch.rank)
    return Communicator(
        settings,
        rank=launch.rank,
        size=launch.size,
        local_rank=launch.local_rank,
        local_size=launch.local_size,
        job=job_name(settings, launch.job),
    )


def init(
    config: str | Path | Config | None = None,
    *,
    aggregators: str | Sequence[str] | None = None,
    job: str | None = None,
    rank: int | None = None,
    size: int | None = None,
) -> Communicator:
    """Make the global communicator: see `connect`. `with omnireduce.init():` shuts it down at the end, and `init` may
    be called again. Raises UsageError when there is one already."""
    global _global
    if is_initialized():
        raise UsageError("omnireduce is initialised already; call omnireduce.shutdown() first")
    _global = connect(config, aggregators=aggregators, job=job, rank=rank, size=size)
    _global._on_shutdown = _forget
    return _global


def _forget(communicator: Communicator) -> None:
    global _global
    if _global is communicator:  # not a communicator that was made after it
        _global = None


def is_initialized() -> bool:
    """Whether there is a global communicator."""
    return _global is not None


def running() -> Communicator:
    """The global communicator. Raises UsageError when there is none."""
    if _global is None:
        raise UsageError("omnireduce is not initialised; call omnireduce.init() first")
    return _global


def shutdown() -> None:
    """Leave the job of the global communicator; does nothing when there is none."""
    if _global is not None:
        _global.shutdown()


def _function(method: Callable[Concatenate[Communicator, P], T]) -> Callable[P, T]:
    """A function that calls `method` of the global communicator. Arguments, types and docstring are the method's."""

    @wraps(method)
    def function(*args: P.args, **kwargs: P.kwargs) -> T:
        return method(running(), *args, **kwargs)

    signature = inspect.signature(method)
    function.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    function.__module__, function.__qualname__ = __name__, method.__name__
    return function


allreduce = _function(Communicator.allreduce)
allreduce_async = _function(Communicator.allreduce_async)
allreduce_rows = _function(Communicator.allreduce_rows)
allreduce_rows_async = _function(Communicator.allreduce_rows_async)
allreduce_rows_into = _function(Communicator.allreduce_rows_into)
allreduce_rows_into_async = _function(Communicator.allreduce_rows_into_async)
allreduce_tables = _function(Communicator.allreduce_tables)
allreduce_tables_async = _function(Communicator.allreduce_tables_async)
reduce = _function(Communicator.reduce)
reduce_async = _function(Communicator.reduce_async)
reduce_scatter = _function(Communicator.reduce_scatter)
reduce_scatter_async = _function(Communicator.reduce_scatter_async)
broadcast = _function(Communicator.broadcast)
broadcast_async = _function(Communicator.broadcast_async)
allgather = _function(Communicator.allgather)
allgather_async = _function(Communicator.allgather_async)
allgather_ragged = _function(Communicator.allgather_ragged)
allgather_ragged_async = _function(Communicator.allgather_ragged_async)
gather = _function(Communicator.gather)
gather_async = _function(Communicator.gather_async)
scatter = _function(Communicator.scatter)
scatter_async = _function(Communicator.scatter_async)
alltoall = _function(Communicator.alltoall)
alltoall_async = _function(Communicator.alltoall_async)
broadcast_object = _function(Communicator.broadcast_object)
broadcast_object_async = _function(Communicator.broadcast_object_async)
allgather_object = _function(Communicator.allgather_object)
allgather_object_async = _function(Communicator.allgather_object_async)
barrier = _function(Communicator.barrier)
barrier_async = _function(Communicator.barrier_async)
refuse = _function(Communicator.refuse)
reform = _function(Communicator.reform)
start_timeline = _function(Communicator.start_timeline)
stop_timeline = _function(Communicator.stop_timeline)


def rank() -> int:
    """This worker's rank in the global communicator."""
    return running().rank


def size() -> int:
    """The number of workers in the global communicator."""
    return running().size


def local_rank() -> int:
    """This worker's number among the workers on its host, from the launcher. Raises UsageError if the launcher did not
    give it."""
    return _launcher_number(running().local_rank, "this worker's number on its host")


def local_size() -> int:
    """The number of workers of the launch on this host, from the launcher. Raises UsageError if the launcher did not
    give it."""
    return _launcher_number(running().local_size, "how many workers this host has")


def local_first() -> AbstractContextManager[bool]:
    """`with omnireduce.local_first():` lets one rank of each host, local rank 0, go first through the block.

    For data that are downloaded or prepared once per host: the other ranks then find them. All ranks must call it. It
    gives whether this rank is the first of its host. Raises the errors of `barrier` and `local_rank`.
    """
    return first_of_host(local_rank() == 0, barrier)


@contextmanager
def first_of_host(is_first: bool, barrier: Callable[[], object]) -> Iterator[bool]:
    """Run a block first, or after the ranks that are first. Each rank calls `barrier` once.

    If the block of a first rank raises, the others are not let in. They hear that this rank has failed when it leaves
    its job, so the exception must not be caught before that.
    """
    if not is_first:
        barrier()
    yield is_first
    if is_first:
        barrier()


def _launcher_number(number: int | None, name: str) -> int:
    if number is None:
        raise UsageError(f"{name} is not known: no launcher gave it, expected omnireduce run, mpirun, srun or torchrun")
    return number
