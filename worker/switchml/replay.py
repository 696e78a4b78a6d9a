"""The training of a model by its timing: layers compute for as long as a file says, and their gradients are exchanged.

The exchange overlaps with the backward pass, because each gradient is submitted when it is ready, and with the next
forward pass, because a layer waits there for the sum of its own gradient only. The latter gains where the first layers
are urgent (protocol.urgent_bytes): their gradients are submitted last and needed first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.support.files.output import check_writable, write_json
from omnireduce.support.printing import carriers_text
from omnireduce.switchml import Context, Distribution, Job, Settings
from omnireduce.worker.switchml.benchmark import (
    Print,
    WrongElements,
    named_statistics,
    start_context,
    summands_of,
    verdict,
)
from omnireduce.worker.switchml.recording import Layer

SLACK_NS = 200_000  # error of a timer; a process that waits for a processor loses more, as a GPU would be idle too


@dataclass(frozen=True, slots=True)
class Replay:
    """The values of the flags. `overlap`: what the exchange overlaps. "iterations": with the backward pass and the next
    forward pass; "backward": with the former only; "none": it begins when that has ended."""

    num_iters: int
    num_warmup_iters: int
    verify: bool
    err: float
    random: bool
    seed: int
    overlap: str


class Report(msgspec.Struct, frozen=True):
    """The JSON output: nanoseconds of each iteration, and iterations per second."""

    asked: Replay
    world_size: int
    transport: str
    ns: list[int]
    rate: Distribution
    wrong: int


class Device:
    """Computes for a given time, while the processor is free, as beside a GPU. If a sleep is too long, the next
    one is shorter by that time, up to SLACK_NS."""

    def __init__(self) -> None:
        self._busy_until = time.perf_counter_ns()

    def restart_clock(self) -> None:
        """Count time from now: the training had to wait."""
        self._busy_until = time.perf_counter_ns()

    def compute(self, ns: int) -> None:
        """Return when it has computed for so long."""
        self._busy_until = max(self._busy_until, time.perf_counter_ns() - SLACK_NS) + ns
        time.sleep(max(0, self._busy_until - time.perf_counter_ns()) / 1e9)


class Training:
    """The layers of a model, with a gradient and its sum for each, float32. Gradients are filled once."""

    def __init__(self, context: Context, layers: Sequence[Layer], options: Replay) -> None:
        comm = context.communicator
        self._context, self._layers, self._options, self._device = context, layers, options, Device()
        self._summands = summands_of(comm, "float", options.seed if options.random else None)
        self._gradients = [np.empty(layer.numel, np.float32) for layer in layers]
        self._sums = self._new_sums()
        self._jobs: list[Job | None] = [None for _ in layers]
        for number, gradient in enumerate(self._gradients):
            self._summands.fill(comm.rank, gradient, number)

    def iterate(self) -> int:
        """One iteration; how long it took, in nanoseconds."""
        begin = time.perf_counter_ns()
        for layer, job in zip(self._layers, self._jobs, strict=True):
            if job is not None:
                self._wait(job)
            self._device.compute(layer.forward_pass_ns)
        for number in reversed(range(len(self._layers))):
            self._device.compute(self._layers[number].backward_pass_ns)
            if self._options.overlap != "none":
                self._submit(number)
        if self._options.overlap == "none":
            for number in reversed(range(len(self._layers))):
                self._submit(number)
        if self._options.overlap != "iterations":
            self.finish()
        return time.perf_counter_ns() - begin

    def _submit(self, number: int) -> None:
        self._jobs[number] = self._context.allreduce_async(self._gradients[number], self._sums[number])

    def _wait(self, job: Job) -> None:
        is_over = job.over
        job.wait()
        if not is_over:
            self._device.restart_clock()

    def finish(self) -> None:
        """Wait for all sums."""
        self._context.wait_for_all_jobs()
        self._device.restart_clock()

    def _new_sums(self) -> list[Array]:
        return [np.full(layer.numel, -1, np.float32) for layer in self._layers]

    def use_new_sums(self) -> None:
        """Give the next jobs new memory for their sums, because the sums of all iterations are equal. Jobs under way
        keep theirs."""
        self._sums = self._new_sums()

    def wrong(self) -> WrongElements:
        """Check the sums."""
        total = WrongElements(0, ())
        for number, result in enumerate(self._sums):
            total = total.plus(self._summands.wrong(result, number=number, err=self._options.err))
        return total


def run_replay(settings: Settings, layers: Sequence[Layer], options: Replay, json_path: str | None) -> int:
    """Train on all ranks; return the number of wrong elements in the last sums, the same on all ranks. Rank 0 prints,
    and writes to `json_path`. Raises ConfigError, UsageError, and the errors that end a job of the service."""
    with start_context(settings) as (context, print_line):
        comm = context.communicator
        with context:
            if json_path is not None and comm.rank == 0:
                check_writable(json_path)
            training = Training(context, layers, options)
            times = _iterate(training, options, print_line)
            wrong = verdict(comm, training.wrong(), print_line) if options.verify else 0
            rates = Distribution.of([1e9 / ns for ns in times])
            print_line("\n".join(["", *(f"{name} {rate:.6g} iter/s" for name, rate in named_statistics(rates))]))
            print_line("Cleaning up.")
        if json_path is not None and comm.rank == 0:
            report = Report(options, comm.size, carriers_text(comm.statistics().carried), times, rates, wrong)
            write_json(msgspec.json.encode(report), json_path)
    return wrong


def _iterate(training: Training, options: Replay, print_line: Print) -> list[int]:
    print_line(f"Running {options.num_warmup_iters} warmup iterations.")
    for _ in range(options.num_warmup_iters):
        training.iterate()
    training.finish()
    print_line(f"Warmup finished.\nRunning {options.num_iters} iterations.")
    times = []
    for number in range(options.num_iters):
        if number == options.num_iters - 1:
            training.use_new_sums()  # the sums of this iteration are checked
        times.append(training.iterate())
        print_line(f"Iteration #{number}# finished. Duration: #{times[-1]}# ns Rate: #{1e9 / times[-1]:.6g}# iter/s.")
    training.finish()
    print_line("All iterations finished.")
    return times
