"""`omnireduce status`: asks aggregators and shows the answers once, again and again, or as JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from omnireduce.console.fitting_table import FittingTable
from omnireduce.core.status_messages import Status, Traffic
from omnireduce.core.wire.safe_text import listed, shown
from omnireduce.errors import RefusedError
from omnireduce.runtime.aggregator_client import ask_all
from omnireduce.support.addresses import Address, address_from_this_host, parse_listen
from omnireduce.support.config import Config, override_config
from omnireduce.support.job_summary import Answers, JobSummary, summarize_jobs, waits_for
from omnireduce.support.printing import density_text, duration, short_count
from omnireduce.support.secret import load_secret

# columns of jobs that a narrow terminal does without, the least important first
_DISPENSABLE = ("slots", "union", "by", "in", "out", "density", "late", "age", "team", "in/s", "out/s", "done")


class StatusView:
    """The tables for one look after another. From the second look on they have the rates since the one before."""

    def __init__(self) -> None:
        self._last_traffic: dict[tuple[str, str, bool], Traffic] = {}
        self._last_time: float | None = None

    def show(self, answers: Answers, now: float) -> RenderableType:
        """The tables for these answers, which came at `now` (seconds), and below them what stands out."""
        elapsed_s = None if self._last_time is None else now - self._last_time
        jobs = summarize_jobs(answers)
        with_teams = any(job.team for job in jobs)
        table, traffic_by_job = _jobs_table(with_rates=elapsed_s is not None, with_teams=with_teams), {}
        notes = [
            Text(shown(str(answer)), style="bold red") for answer in answers.values() if isinstance(answer, Exception)
        ]
        draining = [address for address, answer in answers.items() if isinstance(answer, Status) and answer.draining]
        if draining:
            notes.append(Text(f"{listed(draining)} drains, and takes no new jobs", style="yellow"))
        for job in jobs:
            traffic_by_job[job.key] = job.traffic
            rates = [] if elapsed_s is None else _rates(job.traffic, self._last_traffic.get(job.key), elapsed_s)
            name, *cells = _cells(job, rates)
            table.add([name, *([job.team] if with_teams else []), *cells])
            notes += _notes(job)
        self._last_traffic, self._last_time = traffic_by_job, now
        are_known = any(isinstance(answer, Status) for answer in answers.values())
        no_jobs = Text("no jobs") if are_known else Text("nothing is known of jobs")
        return Group(_shards_table(answers), Text(), table if jobs else no_jobs, *notes)


def _rates(traffic: Traffic, last: Traffic | None, elapsed_s: float) -> list[str]:
    if last is None or not elapsed_s:
        return ["", ""]
    pairs = [(traffic.received_bytes, last.received_bytes), (traffic.sent_bytes, last.sent_bytes)]
    return [short_count(max(0, new - old) / elapsed_s) for new, old in pairs]  # a new job may have an old one's name


def _shards_table(answers: Answers) -> FittingTable:
    titles = ("shard", "up", "jobs", "gather", "conn", "in", "out", "refused", "aborts")
    table = FittingTable(
        titles, left_aligned=("shard", "aborts"), dispensable=("gather", "conn", "refused", "aborts", "out", "in")
    )
    for address, status in answers.items():
        if isinstance(status, Exception):
            table.add([address, _state_after_error(status)])
            continue
        aborts = ", ".join(f"{count} {cause}" for cause, count in status.aborts.items() if count) or "none"
        counts = [status.running, status.gathering, status.connections]
        traffic = [short_count(status.traffic.received_bytes), short_count(status.traffic.sent_bytes)]
        table.add([address, duration(status.uptime_s), *map(str, counts), *traffic, str(status.refused), aborts])
    return table


def _state_after_error(error: Exception) -> str:
    """Why a shard has said nothing, in one word or two."""
    if isinstance(error, RefusedError):
        return "refused"
    return "down" if isinstance(error.__cause__, OSError) else "no answer"


def _jobs_table(*, with_rates: bool, with_teams: bool) -> FittingTable:
    rates = ("in/s", "out/s") if with_rates else ()
    team = ("team",) if with_teams else ()
    first = ("ranks", "by", "age", "done", "in", "out")
    titles = ("job", *team, *first, *rates, "density", "union", "slots", "late", "waits for")
    return FittingTable(titles, left_aligned=("job", "team"), dispensable=_DISPENSABLE)


def _cells(job: JobSummary, rates: Sequence[str]) -> list[str]:
    names, age, traffic = [job.name, f"{job.joined}/{job.world_size}"], duration(job.age_s), job.traffic
    if job.gathers:
        return [*names, "", age]
    densities = [
        "" if density is None else density_text(density) for density in (traffic.density, traffic.union_density)
    ]
    counts = [str(traffic.collectives), short_count(traffic.received_bytes), short_count(traffic.sent_bytes)]
    late = f"rank {job.late.rank} {duration(job.late.seconds)}" if job.late else ""
    slots = f"{job.slots_in_use}/{job.slots}"
    return [*names, job.carriers, age, *counts, *rates, *densities, slots, late, waits_for(job.wait)]


def _notes(job: JobSummary) -> list[Text]:
    """The reasons for which a job waits, in full; none if it does not wait."""
    name, wait = shown(job.name), job.wait
    if job.gathers:
        missing = ", ".join(map(str, job.missing))
        missing += " …" if job.world_size - job.joined > len(job.missing) else ""
        return [Text(f"{name}: rank {missing} must still join", style="yellow")]
    levels = [Text(f"{name}: {levels_of(job)}")] if job.upstream or job.relays else []
    if wait is None:
        return levels
    text = f"{name}: {shown(wait.what)} waits for {shown(wait.who)} since {duration(wait.seconds)}"
    return [*levels, Text(text, style="bold yellow")]


def levels_of(job: JobSummary) -> str:
    """The upstream of this aggregator, and the relays below it, in a job with relays."""
    up, down = (short_count(nbytes) for nbytes in (job.traffic.up_sent_bytes, job.traffic.up_received_bytes))
    parts = [f"relay of aggregator {shown(job.upstream)}, {up} up and {down} down"] if job.upstream else []
    below = [
        f"{shown(relay.address)} ({relay.ranks} {'rank' if relay.ranks == 1 else 'ranks'})" for relay in job.relays
    ]
    if below:
        parts.append(f"relays below: {', '.join(below)}")
    return "; ".join(parts)


WIDTH = 140  # characters, where no terminal says otherwise


class StatusReader:
    """Asks the aggregators at `addresses`, as often as wanted; each answer takes `timeout_s` at most.

    Raises ConfigError for a malformed address, and when the secret cannot be used.
    """

    def __init__(self, addresses: Sequence[str], config: Config, timeout_s: float) -> None:
        overrides = {"cluster.aggregators": list(addresses), "transport.kind": "auto"}
        self._config, self._timeout_s = override_config(config, overrides, source="HOST:PORT"), timeout_s
        self._secret = load_secret(config.security)

    def ask(self) -> dict[str, Status | Exception]:
        """The status of each aggregator, or why it does not answer."""
        addresses = self._config.cluster.aggregators
        answers = ask_all(addresses, self._config, self._timeout_s, secret=self._secret)
        return dict(zip(addresses, answers, strict=True))


def default_addresses(config: Config) -> Sequence[str]:
    """The configured aggregators or, where there are none, the shards of the daemon that this configuration would start
    here."""
    if config.cluster.aggregators:
        return config.cluster.aggregators
    host, port = address_from_this_host(parse_listen(config.aggregator.listen))
    return [str(Address(host, port + shard)) for shard in range(config.aggregator.shards)]


def print_json(reader: StatusReader) -> bool:
    """Print one list; return whether all aggregators answered."""
    answers = reader.ask()
    entries = [
        {"address": address, "error": str(answer)}
        if isinstance(answer, Exception)
        else {"address": address, "status": answer}
        for address, answer in answers.items()
    ]
    click.echo(msgspec.json.format(msgspec.json.encode(entries)))
    return _all_answered(answers)


def print_once(reader: StatusReader) -> bool:
    """Print the tables; return whether all aggregators answered."""
    answers = reader.ask()
    _console().print(StatusView().show(answers, time.monotonic()))
    return _all_answered(answers)


def watch_status(reader: StatusReader, every_s: float) -> None:
    """Show the tables until Ctrl-C: in place on a terminal, else one after another."""
    console, view = _console(), StatusView()
    try:
        with Live(console=console, auto_refresh=False, transient=False) as live:
            while True:
                tables = view.show(reader.ask(), time.monotonic())
                if console.is_terminal:
                    live.update(tables, refresh=True)
                else:
                    console.print(tables)
                time.sleep(every_s)
    except KeyboardInterrupt:
        pass  # Ctrl-C is the way to end it


def _console() -> Console:
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def _all_answered(answers: dict[str, Status | Exception]) -> bool:
    return not any(isinstance(answer, Exception) for answer in answers.values())
