"""The command of CoCoNet's experiments."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.experiments import EXPERIMENTS, LARGE, SMALL, measure, read_rows, runs_of
from omnireduce.errors import UsageError
from omnireduce.support.extras import install


@click.command(help="Run an experiment of CoCoNet, and write its CSV and its figures to the folder RESULTS.")
@click.argument("experiment", metavar=f"[{'|'.join(EXPERIMENTS)}]")
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--epochs", type=click.IntRange(1), default=10, show_default=True, help="Steps of each size.")
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True, help="In which the schedules take turns."
)
@click.option("--first", type=click.IntRange(1, 30), help="Of data-parallel: from 2**FIRST elements on.  [default: 10]")
@click.option("--last", type=click.IntRange(1, 30), help="Of data-parallel: up to 2**LAST elements.  [default: 20]")
@click.option("--sequence", type=click.IntRange(1), help="Tokens of a sequence, in the other ones.  [default: 32]")
@click.option("--hidden", type=click.IntRange(1), help="The width of a layer there.  [default: 256]")
@click.option("--large", is_flag=True, help="Up to 2**24 elements, sequences of 128, layers of 1024.")
@click.option("--draw-only", is_flag=True, help="Draw what an earlier run has written.")
def programs(
    experiment: str, results: Path, epochs: int, rounds: int, large: bool, draw_only: bool, **sizes: int | None
) -> None:
    try:
        from benchmarks.figures import draw
    except ImportError as error:
        raise click.ClickException(f"{error}: {install('matplotlib', 'plot')}") from error
    scale = (LARGE if large else SMALL)._replace(**{name: size for name, size in sizes.items() if size is not None})
    if scale.first > scale.last:
        raise UsageError(f"--first {scale.first} --last {scale.last}: expected --first <= --last")
    runs_of(experiment, scale)
    table = results / f"{experiment}.csv"
    if not draw_only:
        measure(experiment, results, scale=scale, epochs=epochs, rounds=rounds)
    for path in [table, *draw(read_rows(table), results)]:
        click.echo(path)
