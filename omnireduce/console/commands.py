"""The command line of `omnireduce`."""

from __future__ import annotations

import re
import sys
from typing import Any

import click
from click.core import ParameterSource

from omnireduce.console.coconet.command import coconet
from omnireduce.errors import UsageError
from omnireduce.support.cli import Group, NumberRange, config_options, json_option, parse_numbers
from omnireduce.support.config import dump_config, load_config, override_config, reference_toml, split_list
from omnireduce.support.logs import start_logs
from omnireduce.support.version import __version__

_LARGEST_BLOCK = 65536

_link_gbps = click.option(
    "--link-gbps",
    type=NumberRange(0, 1e6, min_open=True),
    default=10.0,
    show_default=True,
    help="Bandwidth of a link in each direction, Gbit/s.",
)

# The commands import what they run when they run: --help need not wait for it.


@click.group(
    cls=Group,
    name="omnireduce",
    help="""
    Sum sparse gradients over many workers: run the service, measure it, look after it.

    Start N workers with `mpirun -n N omnireduce bench`; for several hosts, aggregators with `omnireduce aggregator`.
    """,
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    pass


@main.command(
    "slurm-script",
    short_help="Write a batch file for Slurm.",
    help="""
    Write a batch file for Slurm to standard output. It starts an aggregator on every node of the allocation, and
    COMMAND as every rank.

    Example: omnireduce slurm-script --nodes 2 --ntasks-per-node 2 -- python train.py > train.sbatch
    """,
)
@click.option("--nodes", type=click.IntRange(1), default=2, show_default=True)
@click.option("--ntasks-per-node", type=click.IntRange(1), default=2, show_default=True, help="Ranks on each node.")
@click.option("--time", default="00:30:00", show_default=True, help="How long it may take, as Slurm says it.")
@click.option("--job-name", default="omnireduce", show_default=True)
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...")
def slurm_script(command: tuple[str, ...], **options: Any) -> None:
    from omnireduce.console.batch_script import batch_script

    click.echo(batch_script(command=command, **options), nl=False)


@main.command(
    "warm",
    short_help="Compile the kernels now, as when an image is built.",
    help="""
    Compile all kernels for this processor, or load them, and say where they are kept: so the first start of a job
    need not. An image that is built as root has them for all users, who cannot change them:

    OMNIREDUCE_CACHE=/opt/omnireduce/cache omnireduce warm
    """,
)
def warm_up() -> None:
    from omnireduce.console.doctor import warm

    warm()


@main.command(
    short_help="Show what aggregators do: jobs, traffic, stragglers.",
    help="""
    Show what the aggregator shards at HOST:PORT do, or those of cluster.aggregators. Without any of these it looks
    at aggregator.listen, where `omnireduce aggregator` listens on this host.

    A job's row adds up its shards. `done` are collectives, `in` and `out` bytes from and to its workers; `density` is
    that of a worker's blocks, `union` that of the results; `slots` are receive slots in use. `late` names the rank that
    the others have waited for most, all in all, to begin a collective, `waits for` whom a collective waits for now.

    The exit status is 1 if one of them does not answer.
    """,
)
@click.argument("addresses", nargs=-1, metavar="[HOST:PORT]...")
@config_options
@click.option("--watch/--once", default=None, help="Go on until Ctrl-C, or not.  [default: --watch on a terminal]")
@click.option("--every", type=NumberRange(0.1, 3600), default=1.0, show_default=True, help="Seconds between two looks.")
@click.option(
    "--timeout", type=NumberRange(0.1, 60), default=2.0, show_default=True, help="Seconds to wait for an answer."
)
@click.option("--json", "as_json", is_flag=True, help="Print all that the aggregators say, as JSON, once.")
def status(
    addresses: tuple[str, ...],
    config_file: str | None,
    overrides: tuple[str, ...],
    watch: bool | None,
    every: float,
    timeout: float,
    as_json: bool,
) -> None:
    config = load_config(config_file, overrides=overrides)
    start_logs(config.log)
    from omnireduce.console.status import StatusReader, default_addresses, print_json, print_once, watch_status

    reader = StatusReader(split_list(addresses) or default_addresses(config), config, timeout)
    if as_json:
        sys.exit(0 if print_json(reader) else 1)
    if sys.stdout.isatty() if watch is None else watch:
        watch_status(reader, every)
    else:
        sys.exit(0 if print_once(reader) else 1)


@main.command(
    "drain",
    short_help="Refuse new jobs, wait for running ones, end.",
    help="""
    Let the aggregators at HOST:PORT, or those of cluster.aggregators, refuse new jobs. Each ends when its last job
    has ended. All shards of a daemon drain together. This waits until they have ended.

    Jobs that gather ranks, and elastic jobs that are formed anew, count as running. Ctrl-C, and a --timeout that is
    over, leave the aggregators draining.

    Only the operator may do this: root or the daemon's user on its host, or who has the aggregators' own secret. The
    exit status is 1 if an aggregator does not do it, or has not ended in time.
    """,
)
@click.argument("addresses", nargs=-1, metavar="[HOST:PORT]...")
@config_options
@click.option(
    "--timeout",
    type=NumberRange(0, 7 * 86400),
    default=600.0,
    show_default=True,
    help="Seconds to wait; 0: do not wait.",
)
@click.option("--undo", is_flag=True, help="Let aggregators that drain take jobs again.")
def drain_aggregators(
    addresses: tuple[str, ...], config_file: str | None, overrides: tuple[str, ...], timeout: float, undo: bool
) -> None:
    config = load_config(config_file, overrides=overrides)
    start_logs(config.log)
    from omnireduce.console.administration import Administrator, drain, undo_drain
    from omnireduce.console.status import default_addresses

    administrator = Administrator(split_list(addresses) or default_addresses(config), config)
    sys.exit(0 if (undo_drain(administrator) if undo else drain(administrator, timeout)) else 1)


@main.command(
    "end-job",
    short_help="End a job, or all jobs of a team.",
    help="""
    End JOB on the aggregators at HOST:PORT, or on those of cluster.aggregators. Name all aggregators of the job.

    Each rank gets an AbortedError that says who ended the job. An elastic job does not go on. For
    aggregator.join_timeout_s the aggregators refuse ranks of the same launch.

    The operator may end any job, a team its own. The exit status is 1 if there is no such job, or an aggregator does
    not do it.
    """,
)
@click.argument("job", required=False, default="")
@click.argument("addresses", nargs=-1, metavar="[HOST:PORT]...")
@config_options
@click.option("--team", default="", help="Only jobs of this team; without JOB all of them.")
@click.option("--why", default="", metavar="TEXT", help="What the ranks of the job are told.")
def end_job(
    job: str, addresses: tuple[str, ...], config_file: str | None, overrides: tuple[str, ...], team: str, why: str
) -> None:
    config = load_config(config_file, overrides=overrides)
    start_logs(config.log)
    from omnireduce.console.administration import Administrator, end_jobs
    from omnireduce.console.status import default_addresses

    if team and re.search(r":[0-9]+\Z", job):  # all jobs of the team: the first word is an address
        job, addresses = "", (job, *addresses)
    administrator = Administrator(split_list(addresses) or default_addresses(config), config)
    sys.exit(0 if end_jobs(administrator, job, team, why) else 1)


@main.command(
    short_help="Say what does not work here, and what to do.",
    help="""
    Look at this host and at the aggregators at HOST:PORT, or those of cluster.aggregators: versions, processor,
    kernels, limits, transports, RDMA devices with their ports and GIDs, the launcher, rank and job of this process, and
    whether each aggregator answers and has the same secret.

    What is not well comes with what to do about it. The exit status is 1 if something that the configuration asks for
    cannot work.
    """,
)
@click.argument("addresses", nargs=-1, metavar="[HOST:PORT]...")
@config_options
def doctor(addresses: tuple[str, ...], config_file: str | None, overrides: tuple[str, ...]) -> None:
    config = load_config(config_file, overrides=overrides)
    if addresses:
        config = override_config(config, {"cluster.aggregators": split_list(addresses)}, source="HOST:PORT")
    start_logs(config.log)
    from omnireduce.console.doctor import examine

    sys.exit(0 if examine(config) else 1)


@main.command(
    short_help="Say whether arrays are sparse enough.",
    help="""
    Say how sparse the arrays in files are, and whether the service would help.

    Files are .npy, .npz or .safetensors, best a saved gradient. The density of blocks is what counts: the
    service moves a block unless all of it is zero.

    With --methods it advises: for each array what blocks, rows, each codec and each selector would take at this link.

    The prediction compares with a dense ring all-reduce and assumes that every worker has such an array, its
    non-zero blocks at independent places.
    """,
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--block-sizes", default="32,64,128,256,512,1024", show_default=True, help="Elements, comma-separated.")
@click.option("--world-size", type=click.IntRange(min=2), default=2, show_default=True, help="Workers.")
@_link_gbps
@click.option(
    "--methods", is_flag=True, help="Show for each array what each method of compression would take, and lose."
)
@json_option
def density(
    files: tuple[str, ...], block_sizes: str, world_size: int, link_gbps: float, methods: bool, json_path: str | None
) -> None:
    from omnireduce.console.density.report import report_files

    complete = report_files(
        files,
        block_sizes=sorted(set(parse_numbers("--block-sizes", block_sizes, 8, _LARGEST_BLOCK, multiple_of=8))),
        world_size=world_size,
        link_gbps=link_gbps,
        json_path=json_path,
        methods=methods,
    )
    sys.exit(0 if complete else 2)  # a file is wrong input


@main.command(
    short_help="Predict an all-reduce, say how to place it.",
    help="""
    Predict how long an all-reduce takes, and what it costs: for shards beside the ranks, and on hosts of their own,
    few or many of them; and with a relay in each rack. The best plan comes with its configuration.

    FILES are saved gradients, one of each rank. With --trace, the times are of all all-reduces that a job has recorded
    in FOLDER, by its trace.folder. Without either a tensor is drawn. No host needs to exist. docs/planning.md says what
    the prediction rests on, and how near it came.
    """,
)
@click.argument("files", nargs=-1, metavar="[FILE]...")
@click.option("--trace", metavar="FOLDER", help="Take the all-reduces of a traced job; FOLDER is its trace.folder.")
@click.option("--job", help="Which job, if there are traces of several.")
@click.option("--elements", type=click.IntRange(1), default=25_000_000, show_default=True, help="Of the tensor.")
@click.option("--dtype", default="float32", show_default=True)
@click.option("--density", type=NumberRange(0, 1), default=0.01, show_default=True, help="Blocks that are not zero.")
@click.option("--overlap", default="random", show_default=True, help="Of the ranks' blocks: random, full or none.")
@click.option("--block-size", type=click.IntRange(8, _LARGEST_BLOCK), default=256, show_default=True, help="Elements.")
@click.option("--ranks", type=click.IntRange(2, 65536), default=8, show_default=True, help="In all.")
@click.option("--hosts", type=click.IntRange(1, 65536), help="Hosts with ranks.  [default: as many as ranks]")
@_link_gbps
@click.option("--latency-us", type=NumberRange(0, 1e6), default=50.0, show_default=True, help="Of a link.")
@click.option("--cores", type=NumberRange(0, min_open=True), default=8.0, show_default=True, help="Of each host.")
@click.option(
    "--speed", type=NumberRange(0.01, 100), default=1.0, show_default=True,
    help="Of a processor; 1 is one for which a message costs 130 us.",
)  # fmt: skip
@click.option("--shards", default="", help="Numbers to try, such as 1,4.  [default: 1, 2, 4, … to hosts]")
@click.option("--racks", type=click.IntRange(0), default=0, help="Into which the hosts are divided.  [default: none]")
@click.option("--rack-gbps", type=NumberRange(0), default=0.0, help="Of a rack's link.  [default: that of a host]")
@json_option
def plan(json_path: str | None, hosts: int | None, **options: Any) -> None:
    from omnireduce.console.plan.report import PlanRequest, report_plan

    _refuse_two_inputs(options)
    report_plan(PlanRequest(hosts=hosts or options["ranks"], **options), json_path)


@main.command(
    short_help="Show where the time of a traced job went.",
    help="""
    Show where the time of a traced job went, from the files in FOLDER that its ranks and shards left.

    They leave them when daemon and workers run with the same trace.folder, on one host or on a shared file system, and
    the job is over. The table is about tensors of one size: the one of which most bytes were reduced.

    With --timeline it makes the timeline of what a killed job has left: FOLDER is then its trace.folder or, without
    one, the folder FILE.parts beside its trace.timeline.
    """,
)
@click.argument("folder", metavar="FOLDER")
@click.option("--job", help="Which job, if there are traces of several.")
@click.option("--output", metavar="FILE", help="Also write a timeline to FILE, as JSON that ui.perfetto.dev shows.")
@click.option("--timeline", metavar="FILE", help="Only write the timeline of trace.timeline to FILE, tensor by tensor.")
def trace(folder: str, job: str | None, output: str | None, timeline: str | None) -> None:
    from omnireduce.console.trace import report_timeline, report_trace

    if timeline is not None:
        if output is not None:
            raise UsageError("--output with --timeline: they are two pictures; leave one of them out")
        report_timeline(folder, job, timeline)
        return
    report_trace(folder, job, output)


@main.group(
    short_help="Try a compressor of your own.",
    help="""
    Compression of gradients: docs/compression.md, docs/grace.md.
    """,
)
def compression() -> None:
    pass


@compression.command(
    "test",
    short_help="Try a compressor on many gradients.",
    help="""
    Try CLASS of MODULE, which may be in this folder, on many gradients: random, zero, negative, equal, huge, NaN and
    others, as arrays of NumPy and tensors of torch. It is a compressor in GRACE's form, or a selector of omnireduce.

    KEY=VALUE are arguments of the class. Prints `Test passed!`, or one line for each thing that fails; then the exit
    status is 1.

    Example: omnireduce compression test my_module:GuardedThreshold threshold=0.1 compress_ratio=0.01
    """,
)
@click.argument("name", metavar="MODULE:CLASS")
@click.argument("arguments", nargs=-1, metavar="[KEY=VALUE]...")
def test_compressor(name: str, arguments: tuple[str, ...]) -> None:
    from omnireduce.console.compressor_trial import report_trial

    sys.exit(0 if report_trial(name, arguments) else 1)


main.add_command(coconet)


@main.command(
    "config",
    short_help="Print the effective configuration.",
    help="""
    Print the effective configuration as TOML.
    """,
)
@config_options
@click.option("--reference", is_flag=True, help="Print every key with its meaning, default and range instead.")
def show_config(config_file: str | None, overrides: tuple[str, ...], reference: bool) -> None:
    config = load_config(config_file, overrides=overrides)
    click.echo(reference_toml() if reference else dump_config(config), nl=False)


def _refuse_two_inputs(options: dict[str, Any]) -> None:
    """Raise UsageError for an option of `plan` beside one that says the same."""
    if options["trace"] is None:
        if options["job"] is not None:
            raise UsageError(f"--job {options['job']} without --trace: expected the folder that has traces of this job")
        return
    if options["files"]:
        raise UsageError(f"{options['files'][0]} with --trace: expected files or a trace; leave one of them out")
    context = click.get_current_context()
    for name in ("elements", "dtype", "density", "overlap", "block_size"):
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} with --trace, which says that already: leave one of them out")
