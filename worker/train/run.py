"""A training run: the same training over the service, over MPI, and in one process to verify the first.

Every rank loads the corpus itself, so equal data is checked, not assumed. The steps over the service and over MPI
alternate, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import track

from omnireduce.console.bench.mpi import MpiAllreduce
from omnireduce.console.bench.recorded_tensors import RANK
from omnireduce.core.dtypes import Array
from omnireduce.elastic import ElasticState, run_elastic
from omnireduce.errors import UsageError
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.support.config import Config
from omnireduce.support.files.output import check_writable, make_folder, write_json, write_npy
from omnireduce.support.printing import carriers_text, make_console
from omnireduce.support.progress import PlainProgress
from omnireduce.worker.train.corpus import Corpus, load_corpus, source_files
from omnireduce.worker.train.results import (
    Baseline,
    Gradients,
    Timing,
    TrainingResult,
    Verification,
    print_result,
    verdict_text,
)
from omnireduce.worker.train.trainer import Exchange, Trainer, block_size, held_out_pairs, mean_loss, no_exchange

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
        self._trainer.set_shards((comm.rank,), comm.size)
        self._print(f"train: {comm.size} workers, from step {state.step} of {steps}")
        while state.step < steps:
            self._trainer.step(state.step)
            self._workers[state.step] = comm.size
            state.step += 1
            if state.step % max(1, steps // REPORTS) == 0 and comm.rank == 0:
                self._curve.append(Point(state.step, mean_loss(self._trainer.model, self._held_out), comm.size))
                self._print(f"train: step {state.step} of {steps}, held-out loss {self._curve[-1].loss:.4f}")
            state.commit()
        plain = PlainProgress(time.monotonic())
        verdict = verify(comm, self._config, self._corpus, self._trainer, self._workers.tolist(), plain)
        return ElasticResult(steps, self._workers.tolist(), self._curve, verdict)

    def _print(self, text: str) -> None:
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
        console.print(verdict_text(result.verdict), style=style)
        if json_path is not None:
            write_json(msgspec.json.encode(result), json_path)
    return 0 if result.verdict.passed else 1


_COMMAND = "mpirun -n {} omnireduce train"
_GRADIENT = "gradient-{}.npy"


def run_train(
    comm: Communicator,
    config: Config,
    *,
    json_path: str | None = None,
    against_mpi: bool = True,
    gradients_folder: str | None = None,
) -> int:
    """Train and verify; on rank 0 print the result and write it to `json_path`. Return all ranks' exit status.

    It is 1 if ranks ended with different weights, or with others than a one-process run on the same shards, else 0. All
    ranks of `comm` call this with equal arguments. `against_mpi` compares with MPI where that is possible.
    `gradients_folder`, made if need be, gets each rank's gradient of the last step as gradient-RANK.npy.

    Raises ConfigError when there is too little text, UsageError when the ranks' texts or [train] differ or a file
    cannot be written, and AbortedError when the job failed.
    """
    if json_path is not None and comm.rank == 0:
        check_writable(json_path)
    folder = None if gradients_folder is None else make_folder(gradients_folder)
    result = _train_and_verify(comm, config, against_mpi, folder)
    if comm.rank == 0:
        print_result(make_console(), result)
        if json_path is not None:
            write_json(msgspec.json.encode(result), json_path)
    return 0 if result.verdict.passed else 1


def _train_and_verify(comm: Communicator, config: Config, against_mpi: bool, folder: Path | None) -> TrainingResult:
    plain = PlainProgress(time.monotonic())
    corpus = load_shared_corpus(comm, config)
    held_out = held_out_pairs(corpus, config)
    trainer = _trainer(comm, config, corpus, exchange_over(comm, block_size(config)))
    mpi_trainer, missing_reason = _mpi_trainer(comm, config, corpus) if against_mpi else (None, None)
    loss_before = mean_loss(trainer.model, held_out)
    gradients = _train(comm, config, trainer, mpi_trainer, folder, plain)
    return TrainingResult(
        transport=carriers_text(comm.statistics().carried),
        world_size=comm.size,
        shards=comm.shards,
        train=config.train,
        files=corpus.files,
        words=len(corpus.words),
        loss_before=loss_before,
        loss_after=mean_loss(trainer.model, held_out),
        gradients=gradients,
        timing=_timing(comm, trainer),
        mpi=_baseline(comm, trainer, mpi_trainer, missing_reason) if against_mpi else None,
        verdict=verify(comm, config, corpus, trainer, [comm.size] * config.train.steps, plain),
        saved_gradients=None if folder is None else str(folder / _GRADIENT.format(RANK)),
    )


def load_shared_corpus(comm: Communicator, config: Config, root: Path | None = None) -> Corpus:
    """Load the corpus below `root` (default: the standard library), which must be the same on all ranks.

    Raises UsageError on every rank if a rank has another one or other values in [train].
    """
    _expect_same(comm, configuration_digest(config), "values in [train] or protocol.block_size")
    corpus = load_local_corpus(config, root)
    _expect_same(comm, corpus.digest(), "source files in its Python's standard library")
    return corpus


def configuration_digest(config: Config) -> bytes:
    """SHA-256 of what must be the same on all ranks."""
    return hashlib.sha256(msgspec.json.encode((config.train, config.protocol.block_size))).digest()


def load_local_corpus(config: Config, root: Path | None = None) -> Corpus:
    """Load the corpus below `root` (default: the standard library). Raises ConfigError when there is too little."""
    train = config.train
    files = source_files(train.max_files, root)
    return load_corpus(files, vocabulary=train.vocabulary, window=train.window, seed=train.seed)


def exchange_over(comm: Communicator, block_size: int) -> Exchange:
    """The service's all-reduce, in place, in blocks of `block_size` elements."""

    def exchange(gradient: Array) -> None:
        comm.allreduce(gradient, op="sum", name="gradient", block_size=block_size)

    return exchange


