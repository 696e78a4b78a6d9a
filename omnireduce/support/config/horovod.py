"""The meaning of Horovod's environment variables here. The table applies to every program that loads a configuration,
under any launcher.

A row whose key is not in the schema has no effect.

Source of the names: Horovod 0.28 documentation, "Tensor Fusion", "Timeline", "Autotune", "Stall Inspector".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from omnireduce.errors import ConfigError
from omnireduce.support.launcher_variables import LAUNCHERS

PREFIX = "HOROVOD_"
LEVELS = {"trace": "debug", "fatal": "error"}  # all other levels have the same name here
# Variables of launchers for ranks, variables that scripts of users read, and variables that `omnireduce run` reads.
_LAUNCHER_VARIABLES = {"RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME", "ELASTIC"}
_LAUNCHER_VARIABLES |= {"START_TIMEOUT", "ELASTIC_TIMEOUT"}
SHORTEST_CYCLE_S = 0.0001  # the least value of queue.cycle_s
_has_warned = False


def _number(text: str) -> object:
    value = float(text)
    return int(value) if value.is_integer() else value


def _cycle(text: str) -> object:
    """The cycle time in seconds. Horovod allows 0 and any small number, which become the shortest time here."""
    value = float(text) / 1000
    return SHORTEST_CYCLE_S if 0 <= value < SHORTEST_CYCLE_S else value


def _level(text: str) -> object:
    return LEVELS.get(text.strip().lower(), text.strip().lower())


def _text(text: str) -> object:
    return text


def _zero_if_on(text: str) -> object:
    """0, which means never, if a switch is on. None, which leaves the key as it is, if the switch is off."""
    return 0 if is_on(text) else None


def is_on(text: str) -> bool:
    """Whether the value of a switch means on: a number other than 0, or a word such as true."""
    return text.strip().lower() not in ("", "0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class VariableRow:
    """A variable, the key that it sets, and `read`, which makes a value of its text. If that is None, the key stays."""

    variable: str
    key: str
    read: Callable[[str], object]


ROWS = (
    VariableRow("HOROVOD_FUSION_THRESHOLD", "queue.fusion_bytes", _number),
    VariableRow("HOROVOD_CYCLE_TIME", "queue.cycle_s", _cycle),
    VariableRow("HOROVOD_STALL_CHECK_TIME_SECONDS", "stall.warn_s", _number),
    VariableRow("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "stall.abort_s", _number),
    VariableRow("HOROVOD_STALL_CHECK_DISABLE", "stall.warn_s", _zero_if_on),  # after the rows above, which it overrules
    VariableRow("HOROVOD_STALL_CHECK_DISABLE", "stall.abort_s", _zero_if_on),
    VariableRow("HOROVOD_TIMELINE", "trace.timeline", _text),
    VariableRow("HOROVOD_TIMELINE_MARK_CYCLES", "trace.timeline_cycles", is_on),
    VariableRow("HOROVOD_LOG_LEVEL", "log.level", _level),
    VariableRow("HOROVOD_GLOO_TIMEOUT_SECONDS", "cluster.join_timeout_s", _number),
)
_FIXED = "transports and orders of sums are chosen by [transport] and [protocol]"
_IN_MEMORY = "ranks of a host always exchange in memory first; transport.host_exchange turns that off"
WITHOUT_EFFECT = {  # variable: the reason why it has no effect here
    "HOROVOD_CACHE_CAPACITY": "there is no cache of responses to size",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": _IN_MEMORY,
    "HOROVOD_HIERARCHICAL_ALLGATHER": _IN_MEMORY,
    "HOROVOD_TORUS_ALLREDUCE": _FIXED,
    "HOROVOD_CONTROLLER": "aggregators take the place of MPI and gloo",
    "HOROVOD_CPU_OPERATIONS": "aggregators take the place of MPI, gloo and CCL",
    "HOROVOD_GPU_OPERATIONS": "tensors of GPUs are not known here",
    "HOROVOD_CCL_BGT_AFFINITY": "CCL is not used",
    "HOROVOD_NUM_NCCL_STREAMS": "NCCL is not used",
    "HOROVOD_THREAD_AFFINITY": "use taskset, or mpirun --bind-to",
    "HOROVOD_MPI_THREADS_DISABLE": "MPI is not used for data",
    "HOROVOD_AUTOTUNE": "run omnireduce tune first, and give its file to --config",
    "HOROVOD_GLOO_IFACE": "give aggregators an address of that interface",
    "HOROVOD_LOG_HIDE_TIME": "lines of the log have their time",
    "HOROVOD_LOG_TIMESTAMP": "lines of the log have their time",
}


def settings_of(environ: Mapping[str, str], keys: Collection[str]) -> Iterator[tuple[str, str, object]]:
    """Yield variable, key and value for each of `keys` that Horovod's variables set. Raises ConfigError for a value
    that cannot be read."""
    for row in ROWS:
        if row.variable in environ and row.key in keys and environ[row.variable].strip():
            try:
                value = row.read(environ[row.variable])
            except (ValueError, OverflowError):
                text = environ[row.variable][:80]
                raise ConfigError(f"{row.variable}: {row.key}: got {text!r}, expected a number") from None
            if value is not None:
                yield row.variable, row.key, value


def variables_without_effect(environ: Mapping[str, str], keys: Collection[str]) -> dict[str, str]:
    """Horovod's variables that have no effect here, each with the reason."""
    active = {row.variable for row in ROWS if row.key in keys}
    reasons = {}
    for name in sorted(environ):
        rest = name.removeprefix(PREFIX)
        if rest == name or rest in _LAUNCHER_VARIABLES or name in active:
            continue
        stem = "HOROVOD_AUTOTUNE" if rest.startswith("AUTOTUNE") else name
        reasons[name] = WITHOUT_EFFECT.get(stem, "it is not known here")
    return reasons


def warn_about_variables_without_effect(environ: Mapping[str, str], keys: Collection[str]) -> None:
    """Warn once in a process, on rank 0, about the variables without effect."""
    global _has_warned
    if (
        _has_warned
        or any(environ.get(launcher.rank, "0") not in ("0", "") for launcher in LAUNCHERS)
        or "OMNIRUN_TOLD" in environ
    ):
        return
    ignored = variables_without_effect(environ, keys)
    if ignored:
        _has_warned = True
        text = "; ".join(f"{name}: {reason}" for name, reason in ignored.items())
        extra = {"event": "horovod_ignored", "fields": {"variables": list(ignored)}}
        logging.getLogger("omnireduce").warning("these variables have no effect here: %s", text, extra=extra)
