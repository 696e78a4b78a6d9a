"""Shared parts of all command lines: the options of the configuration, and how errors end a program.

| what happened                                   | stderr               | exit status |
|-------------------------------------------------|----------------------|-------------|
| the configuration is wrong (`ConfigError`)      | one line             | 2           |
| it was called wrongly (`UsageError`)            | one line             | 2           |
| any other error of the library                  | one line             | 1           |
| an array that does not fit into memory          | one line             | 1           |
| results that do not fit on the disk             | one line             | 1           |
| Ctrl-C                                          | one line             | 130         |
| a bug                                           | its traceback        | 1           |

If the logs are JSON, that line is JSON, too. Text that cannot be written to standard error, on a full disk for example,
is lost. The exit status stays the same.
"""

from __future__ import annotations

import errno
import io
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from omnireduce.errors import ConfigError, OmniReduceError, UsageError
from omnireduce.support.logs import logs_are_json, tagged

_F = TypeVar("_F", bound=Callable[..., Any])
LARGEST_NUMBER = 1 << 40  # of elements, or of jobs
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _LossyFile(io.FileIO):
    """A file that drops text that cannot be written, instead of raising or keeping it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or len(data)  # after 0 the caller would try again for ever
        except OSError:
            return len(data)


def lose_unwritable_logs() -> None:
    """Drop text that cannot be written to standard error, so that it disturbs neither this process nor its exit status.

    Otherwise Python raises at every such line, and ends with status 120 if text is still unwritten at exit.
    """
    plain = sys.__stderr__
    if plain is not None and sys.stderr is plain:  # otherwise it was replaced, by a test for example
        buffer = io.BufferedWriter(_LossyFile(plain.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(buffer, plain.encoding, "backslashreplace", line_buffering=True)


def config_options(command: _F) -> _F:
    """Add `--config FILE` and `--set section.key=value`, which may be given several times.

    The command gets `config_file: str | None` and `overrides: tuple[str, ...]`, as `load_config` takes them.
    """
    overrides = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        help="Replace one value of the configuration, such as transport.kind=tcp. May be repeated.",
    )
    config_file = click.option(
        "--config",
        "config_file",
        metavar="FILE",
        help="TOML file with the configuration. [default: the file that OMNIREDUCE_CONFIG names, if any]",
    )
    return config_file(overrides(command))


def launch_options(command: _F) -> _F:
    """Add `--rank R` and `--size N`, for workers that no launcher started."""
    rank = click.option("--rank", type=int, help="This worker's rank. [default: from mpirun, Slurm or torchrun]")
    size = click.option("--size", type=int, help="Number of workers; goes with --rank.")
    return rank(size(command))


class NumberRange(click.FloatRange):
    """A number within limits. NaN is refused: it is neither below nor above any limit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a number in the range {self._describe_range()}.", param, ctx)
        return number


def parse_numbers(option: str, text: str, low: int = 1, high: int = LARGEST_NUMBER, multiple_of: int = 1) -> list[int]:
    """The whole numbers in the `text` of an option, such as `1,4,8`. Raises UsageError if there is none, and for one
    that is no multiple, or not from `low` to `high`."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:  # no number, or a number of thousands of digits
        numbers = []
    if not numbers or any(not low <= number <= high or number % multiple_of for number in numbers):
        kind = "numbers" if multiple_of == 1 else f"multiples of {multiple_of}"
        raise UsageError(f"{option} {text[:80]!r}: expected {kind} from {low} to {high}, such as {low},{4 * low}")
    return numbers


json_option = click.option("--json", "json_path", metavar="FILE", help="Also write the results to FILE, as JSON.")


@contextmanager
def reporting_errors() -> Iterator[None]:
    """End the program as the table above says: one line on stderr and an exit status, no traceback."""
    try:
        yield
    except OmniReduceError as error:
        message = " ".join(str(error).split()) or type(error).__name__
        _report_error(message)
        sys.exit(2 if isinstance(error, ConfigError | UsageError) else 1)
    except MemoryError as error:
        _report_error(f"too little memory: {error}".rstrip(": "))
        sys.exit(1)
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        _report_error(f"cannot write the results: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise Python would fail to write the rest at exit
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("Interrupted", err=True)
        sys.exit(130)


def _report_error(message: str) -> None:
    if logs_are_json():
        logging.getLogger("omnireduce").critical(message, extra=tagged("failed"))
    else:
        click.echo(f"Error: {message}", err=True)


class Command(click.Command):
    """A command that reports errors."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        lose_unwritable_logs()
        return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with reporting_errors():
            return super().invoke(ctx)


class Group(Command, click.Group):
    """A group that reports errors, its own and those of its subcommands."""
