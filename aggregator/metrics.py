"""Prometheus metrics from the statuses of shards. Names and meanings: docs/operations.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from omnireduce.core.status_messages import JobStatus, Status, Traffic

Answers = Mapping[str, Status | Exception]
_Value = float | None  # None: no sample
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
        up = GaugeMetricFamily("omnireduce_shard_up", "Whether the shard answers", labels=["shard"])
        for shard in answers:
            up.add_metric([shard], float(shard in statuses))
        yield up
        yield from _shard_metrics(statuses)
        yield from _job_metrics([(shard, job) for shard, status in statuses.items() for job in status.jobs])


def _shard_metrics(statuses: Mapping[str, Status]) -> Iterator[Metric]:
    def gauge(name: str, text: str, value: Callable[[Status], _Value]) -> Metric:
        family = GaugeMetricFamily(f"omnireduce_shard_{name}", text, labels=["shard"])
        return _with_samples(family, (([shard], value(status)) for shard, status in statuses.items()))

    def counter(name: str, text: str, value: Callable[[Status], _Value]) -> Metric:
        family = CounterMetricFamily(f"omnireduce_{name}", text, labels=["shard"])
        return _with_samples(family, (([shard], value(status)) for shard, status in statuses.items()))

    yield gauge("uptime_seconds", "Time since the shard's process began to serve", lambda status: status.uptime_s)
    yield gauge("connections", "Open connections", lambda status: status.connections)
    yield gauge("running_jobs", "Jobs whose ranks are all here", lambda status: status.running)
    yield gauge("draining", "Whether the shard takes no new jobs", lambda status: status.draining)
    yield gauge("gathering_jobs", "Jobs that wait for ranks to join", lambda status: status.gathering)
    yield counter("jobs_started", "Jobs that began", lambda status: status.jobs_started)
    yield counter("jobs_ended", "Jobs that ended, whether cleanly or not", lambda status: status.jobs_ended)
    refused = CounterMetricFamily("omnireduce_refused", "Connections refused", labels=["shard", "user"])
    yield _with_samples(
        refused, (([shard, user], count) for shard, status in statuses.items() for user, count in _refused(status))
    )
    for name, text, value in _TRAFFIC:
        family = CounterMetricFamily(f"omnireduce_{name}", text, labels=["shard"])
        yield _with_samples(family, (([shard], value(status.traffic)) for shard, status in statuses.items()))
    aborts = CounterMetricFamily("omnireduce_aborts", "Jobs that failed, by cause", labels=["shard", "cause"])
    samples = (([shard, cause], n) for shard, status in statuses.items() for cause, n in status.aborts.items())
    yield _with_samples(aborts, samples)


def _refused(status: Status) -> Iterator[tuple[str, int]]:
    """The number of refused connections by local user; an empty user if the kernel does not know it."""
    yield "", status.refused - sum(status.refused_users.values())
    yield from status.refused_users.items()


def _job_labels(shard: str, job: JobStatus) -> list[str]:
    return [shard, job.name, job.team]


def _job_metrics(jobs: list[tuple[str, JobStatus]]) -> Iterator[Metric]:
    running = [(shard, job) for shard, job in jobs if job.generation]

    def gauge(name: str, text: str, value: Callable[[JobStatus], _Value]) -> Metric:
        family = GaugeMetricFamily(f"omnireduce_job_{name}", text, labels=_JOB)
        return _with_samples(family, ((_job_labels(shard, job), value(job)) for shard, job in running))

    for name, text, value in _TRAFFIC:
        family = CounterMetricFamily(f"omnireduce_job_{name}", text, labels=_JOB)
        yield _with_samples(family, ((_job_labels(shard, job), value(job.traffic)) for shard, job in running))
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
    missing = GaugeMetricFamily("omnireduce_job_missing_ranks", "Ranks still to join", labels=_JOB)
    samples = ((_job_labels(shard, job), job.world_size - job.joined) for shard, job in jobs if not job.generation)
    yield _with_samples(missing, samples)


def _waits(jobs: list[tuple[str, JobStatus]]) -> Iterator[Metric]:
    labels = [*_JOB, "rank"]
    waiting = GaugeMetricFamily(
        "omnireduce_job_waiting_seconds", "Time that a collective has waited for this rank", labels=labels
    )
    late = CounterMetricFamily(
        "omnireduce_job_late_seconds", "Time that others waited for this rank to begin collectives", labels=labels
    )
    for shard, job in jobs:
        if job.waiting is not None:
            for rank in job.waiting.ranks:
                waiting.add_metric([*_job_labels(shard, job), str(rank)], job.waiting.seconds)
        for late_rank in job.late:
            late.add_metric([*_job_labels(shard, job), str(late_rank.rank)], late_rank.seconds)
    yield waiting
    yield late


def _levels(jobs: list[tuple[str, JobStatus]]) -> Iterator[Metric]:
    """The upstream of a shard in a job, and the relays directly below it."""
    above = GaugeMetricFamily(
        "omnireduce_job_upstream", "1 for the aggregator above a relay", labels=[*_JOB, "upstream"]
    )
    below = GaugeMetricFamily(
        "omnireduce_job_relay_ranks", "Ranks that come through this relay, next below", labels=[*_JOB, "relay"]
    )
    for shard, job in jobs:
        if job.upstream:
            above.add_metric([*_job_labels(shard, job), job.upstream], 1.0)
        for relay in job.relays:
            below.add_metric([*_job_labels(shard, job), relay.address], relay.ranks)
    yield above
    yield below


def _with_samples(
    family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[tuple[list[str], _Value]]
) -> GaugeMetricFamily | CounterMetricFamily:
    for labels, value in samples:
        if value is not None:
            family.add_metric(labels, value)
    return family
