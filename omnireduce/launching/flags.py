"""The flags of `horovodrun` that mean the same here, and those that mean nothing here, as tables.

A flag that sets something sets Horovod's variable for the ranks. What that means to the library, one table says for all
launchers: omnireduce/config/horovod.py.

Source of the names: `horovodrun --help` of Horovod 0.28.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from omnireduce.cli import NumberRange
from omnireduce.errors import ConfigError
from omnireduce.files.paths import whole_path
from omnireduce.runtime.tracing.trace import DYNAMIC

F = TypeVar("F", bound=Callable[..., Any])
_NUMBER = NumberRange(0, 1e9)


def _same(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _mebibytes(value: float) -> str:
    return str(int(value * 2**20))


def _switch(value: bool) -> str:
    return str(int(value))


def _whole_path(value: str) -> str:
    return value if value == DYNAMIC else str(whole_path(value))


@dataclass(frozen=True, slots=True)
class Mapped:
    """A flag that sets a variable of the ranks; `kind` None is a switch. `section` is its place in a YAML file.
    `alias`: our own word for it. `opposite`: the flag that turns a switch off."""

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
    Mapped(
        "--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", _NUMBER, _mebibytes, "params.fusion_threshold_mb",
        "Small tensors are put together up to so many MiB; 0: none.",
    ),
    Mapped(
        "--cycle-time-ms", "HOROVOD_CYCLE_TIME", _NUMBER, _same, "params.cycle_time_ms",
        "How long a tensor may wait for others to be put together with, ms.",
    ),
    Mapped(
        "--timeline-filename", "HOROVOD_TIMELINE", click.STRING, _whole_path, "timeline.filename",
        "Write a timeline to this file, for chrome://tracing and Perfetto.", alias="--timeline",
    ),
    Mapped(
        "--timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", None, _switch, "timeline.mark_cycles",
        "Mark in the timeline when ranks look for tensors to combine.",
    ),
    Mapped(
        "--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", None, _switch, "",
        "Neither warn nor end a job because a rank does not take part.", opposite="--stall-check",
    ),
    Mapped(
        "--stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", _NUMBER, _same,
        "stall_check.warning_time_seconds", "Warn when a rank has not taken part for so long.",
    ),
    Mapped(
        "--stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", _NUMBER, _same,
        "stall_check.shutdown_time_seconds", "End the job when a rank has not taken part for so long; 0: never.",
    ),
    Mapped(
        "--gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", _NUMBER, _same,
        "library_options.gloo_timeout_seconds", "How long ranks wait to join: cluster.join_timeout_s.",
    ),
    Mapped(
        "--log-level", "HOROVOD_LOG_LEVEL",
        click.Choice(["trace", "debug", "info", "warning", "error", "fatal"], case_sensitive=False), str,
        "logging.level", "Least severity that the library logs: log.level.",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Refused:
    """A flag that has no meaning here, and what does its work. `has_value`: a value follows it. `section`: its place in
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
    Refused("--jsrun", False, "jsrun is not known here; use --launcher mpirun or --launcher srun in the allocation"),
    Refused("--binding-args", True, "it belongs to jsrun; bind ranks with taskset, or --mpi-args '--bind-to core'"),
    Refused("--disable-cache", False, "nothing of other hosts is cached; leave it out"),
    Refused("--cache-capacity", True, _CACHE, "params.cache_capacity"),
    Refused("--hierarchical-allreduce", False, _IN_MEMORY, "params.hierarchical_allreduce"),
    Refused("--no-hierarchical-allreduce", False, _IN_MEMORY),
    Refused("--hierarchical-allgather", False, _IN_MEMORY, "params.hierarchical_allgather"),
    Refused("--no-hierarchical-allgather", False, _IN_MEMORY),
    Refused("--torus-allreduce", False, "aggregators sum, not rings; leave it out", "params.torus_allreduce"),
    Refused("--no-torus-allreduce", False, "aggregators sum, not rings; leave it out"),
    Refused("--autotune", False, _TUNE, "autotune.enabled"),
    Refused("--no-autotune", False, "nothing is tuned at run time; leave it out"),
    Refused("--autotune-log-file", True, _TUNE, "autotune.log_file"),
    Refused("--autotune-warmup-samples", True, _TUNE, "autotune.warmup_samples"),
    Refused("--autotune-steps-per-sample", True, _TUNE, "autotune.steps_per_sample"),
    Refused("--autotune-bayes-opt-max-samples", True, _TUNE, "autotune.bayes_opt_max_samples"),
    Refused("--autotune-gaussian-process-noise", True, _TUNE, "autotune.gaussian_process_noise"),
    Refused(
        "--no-timeline-mark-cycles", False, "cycles are not marked unless --timeline-mark-cycles is given; leave it out"
    ),
    Refused("--mpi-threads-disable", False, _MPI, "library_options.mpi_threads_disable"),
    Refused("--no-mpi-threads-disable", False, _MPI),
    Refused("--num-nccl-streams", True, "NCCL is not used; leave it out", "library_options.num_nccl_streams"),
    Refused(
        "--thread-affinity", True, "bind ranks with taskset, or with --mpi-args '--bind-to core'",
        "library_options.thread_affinity",
    ),
    Refused("--log-hide-timestamp", False, _LOG, "logging.hide_timestamp"),
    Refused("--no-log-hide-timestamp", False, _LOG),
    Refused("--log-with-timestamp", False, _LOG),
    Refused("--log-without-timestamp", False, _LOG),
)  # fmt: skip


def horovod_options(command: F) -> F:
    """Add the flags of both tables. The command gets those of `MAPPED` under their names, in `**asked`."""
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


def _refuse(refused: Refused) -> Callable[[click.Context, click.Parameter, Any], None]:
    def check(_: click.Context, __: click.Parameter, value: Any) -> None:
        if value is not None and value is not False:
            raise ConfigError(f"{refused.flags}: {refused.reason}")

    return check


def variables_of(asked: Mapping[str, Any]) -> dict[str, str]:
    """The variables that flags set for ranks."""
    given = ((flag, asked.get(flag.name)) for flag in MAPPED)
    return {flag.variable: flag.write(value) for flag, value in given if value is not None}
