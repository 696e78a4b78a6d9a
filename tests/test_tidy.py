"""The tree keeps its shape: layers, purity and a few habits. The checks are in tidy_checks.py, the layers in
pyproject.toml.

Two tables at the end prove that each check can fail, and that it lets pass what is allowed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from tidy_checks import (
    FILE_CHECKS,
    HEAVY,
    MODULE_CHECKS,
    NAMES_OF_OTHERS,
    ROOT,
    TEXT_FOLDERS,
    TEXT_NAMES,
    TEXT_SUFFIXES,
    Check,
    check_articles,
    check_no_machine_path,
    check_paths,
    check_pure,
    check_quoted_names,
    check_shown,
    check_standard_words,
    dotted,
    modules,
    names_of_code,
)


def text_files() -> Iterator[tuple[str, str]]:
    paths = [ROOT / ".ci" / "run", *ROOT.glob("*")]
    for folder in TEXT_FOLDERS:
        paths += [path for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    for path in sorted(paths):
        if path.is_file() and (path.suffix in TEXT_SUFFIXES or path.name in TEXT_NAMES):
            yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")


def loaded_by(statement: str, names: tuple[str, ...]) -> list[str]:
    """Return which of `names`, or parts of them, a fresh interpreter has imported after `statement`."""
    code = (
        f"{statement}\nimport sys\nprint(*(each for each in sys.modules if f'{{each}}.'.startswith({dotted(names)})))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1].split()


def dependencies(pyproject: str) -> list[str]:
    """The names of all dependencies, extras included."""
    project = tomllib.loads(pyproject)["project"]
    extras = project.get("optional-dependencies", {}).values()
    required = [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]
    return [re.split(r"[^\w.-]", requirement)[0] for requirement in required]


def undocumented(pyproject: str, page: str) -> list[str]:
    """Return the dependencies that `page` does not name in backquotes."""
    return [name for name in dependencies(pyproject) if f"`{name}`" not in page]


@pytest.mark.integration  # starts import-linter
def test_imports_keep_the_contracts() -> None:
    """The contracts of import-linter, in pyproject.toml. `make lint` shows the same."""
    pytest.importorskip("importlinter")
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_page_shows_the_layers() -> None:
    pytest.importorskip("grimp")
    layers, advice = import_module("tools.layers"), "run `python tools/layers.py`"
    page = layers.PAGE.read_text("utf-8")
    assert layers.page(page) == page, f"{layers.PAGE}: {advice}"
    assert layers.picture() == layers.PICTURE.read_text("utf-8"), f"{layers.PICTURE}: {advice}"


@pytest.mark.parametrize("check", MODULE_CHECKS, ids=lambda check: check.__name__)
def test_modules(check: Check) -> None:
    messages = [message for module, source in modules() for message in check(module, source)]
    assert not messages, "\n".join(messages)


@pytest.mark.parametrize("check", FILE_CHECKS, ids=lambda check: check.__name__)
def test_files(check: Check) -> None:
    messages = [message for path, text in text_files() for message in check(path, text)]
    assert not messages, "\n".join(messages)


def test_names_in_docstrings_and_comments_are_names_of_the_code() -> None:
    sources = {path: text for path, text in text_files() if path.endswith((".py", ".toml"))}
    sources |= {path.name: path.read_text("utf-8") for path in (ROOT / "omnireduce").rglob("*.jinja")}
    names = names_of_code(sources.values()) | NAMES_OF_OTHERS
    product = [path for path in sources if path.startswith(("omnireduce/", "aggregator/", "worker/", "benchmarks/"))]
    violations = [message for path in product for message in check_quoted_names(path, sources[path], names)]
    assert not violations, "\n".join(violations)


def test_the_check_of_names_sees_one_that_is_gone() -> None:
    source = 'def seal(slot):\n    """Close `slot` after `pack`, see `Slot.seal`."""  # `rank`'
    names = names_of_code([source])
    assert names == {"def", "seal", "slot"}
    messages = check_quoted_names("x.py", source, names)
    assert [message.split("`")[1] for message in messages] == ["pack", "Slot.seal", "rank"]
    assert check_quoted_names("x.py", source, names | {"pack", "Slot", "rank"}) == []


def test_nothing_shown_depends_on_docstrings() -> None:
    sources = [(path, text) for path, text in text_files() if path.endswith(".py")]
    messages = [message for path, source in sources for message in check_shown(path, source)]
    assert not messages, "\n".join(messages)


def test_the_walk_sees_the_tree() -> None:
    names = {name for name, _ in modules()}
    assert {"omnireduce.errors", "omnireduce.aggregator.cli", "omnireduce.worker.cli"} <= names
    paths = {path for path, _ in text_files()}
    assert {"Makefile", ".ci/run", "pyproject.toml", "tests/test_tidy.py", "CONTRIBUTING.md"} <= paths


@pytest.mark.integration
@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("import omnireduce", (*HEAVY, "numba", "numpy")),
        ("import omnireduce as omni; omni.allreduce", HEAVY),
        ("from omnireduce import data_parallel", (*HEAVY, "numba", "numpy")),
        ("from omnireduce.data_parallel import *", HEAVY),
        ("import omnireduce.needle", HEAVY),
        ("import omnireduce.support.cli", (*HEAVY, "numba")),
        ("from omnireduce.__main__ import main\nmain(['--help'], standalone_mode=False)", (*HEAVY, "numba")),
        ("import omnireduce.runtime.shard.server", (*HEAVY, "omnireduce.runtime.rank")),
        ("from omnireduce.aggregator import shard, http_monitor, daemon", (*HEAVY, "omnireduce.runtime.rank")),
    ],
)
def test_an_import_loads_no_more_than_it_needs(statement: str, names: tuple[str, ...]) -> None:
    """Standard output has the help, too; the modules are its last line."""
    assert loaded_by(statement, names) == []


@pytest.mark.integration
def test_the_light_import_check_sees_an_import() -> None:
    assert loaded_by("import colorsys, xml.dom", ("colorsys", "torch")) == ["colorsys"]
    assert "xml.dom" in loaded_by("import xml.dom", ("xml",))
    assert loaded_by("import xmlrpc", ("xml",)) == []


def test_every_dependency_has_its_reason() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text("utf-8")
    missing = undocumented((ROOT / "pyproject.toml").read_text("utf-8"), page)
    assert not missing, f"docs/dependencies.md gives no reason for {missing}"


def test_the_dependency_check_sees_a_gap() -> None:
    pyproject = '[project]\ndependencies = ["a>=1", "b-c"]\n[project.optional-dependencies]\nx = ["d[e]>2"]\n'
    assert undocumented(pyproject, "`a` because. b-c is not marked.") == ["b-c", "d"]


def test_every_event_of_the_log_is_explained() -> None:
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    events = {event for _, source in modules() for event in re.findall(r'tagged\(\s*"(\w+)"', source)}
    assert {"ready", "waiting_for_ranks"} <= events
    missing = sorted(event for event in events if f"`{event}`" not in page)
    assert not missing, f"{missing}: expected a line in docs/operations.md"


def test_files_of_tests_have_names_of_their_own() -> None:
    """Else pytest takes one of them for the other, unless its folder is a package."""
    results = [path for path in Path(__file__).parent.rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    often = [name for name, count in Counter(result.name for result in results).items() if count > 1]
    assert not often, f"several files of tests have these names: {often}"


def test_no_folder_of_tests_has_the_name_of_a_dependency() -> None:
    """`tests` is where Python looks for modules: where torch is not installed, it would find a folder of that name."""
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert folders, "no folders found"
    assert not folders & set(dependencies((ROOT / "pyproject.toml").read_text("utf-8")))


@pytest.mark.parametrize(
    ("check", "name", "text"),
    [
        (check_pure, "omnireduce.protocol.rank", "import time"),
        (check_pure, "omnireduce.protocol.rank", "from os.path import join"),
        (check_pure, "omnireduce.protocol.collective.stream", "import sys"),
        (check_pure, "omnireduce.protocol.collective.stream", "import requests"),
        (check_pure, "omnireduce.protocol.collective.stream", "from omnireduce.support.files import tensors"),
        (check_pure, "omnireduce.protocol.collective.stream", "from omnireduce.support.secret import load_secrets"),
        (check_pure, "omnireduce.protocol.collective.stream", "import omnireduce.support.teams"),
        (check_pure, "omnireduce.protocol.collective.stream", "from omnireduce.support.config import load_config"),
        (check_pure, "omnireduce.protocol.collective.stream", "from omnireduce import logs"),
        (check_pure, "omnireduce.protocol.collective.stream", "def f():\n    return open('x')"),
        (check_pure, "omnireduce.protocol.collective.stream", "import numpy as np\nx = np.load('x')"),
        (check_pure, "omnireduce.protocol.collective.stream", "from numpy import memmap"),
        (check_pure, "omnireduce.protocol.collective.stream", "def f(x):\n    x.tofile('x')"),
        (check_pure, "omnireduce.protocol.collective.stream", "import numpy as np\nx = np.random.default_rng()"),
        (check_pure, "omnireduce.protocol.shard", "def f():\n    from socket import socket"),
        (check_standard_words, "omnireduce/protocol/rank.py", "class Patience: ..."),
        (check_standard_words, "tests/x.py", "    class _Way(Base):"),
        (check_paths, "omnireduce.worker.cli", "os.path.abspath(name)"),
        (check_paths, "omnireduce.support.files.output", "Path(name).expanduser()"),
        (check_articles, "omnireduce.core.dtypes", 'f"{x} is a {' + 'type(x).__name__}"'),
        (check_shown, "tools/x.py", "ArgumentParser(description=__doc__)"),
        (check_shown, "tools/x.py", "print(main.__doc__)"),
        (check_shown, "benchmarks/x.py", "import click\n@main.command('x')\n@A\ndef f(x):\n    'Help.'"),
        (check_no_machine_path, "docs/x.md", "see /" + "home/ann/x"),
        (check_no_machine_path, "x.py", "open('/" + "root/x')"),
        (check_no_machine_path, "x.py", "open('C" + ":\\Users')"),
    ],
)
def test_a_violation_is_seen(check: Check, name: str, text: str) -> None:
    assert len(check(name, text)) == 1


@pytest.mark.parametrize(
    ("check", "name", "text"),
    [
        (check_pure, "omnireduce.protocol.rank", "import re\nfrom omnireduce.kernels import merge_indices"),
        (
            check_pure,
            "omnireduce.protocol.joining.authentication",
            "from omnireduce.support.secret import Secret\nunion.open(x)",
        ),
        (check_pure, "omnireduce.runtime.clock", "import time\nopen('x')"),
        (check_paths, "omnireduce.support.files.paths", "Path.cwd()"),
        (check_articles, "omnireduce.core.dtypes", 'f"{x} is {a_type(x)}, a {kind} of it"'),
        (check_shown, "x.py", "@click.group(help='Help.')\ndef f():\n    'More.'"),
        (check_shown, "x.py", "@A.x()\ndef f():\n    'Not shown.'"),
        (check_no_machine_path, "x.md", "GET https://example.org/home/x, team/work/x, /tmp/x, ~/work/x"),
    ],
)
def test_what_is_allowed_passes(check: Check, name: str, text: str) -> None:
    assert check(name, text) == []
