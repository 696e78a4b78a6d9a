"""Flags of `horovodrun`, as tables: flags with the same meaning here, and flags without a meaning here.

A flag of the first table sets Horovod's variable for the ranks. The table in omnireduce/support/config/horovod.py says
for all launchers what the variable means to the library.

Source of the names: `horovodrun --help` of Horovod 0.28.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from omnireduce.errors import ConfigError, a_type
from omnireduce.runtime.tracing.trace import DYNAMIC
from omnireduce.support.cli import NumberRange
from omnireduce.support.extras import install
from omnireduce.support.files.paths import read_text, whole_path

F = TypeVar("F", bound=Callable[..., Any])
_NUMBER = NumberRange(0, 1e9)


def _plain_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _mebibytes(value: float) -> str:
    return str(int(value * 2**20))


def _switch(value: bool) -> str:
    return str(int(value))


def _whole_path(value: str) -> str:
    return value if value == DYNAMIC else str(whole_path(value))


@dataclass(frozen=True, slots=True)
class VariableFlag:
    """A flag that sets a variable of the ranks; `kind` None is a switch. `section` is its place in a YAML file.
    `alias`: another name of the flag. `opposite`: the flag that turns a switch off."""

    flag: str
    variable: str
    kind: Any
    write: Callable[[Any], str]
    section: str
    meaning: str
    alias: str = ""
    opposite: str = ""

    @property
    def name(self) -> str:
        """The parameter of the command."""
        return self.flag.removeprefix("--").replace("-", "_")


MAPPED = (
    VariableFlag(
        "--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", _NUMBER, _mebibytes, "params.fusion_threshold_mb",
        "Combine small tensors up to this size in MiB; 0: none.",
    ),
    VariableFlag(
        "--cycle-time-ms", "HOROVOD_CYCLE_TIME", _NUMBER, _plain_text, "params.cycle_time_ms",
        "Time that a tensor may wait to be combined with others, in ms.",
    ),
    VariableFlag(
        "--timeline-filename", "HOROVOD_TIMELINE", click.STRING, _whole_path, "timeline.filename",
        "Write a timeline to this file, for chrome://tracing and Perfetto.", alias="--timeline",
    ),
    VariableFlag(
        "--timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", None, _switch, "timeline.mark_cycles",
        "Mark in the timeline when ranks look for tensors to combine.",
    ),
    VariableFlag(
        "--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", None, _switch, "",
        "Neither warn nor end a job because a rank does not take part.", opposite="--stall-check",
    ),
    VariableFlag(
        "--stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", _NUMBER, _plain_text,
        "stall_check.warning_time_seconds", "Warn when a rank has not taken part for this long.",
    ),
    VariableFlag(
        "--stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", _NUMBER, _plain_text,
        "stall_check.shutdown_time_seconds", "End the job when a rank has not taken part for this long; 0: never.",
    ),
    VariableFlag(
        "--gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", _NUMBER, _plain_text,
        "library_options.gloo_timeout_seconds", "Longest wait of ranks to join: cluster.join_timeout_s.",
    ),
    VariableFlag(
        "--log-level", "HOROVOD_LOG_LEVEL",
        click.Choice(["trace", "debug", "info", "warning", "error", "fatal"], case_sensitive=False), str,
        "logging.level", "Least severity that the library logs: log.level.",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RefusedFlag:
    """A flag without a meaning here, and the reason or advice. `has_value`: a value follows it. `section`: its place in
    a YAML file; a value of false there, or none, is no request."""

    flags: str
    has_value: bool
    reason: str
    section: str = ""


_IN_MEMORY = "ranks of a host always sum in memory first; leave it out, or turn that off by transport.host_exchange=off"
_CACHE = "there is no cache of responses; leave it out"
_TUNE = "nothing is tuned during a training; run `omnireduce tune` first, and give its file to --config"
_MPI = "MPI carries no data here; leave it out"
_LOG = "each line of the log has its time; leave it out"
REFUSED = (
    RefusedFlag(
        "--jsrun", False, "jsrun is not known here; use --launcher mpirun or --launcher srun in the allocation"
    ),
    RefusedFlag("--binding-args", True, "it belongs to jsrun; bind ranks with taskset, or --mpi-args '--bind-to core'"),
    RefusedFlag("--disable-cache", False, "nothing of other hosts is cached; leave it out"),
    RefusedFlag("--cache-capacity", True, _CACHE, "params.cache_capacity"),
    RefusedFlag("--hierarchical-allreduce", False, _IN_MEMORY, "params.hierarchical_allreduce"),
    RefusedFlag("--no-hierarchical-allreduce", False, _IN_MEMORY),
    RefusedFlag("--hierarchical-allgather", False, _IN_MEMORY, "params.hierarchical_allgather"),
    RefusedFlag("--no-hierarchical-allgather", False, _IN_MEMORY),
    RefusedFlag("--torus-allreduce", False, "aggregators sum, not rings; leave it out", "params.torus_allreduce"),
    RefusedFlag("--no-torus-allreduce", False, "aggregators sum, not rings; leave it out"),
    RefusedFlag("--autotune", False, _TUNE, "autotune.enabled"),
    RefusedFlag("--no-autotune", False, "nothing is tuned at run time; leave it out"),
    RefusedFlag("--autotune-log-file", True, _TUNE, "autotune.log_file"),
    RefusedFlag("--autotune-warmup-samples", True, _TUNE, "autotune.warmup_samples"),
    RefusedFlag("--autotune-steps-per-sample", True, _TUNE, "autotune.steps_per_sample"),
    RefusedFlag("--autotune-bayes-opt-max-samples", True, _TUNE, "autotune.bayes_opt_max_samples"),
    RefusedFlag("--autotune-gaussian-process-noise", True, _TUNE, "autotune.gaussian_process_noise"),
    RefusedFlag(
        "--no-timeline-mark-cycles", False, "cycles are not marked unless --timeline-mark-cycles is given; leave it out"
    ),
    RefusedFlag("--mpi-threads-disable", False, _MPI, "library_options.mpi_threads_disable"),
    RefusedFlag("--no-mpi-threads-disable", False, _MPI),
    RefusedFlag("--num-nccl-streams", True, "NCCL is not used; leave it out", "library_options.num_nccl_streams"),
    RefusedFlag(
        "--thread-affinity", True, "bind ranks with taskset, or with --mpi-args '--bind-to core'",
        "library_options.thread_affinity",
    ),
    RefusedFlag("--log-hide-timestamp", False, _LOG, "logging.hide_timestamp"),
    RefusedFlag("--no-log-hide-timestamp", False, _LOG),
    RefusedFlag("--log-with-timestamp", False, _LOG),
    RefusedFlag("--log-without-timestamp", False, _LOG),
)  # fmt: skip


def horovod_options(command: F) -> F:
    """Add the flags of both tables. The command gets the flags of `MAPPED` under their names, in `**asked`."""
    for mapped in reversed(MAPPED):
        kind = {"is_flag": True, "default": None} if mapped.kind is None else {"type": mapped.kind}
        flag = f"{mapped.flag}/{mapped.opposite}" if mapped.opposite else mapped.flag
        flags = (flag, mapped.alias) if mapped.alias else (flag,)
        command = click.option(*flags, mapped.name, help=mapped.meaning, **kind)(command)
    for refused in REFUSED:
        option = click.option(
            refused.flags, hidden=True, expose_value=False, callback=_refuse(refused), is_flag=not refused.has_value,
            default=None,
        )  # fmt: skip
        command = option(command)
    return command


def _refuse(refused: RefusedFlag) -> Callable[[click.Context, click.Parameter, Any], None]:
    def check(_: click.Context, __: click.Parameter, value: Any) -> None:
        if value is not None and value is not False:
            raise ConfigError(f"{refused.flags}: {refused.reason}")

    return check


def variables_of(options: Mapping[str, Any]) -> dict[str, str]:
    """The variables that flags set for ranks."""
    flags_and_values = ((flag, options.get(flag.name)) for flag in MAPPED)
    return {flag.variable: flag.write(value) for flag, value in flags_and_values if value is not None}


_SECTIONS = ("params", "autotune", "timeline", "stall_check", "library_options", "logging")
_MAPPED_KEYS = {flag.section: flag.name for flag in MAPPED if flag.section}
_REFUSED_KEYS = {flag.section: flag for flag in REFUSED if flag.section}
_REFUSED_KEYS |= {"library_options.ccl_bgt_affinity": RefusedFlag("", True, "CCL is not used; leave it out")}
_STALL_CHECK_ENABLED, _CONTROLLER_KEY, _TIMESTAMP_KEY = "stall_check.enabled", "controller", "logging.with_timestamp"
_CONTROLLERS = ("gloo", "mpi")


def read_yaml(path: str, top_keys: Collection[str]) -> dict[str, Any]:
    """The parameters of the command that the file gives. `top_keys` are names that may stand at the top. Raises
    ConfigError, which names the file and the key."""
    source = f"--config-file {path}"
    parameters: dict[str, Any] = {}
    for key, value in _flat(_load(path, source), source).items():
        if key in _REFUSED_KEYS:
            if value not in (None, False):
                raise ConfigError(f"{source}: {key}: {_REFUSED_KEYS[key].reason}")
        elif key == _TIMESTAMP_KEY:
            if value not in (None, True):
                raise ConfigError(f"{source}: {key}: each line of the log has its time; leave it out")
        elif key == _CONTROLLER_KEY:
            parameters |= _controller(value, source)
        elif key == _STALL_CHECK_ENABLED:
            parameters["no_stall_check"] = None if value is None else not value
        elif key in _MAPPED_KEYS:
            parameters[_MAPPED_KEYS[key]] = value
        elif key in top_keys:
            parameters[key.replace("-", "_")] = value
        else:
            raise ConfigError(f"{source}: {key}: unknown key{_hint(key, top_keys)}")
    return {name: value for name, value in parameters.items() if value is not None}


def _controller(value: Any, source: str) -> dict[str, bool]:
    """The flag with the same meaning."""
    name = str(value).lower()
    if value is not None and name not in _CONTROLLERS:
        raise ConfigError(f"{source}: {_CONTROLLER_KEY}: got {value!r:.80}, expected one of {', '.join(_CONTROLLERS)}")
    return {} if value is None else {name: True}


def _load(path: str, source: str) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"{source}: needs PyYAML: {install('yaml', 'launch')}") from None
    text = read_text(path, source, expected="a YAML file")
    try:
        tables = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        position = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{source}{position}: {getattr(error, 'problem', None) or 'is no YAML'}") from None
    if tables is not None and not isinstance(tables, dict):
        raise ConfigError(f"{source}: got {a_type(tables)}, expected keys such as `verbose: true`")
    return tables or {}


def _flat(tables: Mapping[Any, Any], source: str) -> dict[str, Any]:
    """The values by `section.key`, and the values at the top by their key."""
    flat: dict[str, Any] = {}
    for name, table in tables.items():
        if name not in _SECTIONS:
            flat[str(name)] = table
        elif isinstance(table, dict):
            flat |= {f"{name}.{key}": value for key, value in table.items()}
        elif table is not None:
            raise ConfigError(f"{source}: {name}: got {table!r:.80}, expected keys and values")
    return flat


def _hint(key: str, top_keys: Collection[str]) -> str:
    similar = difflib.get_close_matches(
        key, [*_MAPPED_KEYS, *_REFUSED_KEYS, *top_keys, _STALL_CHECK_ENABLED, _CONTROLLER_KEY, _TIMESTAMP_KEY], n=1
    )
    return f" (did you mean {similar[0]}?)" if similar else ""
