"""The options of `omnireduce run` as keywords of a function: those of `horovod.run` are among them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import click

from omnireduce.errors import UsageError
from omnireduce.launching.command import read_words
from omnireduce.launching.command import run as command
from omnireduce.launching.launch import STARTED_BY_US
from omnireduce.launching.plan import LaunchRequest

_SAY_AND_STOP = ("check_build", "version")
_HOROVOD = {"use_mpi": "mpi", "use_gloo": "gloo", "cooldown_range": "blacklist_cooldown_range"}


def read_keywords(given: Mapping[str, Any]) -> LaunchRequest:
    """The request of keywords that are named like flags, for ranks that call a function. None and False count as
    absent. Raises UsageError for a keyword that is no flag, or has another value than the flag, and for what only a
    command can do; ConfigError for values that do not fit together."""
    options = [
        option for option in command.params if isinstance(option, click.Option) and option.name not in _SAY_AND_STOP
    ]
    flags = {flag.lstrip("-").replace("-", "_"): (flag, option) for option in options for flag in option.opts}
    words: list[str] = []
    for name, value in given.items():
        if value is None or value is False:
            continue
        flag_and_option = flags.get(_HOROVOD.get(name, name))
        if flag_and_option is None:
            raise UsageError(f"{name}: not an option of omnireduce.run; `omnireduce run --help` lists them")
        words += _words(name, *flag_and_option, value)
    if len([name for name in ("np", "num_proc") if given.get(name) is not None]) > 1:
        raise UsageError("np and num_proc: expected one of them")
    try:
        asked = read_words(words, 1)
    except click.UsageError as error:
        raise UsageError(error.format_message()) from None
    if asked.launcher not in STARTED_BY_US:
        raise UsageError(f"launcher {asked.launcher}: omnireduce.run starts ranks itself; expected local or ssh")
    if asked.smallest:
        raise UsageError("min_np: ranks of a function do not come and go; start a program by omnireduce run --min-np")
    return asked


def _words(name: str, flag: str, option: click.Option, value: Any) -> Iterator[str]:
    """The words of a command line that say so. Raises UsageError."""
    if option.is_flag:
        if not isinstance(value, int):
            raise UsageError(f"{name}: got {value!r}, expected True or False")
        if value:
            yield flag
    elif option.multiple:
        if isinstance(value, Mapping):
            value = [f"{key}={setting}" for key, setting in value.items()]
        for word in [value] if isinstance(value, str) else value:
            yield from (flag, str(word))
    elif option.name == "ssh" and not isinstance(value, str):
        yield from (flag, shlex.join(value))
    elif isinstance(value, list | tuple):
        yield from (flag, *map(str, value)) if option.nargs > 1 else (flag, ",".join(map(str, value)))
    else:
        yield from (flag, str(value))