def _trainer(comm: Communicator, config: Config, corpus: Corpus, exchange: Exchange) -> Trainer:
    """The trainer of this rank's shard."""
    return Trainer(corpus, config, ranks=(comm.rank,), size=comm.size, exchange=exchange)


def _mpi_trainer(comm: Communicator, config: Config, corpus: Corpus) -> tuple[Trainer | None, str | None]:
    """The same training over MPI's all-reduce, in place, or the reason why some rank cannot do that."""
    missing_reason = None
    try:
        mpi = MpiAllreduce(comm.rank, comm.size, command=_COMMAND.format(comm.size))
    except UsageError as error:
        missing_reason = str(error)
    ranks_without_mpi = np.flatnonzero(comm.allgather(np.array([missing_reason is not None])))
    if ranks_without_mpi.size:
        return None, missing_reason or f"rank {ranks_without_mpi[0]} has none"

    def exchange(gradient: Array) -> None:
        mpi.in_place(gradient, "sum")

    return _trainer(comm, config, corpus, exchange), None


def _train(
    comm: Communicator,
    config: Config,
    trainer: Trainer,
    mpi_trainer: Trainer | None,
    folder: Path | None,
    plain: PlainProgress,
) -> Gradients:
    """Take all steps of both; return the gradients' sizes and the bytes they took, mean over ranks and steps."""

    def save(gradient: Array) -> None:
        if folder is not None:
            write_npy(gradient, folder / _GRADIENT.format(comm.rank))

    before = comm.statistics()
    for number in progress(comm, config, "train: step", plain):
        trainer.step(number, inspect=save if number == config.train.steps - 1 else None)
        if mpi_trainer:
            mpi_trainer.step(number)
    after = comm.statistics()
    moved_bytes = np.array([after.sent_bytes - before.sent_bytes, after.received_bytes - before.received_bytes])
    up, down = comm.allgather(moved_bytes).mean(axis=0) / config.train.steps
    blocks = np.array([(record.own_blocks, record.union_blocks) for record in trainer.records])
    density, union_density = comm.allgather(blocks).mean(axis=(0, 1)) / trainer.gradient.blocks
    return Gradients(
        bytes=trainer.gradient.rows.nbytes,
        block_size=trainer.gradient.block_size,
        density=float(density),
        union_density=float(union_density),
        wire_up_bytes=round(up),
        wire_down_bytes=round(down),
    )


