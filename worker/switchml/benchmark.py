"""SwitchML's benchmark: all-reduces of one size, in groups, each group timed from its first start to its last end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click
import msgspec
import numpy as np

from omnireduce.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.files.output import check_writable, write_json
from omnireduce.printing import carriers_text
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.switchml import Context, Distribution, Settings
from omnireduce.switchml.dummy import DummyCommunicator
from omnireduce.worker.switchml.signals import Say, started
from omnireduce.worker.switchml.summands import Wrong, summands_of

BITS = 32  # of an element


@dataclass(frozen=True, slots=True)
class BenchmarkOptions:
    """The values of the flags. `tensor_type` is a key of `DTYPES`; `err` is in per cent; of `sync_every` 0 is all jobs;
    `num_tensors`: how many tensors the jobs of a group take in turn."""

    tensor_numel: int
    tensor_type: str
    num_jobs: int
    num_warmup_jobs: int
    inplace: bool
    verify: bool
    sync_every: int
    err: float
    random: bool
    seed: int
    dump_stats: bool
    num_tensors: int

    def groups(self) -> Iterator[range]:
        """The numbers of the jobs of each group. The last one may be shorter."""
        step = self.sync_every or self.num_jobs
        for first in range(0, self.num_jobs, step):
            yield range(first, min(first + step, self.num_jobs))

    @property
    def rounds(self) -> int:
        """How many jobs of a group, or of the warm-up, take the same tensor at most."""
        longest = max(self.num_warmup_jobs, *(len(group) for group in self.groups()))
        return math.ceil(longest / self.num_tensors)


class Group(msgspec.Struct, frozen=True):
    """Jobs from `first` to `last` that were waited for together. `ns`: of all; `goodput_gbps`: bits of the tensors of
    one rank / time."""

    first: int
    last: int
    ns: int
    goodput_gbps: float

    def __str__(self) -> str:
        label = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        return f"Job(s) #{label}# finished. Duration: #{self.ns}# ns Goodput: #{self.goodput_gbps:.6g}# Gbps."


class Report(msgspec.Struct, frozen=True):
    """The JSON output. `job_ns`: of one job each."""

    asked: BenchmarkOptions
    world_size: int
    transport: str
    groups: list[Group]
    job_ns: Distribution
    wrong: int


class Tensors:
    """The memory that the jobs of one rank use, and the check of what is in it. Raises UsageError for a series of jobs
    in place whose sums the type does not hold."""

    def __init__(self, asked: BenchmarkOptions, comm: Communicator | DummyCommunicator) -> None:
        self._asked, self._rank, size = asked, comm.rank, comm.size
        self._summands = summands_of(comm, asked.tensor_type, asked.seed if asked.random else None)
        most = self._summands.most_rounds()
        if asked.inplace and most is not None and asked.rounds > most:
            raise UsageError(
                f"{asked.rounds} jobs one after the other in place: with {size} workers {asked.tensor_type} holds the "
                f"sums of {most}; set --inplace 0, a smaller --sync-every or --num-warmup-jobs, or more --num-tensors"
            )
        self.inputs = [self._allocate() for _ in range(asked.num_tensors)]
        self.outs: list[Array | None] = [None if asked.inplace else self._allocate() for _ in self.inputs]
        for number, tensor in enumerate(self.inputs):
            self._summands.fill(self._rank, tensor, number)

    def _allocate(self) -> Array:
        return np.empty(self._asked.tensor_numel, self._summands.dtype)

    def refresh(self) -> None:
        """Before a group: nothing is in them that an earlier group has left."""
        for number, (tensor, out) in enumerate(zip(self.inputs, self.outs, strict=True)):
            if out is None:
                self._summands.fill(self._rank, tensor, number)
            else:
                out.fill(-1)

    def wrong(self, jobs: int) -> Wrong:
        """Check what a group of so many jobs has left."""
        total = Wrong(0, ())
        for number, (tensor, out) in enumerate(zip(self.inputs, self.outs, strict=True)):
            turns = len(range(number, jobs, self._asked.num_tensors))
            if turns:
                summed, rounds = (tensor, turns) if out is None else (out, 1)
                total = total.beside(self._summands.wrong(summed, number=number, rounds=rounds, err=self._asked.err))
        return total


def run_benchmark(settings: Settings, asked: BenchmarkOptions, json_path: str | None) -> int:
    """Run the benchmark on all ranks; return how many elements were wrong, the same number on all of them. Rank 0
    prints, and writes to `json_path`. Raises UsageError, ConfigError, and what ends a job of the service."""
    with started(settings) as (context, say):
        comm = context.communicator
        with context:
            if json_path is not None and comm.rank == 0:
                check_writable(json_path)
            groups, wrong = run_groups(context, asked, say)
            job_ns = ns_of_jobs(groups)
            say(_table(asked.tensor_numel, job_ns))
            if asked.dump_stats:
                say(str(context.stats))
            say("Cleaning up.")
        if json_path is not None and comm.rank == 0:
            report = Report(asked, comm.size, carriers_text(comm.statistics().carried), groups, job_ns, wrong)
            write_json(msgspec.json.encode(report), json_path)
    return wrong


def run_groups(context: Context, asked: BenchmarkOptions, say: Say) -> tuple[list[Group], int]:
    """Warm up, then time every group, and check its tensors if that was asked for. Returns also how many elements were
    wrong, on all ranks together."""
    comm = context.communicator
    tensors = Tensors(asked, comm)
    say(f"Submitting {asked.num_warmup_jobs} warmup jobs.")
    if asked.num_warmup_jobs:
        _time_group(context, tensors, range(asked.num_warmup_jobs))
    say(f"Warmup finished.\nSubmitting {asked.num_jobs} jobs.")
    groups, wrong = list[Group](), Wrong(0, ())
    for jobs in asked.groups():
        tensors.refresh()
        groups.append(_time_group(context, tensors, jobs))
        say(str(groups[-1]))
        if asked.verify:
            wrong = wrong.beside(tensors.wrong(len(jobs)))
    say("All jobs finished.")
    return groups, verdict(comm, wrong, say) if asked.verify else 0


def _time_group(context: Context, tensors: Tensors, jobs: range) -> Group:
    """All ranks begin together; the time is that of this one."""
    context.communicator.barrier(name="group")
    begin = time.perf_counter_ns()
    for number in range(len(jobs)):
        turn = number % len(tensors.inputs)
        context.allreduce_async(tensors.inputs[turn], tensors.outs[turn])
    context.wait_for_all_jobs()
    ns = time.perf_counter_ns() - begin
    return Group(jobs[0], jobs[-1], ns, tensors.inputs[0].size * BITS * len(jobs) / ns)


def verdict(comm: Communicator | DummyCommunicator, wrong: Wrong, say: Say) -> int:
    """How many elements all ranks together have found wrong. Rank 0 says whether there are any, and each rank which."""
    say("Verifying final results")
    everywhere = int(comm.allreduce(np.array([wrong.count]), name="wrong")[0])
    if wrong.count:
        click.echo(f"rank {comm.rank}: {wrong}", err=True)
    say("Verification failed." if everywhere else "Data verified successfully.")
    return everywhere


def ns_of_jobs(groups: Sequence[Group]) -> Distribution:
    """The times of jobs: where several were waited for together, each has an equal part."""
    return Distribution.of([group.ns / (group.last - group.first + 1) for group in groups])


def named(found: Distribution) -> list[tuple[str, float]]:
    """The statistics that are printed, each with its name."""
    values = (found.min, found.max, found.median, found.mean, found.stdev)
    return list(zip(("Min", "Max", "Median", "Mean", "Std dev"), values, strict=True))


def _table(numel: int, each: Distribution) -> str:
    *lines, (last, deviation) = named(each)
    times = [f"{name} {ns:.0f} ns {numel * BITS / ns:.6g} Gbps" for name, ns in lines]
    return "\n".join(["", *times, f"{last} {deviation:.0f} ns"])
