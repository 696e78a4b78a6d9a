"""What the tensors of a queue go through, for the timeline of its communicator. Without one it costs a call."""

from __future__ import annotations

from collections.abc import Sequence

from omnireduce.data_parallel.requests import Request
from omnireduce.runtime.member.communicator import Communicator
from omnireduce.runtime.tracing.timeline import EXCHANGE, MEMCPY_IN, MEMCPY_OUT, QUEUE


def _activity(request: Request) -> str:
    """What Horovod calls it."""
    return request.kind.upper()


class Pictured:
    """The timeline of `comm`, in the words of a queue."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def submitted(self, request: Request) -> None:
        """This rank is ready for it."""
        timeline = self._comm.timeline
        if timeline.is_on:
            timeline.begin(request.name, f"NEGOTIATE_{_activity(request)}")

    def cycle(self) -> None:
        """Ranks meet."""
        self._comm.timeline.cycle()

    def agreed(self, requests: Sequence[Request]) -> None:
        """All ranks are ready for them, and they wait for their turn."""
        timeline = self._comm.timeline
        for each in requests if timeline.is_on else ():
            timeline.end(each.name, f"NEGOTIATE_{_activity(each)}")
            timeline.begin(each.name, _activity(each))
            timeline.begin(each.name, QUEUE)

    def filling(self, requests: Sequence[Request]) -> None:
        """They are copied into a buffer."""
        self._next(requests, QUEUE, MEMCPY_IN)

    def exchanging(self, requests: Sequence[Request], after: str = QUEUE) -> None:
        """They travel."""
        self._next(requests, after, EXCHANGE)

    def emptying(self, requests: Sequence[Request]) -> None:
        """They are copied out of a buffer."""
        self._next(requests, EXCHANGE, MEMCPY_OUT)

    def spoiled(self, requests: Sequence[Request]) -> None:
        """Not all ranks were ready. Those for which this rank was are negotiated again."""
        timeline = self._comm.timeline
        for each in requests if timeline.is_on else ():
            timeline.end(each.name, _activity(each))

    def done(self, requests: Sequence[Request]) -> None:
        """Their results are there."""
        timeline = self._comm.timeline
        for each in requests if timeline.is_on else ():
            parts = each.parts[:1]
            details = {"dtype": parts[0].dtype, "shape": list(parts[0].shape), "bytes": each.nbytes} if parts else {}
            timeline.end(each.name, _activity(each), **details)

    def _next(self, requests: Sequence[Request], last: str, activity: str) -> None:
        timeline = self._comm.timeline
        for each in requests if timeline.is_on else ():
            timeline.end(each.name, last)
            timeline.begin(each.name, activity)
