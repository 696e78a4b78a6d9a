"""The blocks of the README and the documents: examples run, commands and options exist, settings are read."""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
from functools import cache
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from local_cluster import MPIRUN, ROOT, WAIT_S, Daemon

import omnireduce
from omnireduce import Communicator
from omnireduce.config import load_config
from omnireduce.kernels.warm import warm_up_worker
from omnireduce.runtime.member.collectives import Collectives
from omnireduce.wire.control import PROTOCOL_VERSION

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "sh", "toml", "yaml", "text"}
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = {
    "cd",
    "chgrp",
    "chmod",
    "cp",
    "export",
    "kill",
    "mv",
    "openssl",
    "source",
    "systemctl",
    "umask",
    "mkdir",
    "cat",
}
BIN = Path(sys.executable).parent


@cache
def site() -> Path:
    """Where the site was built, without a warning."""
    folder = Path(tempfile.mkdtemp(prefix="omnireduce-site-"))
    atexit.register(shutil.rmtree, folder)
    done = subprocess.run(
        [BIN / "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_the_page_of_the_library_has_every_public_name() -> None:
    names = set(re.findall(r'<h[34] id="omnireduce\.([\w.]+)"', (site() / "api.html").read_text()))
    methods = {name for name in vars(Communicator) if not name.startswith("_")} | vars(Collectives).keys()
    types = {"Op", "__version__"}
    missing = [name for name in omnireduce.__all__ if name not in names | types and f"Communicator.{name}" not in names]
    assert not missing, f"docs/api.md: {missing}"
    assert {f"Communicator.{name}" for name in methods if not name.startswith("_")} <= names


def test_the_protocol_says_its_version() -> None:
    assert f"Version {PROTOCOL_VERSION}." in (ROOT / "docs" / "protocol.md").read_text()


def test_the_site_fetches_nothing() -> None:
    pages = list(site().glob("*.html"))
    assert {"index.html", "configuration.html", "contributing.html", "changelog.html"} <= {page.name for page in pages}
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"(?:https?:)?//[^\"]*", page.read_text())
        assert not loaded, f"{page.name}: {loaded}"


class Block(NamedTuple):
    document: str
    line: int
    language: str
    text: str


def blocks(language: str = "") -> list[Block]:
    found = []
    for document in DOCUMENTS:
        text = document.read_text()
        for each in FENCE.finditer(text):
            line = text.count("\n", 0, each.start()) + 1
            found.append(Block(document.name, line, each[1], each[2]))
    return [block for block in found if block.language == language or not language]


def named(block: Block) -> str:
    return f"{block.document}:{block.line}"


def commands() -> list[tuple[str, str]]:
    """Each command of the blocks of shell, with where it is; comments and what only the shell does are gone."""
    found = []
    for block in blocks("sh"):
        for at, line in enumerate(block.text.splitlines(), block.line + 1):
            for each in re.split(r"&&|;|\||&", re.sub(r"(^|\s)#.*", "", line)):
                command = re.sub(r"[<>]\s*\S+", "", each).strip(" ()")
                if command:
                    found.append((f"{block.document}:{at}", command))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_says_its_language(document: Path) -> None:
    text = document.read_text()
    assert {found[1] for found in FENCE.finditer(text)} <= LANGUAGES
    outside = FENCE.sub("", text)
    assert "```" not in outside
    assert not re.search(r"\n\n    \S", outside), "a block that is only indented; fence it and say its language"


@pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")
@pytest.mark.parametrize("block", blocks("python"), ids=named)
def test_examples_run_as_they_are(daemon: Daemon, tmp_path: Path, block: Block) -> None:
    """With the aggregator that the document starts before it, and kernels that need not be compiled."""
    warm_up_worker()
    (tmp_path / "example.py").write_text(block.text)
    done = subprocess.run(
        [str(MPIRUN), "-n", "2", sys.executable, "example.py"],
        cwd=tmp_path, env=os.environ | {"OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(daemon.addresses)},
        capture_output=True, text=True, timeout=2 * WAIT_S, check=False,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if not line.startswith("waiting for")]  # a busy machine
    assert (done.returncode, said) == (0, [])


def make_targets() -> set[str]:
    """The targets that `make help` lists."""
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines()}


@pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")
def test_the_quickstart_runs_as_it_is() -> None:
    """But for what installs, which has happened, and for the port, which another program may have."""
    block = blocks("sh")[0]
    assert block.text.startswith("make install")
    assert "omnireduce aggregator &" in block.text
    lines = [line for line in block.text.splitlines() if not line.startswith(("make", "source"))]
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    script = [*lines, "status=$?", "kill %1", "wait %1", "exit $status"]
    environ = {"OMNIREDUCE_AGGREGATOR_LISTEN": address, "OMNIREDUCE_CLUSTER_AGGREGATORS": address}
    done = subprocess.run(
        ["bash", "-m", "-c", "\n".join(script)],
        env=os.environ | environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=4 * WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"ready {address}" in done.stdout
    shown = next(block for block in blocks("text") if block.document == "README.md").text
    found, expected = ([line.split() for line in text.splitlines()] for text in (done.stdout, shown))
    assert found[1:4] == expected[:3]
    assert [row[:5] for row in found[4:]] == [row[:5] for row in expected[3:]]  # what is timed differs


@pytest.mark.parametrize("block", blocks("toml"), ids=named)
def test_settings_can_be_read(block: Block) -> None:
    assert tomllib.loads(block.text)


@pytest.mark.parametrize("block", blocks("yaml"), ids=named)
def test_yaml_can_be_read(block: Block) -> None:
    assert yaml.safe_load(block.text)


@pytest.mark.parametrize(("where", "command"), commands())
def test_commands_and_options_exist(where: str, command: str) -> None:
    words = list(dropwhile(re.compile(r"[A-Z_]+=").match, shlex.split(command)))
    if words[:2] == ["mpirun", "-n"]:
        words = words[3:]
    program, *arguments = words or ["export"]
    if program == "make":
        run = subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, check=False)
        assert run.returncode == 0
        targets = [word for word in arguments if "=" not in word and not word.startswith("-")]
        assert set(targets) <= make_targets(), "a target that `make help` does not list"
    elif program == "omnireduce":
        assert_options(("-m", "omnireduce"), arguments)
    elif program == "python" and arguments[0] == "-m":
        assert_options(("-m", arguments[1]), arguments[2:])
    elif program == "python":
        assert arguments[0].isupper() or arguments[0] == "train.py" or (ROOT / arguments[0]).exists()
    else:
        assert program in PROGRAMS, f"{where}: {command}"


def assert_options(program: tuple[str, ...], arguments: list[str]) -> None:
    """The program has that command, the command has these options, and the settings are ones."""
    found = help_of(program)
    if arguments and arguments[0][0] != "-" and re.search(rf"^\s+{re.escape(arguments[0])}\b", found, re.MULTILINE):
        found = help_of((*program, arguments[0]))
    for option in (each for each in arguments if each.startswith("--")):
        assert re.search(rf"{re.escape(option.partition('=')[0])}\b", found), f"{program} has no {option}"
    settings = [value for option, value in pairwise(arguments) if option == "--set"]
    load_config(overrides=settings, environ={})


@cache
def help_of(program: tuple[str, ...]) -> str:
    command = [sys.executable, *program, "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout
