"""The queue of a process that fronts use whose collectives are functions, such as `allreduce(x)`.

Ranks may form sets, each with a queue of its own. The names are Horovod's.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from omnireduce.data_parallel.dispatcher import Task
from omnireduce.data_parallel.queue import Queue
from omnireduce.errors import OmniReduceError, UsageError
from omnireduce.runtime.rank import engine, global_communicator
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.error_agreement import run_agreed_by

T = TypeVar("T")


class ProcessSet:
    """Some ranks of the job, by their numbers, which do collectives among themselves.

    `process_set_id`: its number once it was added; None before, and after it was removed. `global_process_set` is 0.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks: list[int] | None = sorted(set(ranks))
        self.process_set_id: int | None = None

    def included(self) -> bool:
        """Whether this rank belongs to it."""
        return global_communicator.running().rank in self.members()

    def rank(self) -> int:
        """The number of this rank in the set. Raises UsageError where it does not belong to it."""
        own_rank = global_communicator.running().rank
        if own_rank not in self.members():
            raise UsageError(f"rank {own_rank} does not belong to the process set {self.members()}")
        return self.members().index(own_rank)

    def size(self) -> int:
        """The number of its ranks."""
        return len(self.members())

    def members(self) -> list[int]:
        """Its ranks, by their numbers in the job."""
        return list(range(global_communicator.running().size)) if self.ranks is None else self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
global_process_set.ranks, global_process_set.process_set_id = None, 0


class LocalRank(NamedTuple):
    """Numbers of a rank: its own among the ranks of its host, and that of its host among the hosts with such a rank.

    In an elastic job that has fewer ranks than before, `local_rank` may be `local_size` or more.
    """

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool


class _Session:
    """Queues and process sets of the global communicator. `added` counts the sets that were added so far, `unnamed` the
    collectives without a name, by kind and set."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.begin()

    def begin(self) -> None:
        """The communicator is in a job, or in a new formation of it. All its ranks call this."""
        self.sets, self.queues = {0: global_process_set}, {0: Queue(self.comm)}
        self.added, self.unnamed = 0, Counter[tuple[str, int]]()
        self.local = _find_local_rank(self.queues[0], self.comm)

    def close_queues(self) -> None:
        """End them on all ranks."""
        for open_queue in self.queues.values():
            open_queue.close()


_session: _Session | None = None


def init(
    comm: Any = None, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None, **named: Any
) -> None:
    """Join the job, unless this process has: as `omnireduce.init` with the arguments `named`, whose global communicator
    is used if there is one. `process_sets`: sets of ranks, the same on all ranks; "dynamic", or None, for none yet.

    Raises UsageError for a `comm` other than None and for other `process_sets`, and otherwise what `omnireduce.init`
    raises.
    """
    global _session
    if comm is not None:
        raise UsageError(
            "init takes no communicator of MPI and no list of ranks; use process sets for some of the ranks"
        )
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise UsageError(f'process_sets is {process_sets!r}; expected sets of ranks, "dynamic" or None')
    if is_initialized():
        return
    joined = (
        global_communicator.running() if global_communicator.is_initialized() else global_communicator.init(**named)
    )
    _session = _Session(joined)
    for process_set in () if isinstance(process_sets, str) else process_sets or ():
        add_process_set(process_set)


def is_initialized() -> bool:
    """Whether there is a job."""
    return _session is not None and not _session.comm.is_shut_down


def session_of() -> _Session:
    """The session of this process. If there is only a global communicator, all ranks begin a session now."""
    if _session is not None and not _session.comm.is_shut_down:
        return _session
    if global_communicator.is_initialized():
        init()
    if _session is None or _session.comm.is_shut_down:
        raise UsageError("omnireduce is not initialised; call omnireduce.init() first")
    return _session


def shutdown() -> None:
    """Leave the job. Collectives under way on other ranks fail. Does nothing when there is none."""
    global _session
    session = _session  # a signal handler may call this meanwhile
    if session is not None:
        session.close_queues()
        session.comm.shutdown()
        if _session is session:
            _session = None


def reset() -> None:
    """After a fault, or where workers wait to join: form the job anew, with new queues. Process sets are gone."""
    session = session_of()
    session.close_queues()
    session.comm.reform()
    for process_set in session.sets.values():
        process_set.process_set_id = 0 if process_set is global_process_set else None
    session.begin()


def queue(process_set: ProcessSet = global_process_set) -> Queue:
    """The queue of a set of ranks. Raises UsageError where this rank, or nobody, belongs to it."""
    session, number = session_of(), process_set.process_set_id
    if number is not None and session.sets.get(number) is process_set and number in session.queues:
        return session.queues[number]
    if number is None or session.sets.get(number) is not process_set:
        raise UsageError(f"{process_set} was not added, or is removed; call add_process_set on all ranks first")
    raise UsageError(f"rank {session.comm.rank} does not belong to {process_set}")


def name_of(kind: str, name: str | None, process_set: ProcessSet = global_process_set) -> str:
    """The name of a collective. A collective without a name gets a number: then all ranks call such collectives in one
    order."""
    if name:
        return f"{kind}.{name}"
    key = kind, process_set.process_set_id or 0
    session_of().unnamed[key] += 1
    return f"{kind}.noname.{session_of().unnamed[key]}"


def names_of(kind: str, name: str | None, values: Sequence[Any], process_set: ProcessSet) -> list[str]:
    """The names of several collectives that are called together, one for each value."""
    first = name_of(kind, name, process_set)
    return [f"{first}.{at}" for at in range(len(values))]


def submit_named(names: Sequence[str], process_set: ProcessSet, begin: Callable[[], T]) -> T:
    """Call `begin`, which submits the collectives of these names, and return its result. If it raises an error, the
    ranks that wait for these names are told of it, unless they know of it already."""
    try:
        return begin()
    except Exception as error:
        with suppress(Exception):  # this rank does not belong to the set, or it is none: nobody waits for it
            queue(process_set).refuse(error, *names)
        raise


def submit_each(names: Sequence[str], process_set: ProcessSet, begin: Callable[[int], Task]) -> list[Task]:
    """Call `begin` with the index of each name, and return the tasks. If it raises an error, this collective and
    all later ones are refused. The earlier ones are waited for, so that their names are free again."""
    tasks = list[Task]()
    try:
        for at in range(len(names)):
            tasks.append(submit_named(names[at:], process_set, partial(begin, at)))
    except Exception:
        for task in tasks:
            with suppress(OmniReduceError):
                task.wait()
        raise
    return tasks


def communicator() -> Communicator:
    """The global communicator, for collectives outside of the queue. Raises UsageError where there is none."""
    return session_of().comm


def join() -> int:
    """This rank has no more data: see `omnireduce.Queue.join`. Returns the rank that joined last. Collectives without a
    name are numbered anew after that: ranks may have had more of them than others."""
    last_joined = queue().join()
    session_of().unnamed.clear()
    return last_joined


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """From now on record what happens to each tensor, in this file: see `Communicator.start_timeline`. A timeline that
    is being recorded ends."""
    comm = session_of().comm
    comm.stop_timeline()
    comm.start_timeline(file_path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """End what `start_timeline` began."""
    session_of().comm.stop_timeline()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Let these ranks have collectives of their own; return the set. All ranks of the job call this, in one order.

    Raises UsageError on all ranks where one gives ranks that cannot be, other ranks than the others, or those of a set
    that there is.
    """
    session = session_of()
    session.added += 1  # also where one refuses: all count alike
    number = session.added

    def exchange(checked_set: ProcessSet | None, reason: str) -> list[str]:
        ranks = [] if checked_set is None else checked_set.members()
        replies = session.queues[0].allgather_object_async((ranks, reason), name=f"process set {number}").wait()
        differs = "process set {}; this rank has {}".format
        return [
            other_reason or (differs(other_ranks, ranks) if other_ranks != ranks else "")
            for other_ranks, other_reason in replies
        ]

    added_set = run_agreed_by(lambda: _check_new_set(process_set, session), exchange)
    added_set.process_set_id, session.sets[number] = number, added_set
    if added_set.included():
        session.queues[number] = Queue(session.comm, added_set.members(), name=f"set-{number}")
    return added_set


