"""State of a training that is plain data, over the queue of the session, in Horovod's words."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from omnireduce.data_parallel import session
from omnireduce.elastic.loop import State, keep_training
from omnireduce.runtime.rank.communicator import Communicator

P = ParamSpec("P")
T = TypeVar("T")


class ObjectState(State):
    """State of a training: its attributes, which are plain data, such as `epoch` and `batch`.

    The state of a framework is a subclass. Before it calls this `__init__`, which saves, it must have all attributes
    that its own `save` needs.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._names = tuple(values)
        self._saved: dict[str, Any] = {}
        self.__dict__.update(values)
        self.save()

    def save(self) -> None:
        """Keep the state as it is now, on this rank."""
        self._saved = copy.deepcopy(self._values())

    def restore(self) -> None:
        """Go back to the state of the last `save`."""
        self.__dict__.update(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Give all ranks the state of the one that has committed most often, and keep it."""
        root = self.root()
        own_state = self._commits, self._values()
        commits, values = session.queue().broadcast_object_async(own_state, root, name="state").wait()
        self.__dict__.update(values)
        self.save()
        self._commits = commits  # not before it is kept: to keep it may fail

    def root(self) -> int:
        """The rank that has committed most often; of several the first. All ranks call this."""
        commits = session.queue().allgather_async(np.array([self._commits]), name="commits").wait()
        return int(commits.argmax())

    def _values(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self._names}

    def _communicator(self) -> Communicator:
        return session.communicator()

    def _reform(self) -> None:
        session.reset()

    def _newcomers(self) -> int:
        waiting = np.array([session.communicator().newcomers])
        return int(session.queue().allreduce_async(waiting, name="newcomers", op="max").wait()[0])


def run(train: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Decorate `train(state, ...)`, which all ranks call: it is called until it returns.

    Before each call all ranks get the same state. When a rank fails, the job is formed anew and `train` is called again
    from the last commit; when workers wait to join, from where it is. The job needs `elastic.enabled`.

    Raises AbortedError when the job failed three times in a row without a commit and without the loss of a rank.
    Otherwise it raises what `train` and `Communicator.reform` raise, among that RefusedError when fewer than
    `elastic.min_ranks` have come after `cluster.join_timeout_s`.
    """

    @functools.wraps(train)
    def wrapped(state: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return keep_training(state, lambda _: train(state, *args, **kwargs))

    return wrapped
