"""`switchml.cfg`: SwitchML's configuration, as far as it means something here.

A file has sections in brackets, and lines `key = value`; what follows # or ; is a comment. Keys that mean something are
defaults: the TOML file, the environment and overrides replace them. The others are read and checked, and named in a log
line when a context starts. docs/switchml.md has the table.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omnireduce.errors import ConfigError, UsageError, show
from omnireduce.runtime.rank.launcher_detection import detect_launch
from omnireduce.support.config import Config, load_config
from omnireduce.support.config.validation import expected_one_of
from omnireduce.support.files.paths import read_text
from omnireduce.support.load_by_name import load_class
from omnireduce.switchml.prepostprocessor import BUILT_IN, PrePostProcessor

LARGEST_BLOCK = 1024  # SwitchML sends packets of 64 to 1024 elements; a tensor is padded to whole blocks
MAX_THREADS = 64
ENDING = ".cfg"
BACKEND, PROCESSOR = "general.backend", "general.prepostprocessor"
DEFAULT = "cpu_exponent_quantizer"


class Dummy(NamedTuple):
    """The dummy backend: how fast it seems to be, 0 without a limit, and whether it makes sums."""

    bandwidth_mbps: float = 1000.0
    process_packets: bool = True


class PacketSettings(NamedTuple):
    """Settings of jobs in packets: the processor, the entries of a packet, and the number of packets under way.
    `dummy`: None if they go over the service."""

    processor: type[PrePostProcessor]
    packet_numel: int = 1024
    max_outstanding_packets: int = 256
    dummy: Dummy | None = None


class Settings(NamedTuple):
    """`rank` and `size`: who this process is, where the file says it and no launcher does. `unused`: the keys of the
    file `source` that mean nothing here. `in_packets`: None where the service takes tensors as they are.
    `completes_instantly`: jobs are over when they are submitted."""

    config: Config
    rank: int | None = None
    size: int | None = None
    source: str = ""
    unused: tuple[str, ...] = ()
    in_packets: PacketSettings | None = None
    completes_instantly: bool = False


class _Allowed(NamedTuple):
    """Values that a key may have: `read` gives the value of a text, or raises ValueError or KeyError."""

    text: str
    read: Callable[[str], object]


def _between(smallest: int, largest: int) -> _Allowed:
    def read(text: str) -> int:
        value = int(text)
        if not smallest <= value <= largest:
            raise ValueError
        return value

    return _Allowed(f"an int from {smallest} to {largest}", read)


def _one_of(*words: str) -> _Allowed:
    return _Allowed(f"one of {', '.join(words)}", {word: word for word in words}.__getitem__)


def _rate(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:  # NaN is not
        raise ValueError
    return value


def _processor(text: str) -> str:
    if text not in BUILT_IN and ":" not in text:
        raise ValueError
    return text


_NUMBER = _between(0, 2**31 - 1)
_POSITIVE = _between(1, 2**31 - 1)
_TEXT = _Allowed("a text", str)
_RATE = _Allowed("a number from 0 on", _rate)
_SWITCH = _Allowed("true or false", {"true": True, "1": True, "false": False, "0": False}.__getitem__)

KEYS: dict[str, _Allowed] = {
    "general.rank": _NUMBER,
    "general.num_workers": _POSITIVE,
    "general.num_worker_threads": _between(1, MAX_THREADS),
    "general.max_outstanding_packets": _POSITIVE,
    "general.packet_numel": _POSITIVE,
    "general.backend": _one_of("dummy", "dpdk", "rdma"),
    "general.scheduler": _one_of("fifo"),
    "general.prepostprocessor": _Allowed(f"one of {', '.join(BUILT_IN)}, or module:Class", _processor),
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
    "backend.rdma.use_gdr": _SWITCH,
    **{
        f"backend.dpdk.{name}": _TEXT
        for name in (
            "worker_port", "worker_ip", "cores", "extra_eal_options", "port_id", "pool_size", "pool_cache_size",
            "burst_rx", "burst_tx", "bulk_drain_tx_us",
        )
    },
}  # fmt: skip
OWN_KEYS = {  # what each of them sets
    "general.num_worker_threads": "transport.threads",
    "backend.rdma.device_name": "verbs.device",
    "backend.rdma.device_port_id": "verbs.port",
    "backend.rdma.gid_index": "verbs.gid_index",
}


class _Setting(NamedTuple):
    line: int
    value: Any


class _File:
    """The keys of a file that have a value, each with its section in front; no keys without a `source`."""

    def __init__(self, source: str) -> None:
        self.source, self.keys = source, _read(source) if source else {}
        self.used = set[str]()

    def get(self, name: str, default: Any) -> Any:
        """The value of a key, which then counts as used."""
        self.used.add(name)
        return self.peek(name, default)

    def peek(self, name: str, default: Any) -> Any:
        """The value of a key, without counting it as used."""
        return self.keys[name].value if name in self.keys else default

    def where(self, name: str) -> str:
        """The place of a key, for messages."""
        return f"{self.source}:{self.keys[name].line}: {name}"


def load_settings(
    path: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    places: Sequence[str | Path] | None = None,
) -> Settings:
    """The effective configuration: defaults < `switchml.cfg` < TOML file < environment < overrides.

    `path` is a TOML file, or a file like `switchml.cfg` if its name ends in .cfg. Unless it is the latter, the first of
    `places` that exists is read; by default these are /etc/switchml.cfg, ./switchml.cfg and ./switchml-HOSTNAME.cfg. If
    none exists, the defaults apply. Raises ConfigError, one line, for the first mistake.
    """
    is_cfg = path is not None and str(path).endswith(ENDING)
    if places is None:
        places = ("/etc/switchml.cfg", "switchml.cfg", f"switchml-{socket.gethostname()}.cfg")
    cfg_file = _File(
        str(path) if is_cfg else next((str(candidate) for candidate in places if Path(candidate).exists()), "")
    )
    rank, size = _rank_and_size(cfg_file, environ)
    defaults = _defaults(cfg_file)
    config = load_config(None if is_cfg else path, overrides=overrides, environ=environ, defaults=defaults)
    in_packets, is_instant = _packet_settings(cfg_file, config), cfg_file.get("general.instant_job_completion", False)
    unused = [name.removeprefix("general.") for name in cfg_file.keys if name not in cfg_file.used]
    if in_packets is None and cfg_file.get("general.packet_numel", 0) > LARGEST_BLOCK:
        unused.append(f"packet_numel above {LARGEST_BLOCK}")
    return Settings(
        config, rank, size, cfg_file.source, tuple(unused), in_packets=in_packets, completes_instantly=is_instant
    )


def _rank_and_size(file: _File, environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Rank and number of workers, if the file has one of them and no launcher started this process: all ranks of a
    launcher may share one file. Raises ConfigError for a rank that is not below the number of workers."""
    if not {"general.rank", "general.num_workers"} & file.keys.keys() or detect_launch(environ).launcher != "none":
        return None, None
    rank, size = file.get("general.rank", 0), file.get("general.num_workers", 1)
    if rank >= size:
        raise ConfigError(f"{file.where('general.rank')}: got {rank}, expected less than num_workers, which is {size}")
    return rank, size


