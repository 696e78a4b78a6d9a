"""Prometheus metrics from the statuses of shards. Names and meanings: docs/operations.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from omnireduce.core.status_messages import JobStatus, Status, Traffic
from omnireduce.support.job_summary import Answers

_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily
_Value = float | None  # None: no sample
_Samples = Iterable[tuple[list[str], _Value]]  # the labels of each value
_SHARD = ["shard"]
_JOB = ["shard", "job", "team"]  # to Prometheus an empty label, as team "" gives, is no label
_TRAFFIC: tuple[tuple[str, str, Callable[[Traffic], int]], ...] = (
    ("collectives", "Collectives completed", lambda traffic: traffic.collectives),
    ("received_bytes", "Bytes from workers, framing included", lambda traffic: traffic.received_bytes),
    ("sent_bytes", "Bytes to workers, framing included", lambda traffic: traffic.sent_bytes),
    ("blocks", "Blocks of reduced tensors", lambda traffic: traffic.blocks),
    ("rank_blocks", "Blocks of reduced tensors, times ranks", lambda traffic: traffic.rank_blocks),
    ("own_blocks", "Non-zero blocks from workers", lambda traffic: traffic.own_blocks),
    ("union_blocks", "Non-zero blocks of results", lambda traffic: traffic.union_blocks),
    ("up_received_bytes", "Bytes from the upstream of a relay", lambda traffic: traffic.up_received_bytes),
    ("up_sent_bytes", "Bytes to the upstream of a relay", lambda traffic: traffic.up_sent_bytes),
)


class ShardCollector(Collector):
    """Asks the shards, by `ask`, at each scrape."""

    def __init__(self, ask: Callable[[], Answers]) -> None:
        self._ask = ask

    def describe(self) -> Iterable[Metric]:
        """Return nothing: otherwise registering this collector would ask the shards."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics of all shards."""
        answers = self._ask()
        statuses = {shard: answer for shard, answer in answers.items() if isinstance(answer, Status)}
        samples = (([shard], float(shard in statuses)) for shard in answers)
        yield _metric(_GAUGE, "shard_up", "Whether the shard answers", _SHARD, samples)
        yield from _shard_metrics(statuses)
        yield from _job_metrics([(shard, job) for shard, status in statuses.items() for job in status.jobs])


def _shard_metrics(statuses: Mapping[str, Status]) -> Iterator[Metric]:
    def samples(value: Callable[[Status], _Value]) -> _Samples:
        return (([shard], value(status)) for shard, status in statuses.items())

    def gauge(name: str, text: str, value: Callable[[Status], _Value]) -> Metric:
        return _metric(_GAUGE, f"shard_{name}", text, _SHARD, samples(value))

    def counter(name: str, text: str, value: Callable[[Status], _Value]) -> Metric:
        return _metric(_COUNTER, name, text, _SHARD, samples(value))

    yield gauge("uptime_seconds", "Time since the shard's process began to serve", lambda status: status.uptime_s)
    yield gauge("connections", "Open connections", lambda status: status.connections)
    yield gauge("running_jobs", "Jobs whose ranks are all here", lambda status: status.running)
    yield gauge("draining", "Whether the shard takes no new jobs", lambda status: status.draining)
    yield gauge("gathering_jobs", "Jobs that wait for ranks to join", lambda status: status.gathering)
    yield counter("jobs_started", "Jobs that began", lambda status: status.jobs_started)
    yield counter("jobs_ended", "Jobs that ended, whether cleanly or not", lambda status: status.jobs_ended)
    refused = (([shard, user], n) for shard, status in statuses.items() for user, n in _refused(status))
    yield _metric(_COUNTER, "refused", "Connections refused", ["shard", "user"], refused)
    for name, text, value in _TRAFFIC:
        traffic = (([shard], value(status.traffic)) for shard, status in statuses.items())
        yield _metric(_COUNTER, name, text, _SHARD, traffic)
    aborts = (([shard, cause], n) for shard, status in statuses.items() for cause, n in status.aborts.items())
    yield _metric(_COUNTER, "aborts", "Jobs that failed, by cause", ["shard", "cause"], aborts)


