"""Administrative requests to a shard: to drain, and to end jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from omnireduce.core.admin_messages import Order
from omnireduce.core.names import URGENT
from omnireduce.core.wire.control import Cause
from omnireduce.errors import ProtocolError
from omnireduce.protocol.joining.admission import Admission, AdmissionEffect
from omnireduce.runtime.driver import Clock
from omnireduce.runtime.shard.job import ShardJob
from omnireduce.runtime.shard.relay_admission import Relaying


class Administration:
    """Carries out requests. `jobs` run on the shard; `answer` passes the decisions of `admission` to waiting workers.

    `pass_on` tells the rest of the daemon what was requested of this shard.
    """

    def __init__(
        self,
        admission: Admission | Relaying,
        jobs: Mapping[int, ShardJob],
        answer: Callable[[Iterable[AdmissionEffect]], None],
        clock: Clock,
    ) -> None:
        self._admission, self._jobs, self._answer, self._clock = admission, jobs, answer, clock
        self._stops = False
        self.pass_on: Callable[[Order], None] = lambda order: None

    @property
    def draining(self) -> bool:
        """Whether the shard takes no new jobs."""
        return self._admission.intake.state != "open"

    @property
    def remaining_jobs(self) -> int:
        """The number of jobs that run or wait for ranks."""
        return len(self._jobs) + self._admission.gathers

    def ask(self, order: Order) -> int:
        """Carry out a request to this shard, and pass it on to the rest of the daemon. Returns the number of jobs
        concerned.

        Raises ProtocolError if the daemon cannot be told.
        """
        if self._stops and order.action == "resume":
            raise ProtocolError("the aggregator stops, which cannot be taken back")
        if order.action != "drain" or not self.draining:
            self.pass_on(order)
        return self.obey(order)

    def obey(self, order: Order) -> int:
        """Carry out a request to the daemon. Returns the number of jobs concerned."""
        if order.action == "end":
            return self._end(order)
        self._stops |= order.stops
        if order.action == "drain":
            self._admission.intake.drain(self._admission.hellos_in_memory)
        elif not self._stops:
            self._admission.intake.resume()
        return self.remaining_jobs

    def _end(self, order: Order) -> int:
        covered = [job for job in self._jobs.values() if order.covers(job.name, job.team)]
        names = {(job.name.removesuffix(URGENT), job.team) for job in covered}
        names |= {
            (job.name.removesuffix(URGENT), job.team)
            for job in self._admission.pending_jobs(self._clock())
            if order.covers(job.name, job.team)
        }
        reason = f"{order.by} {order.reason}"
        self._answer(self._admission.end(lambda hello: order.covers(hello.job, hello.team), reason, self._clock()))
        for job in covered:
            job.abort(Cause(order.by, order.reason), "ended")
        return len(names)
