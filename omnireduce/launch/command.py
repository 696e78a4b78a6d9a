"""The command line of `omnireduce run`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from omnireduce.errors import ConfigError
from omnireduce.launch.elastic_flags import cooldown, elastic_options, ranks_of_elastic
from omnireduce.launch.flags import horovod_options, read_yaml, variables_of
from omnireduce.launch.hosts import Host, parse_hosts, read_hostfile
from omnireduce.launch.plan import LaunchRequest
from omnireduce.runtime.tracing.trace import DYNAMIC
from omnireduce.support.cli import Command, NumberRange, config_options
from omnireduce.support.config import load_config
from omnireduce.support.files.paths import user_path, whole_path
from omnireduce.support.logs import start_logs
from omnireduce.support.version import __version__

F = TypeVar("F", bound=Callable[..., Any])
LAUNCHERS = ("local", "ssh", "mpirun", "srun", "torchrun")
_LAUNCHER_OPTIONS = ("launcher", "mpi", "gloo")  # options that choose the launcher of ranks
_PATH_OPTIONS = ("hostfile", "ssh_identity_file", "output_filename", "host_discovery_script", "timeline_filename")
_TOP_KEYS = {  # may stand at the top of a YAML file
    *("np", "hosts", "hostfile", "aggregators", "launcher", "verbose", "output-filename", "start-timeout"),
    *("network-interfaces", "ssh-port", "ssh-identity-file", "prefix-output-with-timestamp", "grace-period"),
    *("min-np", "max-np", "slots-per-host", "host-discovery-script", "elastic-timeout", "reset-limit"),
}


def _launch_options(command: F) -> F:
    options = [
        click.option("-np", "--num-proc", "np", type=click.IntRange(1, 32000), help="Number of ranks."),
        click.option("-H", "--hosts", "hosts", metavar="HOST:SLOTS,…", help="Hosts, and the most ranks of each."),
        click.option("-hostfile", "--hostfile", metavar="FILE", help="The same from a file: lines HOST slots=N."),
        click.option("--config-file", "yaml_path", metavar="FILE", help="YAML file with options of this command."),
        click.option(
            "--launcher", type=click.Choice(LAUNCHERS), help="Who starts ranks.  [default: local, ssh elsewhere]"
        ),
        click.option("--mpi", is_flag=True, help="The same as --launcher mpirun."),
        click.option("--gloo", is_flag=True, help="The default: this program starts the ranks."),
        click.option("--mpi-args", default="", metavar="TEXT", help="More arguments for mpirun or srun."),
        click.option(
            "--aggregators", metavar="N|embedded",
            help="Shards to start for this job, or let rank 0 start one.  [default: by hosts]",
        ),
        click.option("-x", "passed", multiple=True, metavar="NAME[=VALUE]", help="A variable for ranks. Repeatable."),
        click.option("--ssh", default="ssh", show_default=True, metavar="COMMAND", help="How to reach other hosts."),
        click.option("-p", "--ssh-port", type=click.IntRange(1, 65535), help="Port of sshd on other hosts."),
        click.option("-i", "--ssh-identity-file", metavar="FILE", help="Private key for ssh."),
        click.option(
            "--network-interfaces", "--network-interface", metavar="NAME", multiple=True,
            help="Interface of this host at which other hosts reach the aggregators. Only one.",
        ),
        click.option(
            "--start-timeout", type=NumberRange(0.1, 86400), default=30.0, show_default=True,
            envvar="HOROVOD_START_TIMEOUT", help="Seconds for all hosts to answer.",
        ),
        click.option(
            "--grace-period", type=NumberRange(0, 86400), default=10.0, show_default=True,
            help="Seconds from SIGTERM to SIGKILL.",
        ),
        click.option("--output-filename", metavar="DIR", help="Also write output to DIR/rank.N/stdout and stderr."),
        click.option(
            "-prefix-timestamp", "--prefix-output-with-timestamp", is_flag=True, help="Put the time before each line."
        ),
        click.option("-cb", "--check-build", is_flag=True, help="Print what is available here, and stop."),
        click.version_option(__version__, "-v", "--version", message="omnireduce %(version)s"),
        click.option("--tcp", is_flag=True, help="Use TCP only: transport.kind=tcp."),
        click.option("--verbose", is_flag=True, help="Log more: log.level=debug."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.command(
    cls=Command,
    name="run",
    short_help="Start the ranks of a job.",
    context_settings={"allow_interspersed_args": False},
    help="""
    Start COMMAND as all ranks of a job, on this host or on several. Each line of their output has its rank before
    it.

    If a rank fails or a signal comes, all ranks end, and nothing is left. The exit status is the status of the first
    rank that failed, 128 + the signal that ended it, or 2 for a wrong command line.

    The flags of horovodrun are known. A flag without meaning here says what to use instead: docs/launching.md.

    Example: omnireduce run -np 4 python train.py
    """,
)
@config_options
@_launch_options
@elastic_options
@horovod_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND...")
def run(command: tuple[str, ...], **options: Any) -> None:
    if options["check_build"]:
        from omnireduce.launch.hosts import report_available

        click.echo(report_available(), nl=False)
        return
    _read_file(options)
    request = request_of_options(command, options)
    start_logs(request.config.log)
    from omnireduce.launch.launch import STARTED_BY_US, launch

    if request.min_ranks:
        from omnireduce.launch.elastic_job import launch_elastic

        sys.exit(launch_elastic(request))
    if request.launcher in STARTED_BY_US:
        sys.exit(launch(request))
    from omnireduce.launch.launcher_commands import start_other

    sys.exit(launch(request, start_other))


def parse_command_line(words: Sequence[str], ranks: int = 0) -> LaunchRequest:
    """The request of a command line with these words. `ranks`: the number of ranks, if the words do not give it. Raises
    click.UsageError, and ConfigError."""
    with run.make_context("run", list(words)) as context:
        options = dict(context.params)
        _read_file(options)
        return request_of_options(options.pop("command"), options, ranks)


def _read_file(options: dict[str, Any]) -> None:
    """Put the values of the YAML file in place of defaults. Raises ConfigError."""
    path = options.pop("yaml_path")
    if path is None:
        return
    context = click.get_current_context()
    types = {param.name: param.type for param in context.command.params}
    for name, value in read_yaml(path, _TOP_KEYS).items():
        same_choice = _LAUNCHER_OPTIONS if name in _LAUNCHER_OPTIONS else (name,)
        if any(
            context.get_parameter_source(param_name) not in (ParameterSource.DEFAULT, None)
            for param_name in same_choice
        ):
            continue
        try:
            options[name] = types[name].convert(value, None, context)
            if name in _PATH_OPTIONS and options[name] != DYNAMIC:
                options[name] = str(whole_path(options[name], user_path(path)))
        except click.BadParameter as error:
            raise ConfigError(f"--config-file {path}: {name}: {error.message}") from None


def request_of_options(command: Sequence[str], options: Mapping[str, Any], ranks: int = 0) -> LaunchRequest:
    """The request of a parsed command line: see `parse_command_line`. Raises ConfigError."""
    hosts = _hosts(options)
    environ = os.environ | variables_of(options) | _passed(options["passed"])
    min_ranks, ranks = ranks_of_elastic(options, options["np"] or sum(host.slots for host in hosts) or ranks)
    if not ranks:
        raise ConfigError("-np: got no number of ranks; expected -np 4, for example, or -H node1:4,node2:4")
    overrides = [*options["overrides"], *(["transport.kind=tcp"] if options["tcp"] else [])]
    if options["verbose"]:
        overrides.append("log.level=debug")
    if min_ranks:
        overrides += ["elastic.enabled=true", f"elastic.min_ranks={min_ranks}"]
    config = load_config(options["config_file"], overrides=overrides, environ=environ)
    environ |= dict(_variable(override) for override in overrides)
    if options["config_file"] is not None:
        environ["OMNIREDUCE_CONFIG"] = str(whole_path(options["config_file"]))
    return LaunchRequest(
        words=command,
        ranks=ranks,
        config=config,
        hosts=hosts,
        launcher=_launcher(options),
        aggregators=options["aggregators"],
        environ=environ,
        ssh=_ssh(options),
        interface=_interface(options["network_interfaces"]),
        start_timeout_s=options["start_timeout"],
        grace_s=options["grace_period"],
        output_folder=options["output_filename"],
        timestamps=options["prefix_output_with_timestamp"],
        verbose=options["verbose"],
        mpi_args=shlex.split(options["mpi_args"]),
        min_ranks=min_ranks,
        discovery_script=_script(options["host_discovery_script"] or ""),
        slots_per_host=options["slots_per_host"] or 1,
        reset_limit=options["reset_limit"],
        elastic_timeout_s=options["elastic_timeout"],
        cooldown_s=cooldown(options["blacklist_cooldown_range"]),
    )


def _hosts(options: Mapping[str, Any]) -> list[Host]:
    option_names = [name for name in ("hosts", "hostfile", "host_discovery_script") if options[name] is not None]
    if len(option_names) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in option_names)
        raise ConfigError(f"{flags}: expected one of them")
    for name in option_names:
        if not options[name]:  # most likely an empty variable of a script: the user did not mean all ranks on this host
            raise ConfigError(f"--{name.replace('_', '-')}: got nothing; leave it out for ranks on this host alone")
    if options["hosts"]:
        return parse_hosts(options["hosts"])
    return read_hostfile(options["hostfile"]) if options["hostfile"] else []


def _interface(named: str | Sequence[str]) -> str:
    """The interface that was named. Only one can count, because other hosts reach the aggregators there."""
    names = ",".join([named] if isinstance(named, str) else named).split(",")
    if len(names) > 1:
        raise ConfigError(f"--network-interfaces {','.join(names)}: expected one, at which other hosts reach this one")
    return names[0].strip()


def _launcher(options: Mapping[str, Any]) -> str:
    launchers = {name for name in (options["launcher"], "mpirun" if options["mpi"] else None) if name}
    if len(launchers) > 1 or (options["gloo"] and launchers - {"local", "ssh"}):
        raise ConfigError("--launcher, --mpi and --gloo say different things: expected one of them")
    return launchers.pop() if launchers else ""


def _ssh(options: Mapping[str, Any]) -> str:
    words = shlex.split(options["ssh"])
    if options["ssh_port"]:
        words += ["-p", str(options["ssh_port"])]
    if options["ssh_identity_file"]:
        key = whole_path(options["ssh_identity_file"])
        if not key.exists():
            raise ConfigError(f"--ssh-identity-file {key}: no such file")
        words += ["-i", str(key)]
    return shlex.join(words)


def _script(name: str) -> str:
    """The script that prints hosts: a path or, if that is no file, the name of a program."""
    path = user_path(name)
    return str(whole_path(path)) if name and (os.sep in name or path.exists()) else name


def _passed(settings: Sequence[str]) -> dict[str, str]:
    variables = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not name or (not equals and name not in os.environ):
            raise ConfigError(f"-x {setting}: expected NAME=VALUE, or the name of a variable that is set")
        variables[name] = text if equals else os.environ[name]
    return variables


def _variable(override: str) -> tuple[str, str]:
    """The variable that sets for ranks what `--set` sets here."""
    key, _, text = override.partition("=")
    return f"OMNIREDUCE_{key.strip().upper().replace('.', '_')}", text
