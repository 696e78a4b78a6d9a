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
from omnireduce.protocol.host.local_ranks import LocalRanks
from omnireduce.protocol.joining.authentication import UNHEARD
from omnireduce.protocol.joining.compiling import COMPILING_S
from omnireduce.protocol.joining.pending_job import worker_name
from omnireduce.protocol.joining.worker_request import JoinRequest
from omnireduce.protocol.wait_notices import WaitNotices
from omnireduce.support.secret import Secret


class Connect(NamedTuple):
    """Connect to aggregator `shard`, at the latest at time `deadline`. Then call `connected` or `unreachable`."""

    shard: int
    deadline: float


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


class MeetLocalRanks(NamedTuple):
    """Meet the other ranks of this host at the socket that `token` names. This worker is number `rank` of `size` there.
    The job has `hosts` hosts."""

    token: bytes
    rank: int
    size: int
    hosts: int


class JoinFailed(NamedTuple):
    """This worker cannot join; all connections are closed."""

    error: OmniReduceError


JoinAction = Connect | SendControl | HangUp | Notice | MeetLocalRanks | Joined
JoinEffect = JoinAction | JoinFailed


def perform(effects: Iterator[JoinEffect], execute: Callable[[JoinAction], Iterator[JoinEffect] | None]) -> None:
    """Carry out effects in order by `execute`, then the effects that each call of `execute` has returned.

    Raises the error of JoinFailed.
    """
    queue = deque([effects])
    while queue:
        for effect in queue.popleft():
            if isinstance(effect, JoinFailed):
                raise effect.error
            outcome = execute(effect)
            if outcome is not None:
                queue.append(outcome)


RETRY_S = 0.1  # pause between attempts to reach an aggregator that is not up yet; first pause between attempts to join
LONGEST_PAUSE_S = 2.0
ASSIGNED_S = 5.0  # the least time that a worker has from the first aggregator of an elastic job to the others
MAX_ERROR_CHARACTERS = 400  # the most characters of an error that the other ranks are told
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
        self._join_deadline = self._latest_deadline = self._attempt_deadline = self._attempt_begun_at = (
            self._assigned_at
        ) = 0.0  # `_attempt_deadline`: the end of this attempt
        self._last_error: OmniReduceError | None = None  # the error of the attempt before
        self._reminders = WaitNotices(0.0)  # reminders of the wait of this attempt
        self._failures = WaitNotices(0.0)  # reminders of attempts that fail for the same reason
        self._retry_at: float | None = None  # when to connect again or, in a pause, to try again
        self._is_pausing = False
        self._pause_s = RETRY_S
        self._reason = ""  # why the current aggregator could not be reached, or was lost before the Hello
        self._connections: list[_ShardConnection] = []
        self._shard_count = 0  # the number of aggregators to visit so far
        self._assignment: RankAssignment | None = None
        self.newcomers = 0  # workers that wait for the next generation
        self._reported_texts: set[str] = set()
        self._has_joined = self._has_failed = False
        self._joined_job: Joined | None = None  # while the ranks of this host meet
        self._has_answer = False  # an aggregator of the list has said something: its address is not wrong

    @property
    def deadline(self) -> float | None:
        """The time to call `timer`, if nothing happens before; None: never."""
        if self._has_joined or self._has_failed:
            return None
        if self._is_pausing:
            return self._retry_at
        return min(at for at in (self._attempt_deadline, self._reminders.at, self._retry_at) if at is not None)

    # events

    def start(self, now: float) -> Iterator[JoinEffect]:
        """Begin."""
        self._join_deadline, self._failures = now + self._limit_s, WaitNotices(now)
        self._latest_deadline = now + COMPILING_S + self._limit_s  # the latest end, even if ranks compile for longer
        yield self._begin_attempt(now)

    def connected(self, shard: int, nonce: bytes, now: float, hint: str = "") -> Iterator[JoinEffect]:
        """There is a connection to this aggregator. `nonce` is fresh. `hint`: a possible reason if it is lost."""
        if shard != len(self._connections):
            return  # the connection belongs to an attempt that has ended
        request = JoinRequest(self._hello_for(shard), self._secret, nonce)
        self._connections.append(_ShardConnection(now, hint, request))
        self._retry_at = None
        yield from self._send_opening(shard, request.first, now)

    def unreachable(self, shard: int, reason: str, now: float) -> Iterator[JoinEffect]:
        """No connection to this aggregator could be made. It may still start, or its name may become known later."""
        self._reason = reason
        self._retry_at = min(now + RETRY_S, self._attempt_deadline)
        return iter(())

    def control_received(self, shard: int, message: ControlMessage, now: float) -> Iterator[JoinEffect]:
        """An aggregator said something."""
        if shard >= len(self._connections):
            return  # the message belongs to an attempt that has ended
        address, self._has_answer = self._addresses[shard], True
        try:
            answer = self._connections[shard].request.answer(message)
        except ProtocolError as error_of_answer:
            yield from self.failed(TransportError(f"aggregator {address} {error_of_answer}"), now)
            return
        if answer is not None:
            yield from self._send_opening(shard, answer, now)
        elif isinstance(message, Refused):
            error = RefusedError(f"aggregator {address} refused: {shown(message.reason)}", temporary=message.temporary)
            yield from self.failed(error, now)
        else:
            yield from self._handle_answer(shard, message, now)

    def lost(self, shard: int, reason: str, now: float, *, for_good: bool = False) -> Iterator[JoinEffect]:
        """The connection to this aggregator is over. `for_good`: the next connection would end in the same way."""
        if shard >= len(self._connections):
            return
        connection, address = self._connections[shard], self._addresses[shard]
        if not connection.request.has_said_hello and not for_good:
            yield HangUp(shard)
            del self._connections[shard:]
            yield from self.unreachable(shard, f"{reason} before the hello{connection.hint}", now)
        else:
            when = (
                "(before this worker was admitted)" if for_good else f"before this worker was admitted{connection.hint}"
            )
            error = TransportError(f"aggregator {address}: {reason} {when}")
            yield from self.failed(error, now, Cause(f"aggregator {address}", reason))

    def timer(self, now: float) -> Iterator[JoinEffect]:
        """Time has passed."""
        if self._has_joined or self._has_failed:
            return
        if self._is_pausing:
            if self._retry_at is not None and now >= self._retry_at:
                yield self._begin_attempt(now)
        elif now >= self._attempt_deadline:
            yield from self.failed(self._timeout_error(now), now)
        else:
            if waited_s := self._reminders.due(now):
                yield self._wait_notice(waited_s)
            if self._retry_at is not None and now >= self._retry_at:
                self._retry_at = None
                yield Connect(len(self._connections), self._attempt_deadline)

    def failed(self, error: OmniReduceError, now: float, cause: Cause | None = None) -> Iterator[JoinEffect]:
        """This attempt has failed: one of the events above says so, or the caller could not carry out an effect.

        Some aggregators may have begun the job by now. So the other ranks are told `cause` or, without a cause,
        `error`.
        """
        cause = cause or Cause(self._own_name, f"could not begin: {error}")
        leave = Leave(
            replace(cause, culprit=cause.culprit[:MAX_ERROR_CHARACTERS], reason=cause.reason[:MAX_ERROR_CHARACTERS])
        )
        for shard, connection in enumerate(self._connections):
            if connection.request.has_said_hello:
                yield SendControl(shard, leave)
        yield HangUp()
        self._connections.clear()
        self._has_joined, self._joined_job = False, None
        if self._last_error is not None and now >= self._join_deadline and now < self._attempt_begun_at + QUIET_S:
            error = self._last_error  # the attempt had hardly begun: the error of the attempt before says more
        self._last_error = error
        if self._is_final(error) or now + self._pause_s >= self._join_deadline:
            self._has_failed = True
            yield JoinFailed(error)
            return
        self._is_pausing, self._retry_at = True, now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        is_new, waited_s = self._is_new_text(str(error)), self._failures.due(now)
        if is_new or waited_s:
            since = "" if is_new else f", since {waited_s:.0f} s"
            yield Notice("joining_again", f"joining once more{since}: {error}")

    # an attempt

    def _begin_attempt(self, now: float) -> Connect:
        self._attempt_begun_at, self._attempt_deadline, self._is_pausing, self._retry_at = (
            now,
            self._join_deadline,
            False,
            None,
        )
        self._reminders, self._assignment, self.newcomers = WaitNotices(now), None, 0
        self._shard_count = 1 if self._is_elastic or self._hello.parent_rank >= 0 else len(self._addresses)
        return Connect(0, self._attempt_deadline)

    @property
    def _own_name(self) -> str:
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

    def _is_new_text(self, text: str) -> bool:
        is_new = text not in self._reported_texts
        self._reported_texts = {text}
        return is_new

    def _hello_for(self, shard: int) -> Hello:
        hello, assignment = replace(self._hello, shard=shard), self._assignment
        if assignment is None:
            return hello
        return replace(
            hello, rank=assignment.rank, world_size=assignment.world_size, formation=assignment.formation,
            min_ranks=0, last_call_s=0.0, survived=0, ticket=b"",
        )  # fmt: skip

    def _send_opening(self, shard: int, message: Greeting | Proof | Hello, now: float) -> Iterator[JoinEffect]:
        """Say it at once: an aggregator drops a connection without a Hello, and the next aggregator may take long to
        start."""
        yield SendControl(shard, message)
        if isinstance(message, Hello):
            self._reminders, self._reason = WaitNotices(now), ""
            if shard + 1 < self._shard_count:
                yield Connect(shard + 1, self._attempt_deadline)

    def _handle_answer(self, shard: int, message: ControlMessage, now: float) -> Iterator[JoinEffect]:
        """An aggregator answered the Hello, or said something later. One shard may admit a job while another still
        gathers it. Ranks that have all their welcomes go ahead. So the first shard can say Waiting, or Aborted, to a
        rank that waits for the second shard."""
        address = self._addresses[shard]
        if isinstance(message, Pending):
            if message.compiling and self._assignment is None:
                more_s = max(self._limit_s, NEWS_LATE_S)
                self._attempt_deadline = self._join_deadline = min(
                    max(self._join_deadline, now + more_s), self._latest_deadline + more_s
                )
            if message.note and self._is_new_text(message.note):
                yield Notice("rank_refused", f"aggregator {address}: {shown(message.note)}", shard)
        elif isinstance(message, Newcomers):
            self.newcomers = message.count
        elif isinstance(message, Aborted):
            yield from self.failed(error_of(message.cause), now, message.cause)
        elif isinstance(message, Welcome):
            yield from self._handle_welcome(now)

    def _handle_welcome(self, now: float) -> Iterator[JoinEffect]:
        """Go on once all aggregators that were visited have said Welcome."""
        welcomes = [
            connection.request.welcome for connection in self._connections if connection.request.welcome is not None
        ]
        if len(welcomes) < self._shard_count:
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
            self._attempt_deadline = min(self._join_deadline, now + max(ASSIGNED_S, 2 * self._hello.last_call_s))
        if self._shard_count < len(self._addresses):
            self._shard_count, self._reminders = len(self._addresses), WaitNotices(now)
            yield Connect(1, self._attempt_deadline)
        else:
            yield from self._check_welcomes(welcomes, now)

    def _check_welcomes(self, welcomes: list[Welcome], now: float) -> Iterator[JoinEffect]:
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
        identity = self._hello if assignment is None else assignment
        rank, size = identity.rank, identity.world_size
        local_ranks = LocalRanks((rank,))
        if max(welcome.place for welcome in welcomes) > rank:
            error = TransportError(f"an aggregator gave slots that do not belong to rank {rank}")
            yield from self.failed(error, now)
            return
        if first.local_ranks:
            local_ranks = LocalRanks(first.local_ranks, first.host, first.hosts)
            shares_none = len(local_ranks.ranks) > 1 and not self._hello.memory
            if shares_none or not local_ranks.is_possible_for(rank, size):
                error = TransportError(f"aggregator {self._addresses[0]} assigned no rank among those of this host")
                yield from self.failed(error, now)
                return
        joined_job = Joined(
            welcomes,
            rank,
            size,
            first.generation,
            first.whole_bytes,
            assignment=first.assignment,
            local_ranks=local_ranks,
        )
        shard_count = max(welcome.shards for welcome in welcomes)
        is_first = rank == 0 and not self._hello.survived and not self._hello.job.endswith(URGENT)
        if is_first and len(welcomes) < shard_count:
            listed = f"cluster.aggregators lists {len(welcomes)}"
            text = f"has {shard_count} shards, and {listed}: the others have nothing to do"
            yield Notice("idle_shards", f"aggregator {self._addresses[0]} {text}", 0)
        if first.host_token is not None and len(local_ranks.ranks) > 1:
            self._joined_job = joined_job
            yield MeetLocalRanks(
                first.host_token, local_ranks.ranks.index(rank), len(local_ranks.ranks), local_ranks.hosts
            )
        else:
            self._has_joined = True
            yield joined_job

    def local_ranks_met(self) -> Iterator[JoinEffect]:
        """All ranks of this host have each other's memory."""
        if self._joined_job is not None:
            joined_job, self._joined_job, self._has_joined = self._joined_job, None, True
            yield joined_job

    # waiting for too long

    def _wait_notice(self, waited_s: float) -> Notice:
        since = f"since {waited_s:.0f} s"
        if len(self._connections) < self._shard_count:
            shard = len(self._connections)
            text = f"waiting for aggregator {self._addresses[shard]} {since}: {self._reason}"
            return Notice("waiting_for_aggregator", text, shard)
        return Notice("waiting_for_ranks", f"waiting for {self._missing_text()} {since}")

    def _timeout_error(self, now: float) -> OmniReduceError:
        """The error for the end of this attempt's time. It says whom the attempt waited for."""
        proving = next(
            (
                (i, connection)
                for i, connection in enumerate(self._connections)
                if not connection.request.has_said_hello
            ),
            None,
        )
        if proving is not None and (waited_s := now - proving[1].since) >= min(
            QUIET_S, (now - self._attempt_begun_at) / 2
        ):
            period = f"within {waited_s:.2g} s; {UNHEARD}"
            return RefusedError(
                f"no proof of the secret came from aggregator {self._addresses[proving[0]]} {period}", temporary=True
            )
        shard = len(self._connections) if proving is None else proving[0]
        if self._reason or (proving is None and shard < self._shard_count):
            return unreachable(self._addresses[shard], self._transport, self._reason)
        limit = f"cluster.join_timeout_s = {self._limit_s:g}"
        if self._attempt_deadline < self._join_deadline:
            limit_s = self._attempt_deadline - self._assigned_at
            limit = f"{limit_s:.2g} s, which a worker has from the first aggregator to the others"
        is_known = any(
            connection.request.pending for connection in self._connections if connection.request.welcome is None
        )
        hint = "; were all workers started, with the same world size and job?" if is_known else ""
        if self._joined_job is None and not self._has_answer:
            hint = f"; {UNHEARD}"
        return RefusedError(f"still waiting for {self._missing_text()} after {limit}{hint}", temporary=True)

    def _missing_text(self) -> str:
        if self._joined_job is not None:
            return f"the other ranks of job '{self._hello.job}' on this host to share their memory"
        requests = [(self._addresses[i], connection.request) for i, connection in enumerate(self._connections)]
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
    by_transport = "" if transport == "auto" else f" by {transport}"
    return TransportError(
        f"cannot reach aggregator {address}{by_transport}: {reason.rstrip('?') or 'nobody answers'}; "
        "is `omnireduce aggregator` running there, and is its port open to this host?"
    )