def _refused(status: Status) -> Iterator[tuple[str, int]]:
    """The number of refused connections by local user; an empty user if the kernel does not know it."""
    yield "", status.refused - sum(status.refused_users.values())
    yield from status.refused_users.items()


def _job_labels(shard: str, job: JobStatus) -> list[str]:
    return [shard, job.name, job.team]


def _job_metrics(jobs: list[tuple[str, JobStatus]]) -> Iterator[Metric]:
    running = [(shard, job) for shard, job in jobs if job.generation]

    def gauge(name: str, text: str, value: Callable[[JobStatus], _Value]) -> Metric:
        samples = ((_job_labels(shard, job), value(job)) for shard, job in running)
        return _metric(_GAUGE, f"job_{name}", text, _JOB, samples)

    for name, text, value in _TRAFFIC:
        samples = ((_job_labels(shard, job), value(job.traffic)) for shard, job in running)
        yield _metric(_COUNTER, f"job_{name}", text, _JOB, samples)
    yield gauge("ranks", "Ranks of the job that are here", lambda job: job.joined)
    yield gauge("age_seconds", "Time since all ranks had joined", lambda job: job.age_s)
    yield gauge("density", "Non-zero blocks / blocks of a rank's tensors so far", lambda job: job.traffic.density)
    yield gauge("union_density", "Non-zero blocks / blocks of results so far", lambda job: job.traffic.union_density)
    yield gauge("slots", "Receive slots of all ranks", lambda job: job.slots)
    yield gauge("slots_in_use", "Receive slots whose message is still needed", lambda job: job.slots_in_use)
    yield gauge("result_slots", "Result slots", lambda job: job.results)
    yield gauge("result_slots_in_use", "Result slots being filled or read", lambda job: job.results_in_use)
    yield from _waits(running)
    yield from _levels(running)
    missing = ((_job_labels(shard, job), job.world_size - job.joined) for shard, job in jobs if not job.generation)
    yield _metric(_GAUGE, "job_missing_ranks", "Ranks still to join", _JOB, missing)


def _waits(jobs: list[tuple[str, JobStatus]]) -> Iterator[Metric]:
    waiting = (
        ([*_job_labels(shard, job), str(rank)], job.waiting.seconds)
        for shard, job in jobs if job.waiting is not None for rank in job.waiting.ranks
    )  # fmt: skip
    late = (
        ([*_job_labels(shard, job), str(late_rank.rank)], late_rank.seconds)
        for shard, job in jobs for late_rank in job.late
    )  # fmt: skip
    text = "Time that a collective has waited for this rank"
    yield _metric(_GAUGE, "job_waiting_seconds", text, [*_JOB, "rank"], waiting)
    text = "Time that others waited for this rank to begin collectives"
    yield _metric(_COUNTER, "job_late_seconds", text, [*_JOB, "rank"], late)


def _levels(jobs: list[tuple[str, JobStatus]]) -> Iterator[Metric]:
    """The upstream of a shard in a job, and the relays directly below it."""
    above = (([*_job_labels(shard, job), job.upstream], 1.0) for shard, job in jobs if job.upstream)
    yield _metric(_GAUGE, "job_upstream", "1 for the aggregator above a relay", [*_JOB, "upstream"], above)
    below = (([*_job_labels(shard, job), relay.address], relay.ranks) for shard, job in jobs for relay in job.relays)
    text = "Ranks that come through this relay, next below"
    yield _metric(_GAUGE, "job_relay_ranks", text, [*_JOB, "relay"], below)


def _metric(
    kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, labels: list[str], samples: _Samples
) -> Metric:
    family = kind(f"omnireduce_{name}", text, labels=labels)
    for values, value in samples:
        if value is not None:
            family.add_metric(values, value)
    return family
