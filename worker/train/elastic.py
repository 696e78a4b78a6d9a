"""A training run that outlives its workers: survivors go on from the last step, workers that are started again join.

Every worker keeps how many workers took each step, so that one process can repeat the whole run and compare.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np

from omnireduce.config import Config
from omnireduce.elastic import ElasticState, run_elastic
from omnireduce.files.output import check_writable, write_json
from omnireduce.printing import make_console
from omnireduce.progress import PlainProgress
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.worker.train.corpus import Corpus
from omnireduce.worker.train.results import Verification, say_verdict
from omnireduce.worker.train.run import configuration_digest, exchange_over, verify
from omnireduce.worker.train.trainer import Trainer, block_size, held_out_pairs, mean_loss

REPORTS = 10  # points of the loss curve


class Point(msgspec.Struct, frozen=True):
    """The held-out loss after `step` steps, the last one taken by `workers`."""

    step: int
    loss: float
    workers: int


class ElasticResult(msgspec.Struct, frozen=True):
    """The result of the run, as the process sees it that is rank 0 at its end.

    `workers`: how many took each step. `curve`: its points while this process was rank 0.
    """

    steps: int
    workers: list[int]
    curve: list[Point]
    verdict: Verification


class ElasticTraining:
    """One worker's part of the run."""

    def __init__(self, comm: Communicator, config: Config, corpus: Corpus) -> None:
        self._comm, self._config, self._corpus = comm, config, corpus
        self._held_out = held_out_pairs(self._corpus, config)
        exchange = exchange_over(comm, block_size(config))
        self._trainer = Trainer(self._corpus, config, ranks=(comm.rank,), size=comm.size, exchange=exchange)
        model = self._trainer.model
        self._workers = np.zeros(config.train.steps, np.int32)
        self.state = ElasticState(
            comm,
            {"weights": model.weights, "squares": model.squares, "workers": self._workers},
            fingerprint=configuration_digest(config) + corpus.digest(),
        )
        self._curve: list[Point] = []
        self._console = make_console()

    def train(self, source: int) -> ElasticResult:
        """Take the steps that are left with the workers that there are; all ranks call this after a sync."""
        comm, state, steps = self._comm, self.state, self._config.train.steps
        self._trainer.take_part((comm.rank,), comm.size)
        self._say(f"train: {comm.size} workers, from step {state.step} of {steps}")
        while state.step < steps:
            self._trainer.step(state.step)
            self._workers[state.step] = comm.size
            state.step += 1
            if state.step % max(1, steps // REPORTS) == 0 and comm.rank == 0:
                self._curve.append(Point(state.step, mean_loss(self._trainer.model, self._held_out), comm.size))
                self._say(f"train: step {state.step} of {steps}, held-out loss {self._curve[-1].loss:.4f}")
            state.commit()
        plain = PlainProgress(time.monotonic())
        verdict = verify(comm, self._config, self._corpus, self._trainer, self._workers.tolist(), plain)
        return ElasticResult(steps, self._workers.tolist(), self._curve, verdict)

    def _say(self, text: str) -> None:
        if self._comm.rank == 0:
            self._console.print(text)
            self._console.file.flush()


def run_elastic_train(comm: Communicator, config: Config, corpus: Corpus, *, json_path: str | None = None) -> int:
    """Train through faults and verify. The process that is rank 0 at the end prints the result and writes it to
    `json_path`. Return the exit status: 1 if the weights differ between ranks or from a one-process run, else 0.

    Raises what `run_train` raises, AbortedError when it failed again and again.
    """
    if json_path is not None:
        check_writable(json_path)
    training = ElasticTraining(comm, config, corpus)
    result = run_elastic(comm, training.state, training.train)
    if comm.rank == 0:
        console = make_console()
        style = "" if result.verdict.passed else "bold red"
        console.print(say_verdict(result.verdict), style=style)
        if json_path is not None:
            write_json(msgspec.json.encode(result), json_path)
    return 0 if result.verdict.passed else 1
