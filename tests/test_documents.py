"""The blocks of the README and the documents: examples and commands run, options exist, settings are read."""

from __future__ import annotations

import atexit
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from functools import cache
from importlib.util import find_spec
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from click.testing import CliRunner
from forked_ranks import run_ranks
from free_ports import free_address
from local_cluster import MPIRUN, ROOT, WAIT_S, Daemon, complaints
from nursery import TORCH

import omnireduce
from benchmarks.__main__ import main as benchmarks_main
from omnireduce import Communicator
from omnireduce.__main__ import main
from omnireduce.core.wire.control import PROTOCOL_VERSION
from omnireduce.kernels.warm import make_ready, worker_kernels
from omnireduce.support.config import load_config
from omnireduce.support.files.cache import cache_folders

START = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
DOCUMENTS = [*START, *sorted((ROOT / "docs").glob("*.md")), ROOT / "deploy/README.md", ROOT / "vagrant/README.md"]
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
    "printf",
    "source",
    "systemctl",
    "umask",
    "mkdir",
    "cat",
    "ip",
    "pip",
    "python3",
    "ibv_devinfo",
    "kubectl",
    "rdma",
    "ulimit",
    "vagrant",
}
CANNOT_RUN = {  # begin of a block of shell, and why no test runs it; all others run
    "docs/pytorch.md: make torch": "six minutes; tests/pytorch/test_torch_suite.py runs some of them",
    "CONTRIBUTING.md: make install": "these are the tests themselves, and what takes minutes to hours",
    "docs/operations.md: omnireduce drain": "installs another version; tests/cluster/test_draining.py drains",
    "docs/operations.md: omnireduce end-job": "for aggregators that drain, on other hosts; see there",
    "docs/tutorial.md: ip netns add": "makes network namespaces, as root; tests/cluster/test_examples.py has two hosts",
    "docs/tutorial.md: (umask": "in these namespaces",
    "docs/tutorial.md: export": "in these namespaces",
    "docs/tutorial.md: ip netns del": "removes these namespaces",
    "docs/performance.md: make bench-quick": "benchmarks of a quarter of an hour and more, in part as root",
    "docs/performance.md: python -m benchmarks run": "benchmarks of minutes, in part as root; an older checkout",
    "docs/rdma.md: make rdma": "installs pyverbs, and starts guests for ten minutes; .ci/rdma does both",
    "docs/reliability.md: python -m tests.simulator": "minutes to half an hour; CI runs `make simulate`",
    "docs/reliability.md: python -m tests.faults": "four minutes and twice; tests/faults plays some rounds",
    "docs/security.md: cd /etc/omnireduce": "as root, where the unit of systemd runs",
    "docs/security.md: kubectl": "on a cluster with Kubernetes",
    "docs/security.md: python -m tests.attacks": "ten minutes and more; tests/attacks plays some seconds",
    "vagrant/README.md: cd vagrant": "starts virtual machines",
    "vagrant/README.md: cd /omnireduce\nrdma": "inside two virtual machines, with Soft-RoCE",
    "vagrant/README.md: cd /omnireduce\n.venv/bin/omnireduce": "inside two virtual machines",
    "vagrant/README.md: cd /omnireduce\n.venv/bin/mpirun": "inside two virtual machines; .ci/rdma does it in guests",
    "vagrant/README.md: .venv/bin/mpirun": "inside two virtual machines; .ci/rdma does it in guests",
}
SMALL = {  # sizes for blocks that give none
    "OMNIREDUCE_BENCH_ELEMENTS": "100_000",
    "OMNIREDUCE_BENCH_ROUNDS": "2",
    "OMNIREDUCE_TRAIN_STEPS": "10",
    "OMNIREDUCE_TRAIN_MAX_FILES": "20",
}
NEEDLE = ROOT / "tests/frameworks/stand_in"
STOPPED = '[ -z "$(jobs -p)" ] || { kill %1; wait %1; }'
BIN = Path(sys.executable).parent


