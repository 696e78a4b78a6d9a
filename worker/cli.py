"""The command line of the worker. Only rank 0 prints results; every rank ends with the same status."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from omnireduce.cli import Group, config_options
from omnireduce.config import Config, dump_config, load_config, reference_toml
from omnireduce.errors import OmniReduceError
from omnireduce.logs import start_logs

# The commands import what they run when they run: --help need not wait for it.

_F = TypeVar("_F", bound=Callable[..., Any])
_LARGEST_BLOCK = 65536


def launch_options(command: _F) -> _F:
    """Add `--rank R` and `--size N`, for workers that no launcher started."""
    rank = click.option("--rank", type=int, help="This worker's rank. [default: from mpirun, Slurm or torchrun]")
    size = click.option("--size", type=int, help="How many workers there are; goes with --rank.")
    return rank(size(command))


json_option = click.option("--json", "json_path", metavar="FILE", help="Also write the results to FILE, as JSON.")


@click.group(cls=Group, name="worker")
def main() -> None:
    """Workers of the sparse all-reduce service: benchmark, training, density report.

    Start N of them with: mpirun -n N omnireduce COMMAND
    """


@main.command(short_help="Time the all-reduce, check every element.")
@config_options
@launch_options
@json_option
@click.option(
    "--input",
    "pattern",
    metavar="PATTERN",
    help="Reduce saved arrays: PATTERN, such as gradients/gradient-{rank}.npy, is the file of every rank. Each rank "
    "reads all files.",
)
@click.option("--against", type=click.Choice(["mpi"]), help="Time mpi4py's Allreduce on the same data as well.")
def bench(
    config_file: str | None,
    overrides: tuple[str, ...],
    rank: int | None,
    size: int | None,
    json_path: str | None,
    pattern: str | None,
    against: str | None,
) -> None:
    """Time the all-reduce and check every element of it, as [bench] says; a list of values there is a sweep.

    With --input the tensors are real ones from .npy, .npz or .safetensors files, such as those of train
    --save-gradients: a row for each array, and of [bench] only op, block_size, rounds and warmup count.

    Times are those of the slowest rank; GB/s is tensor bytes / median time; up and down are bytes on the
    wire per worker. The exit status is 1 if any element was wrong.
    """
    config = _load(config_file, overrides)
    from omnireduce.bench.command import run_bench
    from omnireduce.runtime.member.launcher import detect_launch

    launch = detect_launch(rank=rank, size=size)
    wrong = run_bench(config, launch, pattern=pattern, json_path=json_path, against_mpi=against == "mpi")
    if wrong and launch.rank == 0:
        raise OmniReduceError(f"{wrong} elements were wrong")
    sys.exit(1 if wrong else 0)


@main.command(short_help="Train on real text, verify the weights.")
@config_options
@launch_options
@json_option
@click.option(
    "--against",
    type=click.Choice(["mpi", "none"]),
    default="mpi",
    show_default=True,
    help="Train once more with mpi4py's Allreduce, where that is possible.",
)
@click.option(
    "--save-gradients",
    "folder",
    metavar="DIR",
    help="Save each worker's gradient of the last step as DIR/gradient-RANK.npy, for bench --input and density.",
)
@click.option(
    "--elastic",
    is_flag=True,
    help="Go on when workers die, and take in those that are started again; sets elastic.enabled. Without MPI.",
)
def train(
    config_file: str | None,
    overrides: tuple[str, ...],
    rank: int | None,
    size: int | None,
    json_path: str | None,
    against: str,
    folder: str | None,
    elastic: bool,
) -> None:
    """Train word embeddings on the source files of Python's standard library, and verify the result.

    The exit status is 1 if the ranks' weights differ from each other or from a training in one process.
    """
    if elastic and folder is not None:
        raise click.UsageError("--elastic has no --save-gradients: which worker has which rank may change")
    config = _load(config_file, (*overrides, "elastic.enabled=true") if elastic else overrides)
    import omnireduce as omni
    from omnireduce.bench.mpi import finalize
    from worker.train import load_local_corpus, run_elastic_train, run_train

    corpus = load_local_corpus(config) if elastic else None  # before others wait for this worker
    with omni.connect(config, rank=rank, size=size) as comm:
        if corpus is not None:
            status = run_elastic_train(comm, config, corpus, json_path=json_path)
        else:
            status = run_train(comm, config, json_path=json_path, against_mpi=against == "mpi", gradients_folder=folder)
    finalize()
    sys.exit(status)


@main.command(short_help="Say whether arrays are sparse enough.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--block-sizes", default="32,64,128,256,512,1024", show_default=True, help="Elements, comma-separated.")
@click.option("--world-size", type=click.IntRange(min=2), default=2, show_default=True, help="Workers.")
@click.option(
    "--link-gbps",
    type=click.FloatRange(0, 1e6, min_open=True),
    default=10.0,
    show_default=True,
    help="Bandwidth of a worker's link in each direction, Gbit/s.",
)
@json_option
def density(files: tuple[str, ...], block_sizes: str, world_size: int, link_gbps: float, json_path: str | None) -> None:
    """Say how sparse the arrays in files are, and whether the service would help.

    Files are .npy, .npz or .safetensors, best a saved gradient. The density of blocks is what counts: the
    service moves a block unless all of it is zero.

    The prediction compares with a dense ring all-reduce and assumes that every worker has such an array, its
    non-zero blocks at independent places.
    """
    from omnireduce.console.density.command import report_files

    complete = report_files(
        files,
        block_sizes=_parse_block_sizes(block_sizes),
        world_size=world_size,
        link_gbps=link_gbps,
        json_path=json_path,
    )
    sys.exit(0 if complete else 1)


@main.command(short_help="Show where the time of a traced job went.")
@click.argument("folder", metavar="FOLDER")
@click.option("--job", help="Which job, if there are traces of several.")
@click.option("--output", metavar="FILE", help="Also write a timeline to FILE, as JSON that ui.perfetto.dev shows.")
def trace(folder: str, job: str | None, output: str | None) -> None:
    """Show where the time of a traced job went, from the files in FOLDER that its ranks and shards left.

    They leave them when daemon and workers run with the same trace.folder, on one host or on a shared file system, and
    the job is over. The table is about tensors of one size: the one of which most bytes were reduced.
    """
    from omnireduce.console.traces.command import report_trace

    report_trace(folder, job, output)


@main.command("config", short_help="Print the effective configuration.")
@config_options
@click.option("--reference", is_flag=True, help="Print every key with its meaning, default and range instead.")
def show_config(config_file: str | None, overrides: tuple[str, ...], reference: bool) -> None:
    """Print the effective configuration as TOML."""
    config = load_config(config_file, overrides=overrides)
    click.echo(reference_toml() if reference else dump_config(config), nl=False)


def _load(config_file: str | None, overrides: tuple[str, ...]) -> Config:
    config = load_config(config_file, overrides=overrides)
    start_logs(config.log)
    return config


def _parse_block_sizes(text: str) -> list[int]:
    sizes = [int(part) if part.strip().isascii() and part.strip().isdigit() else 0 for part in text.split(",")]
    if not all(8 <= size <= _LARGEST_BLOCK and size % 8 == 0 for size in sizes):
        expected = f"multiples of 8 from 8 to {_LARGEST_BLOCK}, comma-separated"
        raise click.BadParameter(f"got {text!r}, expected {expected}", param_hint="--block-sizes")
    return sorted(set(sizes))
