"""The search space: keys of the configuration, each with values in order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from omnireduce.config import Config, override_config
from omnireduce.errors import ConfigError

Value = int | float
Point = dict[str, Value]  # a value for each key that is free


@dataclass(frozen=True, slots=True)
class Parameter:
    """A key and its values, in order: neighbours are alike. `grid`: those of a small grid. `counts_for`: where it has
    an effect; see `Circumstances`."""

    key: str
    values: tuple[Value, ...]
    grid: tuple[Value, ...] = ()
    counts_for: str = ""


_KIB, _MIB = 1 << 10, 1 << 20
PARAMETERS = (
    Parameter("protocol.block_size", (32, 64, 128, 256, 512, 1024, 2048), (64, 256, 1024)),
    Parameter("protocol.scan_span", (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536), (), "messages"),
    Parameter("protocol.stripe_blocks", (8, 16, 32, 64, 128, 256, 512), (), "shards"),
    Parameter("protocol.slots", (2, 3, 4, 6, 8), (), "messages"),
    Parameter(
        "protocol.slot_bytes", (256 * _KIB, 512 * _KIB, _MIB, 3 << 19, 2 * _MIB, 4 * _MIB), (512 * _KIB, 3 << 19),
        "messages",
    ),
    Parameter("transport.threads", (0, 1, 2, 4, 8), (), "shards"),
    Parameter(
        "queue.fusion_bytes", (0, 64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB),
        (0, 256 * _KIB, _MIB, 16 * _MIB),
    ),
    Parameter("queue.cycle_s", (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03), (), "rounds"),
)  # fmt: skip
BY_KEY = {parameter.key: parameter for parameter in PARAMETERS}


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Conditions for keys to have an effect. `in_memory`: ranks exchange tensors in memory alone, and aggregators get
    none. `in_order`: every step is like the last one, so that the queue has no rounds."""

    shards: int
    in_memory: bool
    in_order: bool

    def why_without_effect(self, parameter: Parameter) -> str:
        """Why a key changes nothing here; empty if it may."""
        if parameter.counts_for == "rounds":
            return "steps that are alike have no rounds" if self.in_order else ""
        if parameter.counts_for and self.in_memory:
            return "ranks sum in memory that they share"
        return "there is one shard" if parameter.counts_for == "shards" and self.shards < 2 else ""


class Space:
    """The keys that are free, and the values that each may take; that of `base` is among them."""

    def __init__(self, base: Config, held: Sequence[str], here: Circumstances) -> None:
        self.base = base
        self.held = dict.fromkeys(held, "held")
        for parameter in PARAMETERS:
            why = here.why_without_effect(parameter)
            if why and parameter.key not in self.held:
                self.held[parameter.key] = why
        self.free = {
            parameter.key: self._values(parameter) for parameter in PARAMETERS if parameter.key not in self.held
        }

    def _values(self, parameter: Parameter) -> tuple[Value, ...]:
        return tuple(sorted({*parameter.values, value_of(self.base, parameter.key)}))

    @property
    def size(self) -> int:
        """How many points there are."""
        return math.prod(len(values) for values in self.free.values())

    @property
    def start(self) -> Point:
        """The point of `base`."""
        return {key: value_of(self.base, key) for key in self.free}

    def grid(self) -> Iterator[Point]:
        """A small grid. Keys without values for it stay as in `base`."""
        axes = [BY_KEY[key].grid or (value,) for key, value in self.start.items()]
        for values in itertools.product(*axes):
            yield dict(zip(self.free, values, strict=True))

    def config(self, point: Mapping[str, Value]) -> Config | None:
        """The configuration at a point; None where its values do not go together."""
        try:
            return override_config(self.base, point, source="tune")
        except ConfigError:
            return None

    def fits(self, config: Config, world_size: int) -> bool:
        """Whether an aggregator, as `config` has it, admits such a job."""
        protocol = config.protocol
        return (world_size + 1) * protocol.slots * protocol.slot_bytes <= config.aggregator.max_job_bytes


def value_of(config: Config, key: str) -> Value:
    """The value of a key that can be tuned."""
    section, _, name = key.partition(".")
    value: Value = getattr(getattr(config, section), name)
    return value


def read_holds(holds: Sequence[str]) -> tuple[list[str], list[str]]:
    """Which keys `--hold section.key` and `--hold section.key=value` hold, and the overrides among them. Raises
    ConfigError."""
    keys, overrides = [], []
    for hold in holds:
        key, equals, _ = hold.partition("=")
        key = key.strip()
        if key not in BY_KEY:
            raise ConfigError(f"--hold: got {hold!r}, expected section.key or section.key=value of {', '.join(BY_KEY)}")
        keys.append(key)
        if equals:
            overrides.append(hold)
    if len(set(keys)) == len(PARAMETERS):
        raise ConfigError("--hold: every parameter is held; expected at least one that is free")
    return keys, overrides