def _defaults(file: _File) -> dict[str, tuple[str, object]]:
    """The values of our own configuration that the keys set, each with its place in the file."""
    is_rdma = file.peek(BACKEND, "") == "rdma"
    direct = {name: key for name, key in OWN_KEYS.items() if is_rdma or not name.startswith("backend")}
    defaults = {key: (file.where(name), file.get(name, None)) for name, key in direct.items() if name in file.keys}
    if "general.packet_numel" in file.keys and not _needs_packets(file):
        block = min(file.get("general.packet_numel", 0), LARGEST_BLOCK)
        defaults["protocol.block_size"] = (file.where("general.packet_numel"), block)
    return defaults


def _needs_packets(file: _File) -> bool:
    """Whether jobs travel in packets: over the dummy backend, or with a processor that the user wrote."""
    return file.peek(BACKEND, "") == "dummy" or file.peek(PROCESSOR, DEFAULT) not in BUILT_IN


def _packet_settings(file: _File, config: Config) -> PacketSettings | None:
    """Settings of jobs that travel in packets; None if they do not. Raises ConfigError."""
    if not _needs_packets(file):
        return None
    name, dummy = file.get(PROCESSOR, DEFAULT), None
    if file.peek(BACKEND, "") == "dummy":
        default = Dummy()
        dummy = Dummy(
            file.get("backend.dummy.bandwidth", default.bandwidth_mbps),
            file.get("backend.dummy.process_packets", default.process_packets),
        )
        file.used |= {BACKEND, "general.scheduler"}
    default_numel, default_outstanding = (
        PacketSettings._field_defaults[field] for field in ("packet_numel", "max_outstanding_packets")
    )
    outstanding = file.get("general.max_outstanding_packets", default_outstanding)
    if outstanding < (config.transport.threads or 1):
        raise ConfigError(
            f"{file.where('general.max_outstanding_packets')}: got {outstanding}, expected at least one for each of "
            f"{config.transport.threads} threads"
        )
    processor = BUILT_IN[name] if name in BUILT_IN else _load_processor(name, file.where(PROCESSOR))
    return PacketSettings(processor, file.get("general.packet_numel", default_numel), outstanding, dummy)


def _load_processor(name: str, position: str) -> type[PrePostProcessor]:
    try:
        loaded: type[PrePostProcessor] = load_class(name, {"omnireduce.switchml.PrePostProcessor": PrePostProcessor})
    except UsageError as error:
        raise ConfigError(f"{position}: {error}") from error
    return loaded


def _read(path: str) -> dict[str, _Setting]:
    """The keys of a file, each with its section in front. Raises ConfigError."""
    section, settings = "", dict[str, _Setting]()
    for number, line in enumerate(read_text(path, expected="a file such as switchml.cfg").split("\n"), 1):
        text, position = re.split("[#;]", line)[0].strip(), f"{path}:{number}"
        if text.startswith("[") and text.endswith("]"):
            section = text[1:-1].strip()
            if not any(name.startswith(f"{section}.") for name in KEYS):
                names = dict.fromkeys(name.rpartition(".")[0] for name in KEYS)
                raise ConfigError(f"{position}: {section}: unknown section, {expected_one_of(section, names)}")
        elif text:
            name, value = _key_and_value(position, section, text)
            if name in settings:
                raise ConfigError(f"{position}: {name}: given a second time, first in line {settings[name].line}")
            settings[name] = _Setting(number, value)
    return settings


def _key_and_value(position: str, section: str, line: str) -> tuple[str, object]:
    key, equals, text = (part.strip() for part in line.partition("="))
    name = f"{section}.{key}" if section else key
    if not equals:
        raise ConfigError(f"{position}: got {show(line)}, expected a section in brackets, or key = value")
    if name not in KEYS:
        section_keys = [
            key_name.removeprefix(f"{section}.") for key_name in KEYS if key_name.rpartition(".")[0] == section
        ]
        raise ConfigError(f"{position}: {name}: unknown key, {expected_one_of(key, section_keys or KEYS)}")
    try:
        return name, KEYS[name].read(text)
    except (ValueError, KeyError):
        raise ConfigError(f"{position}: {name}: got {show(text)}, expected {KEYS[name].text}") from None
