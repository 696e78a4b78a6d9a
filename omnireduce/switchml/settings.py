"""`switchml.cfg`: SwitchML's configuration, as far as it means something here.

A file has sections in brackets, and lines `key = value`; what follows # or ; is a comment. Keys that mean something are
defaults: the TOML file, the environment and overrides replace them. The others are read and checked, and named in a log
line when a context starts. docs/switchml.md has the table.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from omnireduce.config import Config, load_config
from omnireduce.config.keys import unknown
from omnireduce.errors import ConfigError, show
from omnireduce.files.paths import read_text
from omnireduce.runtime.member.launcher import detect_launch

LARGEST_BLOCK = 1024  # SwitchML sends packets of 64 to 1024 elements; a tensor is padded to whole blocks
MOST_THREADS = 64
ENDING = ".cfg"


class Settings(NamedTuple):
    """`rank` and `size`: who this process is, where the file says it and no launcher does. `unused`: the keys of the
    file `source` that mean nothing here."""

    config: Config
    rank: int | None = None
    size: int | None = None
    source: str = ""
    unused: tuple[str, ...] = ()


class _Allowed(NamedTuple):
    """What a value may be: `read` gives it, or raises ValueError or KeyError."""

    text: str
    read: Callable[[str], object]


def _between(least: int, most: int) -> _Allowed:
    def read(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise ValueError
        return value

    return _Allowed(f"an int from {least} to {most}", read)


def _one_of(*words: str) -> _Allowed:
    return _Allowed(f"one of {', '.join(words)}", {word: word for word in words}.__getitem__)


_NUMBER = _between(0, 2**31 - 1)
_POSITIVE = _between(1, 2**31 - 1)
_TEXT = _Allowed("a text", str)
_RATE = _Allowed("a number", float)
_SWITCH = _Allowed("true or false", {"true": True, "1": True, "false": False, "0": False}.__getitem__)

KEYS: dict[str, _Allowed] = {
    "general.rank": _NUMBER,
    "general.num_workers": _POSITIVE,
    "general.num_worker_threads": _between(1, MOST_THREADS),
    "general.max_outstanding_packets": _POSITIVE,
    "general.packet_numel": _POSITIVE,
    "general.backend": _one_of("dummy", "dpdk", "rdma"),
    "general.scheduler": _one_of("fifo"),
    "general.prepostprocessor": _one_of("cpu_exponent_quantizer", "bypass"),
    "general.instant_job_completion": _SWITCH,
    "general.controller_ip": _TEXT,
    "general.controller_port": _between(1, 65535),
    "general.timeout": _RATE,
    "general.timeout_threshold": _NUMBER,
    "general.timeout_threshold_increment": _NUMBER,
    "backend.dummy.bandwidth": _RATE,
    "backend.dummy.process_packets": _SWITCH,
    "backend.rdma.msg_numel": _POSITIVE,
    "backend.rdma.device_name": _TEXT,
    "backend.rdma.device_port_id": _POSITIVE,
    "backend.rdma.gid_index": _NUMBER,
    **{
        f"backend.dpdk.{name}": _TEXT
        for name in (
            "worker_port", "worker_ip", "cores", "extra_eal_options", "port_id", "pool_size", "pool_cache_size",
            "burst_rx", "burst_tx", "bulk_drain_tx_us",
        )
    },
}  # fmt: skip
DIRECT = {  # what each of them sets
    "general.num_worker_threads": "transport.threads",
    "backend.rdma.device_name": "verbs.device",
    "backend.rdma.device_port_id": "verbs.port",
    "backend.rdma.gid_index": "verbs.gid_index",
}


class _Given(NamedTuple):
    line: int
    value: object


def load_settings(
    path: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    places: Sequence[str | Path] | None = None,
) -> Settings:
    """The effective configuration: defaults < `switchml.cfg` < TOML file < environment < overrides.

    `path` is a TOML file, or a file like `switchml.cfg` if its name ends in .cfg. Unless it is the latter, the first of
    `places` that exists is read; without `places` these are /etc/switchml.cfg, ./switchml.cfg and
    ./switchml-HOSTNAME.cfg. There need be none. Raises ConfigError, one line, for the first thing that is wrong.
    """
    is_ours = path is not None and str(path).endswith(ENDING)
    if places is None:
        places = ("/etc/switchml.cfg", "switchml.cfg", f"switchml-{socket.gethostname()}.cfg")
    source = str(path) if is_ours else next((str(place) for place in places if Path(place).exists()), "")
    given = _read(source) if source else {}
    told, defaults = _told(given, environ), _defaults(source, given)
    config = load_config(None if is_ours else path, overrides=overrides, environ=environ, defaults=defaults)
    used = {"general.packet_numel", *told, *(name for name in DIRECT if DIRECT[name] in defaults)}
    unused = [name.removeprefix("general.") for name in given if name not in used]
    if "general.packet_numel" in given and _number(given, "general.packet_numel") > LARGEST_BLOCK:
        unused.append(f"packet_numel above {LARGEST_BLOCK}")
    return Settings(config, told.get("general.rank"), told.get("general.num_workers"), source, tuple(unused))


def _told(given: Mapping[str, _Given], environ: Mapping[str, str]) -> dict[str, int]:
    """Rank and number of workers, if the file says one of them. One file may be there for all ranks: a launcher knows
    better."""
    defaults = {"general.rank": 0, "general.num_workers": 1}
    if not defaults.keys() & given.keys() or detect_launch(environ).launcher != "none":
        return {}
    return {name: _number(given, name) if name in given else default for name, default in defaults.items()}


def _defaults(source: str, given: Mapping[str, _Given]) -> dict[str, tuple[str, object]]:
    """What the keys set, by the key here, each with its place."""
    is_rdma = "general.backend" in given and given["general.backend"].value == "rdma"
    found = {key: name for name, key in DIRECT.items() if name in given and (is_rdma or not name.startswith("backend"))}
    values = {key: (name, given[name].value) for key, name in found.items()}
    if "general.packet_numel" in given:
        block = min(_number(given, "general.packet_numel"), LARGEST_BLOCK)
        values["protocol.block_size"] = ("general.packet_numel", block)
    return {key: (f"{source}:{given[name].line}: {name}", value) for key, (name, value) in values.items()}


def _number(given: Mapping[str, _Given], name: str) -> int:
    value = given[name].value
    assert isinstance(value, int)
    return value


def _read(path: str) -> dict[str, _Given]:
    """The keys of a file, each with its section in front. Raises ConfigError."""
    section, given = "", dict[str, _Given]()
    for number, line in enumerate(read_text(path, expected="a file such as switchml.cfg").split("\n"), 1):
        text, where = re.split("[#;]", line)[0].strip(), f"{path}:{number}"
        if text.startswith("[") and text.endswith("]"):
            section = text[1:-1].strip()
            if not any(name.startswith(f"{section}.") for name in KEYS):
                names = dict.fromkeys(name.rpartition(".")[0] for name in KEYS)
                raise ConfigError(f"{where}: {section}: unknown section, {unknown(section, names)}")
        elif text:
            name, value = _key_and_value(where, section, text)
            if name in given:
                raise ConfigError(f"{where}: {name}: given a second time, first in line {given[name].line}")
            given[name] = _Given(number, value)
    return given


def _key_and_value(where: str, section: str, line: str) -> tuple[str, object]:
    key, equals, text = (part.strip() for part in line.partition("="))
    name = f"{section}.{key}" if section else key
    if not equals:
        raise ConfigError(f"{where}: got {show(line)}, expected a section in brackets, or key = value")
    if name not in KEYS:
        near = [each.removeprefix(f"{section}.") for each in KEYS if each.rpartition(".")[0] == section]
        raise ConfigError(f"{where}: {name}: unknown key, {unknown(key, near or KEYS)}")
    try:
        return name, KEYS[name].read(text)
    except (ValueError, KeyError):
        raise ConfigError(f"{where}: {name}: got {show(text)}, expected {KEYS[name].text}") from None
