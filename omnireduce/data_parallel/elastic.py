"""Training that goes on when ranks fail or come, for fronts: state as of the last commit, and a loop around a function.

The names are Horovod's ("Elastic Horovod", documentation). `omnireduce.run_elastic` does the same for arrays.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from omnireduce.data_parallel import session
from omnireduce.errors import AbortedError, ClosedError, NewcomersError
from omnireduce.support.logs import tagged

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger("omnireduce")


class State:
    """What a training has achieved: its attributes, which are plain data, such as `epoch` and `batch`.

    A front adds what it knows: subclasses override `exchange`, `collect`, `save`, `restore` and `sync`. They have all
    that these need before they call this `__init__`, which saves.
    """

    def __init__(self, **values: Any) -> None:
        self._names = tuple(values)
        self._commits, self._callbacks = 0, list[Callable[[], None]]()
        self._kept: dict[str, Any] = {}
        self.__dict__.update(values)
        self.save()

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Call these after the job was formed anew, with other ranks, before training goes on: to scale the learning
        rate, for instance."""
        self._callbacks += callbacks

    def on_reset(self) -> None:
        """The job was formed anew."""
        for callback in self._callbacks:
            callback()

    def commit(self) -> None:
        """Keep the state as it is now. All ranks call this after the same step.

        Raises NewcomersError, after that, when workers wait to join; AbortedError when the job failed.
        """
        self.exchange()
        self.save()
        self._commits += 1
        self.check_host_updates()

    def exchange(self) -> None:
        """Tell other ranks, before a commit, what they cannot know if this one dies. Here: nothing."""

    def check_host_updates(self) -> None:
        """Raises NewcomersError on all ranks when workers wait to join; AbortedError when the job failed."""
        waiting = np.array([session.communicator().newcomers])
        if session.queue().allreduce_async(waiting, name="newcomers", op="max").wait()[0]:
            raise NewcomersError("other workers wait to join; form the job anew")

    def collect(self) -> None:
        """Fetch what would be forgotten when the job is formed anew, though nothing has failed. All ranks call this.
        Here: nothing."""

    def save(self) -> None:
        """Keep the state as it is now, on this rank."""
        self._kept = copy.deepcopy(self._values())

    def restore(self) -> None:
        """Go back to what was kept."""
        self.__dict__.update(copy.deepcopy(self._kept))

    def sync(self) -> None:
        """Give all ranks the state of the one that has committed most often, and keep it."""
        root = self.root()
        own = self._commits, self._values()
        commits, values = session.queue().broadcast_object_async(own, root, name="state").wait()
        self.__dict__.update(values)
        self.save()
        self._commits = commits  # not before it is kept: to keep it may fail

    def root(self) -> int:
        """The rank that has committed most often; of several the first. All ranks call this."""
        commits = session.queue().allgather_async(np.array([self._commits]), name="commits").wait()
        return int(commits.argmax())

    def _values(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self._names}


def run(train: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Decorate `train(state, ...)`, which all ranks call: it is called until it returns.

    First all ranks get the same state. When a rank fails, the job is formed anew and `train` is called again from the
    last commit; when workers wait to join, from where it is. The job needs `elastic.enabled`.

    Raises what `train` and `Communicator.reform` raise, among that RefusedError when fewer than `elastic.min_ranks`
    have come after `cluster.join_timeout_s`.
    """

    @functools.wraps(train)
    def wrapped(state: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        is_new = True
        while True:
            try:
                if not is_new:
                    session.reset()
                    state.on_reset()
                is_new = False
                state.sync()
                return train(state, *args, **kwargs)
            except (AbortedError, ClosedError) as error:  # closed: the others form it anew, and this rank had joined
                if not session.is_initialized():
                    raise
                log.warning("forming the job anew: %s", error, extra=tagged("reforming"))
                state.restore()
            except NewcomersError:
                log.info("forming the job anew, with those who wait", extra=tagged("reforming"))
                _collect(state)

    return wrapped


def _collect(state: State) -> None:
    """A rank may fail in this moment, too."""
    try:
        state.collect()
    except (AbortedError, ClosedError):
        state.restore()
