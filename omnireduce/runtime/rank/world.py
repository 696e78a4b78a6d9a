"""The one communicator of a process that needs no more: `init` makes it, and functions stand for its methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, overload

from numpy.typing import NDArray

from omnireduce.core.descriptor import Op, RowOp
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.runtime.rank.batched_calls import Table
from omnireduce.runtime.rank.calls import Rows
from omnireduce.runtime.rank.communicator import Communicator, G, S
from omnireduce.runtime.rank.environment import job_name, own_launch
from omnireduce.runtime.rank.handles import Handle
from omnireduce.support.config import Config, load_config, override_config, split_list
from omnireduce.support.logs import show_debug_lines

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

    Raises ConfigError, also for a file that cannot be read; UsageError, also when the launcher's variables make no
    sense, or speak of ranks and do not say which one this is; otherwise what `Communicator` raises.
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
    if _global is communicator:  # not one that was made after it
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


@overload
def allreduce(x: G, *, op: Op = ..., name: str = ..., priority: int | None = ..., codec: str | None = ...) -> G: ...
@overload
def allreduce(
    x: NDArray[S],
    *,
    out: NDArray[S] | None = ...,
    op: Op = ...,
    name: str = ...,
    block_size: int | None = ...,
    priority: int | None = ...,
    codec: str | None = ...,
) -> NDArray[S]: ...
def allreduce(
    x: Any,
    *,
    out: Any = None,
    op: Op = "sum",
    name: str = "",
    block_size: int | None = None,
    priority: int | None = None,
    codec: str | None = None,
) -> Any:
    """See `Communicator.allreduce`."""
    return running().allreduce(x, out=out, op=op, name=name, block_size=block_size, priority=priority, codec=codec)


@overload
def allreduce_async(
    x: G, *, op: Op = ..., name: str = ..., priority: int | None = ..., codec: str | None = ...
) -> Handle[G]: ...
@overload
def allreduce_async(
    x: NDArray[S],
    *,
    out: NDArray[S] | None = ...,
    op: Op = ...,
    name: str = ...,
    block_size: int | None = ...,
    priority: int | None = ...,
    codec: str | None = ...,
) -> Handle[NDArray[S]]: ...
def allreduce_async(
    x: Any,
    *,
    out: Any = None,
    op: Op = "sum",
    name: str = "",
    block_size: int | None = None,
    priority: int | None = None,
    codec: str | None = None,
) -> Handle[Any]:
    """See `Communicator.allreduce_async`."""
    return running().allreduce_async(
        x, out=out, op=op, name=name, block_size=block_size, priority=priority, codec=codec
    )


def allreduce_rows(indices: Array, values: NDArray[S], n_rows: int, *, op: RowOp = "sum", name: str = "") -> Rows[S]:
    """See `Communicator.allreduce_rows`."""
    return running().allreduce_rows(indices, values, n_rows, op=op, name=name)


def allreduce_rows_async(
    indices: Array, values: NDArray[S], n_rows: int, *, op: RowOp = "sum", name: str = ""
) -> Handle[Rows[S]]:
    """See `Communicator.allreduce_rows_async`."""
    return running().allreduce_rows_async(indices, values, n_rows, op=op, name=name)


def allreduce_rows_into(
    out: NDArray[S], indices: Array, values: NDArray[S], *, op: RowOp = "sum", name: str = ""
) -> NDArray[S]:
    """See `Communicator.allreduce_rows_into`."""
    return running().allreduce_rows_into(out, indices, values, op=op, name=name)


def allreduce_rows_into_async(
    out: NDArray[S], indices: Array, values: NDArray[S], *, op: RowOp = "sum", name: str = ""
) -> Handle[NDArray[S]]:
    """See `Communicator.allreduce_rows_into_async`."""
    return running().allreduce_rows_into_async(out, indices, values, op=op, name=name)


def reduce(x: NDArray[S], root: int = 0, *, op: Op = "sum", name: str = "") -> NDArray[S] | None:
    """See `Communicator.reduce`."""
    return running().reduce(x, root, op=op, name=name)


def reduce_async(x: NDArray[S], root: int = 0, *, op: Op = "sum", name: str = "") -> Handle[NDArray[S] | None]:
    """See `Communicator.reduce_async`."""
    return running().reduce_async(x, root, op=op, name=name)


def allreduce_tables(tables: Sequence[Table], *, op: RowOp = "sum", name: str = "") -> list[Rows[Any]]:
    """See `Communicator.allreduce_tables`."""
    return running().allreduce_tables(tables, op=op, name=name)


def allreduce_tables_async(tables: Sequence[Table], *, op: RowOp = "sum", name: str = "") -> Handle[list[Rows[Any]]]:
    """See `Communicator.allreduce_tables_async`."""
    return running().allreduce_tables_async(tables, op=op, name=name)


def broadcast(x: NDArray[S], root: int = 0, *, name: str = "") -> NDArray[S]:
    """See `Communicator.broadcast`."""
    return running().broadcast(x, root, name=name)


def broadcast_async(x: NDArray[S], root: int = 0, *, name: str = "") -> Handle[NDArray[S]]:
    """See `Communicator.broadcast_async`."""
    return running().broadcast_async(x, root, name=name)


def allgather(x: NDArray[S], *, name: str = "") -> NDArray[S]:
    """See `Communicator.allgather`."""
    return running().allgather(x, name=name)


def allgather_async(x: NDArray[S], *, name: str = "") -> Handle[NDArray[S]]:
    """See `Communicator.allgather_async`."""
    return running().allgather_async(x, name=name)


def allgather_ragged(x: NDArray[S], *, name: str = "") -> list[NDArray[S]]:
    """See `Communicator.allgather_ragged`."""
    return running().allgather_ragged(x, name=name)


def allgather_ragged_async(x: NDArray[S], *, name: str = "") -> Handle[list[NDArray[S]]]:
    """See `Communicator.allgather_ragged_async`."""
    return running().allgather_ragged_async(x, name=name)


def gather(x: NDArray[S], root: int = 0, *, name: str = "") -> NDArray[S] | None:
    """See `Communicator.gather`."""
    return running().gather(x, root, name=name)


def gather_async(x: NDArray[S], root: int = 0, *, name: str = "") -> Handle[NDArray[S] | None]:
    """See `Communicator.gather_async`."""
    return running().gather_async(x, root, name=name)


def scatter(out: NDArray[S], parts: NDArray[S] | None = None, root: int = 0, *, name: str = "") -> NDArray[S]:
    """See `Communicator.scatter`."""
    return running().scatter(out, parts, root, name=name)


def scatter_async(
    out: NDArray[S], parts: NDArray[S] | None = None, root: int = 0, *, name: str = ""
) -> Handle[NDArray[S]]:
    """See `Communicator.scatter_async`."""
    return running().scatter_async(out, parts, root, name=name)


def alltoall(x: NDArray[S], *, name: str = "") -> NDArray[S]:
    """See `Communicator.alltoall`."""
    return running().alltoall(x, name=name)


def alltoall_async(x: NDArray[S], *, name: str = "") -> Handle[NDArray[S]]:
    """See `Communicator.alltoall_async`."""
    return running().alltoall_async(x, name=name)


def broadcast_object(x: object, root: int = 0, *, name: str = "", trust: bool = False) -> Any:
    """See `Communicator.broadcast_object`."""
    return running().broadcast_object(x, root, name=name, trust=trust)


def broadcast_object_async(x: object, root: int = 0, *, name: str = "", trust: bool = False) -> Handle[Any]:
    """See `Communicator.broadcast_object_async`."""
    return running().broadcast_object_async(x, root, name=name, trust=trust)


def allgather_object(x: object, *, name: str = "", trust: bool = False) -> list[Any]:
    """See `Communicator.allgather_object`."""
    return running().allgather_object(x, name=name, trust=trust)


def allgather_object_async(x: object, *, name: str = "", trust: bool = False) -> Handle[list[Any]]:
    """See `Communicator.allgather_object_async`."""
    return running().allgather_object_async(x, name=name, trust=trust)


def reduce_scatter(x: NDArray[S], *, op: Op = "sum", name: str = "") -> NDArray[S]:
    """See `Communicator.reduce_scatter`."""
    return running().reduce_scatter(x, op=op, name=name)


def reduce_scatter_async(x: NDArray[S], *, op: Op = "sum", name: str = "") -> Handle[NDArray[S]]:
    """See `Communicator.reduce_scatter_async`."""
    return running().reduce_scatter_async(x, op=op, name=name)


def barrier(*, name: str = "") -> None:
    """See `Communicator.barrier`."""
    running().barrier(name=name)


def barrier_async(*, name: str = "") -> Handle[None]:
    """See `Communicator.barrier_async`."""
    return running().barrier_async(name=name)


def refuse(error: Exception) -> None:
    """See `Communicator.refuse`."""
    running().refuse(error)


def reform(*, min_ranks: int | None = None, max_ranks: int | None = None) -> None:
    """See `Communicator.reform`."""
    running().reform(min_ranks=min_ranks, max_ranks=max_ranks)


def start_timeline(path: str | Path, mark_cycles: bool = False) -> None:
    """See `Communicator.start_timeline`."""
    running().start_timeline(path, mark_cycles)


def stop_timeline() -> None:
    """See `Communicator.stop_timeline`."""
    running().stop_timeline()


def rank() -> int:
    """This worker's rank in the global communicator."""
    return running().rank


def size() -> int:
    """How many workers the global communicator has."""
    return running().size


def local_rank() -> int:
    """This worker's number among those on its host, as the launcher gave it. Raises UsageError when nobody said it."""
    return _said_by_launcher(running().local_rank, "this worker's number on its host")


def local_size() -> int:
    """How many workers of the launch this host has, as the launcher gave it. Raises UsageError when nobody said it."""
    return _said_by_launcher(running().local_size, "how many workers this host has")


def local_first() -> AbstractContextManager[bool]:
    """`with omnireduce.local_first():` lets one rank of each host, local rank 0, go first through the block.

    For data that are downloaded or prepared once per host: the others find them. All ranks must call it; it gives
    whether this rank is the first of its host. Raises what `barrier` and `local_rank` raise.
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


def _said_by_launcher(found: int | None, what: str) -> int:
    if found is None:
        raise UsageError(f"{what} is not known: no launcher said it, expected omnireduce run, mpirun, srun or torchrun")
    return found
