"""The join protocol of a worker: a pure state machine, from the first connection to the last Welcome.

    to each aggregator in turn   connect; if there is a secret, prove it and have it proved; say Hello
    then                         wait until all of them have said Welcome

In an elastic job the first aggregator decides the ranks. The worker says Hello first to this aggregator alone. Its
Welcome assigns a rank, and the worker shows this assignment to the other aggregators. It has less time for that: a
worker that does not come to them then is left out of the next attempt. The ranks of a group of a job go to the first
aggregator alone, too. If it refuses them because a rank does not come, no other aggregator knows of this attempt when
they come again.

If a connection is lost before the Hello, it is made once more: nobody counts on this worker yet. Any other failure ends
the attempt. A worker of an elastic job then hangs up, pauses and tries again, until its time to join is over or the
failure will not pass. A worker of another job gives up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from omnireduce.core.names import URGENT
from omnireduce.core.wire.control import (
    Aborted,
    Cause,
    ControlMessage,
    Greeting,
    Hello,
    Leave,
    Newcomers,
    Pending,
    Proof,
    RankAssignment,
    Refused,
    Welcome,
)
from omnireduce.core.wire.safe_text import shown
from omnireduce.errors import OmniReduceError, ProtocolError, RefusedError, TransportError
from omnireduce.protocol.collective.effects import SendControl, error_of
from omnireduce.protocol.host.groups import LocalRanks
from omnireduce.protocol.joining.authentication import UNHEARD
from omnireduce.protocol.joining.compiling import COMPILING_S
from omnireduce.protocol.joining.pending_job import worker_name
from omnireduce.protocol.joining.request import JoinRequest
from omnireduce.protocol.reminders import Reminders
from omnireduce.support.secret import Secret


class Connect(NamedTuple):
    """Connect to aggregator `shard`, at the latest at time `by`. Then call `connected` or `unreachable`."""

    shard: int
    by: float


class HangUp(NamedTuple):
    """Close the connections to aggregator `first` and those that were made after it."""

    first: int = 0


class Notice(NamedTuple):
    """Tell the user about a long wait. `event` names its kind; `shard` is the aggregator, or -1 for none."""

    event: str
    text: str
    shard: int = -1


class Joined(NamedTuple):
    """Every aggregator has welcomed this worker. It is rank `rank` of `size` now, unless HangUp follows.

    `generation`: the first aggregator's number. `assignment` proves later that this worker was in this generation.
    Tensors of up to `whole_bytes` go to the first aggregator as a whole. `local_ranks`: the ranks that share memory
    with this worker.
    """

    welcomes: list[Welcome]
    rank: int
    size: int
    generation: int
    whole_bytes: int
    assignment: RankAssignment | None
    local_ranks: LocalRanks


class Meet(NamedTuple):
    """Meet the other ranks of this host at the place that `token` names. This worker is number `rank` of `size` there.
    The job has `hosts` hosts."""

    token: bytes
    rank: int
    size: int
    hosts: int


class JoinFailed(NamedTuple):
    """This worker cannot join; all connections are closed."""

    error: OmniReduceError


JoinAction = Connect | SendControl | HangUp | Notice | Meet | Joined
JoinEffect = JoinAction | JoinFailed


def perform(effects: Iterator[JoinEffect], do: Callable[[JoinAction], Iterator[JoinEffect] | None]) -> None:
    """Carry out effects in order by `do`, then the effects that each call of `do` has returned.

    Raises the error of JoinFailed.
    """
    queue = deque([effects])
    while queue:
        for effect in queue.popleft():
            if isinstance(effect, JoinFailed):
                raise effect.error
            outcome = do(effect)
            if outcome is not None:
                queue.append(outcome)


RETRY_S = 0.1  # pause between attempts to reach an aggregator that is not up yet; first pause between attempts to join
LONGEST_PAUSE_S = 2.0
ASSIGNED_S = 5.0  # the least time that a worker has from the first aggregator of an elastic job to the others
MOST_SAID = 400  # the most characters of an error that the other ranks are told
NEWS_LATE_S = 5.0  # news that a rank compiles comes once a second, and extends the time to join by at least this
QUIET_S = 2.0  # the error of an attempt, or of a wait for a proof, that took longer tells something


@dataclass(slots=True)
class _ShardConnection:
    """One connection to an aggregator in this attempt. `hint` may explain its loss."""

    since: float
    hint: str
    request: JoinRequest


class Joining:
    """One worker, until it is a rank of a job or knows why it cannot be.

    `hello` is the worker's message to the first aggregator of `addresses`. It has `limit_s` seconds to join.
    `transport` is the name of the transport in its errors.
    """

    def __init__(
        self, hello: Hello, addresses: Sequence[str], secret: Secret | None, limit_s: float, transport: str = "auto"
    ) -> None:
        self._hello, self._addresses, self._secret = hello, addresses, secret
        self._limit_s, self._transport = limit_s, transport
        self._join_by = self._latest = self._by = self._begun = self._assigned_at = (
            0.0  # `_by`: the end of this attempt
        )
        self._last_error: OmniReduceError | None = None  # the error of the attempt before
        self._reminders = Reminders(0.0)  # reminders of the wait of this attempt
        self._failures = Reminders(0.0)  # reminders of attempts that fail for the same reason
        self._again_at: float | None = None  # when to connect again or, in a pause, to try again
        self._pauses = False
        self._pause_s = RETRY_S
        self._reason = ""  # why the current aggregator could not be reached, or was lost before the Hello
        self._visits: list[_ShardConnection] = []
        self._shards = 0  # the number of aggregators to visit so far
        self._assignment: RankAssignment | None = None
        self.newcomers = 0  # workers that wait for the next generation
        self._said: set[str] = set()
        self._has_joined = self._has_failed = False
        self._place: Joined | None = None  # while the ranks of this host meet
        self._has_answer = False  # an aggregator of the list has said something: its address is not wrong

    @property
    def deadline(self) -> float | None:
        """The time to call `timer`, if nothing happens before; None: never."""
        if self._has_joined or self._has_failed:
            return None
        if self._pauses:
            return self._again_at
        return min(at for at in (self._by, self._reminders.at, self._again_at) if at is not None)

    # events

    def start(self, now: float) -> Iterator[JoinEffect]:
        """Begin."""
        self._join_by, self._failures = now + self._limit_s, Reminders(now)
        self._latest = now + COMPILING_S + self._limit_s  # the latest end, even if ranks compile for longer
        yield self._attempt(now)

    def connected(self, shard: int, nonce: bytes, now: float, hint: str = "") -> Iterator[JoinEffect]:
        """There is a connection to this aggregator. `nonce` is fresh. `hint`: a possible reason if it is lost."""
        if shard != len(self._visits):
            return  # the connection belongs to an attempt that has ended
        request = JoinRequest(self._hello_to(shard), self._secret, nonce)
        self._visits.append(_ShardConnection(now, hint, request))
        self._again_at = None
        yield from self._say(shard, request.first, now)

    def unreachable(self, shard: int, reason: str, now: float) -> Iterator[JoinEffect]:
        """No connection to this aggregator could be made. It may still start, or its name may become known later."""
        self._reason = reason
        self._again_at = min(now + RETRY_S, self._by)
        return iter(())

    def told(self, shard: int, message: ControlMessage, now: float) -> Iterator[JoinEffect]:
        """An aggregator said something."""
        if shard >= len(self._visits):
            return  # of an attempt that has ended
        address, self._has_answer = self._addresses[shard], True
        try:
            answer = self._visits[shard].request.told(message)
        except ProtocolError as wrong:
            yield from self.failed(TransportError(f"aggregator {address} {wrong}"), now)
            return
        if answer is not None:
            yield from self._say(shard, answer, now)
        elif isinstance(message, Refused):
            error = RefusedError(f"aggregator {address} refused: {shown(message.reason)}", temporary=message.temporary)
            yield from self.failed(error, now)
        else:
            yield from self._answered(shard, message, now)

    def lost(self, shard: int, reason: str, now: float, *, for_good: bool = False) -> Iterator[JoinEffect]:
        """The connection to this aggregator is over. `for_good`: the next connection would end in the same way."""
        if shard >= len(self._visits):
            return
        visit, address = self._visits[shard], self._addresses[shard]
        if not visit.request.has_said_hello and not for_good:
            yield HangUp(shard)
            del self._visits[shard:]
            yield from self.unreachable(shard, f"{reason} before the hello{visit.hint}", now)
        else:
            when = "(before this worker was admitted)" if for_good else f"before this worker was admitted{visit.hint}"
            error = TransportError(f"aggregator {address}: {reason} {when}")
            yield from self.failed(error, now, Cause(f"aggregator {address}", reason))

    def timer(self, now: float) -> Iterator[JoinEffect]:
        """Time has passed."""
        if self._has_joined or self._has_failed:
            return
        if self._pauses:
            if self._again_at is not None and now >= self._again_at:
                yield self._attempt(now)
        elif now >= self._by:
            yield from self.failed(self._overdue(now), now)
        else:
            if waited_s := self._reminders.due(now):
                yield self._complaint(waited_s)
            if self._again_at is not None and now >= self._again_at:
                self._again_at = None
                yield Connect(len(self._visits), self._by)

    def failed(self, error: OmniReduceError, now: float, cause: Cause | None = None) -> Iterator[JoinEffect]:
        """This attempt has failed: one of the events above says so, or the caller could not carry out an effect.

        Some aggregators may have begun the job by now. So the other ranks are told `cause` or, without a cause,
        `error`.
        """
        cause = cause or Cause(self._me, f"could not begin: {error}")
        leave = Leave(replace(cause, culprit=cause.culprit[:MOST_SAID], reason=cause.reason[:MOST_SAID]))
        for shard, visit in enumerate(self._visits):
            if visit.request.has_said_hello:
                yield SendControl(shard, leave)
        yield HangUp()
        self._visits.clear()
        self._has_joined, self._place = False, None
        if self._last_error is not None and now >= self._join_by and now < self._begun + QUIET_S:
            error = self._last_error  # the attempt had hardly begun: the error of the attempt before says more
        self._last_error = error
        if self._is_final(error) or now + self._pause_s >= self._join_by:
            self._has_failed = True
            yield JoinFailed(error)
            return
        self._pauses, self._again_at = True, now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        is_news, waited_s = self._is_news(str(error)), self._failures.due(now)
        if is_news or waited_s:
            since = "" if is_news else f", since {waited_s:.0f} s"
            yield Notice("joining_again", f"joining once more{since}: {error}")

    # an attempt

    def _attempt(self, now: float) -> Connect:
        self._begun, self._by, self._pauses, self._again_at = now, self._join_by, False, None
        self._reminders, self._assignment, self.newcomers = Reminders(now), None, 0
        self._shards = 1 if self._is_elastic or self._hello.parent_rank >= 0 else len(self._addresses)
        return Connect(0, self._by)

    @property
    def _me(self) -> str:
        rank = self._hello.rank if self._assignment is None else self._assignment.rank
        return worker_name(rank, self._hello.host, self._hello.pid)

    @property
    def _is_elastic(self) -> bool:
        return self._hello.min_ranks > 0

    def _is_final(self, error: OmniReduceError) -> bool:
        """Whether another attempt could not do better."""
        if not self._is_elastic or (isinstance(error, RefusedError) and not error.temporary):
            return True
        is_new = not self._hello.survived and not self._has_answer
        return isinstance(error, TransportError) and is_new  # most likely a wrong address

    def _is_news(self, text: str) -> bool:
        is_news = text not in self._said
        self._said = {text}
        return is_news

    def _hello_to(self, shard: int) -> Hello:
        hello, assignment = replace(self._hello, shard=shard), self._assignment
        if assignment is None:
            return hello
        return replace(
            hello, rank=assignment.rank, world_size=assignment.world_size, formation=assignment.formation,
            min_ranks=0, last_call_s=0.0, survived=0, ticket=b"",
        )  # fmt: skip

    def _say(self, shard: int, message: Greeting | Proof | Hello, now: float) -> Iterator[JoinEffect]:
        """Say it at once: an aggregator drops a connection without a Hello, and the next aggregator may take long to
        start."""
        yield SendControl(shard, message)
        if isinstance(message, Hello):
            self._reminders, self._reason = Reminders(now), ""
            if shard + 1 < self._shards:
                yield Connect(shard + 1, self._by)

    def _answered(self, shard: int, message: ControlMessage, now: float) -> Iterator[JoinEffect]:
        """An aggregator answered the Hello, or said something later. One shard may admit a job while another still
        gathers it. Ranks that have all their welcomes go ahead. So the first shard can say Waiting, or Aborted, to a
        rank that waits for the second shard."""
        address = self._addresses[shard]
        if isinstance(message, Pending):
            if message.compiling and self._assignment is None:
                more_s = max(self._limit_s, NEWS_LATE_S)
                self._by = self._join_by = min(max(self._join_by, now + more_s), self._latest + more_s)
            if message.note and self._is_news(message.note):
                yield Notice("rank_refused", f"aggregator {address}: {shown(message.note)}", shard)
        elif isinstance(message, Newcomers):
            self.newcomers = message.count
        elif isinstance(message, Aborted):
            yield from self.failed(error_of(message.cause), now, message.cause)
        elif isinstance(message, Welcome):
            yield from self._welcomed(now)

    def _welcomed(self, now: float) -> Iterator[JoinEffect]:
        """Go on once all aggregators that were visited have said Welcome."""
        welcomes = [visit.request.welcome for visit in self._visits if visit.request.welcome is not None]
        if len(welcomes) < self._shards:
            return
        if self._is_elastic and self._assignment is None:
            assignment = self._assignment = welcomes[0].assignment
            if (
                assignment is None
                or assignment.rank >= assignment.world_size
                or assignment.world_size > self._hello.world_size
            ):
                error = TransportError(f"aggregator {self._addresses[0]} assigned no valid rank in an elastic job")
                yield from self.failed(error, now)
                return
            if self._hello.survived:
                self._hello = replace(self._hello, survived=assignment.formation, ticket=assignment.ticket)
            self._assigned_at = now
            self._by = min(self._join_by, now + max(ASSIGNED_S, 2 * self._hello.last_call_s))
        if self._shards < len(self._addresses):
            self._shards, self._reminders = len(self._addresses), Reminders(now)
            yield Connect(1, self._by)
        else:
            yield from self._joined(welcomes, now)

    def _joined(self, welcomes: list[Welcome], now: float) -> Iterator[JoinEffect]:
        if len({welcome.whole_bytes for welcome in welcomes}) > 1:
            sizes = ", ".join(str(welcome.whole_bytes) for welcome in welcomes)
            error = TransportError(f"the aggregators disagree about which tensors stay whole: up to {sizes} bytes")
            yield from self.failed(error, now)
            return
        if len({(welcome.local_ranks, welcome.host, welcome.hosts) for welcome in welcomes}) > 1:
            error = TransportError("the aggregators disagree about which ranks share a host")
            yield from self.failed(error, now)
            return
        assignment, first = self._assignment, welcomes[0]
        given = self._hello if assignment is None else assignment
        rank, size = given.rank, given.world_size
        local_ranks = LocalRanks((rank,))
        if max(welcome.place for welcome in welcomes) > rank:
            error = TransportError(f"an aggregator gave slots that do not belong to rank {rank}")
            yield from self.failed(error, now)
            return
        if first.local_ranks:
            local_ranks = LocalRanks(first.local_ranks, first.host, first.hosts)
            shares_none = len(local_ranks.ranks) > 1 and not self._hello.memory
            if shares_none or not local_ranks.can_be(rank, size):
                error = TransportError(f"aggregator {self._addresses[0]} assigned no rank among those of this host")
                yield from self.failed(error, now)
                return
        place = Joined(
            welcomes,
            rank,
            size,
            first.generation,
            first.whole_bytes,
            assignment=first.assignment,
            local_ranks=local_ranks,
        )
        most = max(welcome.shards for welcome in welcomes)
        is_first = rank == 0 and not self._hello.survived and not self._hello.job.endswith(URGENT)
        if is_first and len(welcomes) < most:
            text = f"has {most} shards, and cluster.aggregators lists {len(welcomes)}: the others have nothing to do"
            yield Notice("idle_shards", f"aggregator {self._addresses[0]} {text}", 0)
        if first.host_token is not None and len(local_ranks.ranks) > 1:
            self._place = place
            yield Meet(first.host_token, local_ranks.ranks.index(rank), len(local_ranks.ranks), local_ranks.hosts)
        else:
            self._has_joined = True
            yield place

    def met(self, now: float) -> Iterator[JoinEffect]:
        """All ranks of this host have each other's memory."""
        if self._place is not None:
            place, self._place, self._has_joined = self._place, None, True
            yield place

    # waiting for too long

    def _complaint(self, waited_s: float) -> Notice:
        since = f"since {waited_s:.0f} s"
        if len(self._visits) < self._shards:
            shard = len(self._visits)
            text = f"waiting for aggregator {self._addresses[shard]} {since}: {self._reason}"
            return Notice("waiting_for_aggregator", text, shard)
        return Notice("waiting_for_ranks", f"waiting for {self._what_is_missing()} {since}")

    def _overdue(self, now: float) -> OmniReduceError:
        """The error for the end of this attempt's time. It says whom the attempt waited for."""
        proving = next(((i, visit) for i, visit in enumerate(self._visits) if not visit.request.has_said_hello), None)
        if proving is not None and (waited_s := now - proving[1].since) >= min(QUIET_S, (now - self._begun) / 2):
            late = f"within {waited_s:.2g} s; {UNHEARD}"
            return RefusedError(
                f"no proof of the secret came from aggregator {self._addresses[proving[0]]} {late}", temporary=True
            )
        at = len(self._visits) if proving is None else proving[0]
        if self._reason or (proving is None and at < self._shards):
            return unreachable(self._addresses[at], self._transport, self._reason)
        limit = f"cluster.join_timeout_s = {self._limit_s:g}"
        if self._by < self._join_by:
            limit = f"{self._by - self._assigned_at:.2g} s, which a worker has from the first aggregator to the others"
        is_known = any(visit.request.pending for visit in self._visits if visit.request.welcome is None)
        hint = "; were all workers started, with the same world size and job?" if is_known else ""
        if self._place is None and not self._has_answer:
            hint = f"; {UNHEARD}"
        return RefusedError(f"still waiting for {self._what_is_missing()} after {limit}{hint}", temporary=True)

    def _what_is_missing(self) -> str:
        if self._place is not None:
            return f"the other ranks of job '{self._hello.job}' on this host to share their memory"
        requests = [(self._addresses[i], visit.request) for i, visit in enumerate(self._visits)]
        address, request = min((pair for pair in requests if pair[1].welcome is None), key=lambda pair: pair[0])
        pending = request.pending
        if pending is None:
            return f"an answer of aggregator {address}"
        if not pending.missing and pending.note:
            return f"an answer of aggregator {address} ({shown(pending.note)})"
        if not pending.missing:
            return f"the last generation of job '{self._hello.job}' to go, at aggregator {address}"
        names = ", ".join(map(str, pending.missing)) + (" …" if pending.total_missing > len(pending.missing) else "")
        compiles = f"the kernels of rank {', '.join(map(str, pending.compiling))} compile" if pending.compiling else ""
        note = f" ({shown(pending.note) or compiles})" if pending.note or compiles else ""
        return f"rank {names} of job '{self._hello.job}' at aggregator {address}{note}"


def unreachable(address: str, transport: str, reason: str) -> TransportError:
    """The error for an aggregator that cannot be connected to."""
    by = "" if transport == "auto" else f" by {transport}"
    return TransportError(
        f"cannot reach aggregator {address}{by}: {reason.rstrip('?') or 'nobody answers'}; "
        "is `omnireduce aggregator` running there, and is its port open to this host?"
    )
