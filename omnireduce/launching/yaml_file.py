"""`--config-file`: the flags of a launch in a YAML file, in the sections that Horovod's has.

    verbose: true
    params: {fusion_threshold_mb: 32, cycle_time_ms: 2.5}
    stall_check: {enabled: true, warning_time_seconds: 120}

A flag of the command line overrides what the file says. At the top a file may also have the launcher's own options:
`np`, `hosts`, `hostfile`, `aggregators` and others, by the names of their flags.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from omnireduce.errors import ConfigError, a_type
from omnireduce.extras import install
from omnireduce.files.paths import read_text
from omnireduce.launching.flags import MAPPED, REFUSED, Refused

_SECTIONS = ("params", "autotune", "timeline", "stall_check", "library_options", "logging")
_MAPPED = {flag.section: flag.name for flag in MAPPED if flag.section}
_REFUSED = {flag.section: flag for flag in REFUSED if flag.section}
_REFUSED |= {"library_options.ccl_bgt_affinity": Refused("", True, "CCL is not used; leave it out")}
_SWITCH, _CONTROLLER, _TIMES = "stall_check.enabled", "controller", "logging.with_timestamp"
_CONTROLLERS = ("gloo", "mpi")


def read_yaml(path: str, own: Collection[str]) -> dict[str, Any]:
    """The parameters of the command that the file gives. `own` are names that may stand at the top. Raises ConfigError,
    which names the file and the key."""
    source = f"--config-file {path}"
    parameters: dict[str, Any] = {}
    for key, value in _flat(_load(path, source), source).items():
        if key in _REFUSED:
            if value not in (None, False):
                raise ConfigError(f"{source}: {key}: {_REFUSED[key].reason}")
        elif key == _TIMES:
            if value not in (None, True):
                raise ConfigError(f"{source}: {key}: each line of the log has its time; leave it out")
        elif key == _CONTROLLER:
            parameters |= _controller(value, source)
        elif key == _SWITCH:
            parameters["no_stall_check"] = None if value is None else not value
        elif key in _MAPPED:
            parameters[_MAPPED[key]] = value
        elif key in own:
            parameters[key.replace("-", "_")] = value
        else:
            raise ConfigError(f"{source}: {key}: unknown key{_hint(key, own)}")
    return {name: value for name, value in parameters.items() if value is not None}


def _controller(value: Any, source: str) -> dict[str, bool]:
    """The flag that says the same."""
    name = str(value).lower()
    if value is not None and name not in _CONTROLLERS:
        raise ConfigError(f"{source}: {_CONTROLLER}: got {value!r:.80}, expected one of {', '.join(_CONTROLLERS)}")
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
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{source}{where}: {getattr(error, 'problem', None) or 'is no YAML'}") from None
    if tables is not None and not isinstance(tables, dict):
        raise ConfigError(f"{source}: got {a_type(tables)}, expected keys such as `verbose: true`")
    return tables or {}


def _flat(tables: Mapping[Any, Any], source: str) -> dict[str, Any]:
    """`section.key` and value of all sections, and what stands at the top."""
    flat: dict[str, Any] = {}
    for name, table in tables.items():
        if name not in _SECTIONS:
            flat[str(name)] = table
        elif isinstance(table, dict):
            flat |= {f"{name}.{key}": value for key, value in table.items()}
        elif table is not None:
            raise ConfigError(f"{source}: {name}: got {table!r:.80}, expected keys and values")
    return flat


def _hint(key: str, own: Collection[str]) -> str:
    close = difflib.get_close_matches(key, [*_MAPPED, *_REFUSED, *own, _SWITCH, _CONTROLLER, _TIMES], n=1)
    return f" (did you mean {close[0]}?)" if close else ""
