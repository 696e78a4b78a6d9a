"""`omnireduce drain` and `omnireduce end-job`: requests of operators to the service."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import click

from omnireduce.core.admin_messages import REASON_CHARACTERS, Action, AdminRequest
from omnireduce.core.names import JOB_ALLOWED, LAUNCH_PATTERN, TEAM_ALLOWED, TEAM_PATTERN, URGENT
from omnireduce.core.status_messages import Status
from omnireduce.core.wire.control import PROTOCOL_VERSION
from omnireduce.core.wire.safe_text import listed, shown
from omnireduce.errors import OmniReduceError, UsageError, show
from omnireduce.runtime.aggregator_client import AT_ONCE, ask_all, request
from omnireduce.support.config import Config, override_config
from omnireduce.support.secret import load_secret

ANSWER_S = 5.0  # for one aggregator
POLL_S = 0.5  # between two looks at aggregators that drain
UNDO = "`omnireduce drain --undo` takes that back"


class Administrator:
    """Asks the aggregators at `addresses`. Raises ConfigError for a malformed address, and when the secret cannot be
    used."""

    def __init__(self, addresses: Sequence[str], config: Config) -> None:
        overrides = {"cluster.aggregators": list(addresses), "transport.kind": "auto"}
        self._config = override_config(config, overrides, source="HOST:PORT")
        self._secret = load_secret(config.security)

    @property
    def addresses(self) -> Sequence[str]:
        return self._config.cluster.aggregators

    def ask(self, action: Action, **details: str) -> dict[str, int]:
        """Ask all. Print who refuses or does not answer. Return the answers of the others: how many jobs that concerns
        there."""
        admin_request = AdminRequest(PROTOCOL_VERSION, action, **details)

        def answer(address: str) -> int | OmniReduceError:
            try:
                return request(address, self._config, ANSWER_S, admin_request, self._secret)
            except OmniReduceError as error:
                return error

        with ThreadPoolExecutor(min(len(self.addresses), AT_ONCE)) as pool:
            answers = dict(zip(self.addresses, pool.map(answer, self.addresses), strict=True))
        for error in answers.values():
            if isinstance(error, OmniReduceError):
                click.echo(f"Error: {shown(str(error))}", err=True)
        return {address: jobs for address, jobs in answers.items() if not isinstance(jobs, OmniReduceError)}

    def statuses(self, addresses: Sequence[str]) -> dict[str, Status | OmniReduceError]:
        """The status of each aggregator now, or why it does not answer."""
        answers = ask_all(addresses, self._config, ANSWER_S, secret=self._secret)
        return dict(zip(addresses, answers, strict=True))

    def report_missing(self, target: str) -> None:
        """Say that no job was meant, and which jobs there are."""
        answers = self.statuses(self.addresses).values()
        names = sorted({job.name for answer in answers if isinstance(answer, Status) for job in answer.jobs})
        existing_jobs = f"there are {listed(list(map(shown, names)))}" if names else "there are no jobs"
        click.echo(f"Error: no {target} at {listed(list(self.addresses))}; {existing_jobs}", err=True)


def end_jobs(administrator: Administrator, job: str, team: str, reason: str) -> bool:
    """End the jobs called `job` of `team` (empty: all). Return whether all aggregators did as they were asked, and some
    job was meant. Raises UsageError for what no job or team can be called, and for a `reason` that cannot be sent."""
    _check_names(job, team, reason)
    answers = administrator.ask("end", job=job, team=team, why=reason)
    target = (f"job '{job}'" if job else "job") + (f" of team '{team}'" if team else "")
    if answers and not any(answers.values()):
        administrator.report_missing(target)
        return False
    if answers:
        jobs = max(answers.values())  # one shard tells the others of its daemon, which then find no such job
        click.echo(f"ended {jobs} {'job' if jobs == 1 else 'jobs'}")
    return len(answers) == len(administrator.addresses)


def _check_names(job: str, team: str, reason: str) -> None:
    if not job and not team:
        raise UsageError("end-job: expected the name of a JOB, or --team; `omnireduce status` lists the jobs")
    if not re.match(LAUNCH_PATTERN, job):
        raise UsageError(f"JOB: got {show(job)}, expected {JOB_ALLOWED}")
    if not re.match(TEAM_PATTERN, team):
        raise UsageError(f"--team: got {show(team)}, expected {TEAM_ALLOWED}")
    if len(reason) > REASON_CHARACTERS or not reason.isprintable():
        raise UsageError(
            f"--why: got {show(reason)}, expected up to {REASON_CHARACTERS} characters that can be printed"
        )


def undo_drain(administrator: Administrator) -> bool:
    """Let aggregators that drain take jobs again. Return whether all do."""
    answers = administrator.ask("resume")
    for address in answers:
        click.echo(f"{address} takes new jobs")
    return len(answers) == len(administrator.addresses)


def drain(administrator: Administrator, timeout_s: float) -> bool:
    """Let the aggregators drain, and wait until they have ended, for `timeout_s` at most. Return whether all have."""
    requested_at = time.monotonic()
    answers = administrator.ask("drain")
    for address, jobs in answers.items():
        click.echo(f"{address} drains: {jobs} {'job is' if jobs == 1 else 'jobs are'} here")
    try:
        have_ended = not timeout_s or _wait(administrator, list(answers), requested_at, timeout_s)
    except KeyboardInterrupt:
        click.echo(f"the aggregators go on draining; {UNDO}", err=True)
        raise
    return have_ended and len(answers) == len(administrator.addresses)


def _wait(administrator: Administrator, draining: Sequence[str], requested_at: float, timeout_s: float) -> bool:
    last_text = ""
    while draining:
        answers, elapsed_s = administrator.statuses(draining), time.monotonic() - requested_at
        draining = [address for address, answer in answers.items() if not _has_ended(answer, elapsed_s)]
        for address in answers.keys() - set(draining):
            click.echo(f"{address} has drained, and ended")
        still_draining = {address: answers[address] for address in draining}
        resumed = [
            address for address, answer in still_draining.items() if isinstance(answer, Status) and not answer.draining
        ]
        if resumed:
            click.echo(f"Error: {listed(resumed)} takes new jobs again: somebody has taken the drain back", err=True)
            return False
        text = _text_of_jobs(still_draining)
        if draining and elapsed_s >= timeout_s:
            advice = f"the drain goes on. Wait again, or end what is left (omnireduce end-job), or {UNDO}"
            click.echo(f"Error: still waiting for {text} after {timeout_s:g} s; {advice}", err=True)
            return False
        if draining and text != last_text:
            click.echo(f"waiting for {text}", err=True)
        last_text = text
        if draining:
            time.sleep(min(POLL_S, timeout_s - elapsed_s))
    return True


def _has_ended(answer: Status | OmniReduceError, elapsed_s: float) -> bool:
    """Whether an aggregator that was told to drain has ended. Another one may run there by now."""
    if isinstance(answer, Status):
        return not answer.draining and answer.uptime_s < elapsed_s
    return isinstance(answer.__cause__, ConnectionRefusedError)


def _text_of_jobs(answers: Mapping[str, Status | OmniReduceError]) -> str:
    """The jobs that are there or, where nothing is known of any, the aggregators."""
    jobs = {
        job.name.removesuffix(URGENT)
        for answer in answers.values()
        if isinstance(answer, Status)
        for job in answer.jobs
    }
    return listed([f"job '{shown(name)}'" for name in sorted(jobs)] or [*answers])
