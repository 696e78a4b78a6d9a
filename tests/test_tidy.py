"""The tree keeps its shape: import direction, purity, lengths and a few habits.

A check takes a module's name or a file's path and its text, and returns one message per violation. Two tables
at the end prove that each check can fail, and that it lets pass what is allowed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("omnireduce", "aggregator", "worker")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".sh", ".yml", ".yaml", ".service", ".sbatch"}
TEXT_NAMES = {"Makefile", "Vagrantfile", "Containerfile", "run"}
TEXT_FOLDERS = (*PACKAGES, "tests", "examples", "benchmarks", "configs", "docs", "tools", "vagrant", "deploy")

LIBRARY = ("compression", "programs", "elastic", "data_parallel")  # what users call, on top of a communicator
FRONTS = ("torch", "keras", "bench", "console")
ROOMS = ("kernels", "protocol", "transport", "runtime", *LIBRARY, *FRONTS)  # of `omnireduce`, beside the base
# A module may import from its own layer and all lower levels. Layers on one level do not know each other.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("base",),
    ("kernels",),
    ("protocol", "transport"),
    ("runtime",),
    ("tracing",),
    ("member", "shard"),
    LIBRARY,
    ("face",),
    FRONTS,
    ("aggregator", "worker"),
    ("program",),
)
STRANGE = {  # a program on one side knows nothing of the other side's rooms
    "aggregator": ("member", *LIBRARY, "face"),
    "worker": ("shard",),
}
BASE = {
    "cli",
    "config",
    "descriptor",
    "dtypes",
    "errors",
    "files",
    "layout",
    "logs",
    "printing",
    "progress",
    "secret",
    "status",
    "teams",
    "version",
    "wire",
}
PURE = {  # what a protocol machine may import, beside our own lower layers
    *("__future__", "collections", "dataclasses", "enum", "hashlib", "hmac", "itertools", "re", "types", "typing"),
    *("msgspec", "numpy"),
}
JIT = "omnireduce.kernels.jit"
HEAVY = ("mpi4py", "pyverbs", "torch")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MARKERS = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b")
MACHINE_PATHS = re.compile(r"(?<![\w.~<>{}-])/(?:home|root|Users|work)/\w|\b[A-Z]:\\Users")


def layer_of(name: str) -> str | None:
    """Return the layer of a dotted module or object name; None if it is not ours.

    The package `omnireduce` itself, from which users import, and the names that it exports are the face.
    """
    package, _, rest = name.partition(".")
    if package != "omnireduce":
        return package if package in PACKAGES else None
    part, _, within = rest.partition(".")
    if part == "runtime" and (room := within.partition(".")[0]) in ("member", "shard", "tracing"):
        return room
    if part == "__main__":
        return "program"
    if part in BASE:
        return "base"
    return part if part in ROOMS else "face"


def level_of(layer: str) -> int:
    return next(level for level, layers in enumerate(LEVELS) if layer in layers)


def imports(module: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield line and absolute dotted name of all that a module imports, those inside functions included.

    `from a.b import c` yields `a.b.c`, whether `c` is a module or an object. A package is `a.__init__`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            prefix = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


def check_placed(module: str, source: str) -> list[str]:
    if layer_of(module) != "face" or module == "omnireduce.__init__":
        return []
    return [f"{module}: belongs to no layer; put it into one, or name it in BASE here"]


def check_direction(module: str, source: str) -> list[str]:
    layer = layer_of(module)
    assert layer is not None
    found = []
    for line, name in imports(module, source):
        target = layer_of(name)
        if target not in (None, layer) and level_of(target) >= level_of(layer):
            found.append(f"{module}:{line}: {layer} may not import {name} ({target}); imports only go down")
        elif target in STRANGE.get(layer, ()):
            found.append(f"{module}:{line}: {layer} may not import {name}; what both sides use belongs into runtime/")
    return found


def check_kernels(module: str, source: str) -> list[str]:
    """Numba's cache of a function does not see an edit of a jitted function that it calls in another file."""
    if layer_of(module) != "kernels" or module == JIT:
        return []
    names = list(imports(module, source))
    if not any(name == JIT or name.startswith(JIT + ".") for _, name in names):
        return []  # defines no jitted function itself
    return [
        f"{module}:{line}: a file of jitted functions imports {JIT} and base only, not {name}"
        for line, name in names
        if layer_of(name) == "kernels" and not f"{name}.".startswith(JIT + ".")
    ]


def check_one_compiler(module: str, source: str) -> list[str]:
    return [
        f"{module}:{line}: import {name} only in {JIT}, where the JIT can be turned off"
        for line, name in imports(module, source)
        if name.partition(".")[0] == "numba" and module != JIT
    ]


def check_pure(module: str, source: str) -> list[str]:
    if layer_of(module) != "protocol":
        return []
    return [
        f"{module}:{line}: a protocol machine does no I/O and reads no clock, so it may not import {name}"
        for line, name in imports(module, source)
        if name.partition(".")[0] not in PURE | set(PACKAGES)
    ]


