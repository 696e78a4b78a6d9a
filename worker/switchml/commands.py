"""The commands of SwitchML's tutorial."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import click

from omnireduce.errors import OmniReduceError, UsageError
from omnireduce.support.cli import (
    LARGEST_NUMBER,
    NumberRange,
    config_options,
    json_option,
    launch_options,
    parse_numbers,
)
from omnireduce.support.logs import start_logs

if TYPE_CHECKING:
    from omnireduce.switchml import Settings

# The commands import their modules when they run, so that --help does not wait for them.

_F = TypeVar("_F", bound=Callable[..., Any])
_NUMEL = 1 << 28
_VALUES = ("0", "1", "false", "true", "")  # of a switch; the last one: nothing follows
_HELP = {"help_option_names": ["-h", "--help"]}  # as in SwitchML


class _Switch(click.Option):
    """`--name` or `--name 1`: on; `--name 0`: off."""


class _Command(click.Command):
    """A command whose switches take the next word only if it is one of `_VALUES`: not in `--verify model.csv`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        switches = {name for param in self.params if isinstance(param, _Switch) for name in param.opts}
        pairs = pairwise([*args, ""])
        return super().parse_args(ctx, [f"{a}=1" if a in switches and b not in _VALUES else a for a, b in pairs])


def _switch(name: str, text: str, *, default: bool = False) -> Callable[[_F], _F]:
    text += f" [default: {default:d}]"
    return click.option(
        name, cls=_Switch, type=click.BOOL, is_flag=False, flag_value="true", default=default, metavar="[0|1]",
        help=text,
    )  # fmt: skip


