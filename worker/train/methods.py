"""The same training with several methods of compression: what each loses, and what it sends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import msgspec
import numpy as np
from rich.console import Console

from omnireduce.compression.methods import ALL, method_of
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.kernels.codecs.table import NONE
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.support.config import Config
from omnireduce.support.extras import install
from omnireduce.support.files.output import check_writable, write_json
from omnireduce.support.files.paths import user_path
from omnireduce.support.printing import make_console, short_count, short_time, table_of
from omnireduce.support.progress import PlainProgress
from omnireduce.worker.train.corpus import Corpus
from omnireduce.worker.train.run import load_shared_corpus, progress, ranks_unlike_first
from omnireduce.worker.train.trainer import Trainer, held_out_pairs, mean_loss

REPORTS = 10  # points of each curve
PLOTS = (".svg", ".png", ".pdf")
COLOURS = 10  # of lines, before they begin again


class Point(msgspec.Struct, frozen=True):
    """The held-out loss after a number of bytes, sent and received by a worker, mean over the workers."""

    bytes: int
    loss: float


class MethodResult(msgspec.Struct, frozen=True, kw_only=True):
    """A training with one method. `loss_change`: of the loss at the end, as a share of that without compression; bytes
    are those of a step, mean over ranks and steps; `exchange_ms`: the median of the slowest rank."""

    method: str
    loss: float
    loss_change: float
    wire_up_bytes: int
    wire_down_bytes: int
    exchange_ms: float
    ranks_identical: bool
    curve: list[Point]


def named_methods(texts: Sequence[str]) -> list[str]:
    """The methods to train with: none at first, then those of `texts`, of which `all` stands for many. Raises
    UsageError for a text that names no method."""
    names = [NONE]
    for text in texts:
        names += ALL if text == "all" else (text,)
    for name in names:
        method_of(name)
    return list(dict.fromkeys(names))


def run_methods(
    comm: Communicator,
    config: Config,
    methods: Sequence[str],
    *,
    json_path: str | None = None,
    plot_path: str | None = None,
) -> int:
    """Train with each of `methods`, as `named_methods` returns them; on rank 0 print a table, write it to `json_path`
    and draw it to `plot_path`. Return all ranks' exit status: 1 if ranks ended with different weights.

    All ranks call this with equal arguments. Raises UsageError for a file that cannot be written, and what `run_train`
    raises.
    """
    if comm.rank == 0 and json_path is not None:
        check_writable(json_path)
    corpus = load_shared_corpus(comm, config)
    plain, results = PlainProgress(monotonic()), list[MethodResult]()
    for method in methods:
        results.append(_train(comm, config, corpus, method, results[0].loss if results else None, plain))
    if comm.rank == 0:
        _print(make_console(), comm, config, results)
        if json_path is not None:
            write_json(msgspec.json.encode(results), json_path)
        if plot_path is not None:
            _draw(results, user_path(plot_path))
    return 0 if all(result.ranks_identical for result in results) else 1


def _train(
    comm: Communicator, config: Config, corpus: Corpus, method: str, loss_without: float | None, plain: PlainProgress
) -> MethodResult:
    compression, held_out, steps = method_of(method), held_out_pairs(corpus, config), config.train.steps

    def exchange(gradient: Array) -> None:
        compression.allreduce(comm, gradient, name=f"gradient, {method}", op="sum")

    trainer = Trainer(corpus, config, ranks=(comm.rank,), size=comm.size, exchange=exchange)
    before, curve = comm.statistics(), list[Point]()
    for number in progress(comm, config, f"train with {method}: step", plain):
        trainer.step(number)
        if comm.rank == 0 and ((number + 1) * REPORTS // steps > number * REPORTS // steps or number + 1 == steps):
            now = comm.statistics()
            moved_bytes = now.sent_bytes - before.sent_bytes + now.received_bytes - before.received_bytes
            curve.append(Point(moved_bytes, mean_loss(trainer.model, held_out)))
    after = comm.statistics()
    sent, received = after.sent_bytes - before.sent_bytes, after.received_bytes - before.received_bytes
    up, down = comm.allgather(np.array([sent, received])).mean(axis=0) / steps
    exchange_s = np.array([record.exchange_s for record in trainer.records])
    loss = mean_loss(trainer.model, held_out)
    return MethodResult(
        method=method,
        loss=loss,
        loss_change=0.0 if loss_without is None else loss / loss_without - 1,
        wire_up_bytes=round(up),
        wire_down_bytes=round(down),
        exchange_ms=float(np.median(comm.allgather(exchange_s).max(axis=0)) * 1e3),
        ranks_identical=not ranks_unlike_first(comm, trainer.weights_digest()).size,
        curve=curve,
    )


def _print(console: Console, comm: Communicator, config: Config, results: Sequence[MethodResult]) -> None:
    train, uncompressed = config.train, results[0]
    console.print(
        f"word embeddings of the standard library, {comm.size} workers; {train.steps} steps of {train.batch} pairs per"
        f" worker, seed {train.seed}",
        style="bold",
    )
    titles = ("method", "held-out\nloss", "change", "up\nbytes", "down\nbytes", "of\nnone", "exchange\nms")
    table = table_of(titles, left=("method",))
    for result in results:
        share = (result.wire_up_bytes + result.wire_down_bytes) / max(
            1, uncompressed.wire_up_bytes + uncompressed.wire_down_bytes
        )
        table.add_row(
            result.method, f"{result.loss:.4f}", f"{result.loss_change:+.2%}", short_count(result.wire_up_bytes),
            short_count(result.wire_down_bytes), f"{share:.1%}", short_time(result.exchange_ms),
            style="" if result.ranks_identical else "bold red",
        )  # fmt: skip
    console.print(table)
    different = ", ".join(result.method for result in results if not result.ranks_identical)
    verdict = f"DIFFERENT between workers: {different}" if different else "bit-identical on all workers"
    console.print(f"weights: {verdict}")


def check_plot(path: str) -> None:
    """Raises UsageError unless a plot can be drawn to `path`."""
    if not path.endswith(PLOTS):
        raise UsageError(f"--plot {path}: expected a file name that ends with {', '.join(PLOTS)}")
    check_writable(path)
    try:
        import matplotlib.figure  # noqa: F401  only to see whether it is there
    except ImportError as error:
        raise UsageError(f"--plot needs matplotlib ({error}): {install('matplotlib', 'plot')}") from None


def _draw(results: Sequence[MethodResult], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for number, result in enumerate(results):
        megabytes = [point.bytes / 1e6 for point in result.curve]
        style = "-" if number < COLOURS else "--"
        axes.plot(
            megabytes, [point.loss for point in result.curve], style, marker="o", markersize=3, label=result.method
        )
    axes.set(title="Loss against bytes", xscale="log", xlabel="MB of worker 0, up and down", ylabel="held-out loss")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
