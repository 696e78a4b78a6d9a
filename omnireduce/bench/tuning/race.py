"""Configurations that take turns on the same data.

One round: every contender fills its arrays, meets its other ranks, and sums them through a queue; this is timed. The
next round begins with the last one. A round takes as long as its slowest rank. Rounds come after some that are not
timed; in those every element is checked, and the queue learns that steps are alike.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import numpy as np

import omnireduce as omni
from omnireduce.bench.tuning.workload import Workload
from omnireduce.config import Config
from omnireduce.data_parallel.queue import Queue
from omnireduce.errors import OmniReduceError

WARM_UP = 4  # a queue takes two steps that are alike before it leaves its rounds


class Contender:
    """A configuration, and a job of these ranks that has it."""

    def __init__(self, config: Config, job: str, stack: ExitStack) -> None:
        self.comm = stack.enter_context(omni.connect(config, job=job))
        self.queue = Queue(self.comm)

    def step(self, workload: Workload, number: int) -> float:
        """Seconds that this rank's step takes."""
        workload.fill(number)
        self.comm.barrier()
        start = time.perf_counter()
        workload.submit(self.queue, number)
        return time.perf_counter() - start


class Race:
    """Contenders, the first of which the others are compared with. All ranks make it, and use it alike.

    Raises what `connect` raises; OmniReduceError where a sum is wrong.
    """

    def __init__(self, configs: list[Config], workload: Workload, job: str) -> None:
        self._workload, self._number = workload, 0
        self._stack = ExitStack()
        self._seconds = np.empty((len(configs), 0))
        with ExitStack() as stack:
            self._contenders = [Contender(each, f"{job}.{i}", stack) for i, each in enumerate(configs)]
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            for each in self._contenders:
                each.comm.barrier()
                each.queue.close()
        self._stack.__exit__(kind, error, trace)

    def warm_up(self) -> None:
        """Rounds that count for nothing but their sums."""
        wrong = 0
        for _ in range(WARM_UP):
            for each in self._contenders:
                each.step(self._workload, self._number)
                wrong += self._workload.wrong(self._number)
            self._number += 1
        if self._contenders[0].comm.allreduce(np.array([wrong]))[0]:
            raise OmniReduceError("sums are wrong: nothing can be tuned")

    def run(self, rounds: int) -> None:
        """Take so many rounds more."""
        seconds = np.zeros((len(self._contenders), rounds))
        for at in range(rounds):
            numbered = list(enumerate(self._contenders))
            for i, each in numbered if self._number % 2 else reversed(numbered):
                seconds[i, at] = each.step(self._workload, self._number)
            self._number += 1
        slowest = self._contenders[0].comm.allreduce(seconds, op="max")
        self._seconds = np.concatenate([self._seconds, slowest], axis=1)

    def score(self, contender: int) -> float:
        """Bytes per microsecond: of one rank's step, by its median time."""
        return float(self._workload.nbytes / (np.median(self._seconds[contender]) * 1e6))

    def ratio(self, contender: int, against: int = 0) -> float:
        """How many times as fast as another contender. A time counts by its ratio to the geometric mean of its round, a
        contender by the median of these. So of any three the ratios fit together."""
        logs = np.log(self._seconds)
        medians = np.median(logs - logs.mean(axis=0), axis=1)
        return float(np.exp(medians[against] - medians[contender]))