def progress(comm: Communicator, config: Config, label: str, plain: PlainProgress) -> Iterable[int]:
    """The numbers of all steps; rank 0 shows how far they are, in plain lines if it has no terminal."""
    steps = range(config.train.steps)
    if comm.rank != 0:
        return steps
    console = Console(stderr=True)
    if console.is_terminal:
        return track(steps, label, console=console, transient=True)
    return plain.follow(steps, label)


def _baseline(comm: Communicator, trainer: Trainer, mpi_trainer: Trainer | None, missing: str | None) -> Baseline:
    if mpi_trainer is None:
        return Baseline(missing=missing)
    difference = np.abs(mpi_trainer.model.weights - trainer.model.weights).max()
    return Baseline(timing=_timing(comm, mpi_trainer), weights_difference=float(difference))


def verify(
    comm: Communicator,
    config: Config,
    corpus: Corpus,
    trainer: Trainer,
    workers: Sequence[int],
    plain: PlainProgress,
) -> Verification:
    """Compare all ranks' weights bit by bit, and on rank 0 with those of a run of all shards in one process.

    `workers` says how many took part in each step. The other ranks follow with a barrier per step, so that no
    collective waits for longer than a step.
    """
    ranks_identical = not ranks_unlike_first(comm, trainer.weights_digest()).size
    outcome = np.zeros(2)
    if comm.rank == 0:
        reference = Trainer(corpus, config, ranks=range(comm.size), size=comm.size, exchange=no_exchange)
        for number in progress(comm, config, "train: checking against one process, step", plain):
            reference.set_shards(range(workers[number]), workers[number])
            reference.step(number)
            comm.barrier()
        outcome[0] = reference.weights_digest() == trainer.weights_digest()
        outcome[1] = np.abs(reference.model.weights - trainer.model.weights).max()
    else:
        for _ in range(config.train.steps):
            comm.barrier()
    reference_identical, difference = comm.broadcast(outcome).tolist()
    return Verification(
        ranks_identical=ranks_identical,
        reference_identical=bool(reference_identical),
        reference_difference=difference,
    )


def _timing(comm: Communicator, trainer: Trainer) -> Timing:
    """Medians over the steps. Step and computation take as long as on their slowest rank; the difference is
    exchange."""
    compute = np.array([record.compute_s for record in trainer.records])
    step = compute + np.array([record.exchange_s for record in trainer.records])
    step, compute = comm.allgather(np.stack((step, compute)) * 1e3).max(axis=0)
    return Timing(
        step_ms=float(np.median(step)),
        compute_ms=float(np.median(compute)),
        exchange_ms=float(np.median(step - compute)),
    )


def _expect_same(comm: Communicator, digest: bytes, subject: str) -> None:
    different = ranks_unlike_first(comm, digest)
    if different.size:
        comm.shutdown()  # every rank finds this out; leaving cleanly lets each say it
        raise UsageError(
            f"rank {different[0]} has other {subject} than rank 0; training needs the same configuration"
            " and the same version of Python on every worker"
        )


def ranks_unlike_first(comm: Communicator, digest: bytes) -> Array:
    """The ranks whose digest is not that of rank 0."""
    digests = comm.allgather(np.frombuffer(digest, np.uint8))
    return np.flatnonzero((digests != digests[0]).any(axis=1))
