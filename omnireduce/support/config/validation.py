"""Checks of each key of the configuration, and the messages for wrong values.

Messages made here read `got ..., expected ...`; `omnireduce.support.config` puts the source and the key in front.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from omnireduce.core.dtypes import ELEMENT_TYPES
from omnireduce.errors import ConfigError, UsageError, show
from omnireduce.support.addresses import Address, normalize_address, parse_address, parse_listen
from omnireduce.support.config.schema import Config, Section
from omnireduce.support.files.paths import whole_path

FRAMING_BYTES = 2048  # bytes that a message needs in its slot beside one block
WIDEST_ELEMENT_BYTES = 8


def expected_one_of(word: str, allowed: Iterable[str]) -> str:
    """`expected one of ...`, with a hint if an allowed word is close to `word`, or another section has this key."""
    names = list(allowed)
    close = difflib.get_close_matches(word.lower(), names, n=1)
    close = close or [path for path in KEYS if path.endswith(f".{word}")]
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"expected one of {', '.join(names)}{hint}"


def _check_aggregators(addresses: tuple[str, ...]) -> None:
    seen: set[Address] = set()
    for text in addresses:
        address = normalize_address(parse_address(text))
        if address.port == 0:
            raise ConfigError(f"got {show(text)}, expected a port between 1 and 65535")
        if address in seen:
            raise ConfigError(f"got {show(text)} twice, expected every aggregator shard once")
        seen.add(address)


def _check_unless_empty(address: str) -> None:
    if address:
        parse_listen(address)


_CHECKS: dict[str, Callable[[Any], object]] = {
    "cluster.aggregators": _check_aggregators,
    "aggregator.listen": parse_listen,
    "aggregator.upstream": _check_aggregators,
    "metrics.listen": _check_unless_empty,
}


@dataclass(frozen=True)
class Key:
    """A key of the configuration: its section, name, meaning and allowed values."""

    section: str
    name: str
    type: Any
    default: object
    meaning: str
    unit: str
    allowed: str
    path_unless: tuple[str, ...] | None = None  # the value is a path, unless it is one of these words

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    def is_list_in(self, text: str) -> bool:
        """Whether `text`, which is no TOML, means a list: if only a list is allowed, or if a list is allowed and the
        text has a comma."""
        hint = _without_annotations(self.type)
        may_be_list = any(get_origin(_without_annotations(member)) is tuple for member in get_args(hint))
        return get_origin(hint) is tuple or (may_be_list and "," in text)

    def read(self, value: object, file: str | Path | None = None) -> object:
        """The value as its type: lists become tuples, and paths become absolute. A relative path is in the folder of
        the `file` that gives the value, or in the current folder. Raises ConfigError if the value is not allowed."""
        try:
            converted: object = msgspec.convert(value, self.type)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            position = re.search(r"\$\[(\d+)\]", str(error))
            if position is not None and isinstance(value, (list, tuple)):
                value = value[int(position[1])]
            unit = f" (unit: {self.unit})" if self.unit else ""
            raise ConfigError(f"got {show(value)}, expected {self.allowed}{unit}") from None
        if self.path in _CHECKS:
            _CHECKS[self.path](converted)
        return converted if self.path_unless is None else self._to_path(str(converted).strip(), file)

    def _to_path(self, text: str, file: str | Path | None) -> str:
        try:
            return text if text in (self.path_unless or ()) else str(whole_path(text, file))
        except UsageError as error:
            raise ConfigError(f"got {show(text)}: {error}") from None


def _without_annotations(hint: Any) -> Any:
    """A type without its annotations."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _allowed(hint: Any) -> str:
    """The allowed values of a type, in words: "an int between 8 and 65536 that is a multiple of 8"."""
    limits: dict[str, Any] = {}
    may_be_empty = True
    if get_origin(hint) is Annotated:
        hint, *metas = get_args(hint)
        may_be_empty = not any(meta.min_length for meta in metas)
        for meta in metas:
            if (meta.extra or {}).get("allowed"):
                return str(meta.extra["allowed"])
            limits |= {name: getattr(meta, name) for name in ("ge", "le", "multiple_of")}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(show(choice) for choice in arguments)
    if origin in (Union, UnionType):
        return f"{_allowed(arguments[0])}, or a non-empty list of these"
    if origin is tuple:
        return f"a {'' if may_be_empty else 'non-empty '}list of {_allowed(arguments[0])}"
    if hint is bool:
        return "true or false"
    noun = "an int" if hint is int else "a number"
    multiple = limits["multiple_of"]
    suffix = f" that is a multiple of {multiple}" if multiple else ""
    return f"{noun} between {limits['ge']} and {limits['le']}{suffix}"


