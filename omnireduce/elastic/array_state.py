"""State of a training that consists of arrays, over a communicator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec
import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.elastic.loop import ATTEMPTS, State, keep_training
from omnireduce.errors import UsageError
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.reported_errors import report_errors_to

T = TypeVar("T")


class ElasticState(State):
    """State of a training: `step`, the number of steps done, and `arrays`, which the training changes in place.

    `arrays`: C-contiguous, of the same names, shapes and dtypes on all ranks. `fingerprint`: bytes that stand for
    whatever else has to be the same. A copy of the arrays is kept: first as they are at construction, then as of the
    last commit. `committed_step`: the number of steps at that commit.
    """

    def __init__(
        self, comm: Communicator, arrays: Mapping[str, Array], step: int = 0, *, fingerprint: bytes = b""
    ) -> None:
        super().__init__()
        self._comm, self.arrays, self.step = comm, dict(arrays), step
        shapes = sorted((name, array.dtype.str, array.shape) for name, array in self.arrays.items())
        self._fingerprint = hashlib.sha256(msgspec.json.encode(shapes) + fingerprint).digest()
        self._saved = {name: array.copy() for name, array in self.arrays.items()}
        self.committed_step = step

    def save(self) -> None:
        """Keep the state as it is now, on this rank. If that fails, the other ranks are told."""
        with report_errors_to(self._comm):
            self._copy_arrays()

    def restore(self) -> None:
        """Go back to the last commit."""
        for name, array in self.arrays.items():
            np.copyto(array, self._saved[name])
        self.step = self.committed_step

    def sync(self) -> int:
        """Give all ranks the state of the rank with the most steps; return that rank. All ranks call this when the job
        is new or formed anew.

        Raises AbortedError when the job failed. Raises UsageError when this rank's arrays or fingerprint differ from
        those of that rank; this rank should then leave, and the other ranks go on.
        """
        with report_errors_to(self._comm):
            own_record = np.array([(self.step, self._fingerprint)], [("step", np.int64), ("fingerprint", "S32")])
        all_ranks = self._comm.allgather(own_record, name="step and fingerprint")[:, 0]
        steps = all_ranks["step"]
        # Several ranks may have most steps. One of the majority is taken, so that a worker with another state is the
        # one to go.
        votes = [int((all_ranks["fingerprint"] == record["fingerprint"]).sum()) for record in all_ranks]
        source = max(range(len(steps)), key=lambda rank: (steps[rank], votes[rank], -rank))
        with report_errors_to(self._comm):
            if all_ranks["fingerprint"][source] != own_record["fingerprint"][0]:
                raise UsageError(
                    f"this worker's state is another than that of rank {source}: expected the same arrays (names, "
                    "shapes and dtypes), configuration and data on every worker"
                )
        for name in sorted(self.arrays):
            self._comm.broadcast(self.arrays[name], source, name=name)
        self.step = int(steps[source])
        self._copy_arrays()
        return int(source)

    def _copy_arrays(self) -> None:
        for name, array in self.arrays.items():
            np.copyto(self._saved[name], array)
        self.committed_step = self.step

    def _communicator(self) -> Communicator:
        return self._comm

    def _reform(self) -> None:
        self._comm.reform()

    def _newcomers(self) -> int:
        return int(self._comm.allreduce(np.array([self._comm.newcomers]), op="max", name="newcomers")[0])


def run_elastic(comm: Communicator, state: ElasticState, train: Callable[[int], T], *, attempts: int = ATTEMPTS) -> T:
    """Call `train(source)` until it returns, and return its result; all ranks of `comm` call this.

    `train` goes on from `state`, and commits now and then. When it is called, all ranks have the state that rank
    `source` had. When ranks or aggregators fail, or workers wait to join, the job is formed anew and `train` is called
    again from the last commit. `comm.rank` and `comm.size` may then be others.

    Raises AbortedError when the job failed `attempts` times in a row without a commit and without the loss of a rank.
    Otherwise it raises what `train` and `Communicator.reform` raise. Raises UsageError for the state of another
    communicator.
    """
    if state._communicator() is not comm:
        raise UsageError("the state belongs to another communicator; expected ElasticState(comm, ...) with this one")
    return keep_training(state, train, attempts)
