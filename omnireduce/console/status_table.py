"""The tables of `omnireduce status`: one line for each shard, one for each job with its shards added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from omnireduce.console.fitting import FittingTable
from omnireduce.printing import density_text, short_count
from omnireduce.status import JobStatus, Late, Status, Stragglers, Traffic
from omnireduce.wire.words import shown

SHORTEST_WAIT_S = 0.1  # each look meets some collective under way: a shorter wait is normal
# columns of jobs that a narrow terminal does without, the least important first
_SPARE = ("slots", "union", "by", "in", "out", "density", "late", "age", "team", "in/s", "out/s", "done")
_Jobs = Sequence[JobStatus]


class View:
    """The tables for one look after another. From the second look on they have the rates since the one before."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, bool], Traffic] = {}
        self._last_at: float | None = None

    def show(self, answers: Mapping[str, Status | Exception], now: float) -> RenderableType:
        """The tables for these answers, which came at `now` (seconds), and below them what stands out."""
        elapsed_s = None if self._last_at is None else now - self._last_at
        jobs = [job for each in answers.values() if isinstance(each, Status) for job in each.jobs]
        with_teams = any(job.team for job in jobs)
        table, seen = _jobs_table(with_rates=elapsed_s is not None, with_teams=with_teams), {}
        notes = [Text(shown(str(each)), style="bold red") for each in answers.values() if isinstance(each, Exception)]
        for key, parts in groupby(sorted(jobs, key=_same_job), key=_same_job):
            shards = list(parts)
            seen[key] = traffic = _sum(shards)
            rates = [] if elapsed_s is None else _rates(traffic, self._last.get(key), elapsed_s)
            name, *cells = _cells(shards, traffic, rates)
            table.add([name, *([shards[0].team] if with_teams else []), *cells])
            notes += _notes(shards)
        self._last, self._last_at = seen, now
        return Group(_shards_table(answers), Text(), table if jobs else Text("no jobs"), *notes)


def _same_job(job: JobStatus) -> tuple[str, bool]:
    """A key that is the same for a job on all shards: each shard counts generations by itself."""
    return job.name, job.generation > 0


def _sum(shards: _Jobs) -> Traffic:
    total = Traffic()
    for each in shards:
        total.add(each.traffic)
    total.collectives = max(each.traffic.collectives for each in shards)  # the first shard takes part in all
    return total


def _rates(traffic: Traffic, last: Traffic | None, elapsed_s: float) -> list[str]:
    if last is None or not elapsed_s:
        return ["", ""]
    pairs = [(traffic.received_bytes, last.received_bytes), (traffic.sent_bytes, last.sent_bytes)]
    return [short_count(max(0, new - old) / elapsed_s) for new, old in pairs]  # a new job may have an old one's name


def _shards_table(answers: Mapping[str, Status | Exception]) -> FittingTable:
    titles = ("shard", "up", "jobs", "gather", "conn", "in", "out", "refused", "aborts")
    table = FittingTable(titles, left=("shard", "aborts"), spare=("gather", "conn", "refused", "aborts", "out", "in"))
    for address, status in answers.items():
        if isinstance(status, Exception):
            table.add([address, "down"])
            continue
        aborts = ", ".join(f"{count} {cause}" for cause, count in status.aborts.items() if count) or "none"
        counts = [status.running, status.gathering, status.connections]
        traffic = [short_count(status.traffic.received_bytes), short_count(status.traffic.sent_bytes)]
        table.add([address, duration(status.uptime_s), *map(str, counts), *traffic, str(status.refused), aborts])
    return table


def _jobs_table(*, with_rates: bool, with_teams: bool) -> FittingTable:
    rates = ("in/s", "out/s") if with_rates else ()
    team = ("team",) if with_teams else ()
    first = ("ranks", "by", "age", "done", "in", "out")
    titles = ("job", *team, *first, *rates, "density", "union", "slots", "late", "waits for")
    return FittingTable(titles, left=("job", "team"), spare=_SPARE)


def _cells(shards: _Jobs, traffic: Traffic, rates: Sequence[str]) -> list[str]:
    first = shards[0]
    names = [first.name, f"{min(each.joined for each in shards)}/{first.world_size}"]
    age = duration(max(each.age_s for each in shards))
    if not first.generation:
        return [*names, "", age]
    kinds = sorted({kind for each in shards for kind in each.transport.split("+")})
    slots = f"{sum(each.slots_in_use for each in shards)}/{sum(each.slots for each in shards)}"
    densities = ["" if each is None else density_text(each) for each in (traffic.density, traffic.union_density)]
    counts = [str(traffic.collectives), short_count(traffic.received_bytes), short_count(traffic.sent_bytes)]
    return [*names, "+".join(kinds), age, *counts, *rates, *densities, slots, _latest(shards), _waits(shards)]


def _latest(shards: _Jobs) -> str:
    found = [each for shard in shards for each in shard.late]
    worst = max(found, key=lambda each: each.seconds, default=Late(0, 0.0))
    return f"rank {worst.rank} {duration(worst.seconds)}" if worst.seconds >= SHORTEST_WAIT_S else ""


def _longest_wait(shards: _Jobs) -> Stragglers | None:
    found = [each.waiting for each in shards if each.waiting and each.waiting.seconds >= SHORTEST_WAIT_S]
    return max(found, key=lambda each: each.seconds, default=None)


def _waits(shards: _Jobs) -> str:
    wait = _longest_wait(shards)
    if wait is None:
        return ""
    who = f"rank {wait.ranks[0]}" if wait.total == 1 and wait.ranks else f"{wait.total} ranks"
    return f"{who} {duration(wait.seconds)}"


def _notes(shards: _Jobs) -> list[Text]:
    """What a job waits for, in full; nothing if it does not wait."""
    first, wait = shards[0], _longest_wait(shards)
    name = shown(first.name)
    if not first.generation:
        missing = ", ".join(map(str, first.missing))
        missing += " …" if first.world_size - first.joined > len(first.missing) else ""
        return [Text(f"{name}: rank {missing} must still join", style="yellow")]
    if wait is None:
        return []
    text = f"{name}: {shown(wait.what)} waits for {shown(wait.who)} since {duration(wait.seconds)}"
    return [Text(text, style="bold yellow")]


def duration(seconds: float) -> str:
    """A time in a few characters: 0.3 s, 12 s, 5 min, 3.2 h, 12 d."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
