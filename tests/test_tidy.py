"""The tree keeps its shape: import direction, purity, lengths and a few habits. The checks are in tidy_checks.py.

Two tables at the end prove that each check can fail, and that it lets pass what is allowed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tidy_checks import (
    FILE_CHECKS,
    HEAVY,
    JIT,
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    MODULE_CHECKS,
    ROOT,
    TEXT_FOLDERS,
    TEXT_NAMES,
    TEXT_SUFFIXES,
    Check,
    check_addresses,
    check_articles,
    check_direction,
    check_lengths,
    check_no_machine_path,
    check_no_marker,
    check_no_print,
    check_no_sleep,
    check_one_compiler,
    check_one_name,
    check_paths,
    check_placed,
    check_positional,
    check_pure,
    check_shown,
    check_standard_words,
    dotted,
    layer_of,
    modules,
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
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def dependencies(pyproject: str) -> list[str]:
    """The names of all dependencies, extras included."""
    project = tomllib.loads(pyproject)["project"]
    extras = project.get("optional-dependencies", {}).values()
    wanted = [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]
    return [re.split(r"[^\w.-]", requirement)[0] for requirement in wanted]


def undocumented(pyproject: str, page: str) -> list[str]:
    """Return the dependencies that `page` does not name in backquotes."""
    return [name for name in dependencies(pyproject) if f"`{name}`" not in page]


@pytest.mark.parametrize("check", MODULE_CHECKS, ids=lambda check: check.__name__)
def test_modules(check: Check) -> None:
    found = [message for module, source in modules() for message in check(module, source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("check", FILE_CHECKS, ids=lambda check: check.__name__)
def test_files(check: Check) -> None:
    found = [message for path, text in text_files() for message in check(path, text)]
    assert not found, "\n".join(found)


def test_no_test_sleeps() -> None:
    sources = [(path, text) for path, text in text_files() if path.endswith(".py")]
    found = [message for path, source in sources for message in check_no_sleep(path, source)]
    assert not found, "\n".join(found)


def test_nothing_shown_depends_on_docstrings() -> None:
    sources = [(path, text) for path, text in text_files() if path.endswith(".py")]
    found = [message for path, source in sources for message in check_shown(path, source)]
    assert not found, "\n".join(found)


def test_tests_import_each_module_by_one_name() -> None:
    sources = [(path, text) for path, text in text_files() if path.endswith(".py")]
    found = [message for path, source in sources for message in check_one_name(path.replace("/", "."), source)]
    assert not found, "\n".join(found)


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
        ("from omnireduce.aggregator import shard, monitor, daemon", (*HEAVY, "omnireduce.runtime.rank")),
    ],
)
def test_an_import_loads_no_more_than_it_needs(statement: str, names: tuple[str, ...]) -> None:
    """Standard output has the help, too; the modules are its last line."""
    assert loaded_by(statement, names) == []


@pytest.mark.integration
def test_every_module_can_be_imported_first() -> None:
    """Imports form no circle: with a bare package object nothing else has been imported before."""
    names = [name.removesuffix(".__init__") for name, _ in modules() if layer_of(name) == "base"]
    code = (
        "import importlib, sys, types\n"
        "package = types.ModuleType('omnireduce'); package.__path__ = ['omnireduce']\n"
        f"for name in {[name for name in names if name != 'omnireduce']}:\n"
        "    for each in [each for each in sys.modules if each.startswith('omnireduce')]: del sys.modules[each]\n"
        "    sys.modules['omnireduce'] = package\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
    found = [each for each in Path(__file__).parent.rglob("test_*.py") if not (each.parent / "__init__.py").exists()]
    often = [name for name, count in Counter(each.name for each in found).items() if count > 1]
    assert not often, f"several files of tests have these names: {often}"


def test_no_folder_of_tests_has_the_name_of_a_dependency() -> None:
    """`tests` is where Python looks for modules: where torch is not installed, it would find a folder of that name."""
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert folders, "no folders found"
    assert not folders & set(dependencies((ROOT / "pyproject.toml").read_text("utf-8")))


LONG_FUNCTION = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
LONG_METHOD = "class A:\n    async def f():\n" + "        pass\n" * MAX_FUNCTION_LINES
LONG_FILE = "x = 1\n" * (MAX_FILE_LINES + 1)


@pytest.mark.parametrize(
    ("check", "name", "text"),
    [
        (check_placed, "omnireduce.misc", ""),
        (check_placed, "omnireduce.misc.table", ""),
        (check_direction, "omnireduce.errors", "from omnireduce.kernels import merge"),
        (check_direction, "omnireduce.support.config.loading", "import omnireduce"),
        (check_direction, "omnireduce.kernels.pack", "from omnireduce.protocol.rank import Worker"),
        (check_direction, "omnireduce.protocol.rank", "from omnireduce.transport import base"),
        (check_direction, "omnireduce.transport.tcp", "from omnireduce import protocol"),
        (check_direction, "omnireduce.transport.tcp", "from ..protocol import worker"),
        (check_direction, "omnireduce.transport.__init__", "from ..runtime import driver"),
        (check_direction, "omnireduce.runtime.driver", "def f():\n    from omnireduce.console.bench import data"),
        (check_direction, "omnireduce.runtime.driver", "from omnireduce.runtime.rank import engine"),
        (check_direction, "omnireduce.runtime.rank.engine", "from omnireduce.runtime.shard import server"),
        (check_direction, "omnireduce.runtime.shard.job", "from omnireduce.runtime.rank.engine import Engine"),
        (check_direction, "omnireduce.runtime.tracing.aligned_traces", "from ..shard import job"),
        (check_direction, "omnireduce.runtime.rank.engine", "from omnireduce.elastic import ElasticState"),
        (check_direction, "omnireduce.elastic.loop", "import omnireduce as omni"),
        (check_direction, "omnireduce.data_parallel.session", "from omnireduce.elastic import run"),
        (check_direction, "omnireduce.compression.largest", "from omnireduce.programs import Program"),
        (check_direction, "omnireduce.__init__", "from omnireduce.torch import Reducer"),
        (check_direction, "omnireduce.torch.gradients", "from omnireduce.keras import Callback"),
        (check_direction, "omnireduce.console.bench.data", "import omnireduce.worker.cli"),
        (check_direction, "omnireduce.console.status", "from omnireduce.ray import RayExecutor"),
        (check_direction, "omnireduce.__init__", "import omnireduce.worker.cli"),
        (check_direction, "omnireduce.worker.cli", "from omnireduce.aggregator.daemon import Daemon"),
        (check_direction, "omnireduce.aggregator.cli", "if TYPE_CHECKING:\n    import omnireduce.worker"),
        (
            check_direction,
            "omnireduce.aggregator.monitor",
            "from omnireduce.runtime.rank.environment import detect_launch",
        ),
        (check_direction, "omnireduce.aggregator.monitor", "from omnireduce import allreduce"),
        (check_direction, "omnireduce.worker.cli", "def f():\n    import omnireduce.runtime.shard.server"),
        (
            check_direction,
            "omnireduce.runtime.aggregator_client",
            "from omnireduce.runtime.rank.arguments import whole",
        ),
        (check_one_name, "omnireduce.__main__", "from aggregator.cli import main"),
        (check_one_name, "omnireduce.worker.cli", "def f():\n    import worker.train"),
        (check_one_compiler, "omnireduce.kernels.pack", "from numba import njit"),
        (check_one_compiler, "omnireduce.worker.train", "import numba.typed"),
        (check_pure, "omnireduce.protocol.rank", "import time"),
        (check_pure, "omnireduce.protocol.rank", "from os.path import join"),
        (check_pure, "omnireduce.protocol.collective.rows", "import sys"),
        (check_pure, "omnireduce.protocol.collective.rows", "import requests"),
        (check_pure, "omnireduce.protocol.collective.rows", "from omnireduce.support.files import tensors"),
        (check_pure, "omnireduce.protocol.collective.rows", "from omnireduce.support.secret import load_secrets"),
        (check_pure, "omnireduce.protocol.collective.rows", "import omnireduce.support.teams"),
        (check_pure, "omnireduce.protocol.collective.rows", "from omnireduce.support.config import load_config"),
        (check_pure, "omnireduce.protocol.collective.rows", "from omnireduce import logs"),
        (check_pure, "omnireduce.protocol.collective.rows", "def f():\n    return open('x')"),
        (check_pure, "omnireduce.protocol.collective.rows", "import numpy as np\nx = np.load('x')"),
        (check_pure, "omnireduce.protocol.collective.rows", "from numpy import memmap"),
        (check_pure, "omnireduce.protocol.collective.rows", "def f(x):\n    x.tofile('x')"),
        (check_pure, "omnireduce.protocol.collective.rows", "import numpy as np\nx = np.random.default_rng()"),
        (check_pure, "omnireduce.protocol.shard", "def f():\n    from socket import socket"),
        (check_lengths, "omnireduce.worker.cli", LONG_FUNCTION),
        (check_lengths, "omnireduce.worker.cli", LONG_METHOD),
        (check_lengths, "omnireduce.worker.cli", LONG_FILE),
        (check_positional, "omnireduce.worker.cli", "admit_indices(a, b, c, d, e, f, g)"),
        (check_positional, "omnireduce.worker.cli", "merge.admit_indices(a, b, c, *d)"),
        (check_positional, "omnireduce.worker.cli", "SyntheticCase(1, 2, 3, 4, 5, 6, 7)"),
        (check_positional, "omnireduce.worker.cli", "Monitor(1, 2, 3, 4, 5, 6, 7)"),
        (check_standard_words, "omnireduce.protocol.rank", "class Patience: ..."),
        (check_no_print, "omnireduce.console.bench.cases", "def f(x):\n    print(x)"),
        (check_paths, "omnireduce.worker.cli", "os.path.abspath(name)"),
        (check_paths, "omnireduce.support.files.output", "Path(name).expanduser()"),
        (check_articles, "omnireduce.core.dtypes", 'f"{x} is a {' + 'type(x).__name__}"'),
        (check_addresses, "omnireduce.transport.tcp", "socket.create_server(('', 0))"),
        (check_shown, "tools/x.py", "ArgumentParser(description=__doc__)"),
        (check_shown, "tools/x.py", "print(main.__doc__)"),
        (check_shown, "benchmarks/x.py", "@main.command('x')\n@A\ndef f(x):\n    'Help.'"),
        (check_no_sleep, "tests/test_x.py", "import time\ntime.sleep(1)"),
        (check_no_sleep, "tests/test_x.py", "from time import sleep"),
        (check_no_marker, "docs/x.md", "text\nTO" + "DO: more"),
        (check_no_marker, "x.py", "# FIX" + "ME(me)"),
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
        (check_placed, "omnireduce.__init__", ""),
        (check_placed, "omnireduce.runtime.clock", ""),
        (check_direction, "omnireduce.__init__", "from omnireduce.runtime.rank.communicator import init"),
        (
            check_direction,
            "omnireduce.runtime.driver",
            "from ..transport import shm, tcp\nfrom ..core import x",
        ),
        (check_direction, "omnireduce.core.wire", "from omnireduce.errors import ProtocolError\nimport struct"),
        (
            check_direction,
            "omnireduce.worker.train.run",
            "import omnireduce as omni\nfrom omnireduce.console.bench import data",
        ),
        (check_direction, "omnireduce.elastic.loop", "from omnireduce.runtime.rank.communicator import Communicator"),
        (check_direction, "omnireduce.__init__", "from omnireduce.elastic import run_elastic"),
        (
            check_direction,
            "omnireduce.torch.gradients",
            "import omnireduce as omni\nfrom omnireduce.compression import x",
        ),
        (check_direction, "omnireduce.worker.train.run", "from omnireduce.worker import cli"),
        (check_direction, "omnireduce.worker.train.run", "from omnireduce.elastic import run_elastic"),
        (check_direction, "omnireduce.aggregator.shard", "from omnireduce.runtime.shard import server"),
        (check_direction, "omnireduce.aggregator.monitor", "from omnireduce.runtime import aggregator_client"),
        (
            check_direction,
            "omnireduce.__main__",
            "from omnireduce.aggregator.cli import main\nimport omnireduce.worker.cli",
        ),
        (
            check_direction,
            "omnireduce.runtime.shard.traced",
            "from omnireduce.runtime.tracing import links",
        ),
        (check_one_name, "omnireduce.__main__", "from omnireduce.aggregator.cli import main\nimport aggregators"),
        (check_one_compiler, JIT, "import numba"),
        (check_pure, "omnireduce.protocol.rank", "import re\nfrom omnireduce.kernels import merge"),
        (
            check_pure,
            "omnireduce.protocol.joining.authentication",
            "from omnireduce.support.secret import Secret\nunion.open(x)",
        ),
        (check_pure, "omnireduce.runtime.clock", "import time\nopen('x')"),
        (check_lengths, "omnireduce.worker.cli", LONG_FUNCTION.removesuffix("    pass\n")),
        (check_positional, "omnireduce.worker.cli", "admit_indices(a, b, c, d, e, f, own=g)"),
        (check_positional, "omnireduce.worker.cli", "admit_indices(a, b, c, *d, own=g)"),
        (check_positional, "omnireduce.worker.cli", "struct.pack_into(1, 2, 3, 4, 5, 6, 7)"),
        (check_no_print, "omnireduce.worker.cli", "print(1)"),
        (check_paths, "omnireduce.support.files.paths", "Path.cwd()"),
        (check_articles, "omnireduce.core.dtypes", 'f"{x} is {a_type(x)}, a {kind} of it"'),
        (check_addresses, "omnireduce.support.addresses", "socket.getaddrinfo(host, 1)"),
        (check_addresses, "omnireduce.transport.shm", "socket.socket(socket.AF_UNIX)"),
        (check_shown, "x.py", "@click.group(help='Help.')\ndef f():\n    'More.'"),
        (check_shown, "x.py", "@A.x()\ndef f():\n    'Not shown.'"),
        (check_no_sleep, "benchmarks/x.py", "time.sleep(1)"),
        (check_no_marker, "x.py", "todo = XXXL = 1"),
        (check_no_machine_path, "x.md", "GET https://example.org/home/x, team/work/x, /tmp/x, ~/work/x"),
    ],
)
def test_what_is_allowed_passes(check: Check, name: str, text: str) -> None:
    assert check(name, text) == []
