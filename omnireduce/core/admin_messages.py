"""Requests of operators to a daemon: to drain, and to end jobs.

An AdminRequest comes over the same connections as a StatusRequest, and has one answer, an AdminAnswer or a Refused. The
shard that gets it acts at once. It passes an Order to the supervisor, so that all shards of the daemon act as one.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from omnireduce.core.names import LAUNCH_PATTERN, TEAM_PATTERN, URGENT

Action = Literal["drain", "resume", "end"]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Job = Annotated[str, msgspec.Meta(pattern=LAUNCH_PATTERN)]
_Team = Annotated[str, msgspec.Meta(pattern=TEAM_PATTERN)]
REASON_CHARACTERS = 200
_Reason = Annotated[str, msgspec.Meta(max_length=REASON_CHARACTERS)]


class AdminRequest(msgspec.Struct, frozen=True, tag=True):
    """Drain, take jobs again, or end the jobs called `job` of `team`, because of `why`. An empty `job` or `team` stands
    for all."""

    version: int
    action: Action
    job: _Job = ""
    team: _Team = ""
    why: _Reason = ""

    @property
    def text(self) -> str:
        """The request as a verb phrase, such as "end all jobs"."""
        if self.action != "end":
            return {"drain": "drain the aggregator", "resume": "let the aggregator take jobs again"}[self.action]
        team_text = f" of team '{self.team}'" if self.team else ""
        return (f"end job '{self.job}'" if self.job else "end all jobs") + team_text


class AdminAnswer(msgspec.Struct, frozen=True, tag=True):
    """The request was carried out. `jobs` were ended on this shard, or are still on it while it drains."""

    jobs: _Count


class Order(msgspec.Struct, frozen=True, tag=True):
    """An accepted request to a daemon. `by` names the sender.

    `team` is the only team whose jobs are meant; None: the jobs of all teams. `stops`: the daemon drains because it
    stops, and this cannot be taken back.
    """

    action: Action
    by: str
    job: str = ""
    team: str | None = None
    why: str = ""
    stops: bool = False

    def covers(self, job: str, team: str) -> bool:
        """Whether a job is to be ended. A job's channel for urgent tensors ends with it."""
        return self.job in ("", job.removesuffix(URGENT)) and self.team in (None, team)

    @property
    def reason(self) -> str:
        """The reason for the ranks of an ended job, a text that follows `by`."""
        return "ended this job with `omnireduce end-job`" + (f": {self.why}" if self.why else "")
