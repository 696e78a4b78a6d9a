"""Configurations that take turns on the same data.

One round: every contender fills its arrays, meets its other ranks, and sums them through a queue; this is timed. The
first one of a round is the last one of the next. A round takes as long as its slowest rank.

Rounds come in heats. For each heat the contenders form their jobs anew, in another order: of two equal jobs, the one
that was there first may be slower. A heat begins with rounds that are not timed. From these the queue learns that steps
are alike. In the last of these every element is checked.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

import omnireduce as omni
from omnireduce.bench.tuning.workload import Workload
from omnireduce.config import Config
from omnireduce.data_parallel.queue import Queue
from omnireduce.errors import OmniReduceError

WARM_UP = 3  # a queue takes two steps that are alike before it leaves its rounds


class Contender:
    """A configuration, and a job of these ranks that uses it."""

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
    """Contenders, the first of which the others are compared with. All ranks make it, and use it alike."""

    def __init__(self, configs: Sequence[Config], workload: Workload, job: str) -> None:
        self._configs, self._workload, self._job = configs, workload, job
        self._heats = self._round = 0
        self._seconds = np.empty((len(configs), 0))
        self.carried = Counter[str]()  # bytes of this rank's tensors, by transport

    def run(self, rounds: int) -> None:
        """A heat of so many rounds. Raises what `connect` raises, AbortedError, and OmniReduceError where a sum is
        wrong."""
        size = len(self._configs)
        order = [(self._heats + i) % size for i in range(size)]
        with ExitStack() as stack:
            by_index = {i: Contender(self._configs[i], f"{self._job}.{self._heats}.{i}", stack) for i in order}
            contenders = [by_index[i] for i in range(size)]
            self._warm_up(contenders)
            seconds = np.zeros((size, rounds))
            for at in range(rounds):
                for i in order if self._round % 2 else reversed(order):
                    seconds[i, at] = contenders[i].step(self._workload, self._round)
                self._round += 1
            slowest = contenders[0].comm.allreduce(seconds, op="max")
            for contender in contenders:
                contender.comm.barrier()
                contender.queue.close()
                self.carried += contender.comm.statistics().carried
        self._heats += 1
        self._seconds = np.concatenate([self._seconds, slowest], axis=1)

    def _warm_up(self, contenders: list[Contender]) -> None:
        wrong = 0
        for at in range(WARM_UP):
            for contender in contenders:
                contender.step(self._workload, self._round)
                wrong += self._workload.wrong(self._round) if at == WARM_UP - 1 else 0
            self._round += 1
        if contenders[0].comm.allreduce(np.array([wrong]))[0]:
            raise OmniReduceError("sums are wrong: nothing can be tuned")

    def score(self, contender: int) -> float:
        """Bytes per microsecond: of one rank's step, by its median time."""
        return float(self._workload.nbytes / (np.median(self._seconds[contender]) * 1e6))

    def ratio(self, contender: int, against: int = 0) -> float:
        """How many times as fast as another contender. A time counts by its ratio to the geometric mean of its round, a
        contender by the median of these. So of any three the ratios fit together."""
        logs = np.log(self._seconds)
        medians = np.median(logs - logs.mean(axis=0), axis=1)
        return float(np.exp(medians[against] - medians[contender]))
