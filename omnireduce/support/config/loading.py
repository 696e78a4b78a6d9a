"""Reading, checking and writing the configuration.

A value comes from the first of these that gives it: an override (`--set section.key=value`), an environment
variable `OMNIREDUCE_<SECTION>_<KEY>`, a variable of Horovod's that means the same (`horovod`), the TOML file (an
argument, else `OMNIREDUCE_CONFIG`), the default.
Every value is checked at its source. So a ConfigError names, in one line, the source, the key, the given value and the
allowed values.
"""

from __future__ import annotations

import json
import os
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec
import toml
from msgspec.structs import asdict

from omnireduce.errors import ConfigError, show
from omnireduce.support.addresses import is_loopback, parse_address
from omnireduce.support.config.horovod import settings_of, warn_about_variables_without_effect
from omnireduce.support.config.schema import SECRET_KEY, SECRET_VARIABLE, Config
from omnireduce.support.config.validation import KEYS, SECTIONS, Key, conflicts, expected_one_of, keys_of_section
from omnireduce.support.files.cache import CACHE_VARIABLE
from omnireduce.support.files.paths import one_line, read_text, user_path

_PREFIX = "OMNIREDUCE_"
_FILE_VARIABLE = "OMNIREDUCE_CONFIG"
_PROFILE_VARIABLE = "OMNIREDUCE_PROFILE"  # a name like those of other profilers
_NO_KEYS = (_FILE_VARIABLE, SECRET_VARIABLE, _PROFILE_VARIABLE, CACHE_VARIABLE)
# The first conversion to a type prepares it. Threads that do this at the same time crash the process (msgspec 0.22).
msgspec.convert({section: {} for section in SECTIONS}, Config)


def load_config(
    path: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    defaults: Mapping[str, tuple[str, object]] = MappingProxyType({}),
) -> Config:
    """The effective configuration: defaults < file < Horovod's variables < environment < overrides.

    Without `path`, `OMNIREDUCE_CONFIG` may name the file. Each override has the form `section.key=value`, with a TOML
    value or a bare string; later overrides win. `defaults` replaces defaults, by "section.key", each with its source.
    Raises ConfigError, in one line, for the first error.
    """
    layers = _Layers()
    for name, (source, value) in defaults.items():
        layers.add(source, _key(source, name), value)
    if path is not None:
        layers.add_file(path)
    elif path := environ.get(_FILE_VARIABLE, "").strip():
        layers.add_file(path, f"{_FILE_VARIABLE}: ")
    for name, path_of_key, value in settings_of(environ, KEYS):
        layers.add(name, KEYS[path_of_key], value)
    warn_about_variables_without_effect(environ, KEYS)
    if _PROFILE_VARIABLE in environ:
        layers.add_text(_PROFILE_VARIABLE, KEYS["trace.profile"], environ[_PROFILE_VARIABLE])
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in _NO_KEYS:
            layers.add_text(name, _key_of_variable(name), environ[name])
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or "." not in name:
            raise ConfigError(f"--set: got {show(override)}, expected section.key=value")
        layers.add_text("--set", _key("--set", name.strip()), text)
    return layers.build()


def override_config(config: Config, values: Mapping[str, object], *, source: str) -> Config:
    """`config` with some values replaced by `values`, by "section.key". All are checked; errors name `source`."""
    layers = _Layers()
    layers.add_tables("config", {section: asdict(getattr(config, section)) for section in SECTIONS})
    for path, value in values.items():
        layers.add(source, _key(source, path), value)
    return layers.build()


def check_config(config: Config) -> Config:
    """Return `config`, which may have been constructed in Python, with lists made tuples.

    Raises ConfigError for the first value that is not allowed.
    """
    return override_config(config, {}, source="config")


class _Layers:
    """Checked values, each with the source that gave it last."""

    def __init__(self) -> None:
        self._values: dict[str, object] = {}
        self._sources: dict[str, str] = {}  # in the order of the last values

    def add(self, source: str, key: Key, value: object, file: str | Path | None = None) -> None:
        """Check a value and add it. `file`: the file that gives it, if it comes from a file."""
        try:
            self._values[key.path] = key.read(value, file)
        except ConfigError as error:
            raise ConfigError(f"{source}: {key.path}: {error}") from None
        self._sources.pop(key.path, None)
        self._sources[key.path] = source

    def add_text(self, source: str, key: Key, text: str) -> None:
        """Add a TOML value. Text that is no TOML is a bare string; so is any text for a key that allows only strings
        (`cluster.job=42`). A list may also be written as on a command line: its values with commas between them."""
        text = text.strip()
        value = _parse(text)
        if isinstance(value, str) and not text.endswith("]") and key.is_list_in(text):
            value = [_parse(part) for part in split_list(value)]
        try:
            self.add(source, key, value)
        except ConfigError as error:
            try:
                self.add(source, key, text)
            except ConfigError:
                is_bare_list = isinstance(value, str) and value.startswith("[") and value.endswith("]")
                hint = "; leave out the brackets, or put each text in quotes" if is_bare_list else ""
                raise ConfigError(f"{error}{hint}") from None

    def add_tables(self, source: str, tables: Mapping[str, object], file: str | Path | None = None) -> None:
        for section, table in tables.items():
            if section not in SECTIONS:
                raise _unknown_section(source, section)
            if not isinstance(table, dict):
                raise ConfigError(f"{source}: {section}: got {show(table)}, expected a table [{section}]")
            for name, value in table.items():
                self.add(source, _key(source, f"{section}.{name}"), value, file)

    def add_file(self, path: str | Path, named_by: str = "") -> None:
        source = one_line(path)
        text = read_text(path, f"{named_by}{source}", expected="a TOML file")
        try:
            tables = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{source}: not valid TOML: {one_line(str(error))}") from None
        self.add_tables(source, tables, user_path(path))

    def build(self) -> Config:
        tables: dict[str, dict[str, object]] = {section: {} for section in SECTIONS}
        for path, value in self._values.items():
            tables[KEYS[path].section][KEYS[path].name] = value
        config = msgspec.convert(tables, Config)
        ages = {path: age for age, path in enumerate(self._sources)}
        for expected in conflicts(config):
            path = max(expected, key=lambda path: ages.get(path, -1))
            value_text = show(self._values[path])
            raise ConfigError(f"{self._sources[path]}: {path}: got {value_text}, expected {expected[path]}")
        return config


