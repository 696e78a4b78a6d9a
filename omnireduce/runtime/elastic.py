"""Training loops that outlive their workers: state as of the last commit, and a loop that goes on from it.

The words are Horovod's ("Elastic Horovod", documentation): commit, restore, sync.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from omnireduce.dtypes import Array
from omnireduce.errors import AbortedError, OmniReduceError
from omnireduce.logs import tagged
from omnireduce.runtime.communicator import Communicator

T = TypeVar("T")
log = logging.getLogger("omnireduce")


class NewcomersError(OmniReduceError):
    """Other workers wait to join: every rank gets this from the same `ElasticState.commit`, and should `reform`."""


class ElasticState:
    """What a training loop has achieved: `step`, the number of steps done, and `arrays`, which it changes in place.

    `arrays`: C-contiguous, of the same names, shapes and dtypes on all ranks. A copy of all is kept as of the last
    commit, at first of what they are now.
    """

    def __init__(self, comm: Communicator, arrays: Mapping[str, Array], step: int = 0) -> None:
        self._comm, self.arrays, self.step = comm, dict(arrays), step
        self._kept = {name: array.copy() for name, array in self.arrays.items()}
        self.committed_step = step

    def commit(self) -> None:
        """Keep the state as it is now. All ranks call this after the same step.

        Raises NewcomersError, after that, when workers wait to join; AbortedError when the job failed.
        """
        self._keep()
        if self._comm.allreduce(np.array([self._comm.newcomers]), op="max", name="newcomers")[0]:
            raise NewcomersError("other workers wait to join; call Communicator.reform on every rank")

    def restore(self) -> None:
        """Go back to the last commit."""
        for name, array in self.arrays.items():
            np.copyto(array, self._kept[name])
        self.step = self.committed_step

    def sync(self) -> int:
        """Make all ranks' states that of the one with the most steps; return its rank. All ranks call this when the job
        is new or formed anew. Raises AbortedError when the job failed, also because arrays differ in size or dtype."""
        steps = self._comm.allgather(np.array([self.step]), name="step")[:, 0]
        source = int(steps.argmax())
        for name in sorted(self.arrays):
            self._comm.broadcast(self.arrays[name], source, name=name)
        self.step = int(steps[source])
        self._keep()
        return source

    def _keep(self) -> None:
        for name, array in self.arrays.items():
            np.copyto(self._kept[name], array)
        self.committed_step = self.step


def run_elastic(comm: Communicator, state: ElasticState, train: Callable[[int], T], *, attempts: int = 3) -> T:
    """Call `train(source)` until it returns, and return what it does; all ranks of `comm` call this.

    `train` goes on from `state`, which is the same on all ranks when it is called, as it was on rank `source`; it
    commits now and then. When ranks or aggregators fail, or workers wait to join, the job is formed anew and `train`
    called again from the last commit: `comm.rank` and `comm.size` may be others then.

    Raises AbortedError when it failed `attempts` times in a row without a commit, and what `train` and
    `Communicator.reform` raise.
    """
    fruitless, reached = 0, -1
    while True:
        try:
            return train(state.sync())
        except AbortedError as error:
            fruitless = 0 if state.committed_step > reached else fruitless + 1
            reached = max(reached, state.committed_step)
            if fruitless >= attempts:
                raise
            log.warning("forming the job anew: %s", error, extra=tagged("reforming"))
        except NewcomersError:
            log.info("forming the job anew, with those who wait", extra=tagged("reforming"))
        comm.reform()
        state.restore()