def keys_of(section: str, struct: type[msgspec.Struct]) -> Iterator[Key]:
    """The keys of a section, or of another file whose struct is written like a section."""
    for field in msgspec.structs.fields(struct):
        metas = [arg for arg in get_args(field.type) if isinstance(arg, Meta)]
        extra = {name: value for meta in metas for name, value in (meta.extra or {}).items()}
        yield Key(
            section=section,
            name=field.name,
            type=field.type,
            default=field.default,
            meaning=metas[-1].description or "",
            unit=extra.get("unit", ""),
            allowed=_allowed(field.type),
            path_unless=extra.get("path_unless"),
        )


SECTIONS: dict[str, type[Section]] = {field.name: field.type for field in msgspec.structs.fields(Config)}
KEYS: dict[str, Key] = {key.path: key for name, struct in SECTIONS.items() for key in keys_of(name, struct)}


def keys_of_section(section: str) -> list[str]:
    """The keys of a section, in order."""
    return [key.name for key in KEYS.values() if key.section == section]


def conflicts(config: Config) -> Iterator[dict[str, str]]:
    """Values that do not fit together. For each conflict: its keys, each with the values allowed beside the others."""
    protocol, bench, daemon = config.protocol, config.bench, config.aggregator
    max_block_size = (protocol.slot_bytes - FRAMING_BYTES) // WIDEST_ELEMENT_BYTES
    bench_sizes = bench.block_size if isinstance(bench.block_size, tuple) else (bench.block_size,)
    for path, block_size in [
        ("protocol.block_size", protocol.block_size),
        ("bench.block_size", max(bench_sizes)),
    ]:
        if block_size > max_block_size:
            min_slot_bytes = block_size * WIDEST_ELEMENT_BYTES + FRAMING_BYTES
            reason = f"(a slot holds {WIDEST_ELEMENT_BYTES} bytes per element of a block and {FRAMING_BYTES} more)"
            yield {
                path: f"at most {max_block_size} because protocol.slot_bytes is {protocol.slot_bytes} {reason}",
                "protocol.slot_bytes": f"at least {min_slot_bytes} because {path} is {block_size} {reason}",
            }
    ops = bench.op if isinstance(bench.op, tuple) else (bench.op,)
    dtypes = bench.dtype if isinstance(bench.dtype, tuple) else (bench.dtype,)
    integers = [name for name in dtypes if not ELEMENT_TYPES[name].is_float]
    if "mean" in ops and integers:
        yield {
            "bench.op": f"an op other than mean because bench.dtype is {integers[0]}",
            "bench.dtype": "float types because bench.op is mean",
        }
    if daemon.max_bytes < daemon.max_job_bytes:
        yield {
            "aggregator.max_job_bytes": f"at most {daemon.max_bytes} because that is aggregator.max_bytes",
            "aggregator.max_bytes": f"at least {daemon.max_job_bytes} because that is aggregator.max_job_bytes",
        }
    last_call_s, join_s = config.elastic.last_call_s, config.cluster.join_timeout_s
    if config.elastic.enabled and last_call_s >= join_s:  # the job would never have settled when the time is over
        yield {
            "elastic.last_call_s": f"less than {join_s:g} because that is cluster.join_timeout_s",
            "cluster.join_timeout_s": f"more than {last_call_s:g} because that is elastic.last_call_s",
            "elastic.enabled": f"false because elastic.last_call_s is {last_call_s:g}, not less than "
            "cluster.join_timeout_s",
        }
    port = parse_listen(daemon.listen).port
    if port and port + daemon.shards - 1 > 65535:
        yield {
            "aggregator.shards": f"at most {65536 - port} because shard i listens on port {port} + i",
            "aggregator.listen": f"a port up to {65536 - daemon.shards} for {daemon.shards} shards",
        }
