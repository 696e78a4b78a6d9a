"""Errors and options of the configuration in every command line of the project."""

from __future__ import annotations

import signal
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner, Result
from local_cluster import WAIT_S

from omnireduce.errors import AbortedError, ConfigError, UsageError
from omnireduce.support.cli import Command, Group, config_options, reporting_errors
from omnireduce.support.config import load_config


@click.group(cls=Group)
def program() -> None:
    pass


@program.command()
@config_options
def show(config_file: str | None, overrides: tuple[str, ...]) -> None:
    config = load_config(config_file, overrides=overrides, environ={})
    click.echo(f"{config.transport.kind} {config.protocol.slots}")


@program.command()
@click.argument("name")
def fail(name: str) -> None:
    raise {
        "config": ConfigError("x.toml: protocol.slots: got 1"),
        "usage": UsageError("two\nlines"),
        "aborted": AbortedError("rank 1 (host a, pid 7)", "died"),
        "empty": UsageError(),
        "memory": MemoryError("Unable to allocate 4.00 TiB"),
        "interrupt": KeyboardInterrupt(),
        "bug": ZeroDivisionError(),
    }[name]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(program, arguments)


def test_options_reach_the_configuration() -> None:
    assert run("show").output == "auto 3\n"
    assert run("show", "--set", "transport.kind=tcp", "--set", "protocol.slots=8").output == "tcp 8\n"


def test_help_names_the_options() -> None:
    text = run("show", "--help").output
    assert "--config FILE" in text
    assert "--set SECTION.KEY=VALUE" in text


def test_missing_file_is_one_line_and_status_2() -> None:
    result = run("show", "--config", "none.toml")
    assert result.exit_code == 2
    assert result.stderr == "Error: none.toml: no such file, expected a TOML file\n"


@pytest.mark.parametrize(
    ("name", "status", "line"),
    [
        ("config", 2, "Error: x.toml: protocol.slots: got 1"),
        ("usage", 2, "Error: two lines"),
        ("aborted", 1, "Error: rank 1 (host a, pid 7): died"),
        ("empty", 2, "Error: UsageError"),
        ("memory", 1, "Error: too little memory: Unable to allocate 4.00 TiB"),
        ("interrupt", 130, "Interrupted"),
    ],
)
def test_errors_are_one_line_and_a_status(name: str, status: int, line: str) -> None:
    result = run("fail", name)
    assert (result.exit_code, result.stderr, result.stdout) == (status, line + "\n", "")


def test_a_bug_keeps_its_traceback() -> None:
    assert isinstance(run("fail", "bug").exception, ZeroDivisionError)


def test_a_command_alone_and_a_plain_block_report_too() -> None:
    @click.command(cls=Command)
    def alone() -> None:
        raise ConfigError("wrong")

    assert CliRunner().invoke(alone).exit_code == 2
    with pytest.raises(SystemExit) as caught, reporting_errors():
        raise UsageError("wrong")
    assert caught.value.code == 2


@pytest.mark.parametrize("module", ["omnireduce", "omnireduce.aggregator", "omnireduce.worker"])
def test_ctrl_c_shows_no_traceback_while_a_program_is_imported(module: str) -> None:
    source = (
        "import os, runpy, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'click': os.write(1, b'imports\\n'), signal.pause()\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"runpy.run_module({module!r}, run_name='__main__')"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"imports\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors) == (-signal.SIGINT, b"")


def test_ctrl_c_on_a_real_process() -> None:
    source = (
        "import click, sys, omnireduce.support.cli as cli\n"
        "@click.command(cls=cli.Command)\n"
        "def main():\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
        "main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "Interrupted\n")
