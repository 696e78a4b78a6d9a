"""Output of a search: a line for each sample in a CSV file, a table, and a file of the configuration."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console

from omnireduce.console.tune.search import PARAMETERS, Space, Value, value_of
from omnireduce.errors import ConfigError
from omnireduce.support.config import Config, dump_tables, load_config
from omnireduce.support.config.validation import KEYS
from omnireduce.support.files.output import write_file
from omnireduce.support.files.paths import user_path
from omnireduce.support.printing import table_of

HEADER = ("sample", "state", *(parameter.key for parameter in PARAMETERS), "score", "default_score", "ratio")
COMPLETE, PRUNED, IMPOSSIBLE = "complete", "pruned", "impossible"


class SampleLog:
    """The CSV file. It gets a line as soon as a sample is over. Without a file, lines are dropped.

    `score` and `default_score` are bytes per microsecond in the same rounds, `ratio` says how many times as fast as the
    default a sample is. A sample that is `impossible` has none of them.
    """

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self._write(HEADER)

    def add(self, sample: int, state: str, config: Mapping[str, Value], scores: tuple[float, ...]) -> None:
        """Add a sample. `config` has a value for every parameter; `scores`: score, default_score, ratio, or none."""
        values = [config[parameter.key] for parameter in PARAMETERS]
        self._write([sample, state, *values, *([f"{score:.6g}" for score in scores] or [""] * 3)])

    def _write(self, row: Sequence[object]) -> None:
        if self._file is not None:
            csv.writer(self._file, lineterminator="\n").writerow(row)
            self._file.flush()


@contextmanager
def open_log(path: str | None) -> Iterator[SampleLog]:
    """A log in a new file. Raises ConfigError where it cannot be opened."""
    if path is None:
        yield SampleLog(None)
        return
    try:
        file = user_path(path).open("w", newline="", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--log {path}: {error.strerror}") from None
    with file:
        yield SampleLog(file)


def values_of(config: Config) -> dict[str, Value]:
    """The value of every parameter."""
    return {parameter.key: value_of(config, parameter.key) for parameter in PARAMETERS}


def print_table(console: Console, space: Space, best: Config) -> None:
    """The best configuration beside the default one."""
    table = table_of(("parameter", "default", "best"), left=("parameter",))
    table.add_column("")
    for key, value in values_of(best).items():
        default = value_of(space.base, key)
        note = "changed" if value != default else space.held.get(key, "")
        table.add_row(key, f"{default:g}" if isinstance(default, float) else str(default), _text(value), note)
    console.print(table)


def _text(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def write_tuned(path: str, user_config: Config, best: Config, free: Mapping[str, object], comment: str) -> None:
    """Write what differs from the defaults in `user_config`, and the values of `best` for all `free` keys, as TOML.

    `comment` says in one line how good it is. Raises UsageError if the file cannot be written, ConfigError if it could
    not be loaded.

    """
    tables: dict[str, dict[str, object]] = {}
    for key in KEYS.values():
        value = getattr(getattr(user_config, key.section), key.name)
        if key.path in free:
            value = value_of(best, key.path)
        elif value == key.default:
            continue
        tables.setdefault(key.section, {})[key.name] = list(value) if isinstance(value, tuple) else value
    write_file(f"# {comment}\n{dump_tables(tables)}".encode(), path)
    load_config(Path(path), environ={})