def check_lengths(module: str, source: str) -> list[str]:
    lines = len(source.splitlines())
    found = [f"{module}: {lines} lines, at most {MAX_FILE_LINES}: split it"] if lines > MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                limit = f"at most {MAX_FUNCTION_LINES}: split it"
                found.append(f"{module}:{node.lineno}: {node.name} has {length} lines, {limit}")
    return found


def check_no_print(module: str, source: str) -> list[str]:
    if not module.startswith("omnireduce."):
        return []
    return [
        f"{module}:{node.lineno}: a library does not print; return the text or log it"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def check_no_sleep(path: str, source: str) -> list[str]:
    if not path.startswith("tests/"):
        return []
    nodes = ast.walk(ast.parse(source))
    uses = [node.lineno for node in nodes if isinstance(node, ast.Attribute) and node.attr == "sleep"]
    uses += [line for line, name in imports("tests", source) if name.endswith(".sleep")]
    return [f"{path}:{line}: wait for what you need, with a bound; a test never sleeps" for line in uses]


def check_no_marker(path: str, text: str) -> list[str]:
    return [f"{path}:{line}: do it, or open an issue: {found}" for line, found in matches(MARKERS, text)]


def check_no_machine_path(path: str, text: str) -> list[str]:
    why = "this path exists on one machine only"
    return [f"{path}:{line}: {why}: {found}" for line, found in matches(MACHINE_PATHS, text)]


def matches(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if pattern.search(line):
            yield number, line.strip()


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


def dotted(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name}." for name in names)


def undocumented(pyproject: str, page: str) -> list[str]:
    """Return the dependencies, extras included, that `page` does not name in backquotes."""
    project = tomllib.loads(pyproject)["project"]
    extras = project.get("optional-dependencies", {}).values()
    wanted = [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]
    names = [re.split(r"[^\w.-]", requirement)[0] for requirement in wanted]
    return [name for name in names if f"`{name}`" not in page]


Check = Callable[[str, str], list[str]]
MODULE_CHECKS: tuple[Check, ...] = (
    check_placed,
    check_direction,
    check_kernels,
    check_one_compiler,
    check_pure,
    check_lengths,
    check_no_print,
)
FILE_CHECKS: tuple[Check, ...] = (check_no_marker, check_no_machine_path)


def modules() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts), path.read_text("utf-8")


def text_files() -> Iterator[tuple[str, str]]:
    paths = [ROOT / ".ci" / "run", *ROOT.glob("*")]
    for folder in TEXT_FOLDERS:
        paths += [path for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    for path in sorted(paths):
        if path.is_file() and (path.suffix in TEXT_SUFFIXES or path.name in TEXT_NAMES):
            yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")


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


def test_the_walk_sees_the_tree() -> None:
    names = {name for name, _ in modules()}
    assert {"omnireduce.errors", "aggregator.cli", "worker.cli"} <= names
    paths = {path for path, _ in text_files()}
    assert {"Makefile", ".ci/run", "pyproject.toml", "tests/test_tidy.py", "CONTRIBUTING.md"} <= paths


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("import omnireduce", (*HEAVY, "numba", "numpy")),
        ("import omnireduce as omni; omni.allreduce", HEAVY),
        ("import omnireduce.cli", (*HEAVY, "numba")),
        ("from omnireduce.__main__ import main\nmain(['--help'], standalone_mode=False)", (*HEAVY, "numba")),
        ("import omnireduce.runtime.shard.server", (*HEAVY, "omnireduce.runtime.member")),
        ("import aggregator.shard, aggregator.monitor, aggregator.daemon", (*HEAVY, "omnireduce.runtime.member")),
    ],
)
def test_an_import_loads_no_more_than_it_needs(statement: str, names: tuple[str, ...]) -> None:
    """Standard output has the help, too; the modules are its last line."""
    assert loaded_by(statement, names) == []


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


LONG_FUNCTION = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
LONG_METHOD = "class A:\n    async def f():\n" + "        pass\n" * MAX_FUNCTION_LINES
LONG_FILE = "x = 1\n" * (MAX_FILE_LINES + 1)