def _data_options(verify: str) -> Callable[[_F], _F]:
    """The options for tensors and their check, which both commands share. `verify`: the elements that are checked."""
    options = (
        click.option(
            "--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True,
            help="Where tensors are; gpu is refused.",
        ),
        _switch("--verify", f"Check {verify}, from above and from below."),
        click.option(
            "--err", type=NumberRange(0, 100), default=1.0, show_default=True,
            help="Largest error of a float, in per cent.",
        ),
        _switch("--random", "Sum random values."),
        click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of sums."),
    )  # fmt: skip

    def add(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.command(
    "allreduce-benchmark",
    cls=_Command,
    context_settings=_HELP,
    short_help="Run SwitchML's benchmark.",
    help="""
    Time all-reduces of one tensor, as SwitchML's allreduce_benchmark does, with its flags and its lines.

    Goodput is the bits of one rank's tensor / time. The statistics are of one job each: of jobs that were waited for
    together, of an equal part of their time. switchml.cfg is read as SwitchML reads it; docs/switchml.md.

    The exit status is 1 if any element was wrong.
    """,
)
@click.option("--tensor-numel", type=click.IntRange(1, 2**40), default=_NUMEL, show_default=True, help="Elements.")
@click.option("--tensor-type", type=click.Choice(["int32", "float"]), default="float", show_default=True)
@_data_options(verify="every element of every sum, int32 exactly")
@click.option(
    "--num-jobs",
    type=click.IntRange(1, LARGEST_NUMBER),
    default=10,
    show_default=True,
    help="All-reduces that are timed.",
)
@click.option(
    "--num-warmup-jobs",
    type=click.IntRange(0, LARGEST_NUMBER),
    default=5,
    show_default=True,
    help="All-reduces before them.",
)
@_switch("--inplace", "Let the sum replace the tensor.", default=True)
@click.option(
    "--sync-every",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Wait after this number of jobs, and time them together; 0: after all.",
)
@_switch("--dump-stats", "Print what the context has counted.")
@click.option(
    "--num-tensors",
    type=click.IntRange(1, 4096),
    default=1,
    show_default=True,
    help="Tensors that jobs take in turn: jobs with different tensors overlap.",
)
@click.option("--table", is_flag=True, help="Run once for each of --threads and --sizes, and print one table.")
@click.option("--threads", default="1,4,8", show_default=True, help="For --table: values of transport.threads.")
@click.option("--sizes", default="10000,1000000,10000000", show_default=True, help="For --table: numbers of elements.")
@config_options
@launch_options
@json_option
def allreduce_benchmark(
    config_file: str | None, overrides: tuple[str, ...], rank: int | None, size: int | None, json_path: str | None,
    table: bool, threads: str, sizes: str, device: str, **options: Any,
) -> None:  # fmt: skip
    from omnireduce.worker.switchml.benchmark import BenchmarkOptions, run_benchmark, run_table

    _refuse_gpu(device)
    counts, numels = parse_numbers("--threads", threads), parse_numbers("--sizes", sizes)
    settings = _settings(config_file, overrides, rank, size)
    if table:
        wrong = run_table(settings, BenchmarkOptions(**options), counts, numels, json_path)
    else:
        wrong = run_benchmark(settings, BenchmarkOptions(**options), json_path)
    _exit_with_status(wrong)


@click.command(
    "replay",
    cls=_Command,
    context_settings=_HELP,
    short_help="Train a model by its timing, as SwitchML does.",
    help="""
    Train a model by its timing, as SwitchML's dnn_benchmark does: MODEL.CSV has a line for each layer with
    layer_index, numel, forward_pass_ns and backward_pass_ns.

    Passes take as long as the file says. The gradient of each layer is summed over all ranks while others compute; the
    next forward pass of a layer waits for it.

    With --record, FUNCTION of MODULE returns (model, input) or (model, input, loss). One rank, this one, makes its
    forward and backward pass --num-iters times after --num-warmup-iters, and the medians of its layers are written.

    The exit status is 1 if any element of the last iteration's sums was wrong.
    """,
)
@click.argument("model", required=False, metavar="[MODEL.CSV]")
@_data_options(verify="every element of the sums of the last iteration")
@click.option("--num-iters", type=click.IntRange(1), default=10, show_default=True, help="Iterations that are timed.")
@click.option(
    "--num-warmup-iters", type=click.IntRange(0), default=5, show_default=True, help="Iterations before them."
)
@click.option(
    "--overlap",
    type=click.Choice(["iterations", "backward", "none"]),
    default="iterations",
    show_default=True,
    help="Exchange beside the backward and the next forward pass, beside the backward pass, or after it.",
)
@click.option("--record", metavar="MODULE:FUNCTION", help="Time the layers of a model of torch, and write --output.")
@click.option("--output", metavar="FILE", help="For --record: the MODEL.CSV to write.")
@config_options
@launch_options
@json_option
def replay(
    config_file: str | None, overrides: tuple[str, ...], rank: int | None, size: int | None, json_path: str | None,
    model: str | None, device: str, record: str | None, output: str | None, **options: Any,
) -> None:  # fmt: skip
    _refuse_gpu(device)
    if (model is None) == (record is None) or (record is None) != (output is None):
        raise click.UsageError("expected MODEL.CSV, or --record MODULE:FUNCTION --output MODEL.CSV")
    if record is not None and output is not None:
        _record(record, output, options["num_iters"], options["num_warmup_iters"])
        return
    from omnireduce.worker.switchml.recording import read_layers
    from omnireduce.worker.switchml.replay import Replay, run_replay

    settings = _settings(config_file, overrides, rank, size)
    assert model is not None
    _exit_with_status(run_replay(settings, read_layers(model), Replay(**options), json_path))


def _record(name: str, output: str, steps: int, warmup: int) -> None:
    from omnireduce.support.files.output import check_writable
    from omnireduce.worker.switchml.recording import record_layers, write_layers

    check_writable(output)
    layers = record_layers(name, steps, warmup)
    write_layers(layers, output)
    forward, backward = (sum(times) / 1e6 for times in zip(*(layer[2:] for layer in layers), strict=True))
    click.echo(
        f"{output}: {len(layers)} layers, {sum(layer.numel for layer in layers)} parameters, "
        f"forward {forward:.4g} ms, backward {backward:.4g} ms"
    )


def _settings(config_file: str | None, overrides: tuple[str, ...], rank: int | None, size: int | None) -> Settings:
    """The settings of `switchml.cfg` and of omnireduce's configuration, with the rank and size of the command line."""
    from omnireduce.support.load_by_name import add_current_folder_to_path
    from omnireduce.switchml import load_settings

    add_current_folder_to_path()  # a prepostprocessor of the user's own may be here
    settings = load_settings(config_file, overrides=overrides)
    start_logs(settings.config.log)
    return settings if rank is None and size is None else settings._replace(rank=rank, size=size)


def _exit_with_status(wrong: int) -> None:
    """End with status 1 if elements were wrong. Rank 0 says it."""
    from omnireduce.switchml import Context

    if wrong and Context.instance().communicator.rank == 0:
        raise OmniReduceError(f"{wrong} elements were wrong")
    sys.exit(1 if wrong else 0)


def _refuse_gpu(device: str) -> None:
    if device == "gpu":
        raise UsageError(
            "--device gpu: these tensors are in the memory of the host; omnireduce.torch sums those on a GPU"
        )
