"""The command line of the worker. Only rank 0 prints results; every rank ends with the same status."""

from __future__ import annotations

import sys

import click
from click.core import ParameterSource

from omnireduce.console.commands import density, show_config, trace
from omnireduce.errors import OmniReduceError
from omnireduce.support.cli import Group, config_options, json_option, launch_options, parse_numbers
from omnireduce.support.config import Config, load_config
from omnireduce.support.logs import start_logs
from omnireduce.worker.switchml.commands import allreduce_benchmark, replay

# The commands import what they run when they run: --help need not wait for it.


@click.group(
    cls=Group,
    name="worker",
    help="""
    Workers of the sparse all-reduce service: benchmark, training and lab.

    Start N of them with: mpirun -n N python -m omnireduce.worker COMMAND
    """,
)
def main() -> None:
    pass


@main.command(
    short_help="Time the all-reduce, check every element.",
    help="""
    Time the all-reduce and check every element of it, as [bench] says; a list of values there is a sweep.

    With --input the tensors are real ones from .npy, .npz or .safetensors files, such as those of train
    --save-gradients: a row for each array, and of [bench] only op, block_size, rounds and warmup count.

    Times are those of the slowest rank; GB/s is tensor bytes / median time; up and down are bytes on the
    wire per worker. The exit status is 1 if any element was wrong.
    """,
)
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
    config = _load(config_file, overrides)
    from omnireduce.console.bench.run import run_bench
    from omnireduce.runtime.rank.launcher_detection import own_launch

    launch = own_launch(rank=rank, size=size)
    wrong = run_bench(config, launch, pattern=pattern, json_path=json_path, against_mpi=against == "mpi")
    if wrong and launch.rank == 0:
        raise OmniReduceError(f"{wrong} elements were wrong")
    sys.exit(1 if wrong else 0)


@main.command(
    short_help="Compare libraries in the exercises of a first lesson.",
    help="""
    How long a message between two ranks takes; reduce and all-reduce made of such messages, and those of the
    libraries: omnireduce, gloo and mpi4py side by side, with a table for each exercise.

    Times are medians of rank 0. Every result is checked. Start it with mpirun, else mpi4py is left out.
    """,
)
@config_options
@launch_options
@click.option("--elements", default="1,1000,100000,1000000", show_default=True, help="Sizes of tensors of float32.")
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True)
def lab(
    config_file: str | None,
    overrides: tuple[str, ...],
    rank: int | None,
    size: int | None,
    elements: str,
    rounds: int,
) -> None:
    config = _load(config_file, overrides)
    from omnireduce.runtime.rank.launcher_detection import own_launch
    from omnireduce.worker.lab.exercises import run_lab

    sizes = parse_numbers("--elements", elements)
    run_lab(config, own_launch(rank=rank, size=size), sizes, rounds)


@main.command(
    short_help="Train on real text, verify the weights.",
    help="""
    Train word embeddings on the source files of Python's standard library, and verify the result.

    The exit status is 1 if the ranks' weights differ from each other or from a training in one process.
    """,
)
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
@click.option(
    "--compression",
    "methods",
    multiple=True,
    metavar="METHOD",
    help="Train once with each of these methods, and once without, and compare what they lose and what they send: "
    "topk,0.01 or int8 or topk,0.01+bf16, or all. May be repeated. Ranks of one host exchange nothing in memory then.",
)
@click.option("--plot", "plot_path", metavar="FILE", help="Draw loss against bytes to FILE, with --compression.")
def train(
    config_file: str | None,
    overrides: tuple[str, ...],
    rank: int | None,
    size: int | None,
    json_path: str | None,
    against: str,
    folder: str | None,
    elastic: bool,
    methods: tuple[str, ...],
    plot_path: str | None,
) -> None:
    if elastic and folder is not None:
        raise click.UsageError("--elastic has no --save-gradients: which worker has which rank may change")
    if methods:
        _refuse_beside_methods(elastic=elastic, folder=folder)
        overrides = (*overrides, "transport.host_exchange=off")
    elif plot_path is not None:
        raise click.UsageError("--plot without --compression: expected a method, such as topk,0.01, or all")
    config = _load(config_file, (*overrides, "elastic.enabled=true") if elastic else overrides)
    import omnireduce as omni
    from omnireduce.console.bench.mpi import finalize
    from omnireduce.worker.train import (
        check_plot,
        load_local_corpus,
        named_methods,
        run_elastic_train,
        run_methods,
        run_train,
    )

    method_names = named_methods(methods)
    if plot_path is not None:
        check_plot(plot_path)

    corpus = load_local_corpus(config) if elastic else None  # before others wait for this worker
    with omni.connect(config, rank=rank, size=size) as comm:
        if corpus is not None:
            status = run_elastic_train(comm, config, corpus, json_path=json_path)
        elif methods:
            status = run_methods(comm, config, method_names, json_path=json_path, plot_path=plot_path)
        else:
            status = run_train(comm, config, json_path=json_path, against_mpi=against == "mpi", gradients_folder=folder)
    finalize()
    sys.exit(status)


def _refuse_beside_methods(*, elastic: bool, folder: str | None) -> None:
    context = click.get_current_context()
    against = context.get_parameter_source("against") is not ParameterSource.DEFAULT
    for option, is_given in (("--elastic", elastic), ("--save-gradients", folder is not None), ("--against", against)):
        if is_given:
            raise click.UsageError(f"{option} with --compression: leave one of them out")


def _load(config_file: str | None, overrides: tuple[str, ...]) -> Config:
    config = load_config(config_file, overrides=overrides)
    start_logs(config.log)
    return config


for _command in (allreduce_benchmark, replay, density, trace, show_config):  # the last three are of the console
    main.add_command(_command)
