"""What the command lines of all programs share: the configuration's options, and how errors end a program.

| what happened                                   | stderr               | exit status |
|-------------------------------------------------|----------------------|-------------|
| the configuration is wrong (`ConfigError`)      | one line             | 2           |
| any other error of the library                  | one line             | 1           |
| an array that does not fit into memory          | one line             | 1           |
| Ctrl-C                                          | one line             | 130         |
| a bug                                           | its traceback        | 1           |

Where the logs are JSON, so is that line.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from omnireduce.errors import ConfigError, OmniReduceError
from omnireduce.logs import logs_are_json, tagged

_F = TypeVar("_F", bound=Callable[..., Any])


def config_options(command: _F) -> _F:
    """Add `--config FILE` and `--set section.key=value`, which may come often.

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
        help="TOML file with the configuration. [default: the one that OMNIREDUCE_CONFIG names, if any]",
    )
    return config_file(overrides(command))


@contextmanager
def reporting_errors() -> Iterator[None]:
    """End the program as the table above says: one line on stderr and an exit status, no traceback."""
    try:
        yield
    except OmniReduceError as error:
        message = " ".join(str(error).split()) or type(error).__name__
        _complain(message)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except MemoryError as error:
        _complain(f"too little memory: {error}".rstrip(": "))
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("Interrupted", err=True)
        sys.exit(130)


def _complain(message: str) -> None:
    if logs_are_json():
        logging.getLogger("omnireduce").critical(message, extra=tagged("failed"))
    else:
        click.echo(f"Error: {message}", err=True)


class Command(click.Command):
    """A command that reports errors."""

    def invoke(self, ctx: click.Context) -> Any:
        with reporting_errors():
            return super().invoke(ctx)


class Group(click.Group):
    """A group that reports errors, its own and those of its subcommands."""

    def invoke(self, ctx: click.Context) -> Any:
        with reporting_errors():
            return super().invoke(ctx)