@cache
def site() -> Path:
    """Folder of the site, which was built without a warning."""
    folder = Path(tempfile.mkdtemp(prefix="omnireduce-site-"))
    atexit.register(shutil.rmtree, folder)
    result = subprocess.run(
        [BIN / "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=4 * WAIT_S,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.slow
def test_the_page_of_the_library_has_every_public_name() -> None:
    names = set(re.findall(r'<h[34] id="omnireduce\.([\w.]+)"', (site() / "api.html").read_text()))
    methods = {name for name in vars(Communicator) if not name.startswith("_")}
    types = {"Op", "__version__"}
    missing = [name for name in omnireduce.__all__ if name not in names | types and f"Communicator.{name}" not in names]
    assert not missing, f"docs/api.md: {missing}"
    assert {f"Communicator.{name}" for name in methods if not name.startswith("_")} <= names


def test_the_tables_of_the_library_have_every_public_name() -> None:
    """And no other one; the asynchronous forms are told of together."""
    tables = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    listed = {name for cell in tables for name in re.findall(r"`(\w+)`", cell)}
    methods = {name for name in vars(Communicator) if not name.startswith("_")}
    assert listed == {name for name in {*omnireduce.__all__, *methods} - {"__version__"} if not name.endswith("_async")}


def test_the_protocol_says_its_version() -> None:
    assert f"Version {PROTOCOL_VERSION}." in (ROOT / "docs" / "protocol.md").read_text()


@pytest.mark.slow
def test_the_site_fetches_nothing() -> None:
    pages = list(site().glob("**/*.html"))
    assert {"index.html", "configuration.html", "contributing.html", "changelog.html"} <= {page.name for page in pages}
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"(?:https?:)?//[^\"]*", page.read_text())
        assert not loaded, f"{page.name}: {loaded}"


@pytest.mark.slow
def test_the_site_can_be_searched_from_the_disk() -> None:
    """There the index is a script, as a page may not read files, and so is what stands in for a worker."""
    index = json.loads((site() / "search/search_index.js").read_text().removeprefix("var __index = "))
    assert "allreduce" in {entry["title"] for entry in index["docs"]}
    assert (site() / "assets/iframe-worker.js").exists()
    assert '<script src="assets/iframe-worker.js">' in (site() / "api.html").read_text()


class Block(NamedTuple):
    document: str
    line: int
    language: str
    text: str


def blocks(language: str = "") -> list[Block]:
    results = []
    for document in DOCUMENTS:
        text = document.read_text()
        for each in FENCE.finditer(text):
            line = text.count("\n", 0, each.start()) + 1
            results.append(Block(str(document.relative_to(ROOT)), line, each[1], each[2]))
    return [block for block in results if block.language == language or not language]


def examples() -> list[Any]:
    """Blocks of Python as parameters: `make test` runs those of the README, the slow tests all others."""
    return [
        pytest.param(block, marks=() if block.document == "README.md" else pytest.mark.slow)
        for block in blocks("python")
    ]


def named(block: Block) -> str:
    return f"{block.document}:{block.line}"


def quickstart() -> Block:
    return blocks("sh")[0]


def reasons(block: Block) -> list[str]:
    """Entries of CANNOT_RUN with which the block begins; empty for a block that runs."""
    return [each for each in CANNOT_RUN if f"{block.document}: {block.text}".startswith(each)]


def commands() -> list[tuple[str, str]]:
    """Each command of the blocks of shell, with where it is; comments and what only the shell does are gone."""
    results = []
    for block in blocks("sh"):
        for at, line in enumerate(block.text.splitlines(), block.line + 1):
            for word in re.split(r"&&|;|\||&", re.sub(r"(^|\s)#.*", "", line)):
                command = re.sub(r"[<>]\s*\S+", "", word).strip(" ()")
                if command:
                    results.append((f"{block.document}:{at}", command))
    return results


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_says_its_language(document: Path) -> None:
    text = document.read_text()
    assert {fence[1] for fence in FENCE.finditer(text)} <= LANGUAGES
    outside = FENCE.sub("", text)
    assert "```" not in outside
    assert not re.search(r"\n\n    \S", outside), "a block that is only indented; fence it and say its language"


@pytest.mark.parametrize("block", examples(), ids=named)
def test_examples_run_as_they_are(daemon: Daemon, tmp_path: Path, block: Block) -> None:
    """On two ranks, with the aggregator that the document starts before it, and a cache that has kernels only."""
    if "import torch" in block.text:
        pytest.importorskip("torch", reason="no torch here; `make torch` installs it")
    if "import keras" in block.text and not (find_spec("torch") and find_spec("keras")):  # importing it needs a backend
        pytest.skip("no torch or no keras here; `make torch keras` installs them")
    if "import jax" in block.text:
        pytest.importorskip("jax", reason="no jax here; `make keras` installs it")
    paths = [str(ROOT), *([str(NEEDLE)] if "import needle" in block.text else [])]
    make_ready(worker_kernels())
    (tmp_path / "example.py").write_text(block.text)
    ranks = run_ranks(
        ["example.py"], 2, folder=tmp_path, preloaded=TORCH if "import torch" in block.text else (),
        OMNIREDUCE_CLUSTER_AGGREGATORS=",".join(daemon.addresses), OMNIREDUCE_CACHE=str(tmp_path),
        PYTHONPATH=os.pathsep.join(paths),
    )  # fmt: skip
    for rank in ranks:
        lines = [line for line in complaints(rank.err) if " has no effect: all ranks are on this host" not in line]
        assert (rank.status, lines) == (0, [])  # all on one host, where codecs have nothing to do


def make_targets() -> set[str]:
    """The targets that `make help` lists."""
    result = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {line.split()[0] for line in result.stdout.splitlines()}


def test_what_cannot_run_is_there_and_says_why() -> None:
    results = [reason for block in blocks("sh") for reason in reasons(block)]
    assert sorted(results) == sorted(CANNOT_RUN)  # each is the beginning of one block
    assert not reasons(quickstart())
    assert all(CANNOT_RUN.values())


def run_script(lines: list[str], folder: Path, **environ: str) -> str:
    """Run these lines in bash until one fails, and stop the aggregator that they started; what they print.

    Their home is the folder. They keep what they measure there, but find the kernels that are compiled."""
    caches = {"OMNIREDUCE_CACHE": str(folder), "XDG_CACHE_HOME": str(cache_folders()[-1].parent)}
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    script = ["set -e", f"trap 'status=$?; {STOPPED}; exit $status' EXIT", *lines]
    with subprocess.Popen(
        ["bash", "-c", "\n".join(script)],
        cwd=folder, env=os.environ | {"PATH": path, "HOME": str(folder)} | caches | environ,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=4 * WAIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the aggregator
            raise
    assert process.returncode == 0, f"{out}\n{err}"
    return out


def as_test_runs_it(line: str, port: str) -> str:
    """The line as a test can run it: at a port of its own, and until the aggregator is ready."""
    line = re.sub(r"(^|[\s=])((?:127\.0\.0\.1|localhost)?):7400\b", rf"\1\2:{port}", line)
    ready = r'\1 > ready & exec 3< ready; read -r said <&3; echo "$said"; [[ $said == ready* ]]'
    line = re.sub(r"^(omnireduce aggregator\b[^#&]*)&?\s*(#.*)?$", ready, line)
    return f"{STOPPED}; {line}" if line.startswith("omnireduce trace") else line  # a shard writes when a job has ended


@pytest.mark.slow
@pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")
@pytest.mark.parametrize("block", [block for block in blocks("sh")[1:] if not reasons(block)], ids=named)
def test_commands_run(daemon: Daemon, tmp_path: Path, block: Block) -> None:
    """In a folder of their own, with the aggregator that they start, or else with one that runs already."""
    starts = "omnireduce aggregator" in block.text
    address = free_address(2) if starts else ",".join(daemon.addresses)
    os.mkfifo(tmp_path / "ready")
    (tmp_path / "F").touch()  # a configuration
    (tmp_path / "train.py").write_text(blocks("python")[0].text)
    (tmp_path / "recommender.py").symlink_to(ROOT / "examples/recommender.py")
    (tmp_path / "vision.secret").symlink_to("teams/vision")  # in place of a copy on another host
    make = f'make() {{ command make -C {ROOT} -o {sys.prefix}/.ready VENV={sys.prefix} "$@"; }}'
    lines = [make, *(as_test_runs_it(line, address.rpartition(":")[2]) for line in block.text.splitlines())]
    environ = {"OMNIREDUCE_CLUSTER_AGGREGATORS": address, "PYTHONPATH": str(ROOT)}
    if starts:
        environ["OMNIREDUCE_AGGREGATOR_LISTEN"] = address
    else:
        lines.append("wait")  # for ranks in the background
    out = run_script(lines, tmp_path, **SMALL, **environ)
    assert not starts or re.search(rf"^ready \S+:{address.rpartition(':')[2]}\b", out, re.MULTILINE), out


@pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")
def test_the_quickstart_runs_as_it_is(tmp_path: Path) -> None:
    """But for what installs, which has happened. No aggregator runs, and none is configured."""
    installs = ("python3 -m venv", "source")
    assert quickstart().text.startswith(installs[0])
    lines = [line for line in quickstart().text.splitlines() if not line.startswith(installs)]
    assert [line.split("#")[0].strip() for line in lines] == ["mpirun -n 4 python train.py"]
    (tmp_path / "train.py").write_text(blocks("python")[0].text)
    expected, table = (block.text for block in blocks("text")[:2])
    assert run_script(lines, tmp_path) == expected
    bench = blocks("sh")[1].text.splitlines()
    result, shown = ([line.split() for line in text.splitlines()] for text in (run_script(bench, tmp_path), table))
    assert result[:3] == shown[:3]
    assert [row[:5] for row in result[3:]] == [row[:5] for row in shown[3:]]  # measured times differ


def test_the_tutorial_ends_with_the_example() -> None:
    last = [block.text for block in blocks("python") if block.document == "docs/tutorial.md"][-1]
    assert (ROOT / "examples/recommender.py").read_text().endswith(last)


@pytest.mark.parametrize("block", blocks("toml"), ids=named)
def test_settings_can_be_read(block: Block) -> None:
    assert tomllib.loads(block.text)


@pytest.mark.parametrize("block", blocks("yaml"), ids=named)
def test_yaml_can_be_read(block: Block) -> None:
    assert yaml.safe_load(block.text)


@pytest.mark.parametrize(("where", "command"), commands())
def test_commands_and_options_exist(where: str, command: str) -> None:
    words = list(dropwhile(re.compile(r"[A-Z_]+=").match, shlex.split(command)))
    words[:1] = [word.removeprefix(".venv/bin/") for word in words[:1]]
    if words[:1] == ["mpirun"]:
        words = [word.removeprefix(".venv/bin/") for word in words[words.index("-n") + 2 :]]
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
        assert (
            arguments[0].isupper()
            or arguments[0] in ("train.py", "recommender.py", "adam.py")
            or (ROOT / arguments[0]).exists()
        )
    else:
        assert program in PROGRAMS or (ROOT / program).is_file(), f"{where}: {command}"


def assert_options(program: tuple[str, ...], arguments: list[str]) -> None:
    """The program has that command, the command has these options, and the settings are ones."""
    result = help_of(program)
    words = iter(arguments)
    while (word := next(words, "")) and re.search(rf"^\s+{re.escape(word)}\b", commands_in(result), re.MULTILINE):
        program = (*program, word)
        result = help_of(program)
    for option in (argument for argument in arguments if argument.startswith("--")):
        assert re.search(rf"{re.escape(option.partition('=')[0])}\b", result), f"{program} has no {option}"
    settings = [value for option, value in pairwise(arguments) if option == "--set"]
    load_config(overrides=settings, environ={})


def commands_in(text: str) -> str:
    """The part of a help text about commands. `omnireduce aggregator` and others have options only: theirs is empty."""
    return text.partition("\nCommands:\n")[2]


COMMANDS = {("-m", "omnireduce"): main, ("-m", "benchmarks"): benchmarks_main}  # each saves a process


@cache
def help_of(program: tuple[str, ...]) -> str:
    if command := COMMANDS.get(program[:2]):
        return CliRunner().invoke(command, [*program[2:], "--help"], catch_exceptions=False).stdout
    command = [sys.executable, *program, "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout
