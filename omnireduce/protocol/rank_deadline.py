"""The deadline of a rank's oldest collective, and whom to blame when it has passed."""

from __future__ import annotations

from collections.abc import Sequence

from omnireduce.core.wire.control import Cause, Waiting
from omnireduce.core.wire.safe_text import listed
from omnireduce.protocol.collective.stream import ShardStream

MAX_COMPILING_S = 1800.0  # no collective waits longer for ranks that compile
LATE = 0.05  # part of the time limit: a worker that notices it this much later was stopped, or had no processor


class CollectiveDeadline:
    """The wait of rank `me` for its oldest collective: up to `timeout_s`, on the aggregators `addresses`."""

    def __init__(self, me: str, addresses: Sequence[str], timeout_s: float) -> None:
        self._me, self._addresses, self.timeout_s = me, addresses, timeout_s
        self.since = self._begun_at = 0.0
        self._extra_s = 0.0  # time for ranks that know more to judge first
        self.late_s = 0.0  # the time from the time limit until this was noticed; 0: in time
        self._longest: Waiting | None = None  # the longest wait

    def begin(self, now: float) -> None:
        """Another collective is the oldest one."""
        self._begun_at = now
        self._restart(now)

    def compiled(self, at: float) -> bool:
        """A rank that is late said at this time that it compiles kernels: the time limit begins anew then. Returns
        whether that is news."""
        if not self.since < at < self._begun_at + MAX_COMPILING_S:
            return False
        self._restart(at)
        return True

    def _restart(self, now: float) -> None:
        self.since, self._extra_s, self.late_s, self._longest = now, 0.0, 0.0, None

    def heard(self, waiting: Waiting, now: float) -> None:
        """A shard says for whom the oldest collective waits, perhaps since before it was the oldest one."""
        seconds = min(now - self.since, waiting.seconds)
        if self._longest is None or seconds > self._longest.seconds:
            self._longest = Waiting(waiting.what, waiting.who, seconds)

    @property
    def ends_at(self) -> float:
        """The time to name a cause: the time limit, later after `defer`, and still later if this was noticed late."""
        grace_s = self.late_s + self.moment_s if self.late_s else 0.0
        return self.since + self.timeout_s + self._extra_s + grace_s

    def defer(self, moments: int) -> bool:
        """Give other ranks, which know more, this many moments to judge first, but only once. Returns whether to
        wait."""
        if self._extra_s or not moments:
            return False
        self._extra_s = moments * self.moment_s
        return True

    def moments_before(self, cause: Cause) -> int:
        """The moments to wait before this cause is named. A rank that is blamed may itself wait for a shard that hangs.
        It knows that, and names the shard."""
        return 0 if cause.culprit == self._me or cause.culprit.startswith("aggregator ") else 1

    def moments_of_hosts(
        self, now: float, sees_late_rank: bool, owing: Sequence[ShardStream], was_summed_by_host: bool
    ) -> int:
        """The moments to wait before a cause is named, if there are several hosts. A rank that waits for shards which
        hang speaks at once. Next speaks a rank that sees a late rank on its own host (`sees_late_rank`): ranks of other
        hosts cannot see that. Then come ranks that shards in `owing` still owe results: they see which delegates are
        late. The other ranks come last.

        `was_summed_by_host`: the ranks of each host summed the previous collective first. If not, as for float16, each
        rank got its result from the shards by itself. So a late rank may still wait for a shard in that collective, and
        it must name the shard before others name the rank.
        """
        if not sees_late_rank and self._hanging(now, owing):
            return 0
        first = 0 if was_summed_by_host else 3
        return first if sees_late_rank else first + 2 if owing else first + 4

    @property
    def moment_s(self) -> float:
        """A short time: a twentieth of the time limit."""
        return LATE * self.timeout_s

    def _hanging(self, now: float, owing: Sequence[ShardStream]) -> list[ShardStream]:
        return [stream for stream in owing if stream.hangs(now, self.since, self.timeout_s)]

    def cause(self, now: float, reason: str, owing: Sequence[ShardStream]) -> Cause:
        """The cause of the delay: shards that hang, of those `owing` results, or ranks that come late."""
        hanging = self._hanging(now, owing)
        waits = [stream.waiting for stream in owing if stream.waiting is not None]
        if hanging:
            silent_s = now - max(self.since, *(stream.heard_at for stream in hanging))
            reason += f"; nothing came from there for {silent_s:.1f} s: is it stopped or overloaded?"
            return Cause(
                listed([f"aggregator {self._addresses[stream.shard]}" for stream in hanging]), reason, timeout=True
            )
        longest_s = 0.0 if self._longest is None else self._longest.seconds
        long_wait = longest_s >= self.timeout_s / 2
        if self.late_s and not long_wait:  # the news that this rank reads now may be old: it cannot judge others
            reason += f"; it noticed that {self.late_s:.1f} s late: was it stopped or overloaded?"
            return Cause(self._me, reason, timeout=True)
        latest = max(waits, key=lambda wait: wait.seconds, default=None)
        if latest is not None and (not long_wait or latest.seconds >= longest_s):
            return Cause(latest.who, reason, timeout=True)
        if self._longest is not None and long_wait:
            reason += f"; all ranks waited for {self._longest.seconds:.1f} s of this time"
            return Cause(self._longest.who, reason, timeout=True)
        return Cause(self._me, f"{reason}, though it moves on; raise cluster.timeout_s", timeout=True)

    def cause_behind(self, reason: str, streams: Sequence[ShardStream], others: str) -> Cause:
        """The cause, for a rank to which no shard owes anything: the other ranks of its host, which `others` names,
        know more."""
        waits = [stream.waiting for stream in streams if stream.waiting is not None]
        longest = max(waits, key=lambda wait: wait.seconds, default=None)
        return Cause(others if longest is None else longest.who, reason, timeout=True)
