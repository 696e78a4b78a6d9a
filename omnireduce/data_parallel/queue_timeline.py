"""Steps of a queue in the timeline of a job, by Horovod's names."""

from __future__ import annotations

from collections.abc import Sequence

from omnireduce.data_parallel.operations import Request
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.tracing.timeline import EXCHANGE, MEMCPY_IN, MEMCPY_OUT, NEGOTIATE, QUEUE


def _activity(request: Request) -> str:
    """Horovod's name of the request's activity."""
    return request.kind.upper()


class QueueTimeline:
    """The steps of a queue, in the timeline of `comm`."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def submitted(self, request: Request) -> None:
        """This rank is ready for the request."""
        timeline = self._comm.timeline
        if timeline.is_on:
            timeline.begin(request.name, NEGOTIATE + _activity(request))

    def cycle(self) -> None:
        """A round of all ranks begins."""
        self._comm.timeline.cycle()

    def agreed(self, requests: Sequence[Request]) -> None:
        """All ranks are ready for these requests, which now wait for their turn."""
        timeline = self._comm.timeline
        for request in requests if timeline.is_on else ():
            timeline.end(request.name, NEGOTIATE + _activity(request))
            timeline.begin(request.name, _activity(request))
            timeline.begin(request.name, QUEUE)

    def filling(self, requests: Sequence[Request]) -> None:
        """The tensors of these requests are copied into a buffer."""
        self._next(requests, QUEUE, MEMCPY_IN)

    def exchanging(self, requests: Sequence[Request], after: str = QUEUE) -> None:
        """The tensors are exchanged."""
        self._next(requests, after, EXCHANGE)

    def emptying(self, requests: Sequence[Request]) -> None:
        """The tensors are copied out of a buffer."""
        self._next(requests, EXCHANGE, MEMCPY_OUT)

    def spoiled(self, requests: Sequence[Request]) -> None:
        """Not all ranks were ready. The requests for which this rank was ready are negotiated again."""
        timeline = self._comm.timeline
        for request in requests if timeline.is_on else ():
            timeline.end(request.name, _activity(request))

    def done(self, requests: Sequence[Request]) -> None:
        """The results of these requests are there."""
        timeline = self._comm.timeline
        for request in requests if timeline.is_on else ():
            parts = request.parts[:1]
            details = {"dtype": parts[0].dtype, "shape": list(parts[0].shape), "bytes": request.nbytes} if parts else {}
            timeline.end(request.name, _activity(request), **details)

    def _next(self, requests: Sequence[Request], last: str, activity: str) -> None:
        timeline = self._comm.timeline
        for request in requests if timeline.is_on else ():
            timeline.end(request.name, last)
            timeline.begin(request.name, activity)