def _key(source: str, path: str) -> Key:
    """The key at "section.key". Raises ConfigError, which names the closest key, if there is none."""
    if path in KEYS:
        return KEYS[path]
    if path == SECRET_KEY:
        reason = "a command line or a configuration is no place for a secret: others can read it there"
        raise ConfigError(f"{source}: {path}: {reason}; give security.secret_file or the variable {SECRET_VARIABLE}")
    section, _, name = path.partition(".")
    if section not in SECTIONS:
        raise _unknown_section(source, section)
    raise ConfigError(f"{source}: {one_line(path)}: unknown key, {expected_one_of(name, keys_of_section(section))}")


def _unknown_section(source: str, section: str) -> ConfigError:
    return ConfigError(f"{source}: {one_line(section)}: unknown section, {expected_one_of(section, SECTIONS)}")


def _key_of_variable(variable: str) -> Key:
    """The key that an environment variable sets: `OMNIREDUCE_PROTOCOL_BLOCK_SIZE` is protocol.block_size."""
    key = _key(one_line(variable), variable.removeprefix(_PREFIX).lower().replace("_", ".", 1))
    expected = f"{_PREFIX}{key.section}_{key.name}".upper()
    if variable != expected:
        raise ConfigError(f"{one_line(variable)}: unknown variable, did you mean {expected}?")
    return key


def _parse(text: str) -> object:
    """A TOML value, or the text itself if it is no TOML."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return document["value"] if set(document) == {"value"} else text


class _Encoder(toml.TomlEncoder):  # type: ignore[type-arg]  # generic in the stubs only
    def dump_list(self, v: Iterable[object]) -> str:
        return "[" + ", ".join(str(self.dump_value(item)) for item in v) + "]"

    def dump_value(self, v: object) -> str:
        """A value as TOML. The library's own output is wrong for some texts with a backslash."""
        return _quote(v) if isinstance(v, str) else str(super().dump_value(v))


def _quote(text: str) -> str:
    """A text as a basic string of TOML. It is the same as a string of JSON, except for one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def dump_tables(tables: Mapping[str, object]) -> str:
    """Sections and their values as TOML."""
    return toml.dumps(tables, encoder=_Encoder())


def split_list(values: str | Iterable[str]) -> list[str]:
    """The values in texts; each text may have several, with commas between them."""
    texts = [values] if isinstance(values, str) else values
    return [part.strip() for text in texts for part in text.split(",")]


def dump_config(config: Config) -> str:
    """The whole configuration as TOML; loading it gives an equal configuration."""
    return dump_tables(msgspec.to_builtins(config))


def whole_bytes(config: Config) -> int:
    """`protocol.whole_bytes` if all aggregators are reached by loopback, else 0.

    Shards on other hosts have separate links, so they share the load of every tensor.
    """
    are_local = all(is_loopback(parse_address(address).host) for address in config.cluster.aggregators)
    return config.protocol.whole_bytes if are_local else 0


_REFERENCE_HEAD = """\
# Every key of the configuration with its meaning, unit, default and range. The values here are the defaults.
# Written by: omnireduce config --reference > configs/reference.toml
#
# Copy what you want to change into a file F of your own, then:
#   omnireduce aggregator --config F
#   mpirun -n 2 omnireduce bench --config F
# Without --config, OMNIREDUCE_CONFIG names the file. A variable OMNIREDUCE_<SECTION>_<KEY> replaces one value
# (OMNIREDUCE_PROTOCOL_BLOCK_SIZE=512), and --set section.key=VALUE wins (--set protocol.block_size=512). There a list
# has commas between its values (OMNIREDUCE_CLUSTER_AGGREGATORS=node1:7400,node2:7400).
#
# "~" in a path is a home folder. A relative path in a file is relative to the folder of that file, in a variable or
# after --set to the current folder.
"""


def reference_toml() -> str:
    """The reference file: every key with its default, and above it its meaning, unit, default and range."""
    lines = [_REFERENCE_HEAD.rstrip()]
    for section, struct in SECTIONS.items():
        lines += ["", f"# {struct.MEANING}", f"[{section}]"]
        for key in KEYS.values():
            if key.section == section:
                lines += ["", *_reference_lines(key)]
    return "\n".join(lines) + "\n"


def _reference_lines(key: Key) -> list[str]:
    value = _Encoder().dump_value(key.default)
    unit = f"Unit: {key.unit}. " if key.unit else ""
    text = [f"{key.meaning[0].upper()}{key.meaning[1:]}.", f"{unit}Default: {value}. Allowed: {key.allowed}."]
    comment = [line for part in text for line in textwrap.wrap(part, 106)]
    return [*(f"# {line}" for line in comment), f"{key.name} = {value}"]
