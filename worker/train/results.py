"""Results of a training run: JSON for programs, and a table for people."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from omnireduce.support.config import Train
from omnireduce.support.printing import short_count, short_time, table_of


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the steps, in milliseconds: a step of the slowest rank, and its two parts."""

    step_ms: float
    compute_ms: float
    exchange_ms: float


class Gradients(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's dense gradient and what one step moved, mean over ranks and steps.

    `density`: non-zero blocks of `block_size` elements / blocks of one rank's gradient; `union_density` of the sum.
    `wire_up_bytes`, `wire_down_bytes`: sent to and received from all shards by one rank, framing included.
    """

    bytes: int
    block_size: int
    density: float
    union_density: float
    wire_up_bytes: int
    wire_down_bytes: int


class Baseline(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The same training over MPI's all-reduce: its `timing`, or the reason why it is `missing`.

    `weights_difference`: the largest absolute difference between its weights and ours; MPI may add in another order.
    """

    timing: Timing | None = None
    weights_difference: float | None = None
    missing: str | None = None


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Whether all ranks' weights have the same bits, and whether a one-process run has them too.

    `reference_difference`: the largest absolute difference between the two; the one process adds the same shards in
    rank order.
    """

    ranks_identical: bool
    reference_identical: bool
    reference_difference: float

    @property
    def passed(self) -> bool:
        return self.ranks_identical and self.reference_identical


class TrainingResult(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. `train` is its configuration, `words` the size of its vocabulary; losses are means per pair.

    `saved_gradients`: the files with each rank's gradient of the last step, "{rank}" for the rank; None if not saved.
    """

    transport: str
    world_size: int
    shards: int
    train: Train
    files: int
    words: int
    loss_before: float
    loss_after: float
    gradients: Gradients
    timing: Timing
    mpi: Baseline | None
    verdict: Verification
    saved_gradients: str | None


def print_result(console: Console, result: TrainingResult) -> None:
    """Print the table and the lines around it."""
    train, gradients = result.train, result.gradients
    console.print(
        f"word embeddings of the standard library: {result.words} words of {result.files} files,"
        f" dim {train.dim}\n"
        f"{_count(result.world_size, 'worker')}, {_count(result.shards, 'shard')}, {result.transport};"
        f" {train.steps} steps of {train.batch} pairs per worker",
        style="bold",
    )
    console.print(_table(result))
    if result.mpi and result.mpi.missing:
        console.print(f"no comparison with MPI: {result.mpi.missing}")
    console.print(f"held-out loss: {result.loss_before:.3f} before, {result.loss_after:.3f} after")
    console.print(
        f"gradient: {short_count(gradients.bytes)} bytes dense; of its blocks of {gradients.block_size}"
        f" elements {gradients.density:.2%} are non-zero on a worker, {gradients.union_density:.2%} on any"
    )
    console.print(_weights(result), style="" if result.verdict.passed else "bold red")
    if result.saved_gradients:
        console.print(f"saved each worker's gradient of step {train.steps}: {result.saved_gradients}")


def _table(result: TrainingResult) -> Table:
    gradients, mpi = result.gradients, result.mpi.timing if result.mpi else None
    titles = ("", "step\nms", "compute\nms", "exchange\nms", "up\nbytes", "down\nbytes", "of\ndense", "speed\nup")
    table = table_of(titles, left=("",))
    share = (gradients.wire_up_bytes + gradients.wire_down_bytes) / (2 * gradients.bytes)
    table.add_row(
        "omnireduce",
        *_times(result.timing),
        short_count(gradients.wire_up_bytes),
        short_count(gradients.wire_down_bytes),
        f"{share:.2%}",
        f"{mpi.step_ms / result.timing.step_ms:.3g}x" if mpi else "",
    )
    if mpi:
        table.add_row("MPI all-reduce", *_times(mpi))
    return table


def _times(timing: Timing) -> tuple[str, str, str]:
    return short_time(timing.step_ms), short_time(timing.compute_ms), short_time(timing.exchange_ms)


def _weights(result: TrainingResult) -> str:
    """One sentence on which ranks and runs ended with the same weights."""
    sentence = verdict_text(result.verdict)
    if result.mpi and result.mpi.weights_difference is not None:
        difference = result.mpi.weights_difference
        sentence += f", {f'within {difference:.3g} of' if difference else 'equal to'} the run over MPI"
    return sentence


def verdict_text(verdict: Verification) -> str:
    """A sentence on whose weights are the same."""
    ranks = "bit-identical on all workers" if verdict.ranks_identical else "DIFFERENT between workers"
    reference = (
        "equal to a one-process run's"
        if verdict.reference_identical
        else f"NOT those of a one-process run (by up to {verdict.reference_difference:.3g}; hosts with"
        " different processors or versions of NumPy round differently)"
    )
    return f"weights: {ranks}, {reference}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