@pytest.mark.parametrize(
    ("check", "name", "text"),
    [
        (check_placed, "omnireduce.misc", ""),
        (check_placed, "omnireduce.misc.table", ""),
        (check_direction, "omnireduce.errors", "from omnireduce.kernels import merge"),
        (check_direction, "omnireduce.config.loading", "import omnireduce"),
        (check_direction, "omnireduce.kernels.pack", "from omnireduce.protocol.worker import Worker"),
        (check_direction, "omnireduce.protocol.worker", "from omnireduce.transport import base"),
        (check_direction, "omnireduce.transport.tcp", "from omnireduce import protocol"),
        (check_direction, "omnireduce.transport.tcp", "from ..protocol import worker"),
        (check_direction, "omnireduce.transport.__init__", "from ..runtime import driver"),
        (check_direction, "omnireduce.runtime.driver", "def f():\n    from omnireduce.bench import data"),
        (check_direction, "omnireduce.runtime.driver", "from omnireduce.runtime.member import engine"),
        (check_direction, "omnireduce.runtime.member.engine", "from omnireduce.runtime.shard import server"),
        (check_direction, "omnireduce.runtime.shard.job", "from omnireduce.runtime.member.engine import Engine"),
        (check_direction, "omnireduce.runtime.tracing.links", "from ..shard import job"),
        (check_direction, "omnireduce.runtime.member.engine", "from omnireduce.elastic import ElasticState"),
        (check_direction, "omnireduce.elastic", "import omnireduce as omni"),
        (check_direction, "omnireduce.compression.largest", "from omnireduce.programs import Program"),
        (check_direction, "omnireduce.__init__", "from omnireduce.torch import Reducer"),
        (check_direction, "omnireduce.torch.hooks", "from omnireduce.keras import Callback"),
        (check_direction, "omnireduce.bench.data", "import worker.cli"),
        (check_direction, "omnireduce.console.status", "from omnireduce.bench.rows import Row"),
        (check_direction, "omnireduce.__init__", "import worker.cli"),
        (check_direction, "worker.cli", "from aggregator.daemon import Daemon"),
        (check_direction, "aggregator.cli", "if TYPE_CHECKING:\n    import worker"),
        (check_direction, "aggregator.monitor", "from omnireduce.runtime.member.launcher import detect_launch"),
        (check_direction, "aggregator.monitor", "from omnireduce import allreduce"),
        (check_direction, "worker.cli", "def f():\n    import omnireduce.runtime.shard.server"),
        (check_direction, "omnireduce.runtime.asking.observe", "from omnireduce.runtime.member.numbers import whole"),
        (check_kernels, "omnireduce.kernels.pack", f"from {JIT} import jit\nfrom .density import scan"),
        (check_kernels, "omnireduce.kernels.pack", "from .jit import jit\nimport omnireduce.kernels.merge"),
        (check_one_compiler, "omnireduce.kernels.pack", "from numba import njit"),
        (check_one_compiler, "worker.train", "import numba.typed"),
        (check_pure, "omnireduce.protocol.worker", "import time"),
        (check_pure, "omnireduce.protocol.worker", "from os.path import join"),
        (check_pure, "omnireduce.protocol.rows", "import sys"),
        (check_pure, "omnireduce.protocol.rows", "import requests"),
        (check_pure, "omnireduce.protocol.aggregator", "def f():\n    from socket import socket"),
        (check_lengths, "worker.cli", LONG_FUNCTION),
        (check_lengths, "worker.cli", LONG_METHOD),
        (check_lengths, "worker.cli", LONG_FILE),
        (check_no_print, "omnireduce.bench.rows", "def f(x):\n    print(x)"),
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
        (check_direction, "omnireduce.__init__", "from omnireduce.runtime.member.communicator import init"),
        (
            check_direction,
            "omnireduce.runtime.driver",
            "from ..transport import shm, tcp\nfrom ..wire import x",
        ),
        (check_direction, "omnireduce.wire", "from omnireduce.errors import ProtocolError\nimport struct"),
        (check_direction, "worker.train.run", "import omnireduce as omni\nfrom omnireduce.bench import data"),
        (check_direction, "omnireduce.elastic", "from omnireduce.runtime.member.communicator import Communicator"),
        (check_direction, "omnireduce.__init__", "from omnireduce.elastic import run_elastic"),
        (check_direction, "omnireduce.torch.hooks", "import omnireduce as omni\nfrom omnireduce.compression import x"),
        (check_direction, "worker.train.run", "from worker import cli"),
        (check_direction, "worker.train.run", "from omnireduce.elastic import run_elastic"),
        (check_direction, "aggregator.shard", "from omnireduce.runtime.shard import server"),
        (check_direction, "aggregator.monitor", "from omnireduce.runtime.asking import observe"),
        (check_direction, "omnireduce.__main__", "from aggregator.cli import main\nimport worker.cli"),
        (
            check_direction,
            "omnireduce.runtime.shard.traced",
            "from omnireduce.runtime.tracing import links",
        ),
        (check_kernels, "omnireduce.kernels.pack", f"from {JIT} import jit\nfrom .. import dtypes"),
        (check_kernels, "omnireduce.kernels.warm", "from . import merge, pack"),
        (check_one_compiler, JIT, "import numba"),
        (check_pure, "omnireduce.protocol.worker", "import re\nfrom omnireduce.kernels import merge"),
        (check_pure, "omnireduce.runtime.clock", "import time"),
        (check_lengths, "worker.cli", LONG_FUNCTION.removesuffix("    pass\n")),
        (check_no_print, "worker.cli", "print(1)"),
        (check_no_sleep, "benchmarks/x.py", "time.sleep(1)"),
        (check_no_marker, "x.py", "todo = XXXL = 1"),
        (check_no_machine_path, "x.md", "GET https://example.org/home/x, team/work/x, /tmp/x, ~/work/x"),
    ],
)
def test_what_is_allowed_passes(check: Check, name: str, text: str) -> None:
    assert check(name, text) == []
