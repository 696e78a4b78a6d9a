"""The loop of an elastic training, and what it needs of a state.

A generation of the job begins with a sync: all ranks get the state of one of them. It ends in one of three ways.

- The training returns. The loop is over.
- The job fails. It is formed anew, and each rank goes back to its last commit.
- Other workers wait to join. The job is formed anew with them, and each rank goes on from where it is.

The loop gives up when the job has failed `attempts` times in a row. A commit sets the count to zero, and so does a
formation that has fewer ranks than the one before. Some faults would come back for ever, such as ranks that submit
different collectives: the count ends them. The loss of a rank is what elastic jobs are made for. `elastic.min_ranks`
says how many ranks a job may lose.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from omnireduce.errors import AbortedError, ClosedError, NewcomersError
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.support.logs import tagged

T = TypeVar("T")
ATTEMPTS = 3
log = logging.getLogger("omnireduce")


class State(ABC):
    """State of a training. All ranks call `commit`, `check_host_updates`, `sync` and `collect` in the same order."""

    def __init__(self) -> None:
        self._commits = 0  # by this rank, or by the one whose state it has got
        self._callbacks = list[Callable[[], None]]()

    @abstractmethod
    def save(self) -> None:
        """Keep the state as it is now, on this rank."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the state of the last `save`."""

    @abstractmethod
    def sync(self) -> Any:
        """Give all ranks the state of one of them, and keep it. The training may get the value that this returns."""

    def collect(self) -> None:  # noqa: B027  most states have all on each rank
        """Fetch what would be lost when the job is formed anew although nothing has failed: by default nothing."""

    @abstractmethod
    def _communicator(self) -> Communicator:
        """The job. It stays the same object when the job is formed anew."""

    @abstractmethod
    def _reform(self) -> None:
        """Form the job anew."""

    @abstractmethod
    def _newcomers(self) -> int:
        """The number of workers that wait to join; the largest number that any rank knows. All ranks call this."""

    def commit(self) -> None:
        """Keep the state as it is now. All ranks call this after the same step.

        Raises NewcomersError, after that, when workers wait to join; AbortedError when the job failed.
        """
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises NewcomersError on all ranks when workers wait to join; AbortedError when the job failed."""
        if self._newcomers():
            raise NewcomersError("other workers wait to join; call Communicator.reform on every rank")

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Call these after the job was formed anew, with other ranks, before training goes on: to scale the learning
        rate, for instance."""
        self._callbacks += callbacks

    def on_reset(self) -> None:
        """Do what has to be done after the job was formed anew: here the callbacks."""
        for callback in self._callbacks:
            callback()


def keep_training(state: State, train: Callable[[Any], T], attempts: int = ATTEMPTS) -> T:
    """Call `train`, with what `sync` has returned, until it returns; return its result. See the module for the rule by
    which this gives up.

    Raises AbortedError when it gives up, and what `train` and `Communicator.reform` raise, among that RefusedError when
    fewer than `elastic.min_ranks` have come after `cluster.join_timeout_s`.
    """
    comm = state._communicator()
    is_formed, must_restore, faults, commits = True, False, 0, state._commits
    while True:
        try:
            if not is_formed:
                size = comm.size
                _reform_job(state, comm, must_restore)
                is_formed, faults = True, 0 if comm.size < size else faults
            start = state.sync()
            commits = state._commits
            return train(start)
        except (AbortedError, ClosedError) as error:  # closed: the others form it anew, and this rank had joined
            faults = 1 if state._commits > commits else faults + 1
            if comm.is_shut_down or faults >= attempts:
                raise
            log.warning("forming the job anew: %s", error, extra=tagged("reforming"))
            must_restore = True
        except NewcomersError:
            faults = 0 if state._commits > commits else faults
            log.info("forming the job anew, with those who wait", extra=tagged("reforming"))
            must_restore = not _collect_state(state)
        is_formed, commits = False, state._commits


def _reform_job(state: State, comm: Communicator, must_restore: bool) -> None:
    """Go back to the last commit after the job has ended: no collective writes into the state any more. Do that even if
    the job cannot be formed anew, so that the program can save the state."""
    try:
        state._reform()
    finally:
        if must_restore and not comm.is_shut_down:
            state.restore()
    state.on_reset()


def _collect_state(state: State) -> bool:
    """Call `collect` of the state; return False if a rank failed meanwhile."""
    try:
        state.collect()
    except (AbortedError, ClosedError):
        return False
    return True