def _check_new_set(process_set: ProcessSet | Sequence[int], session: _Session) -> ProcessSet:
    """The set that is to be added. Raises UsageError."""
    new_set = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = new_set.members()
    if not ranks or not 0 <= ranks[0] <= ranks[-1] < session.comm.size:
        raise UsageError(f"process set {ranks}: expected ranks from 0 to {session.comm.size - 1}")
    if any(other.members() == ranks for other in session.sets.values()):
        raise UsageError(f"process set {ranks}: there is one of these ranks")
    return new_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a set away, which all ranks do; return whether there was such a set. The one of all ranks stays."""
    session, number = session_of(), process_set.process_set_id
    if not number or session.sets.get(number) is not process_set:
        return False
    if number in session.queues:
        session.queues.pop(number).close()
    del session.sets[number]
    process_set.process_set_id = None
    return True


def rank() -> int:
    """The number of this rank, from 0."""
    return session_of().comm.rank


def size() -> int:
    """The number of ranks of the job."""
    return session_of().comm.size


def local_rank() -> int:
    """The number of this rank among those of its host."""
    return session_of().local.local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return session_of().local.local_size


def cross_rank() -> int:
    """The number of this host among those that have a rank with this `local_rank`."""
    return session_of().local.cross_rank


def cross_size() -> int:
    """The number of hosts that have a rank with this `local_rank`."""
    return session_of().local.cross_size


def is_homogeneous() -> bool:
    """Whether all hosts have as many ranks."""
    return session_of().local.is_homogeneous


def _find_local_rank(global_queue: Queue, comm: Communicator) -> LocalRank:
    """Find the local rank of this rank. The launcher knows best which ranks share a host, as containers have names of
    their own.

    In an elastic job the launcher knew it when it started this rank. Ranks tell each other how many ranks a host has
    now. Each keeps its local rank, by which it may have chosen a device, even if ranks before it have gone.
    """
    launched = None if comm.config.elastic.enabled else comm.local_size
    own_entry = comm.local_rank, launched, os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    entries = global_queue.allgather_object_async(own_entry, name="place").wait()
    hosts: dict[str, list[int]] = {}
    for number, (_, _, host) in enumerate(entries):
        hosts.setdefault(host, []).append(number)
    local_ranks = hosts[own_entry[2]]
    local_rank = local_ranks.index(comm.rank) if own_entry[0] is None else own_entry[0]
    local_numbers = [
        hosts[host].index(number) if index is None else index for number, (index, _, host) in enumerate(entries)
    ]
    peers = [number for number, index in enumerate(local_numbers) if index == local_rank]
    sizes = {len(hosts[host]) if many is None else many for _, many, host in entries}
    return LocalRank(local_rank, launched or len(local_ranks), peers.index(comm.rank), len(peers), len(sizes) == 1)


def _at_exit() -> None:
    if not engine.is_by_exception():  # after an exception the engine tells it to the other ranks
        shutdown()


def _forget() -> None:
    """In a forked child, which has no thread of a queue: the job is its parent's."""
    global _session
    _session = None


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_forget)
