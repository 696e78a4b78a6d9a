"""The checks of test_tidy.py. A check takes a module's name or a file's path and its text, and returns one message per
violation.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {  # folders, and the names by which what is in them is imported: omnireduce/ has links to the others
    "omnireduce": "omnireduce",
    "aggregator": "omnireduce.aggregator",
    "worker": "omnireduce.worker",
}
TEXT_SUFFIXES = {".py", ".md", ".toml", ".sh", ".yml", ".yaml", ".service", ".sbatch"}
TEXT_NAMES = {"Makefile", "Vagrantfile", "Containerfile", "run"}
TEXT_FOLDERS = (*PACKAGES, "tests", "examples", "benchmarks", "configs", "docs", "tools", "vagrant", "deploy")

LIBRARY = (
    "compression",
    "programs",
    "data_parallel",
    "launch",
    "optimizers",
)  # what users call, on top of a communicator
FRONTS = ("torch", "keras", "needle", "jax", "switchml", "console", "ray")
ROOMS = ("kernels", "protocol", "transport", "runtime", *LIBRARY, "elastic", *FRONTS)  # beside the base
# A module may import from its own layer and all lower levels. Layers on one level do not know each other.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("base",),
    ("kernels",),
    ("protocol", "transport"),
    ("runtime",),
    ("tracing",),
    ("rank", "shard"),
    LIBRARY,
    ("elastic",),
    ("face",),
    FRONTS,
    ("aggregator", "worker"),
    ("program",),
)
STRANGE = {  # a program on one side knows nothing of the other side's rooms
    "aggregator": ("rank", *LIBRARY, "elastic", "face"),
    "worker": ("shard",),
}
BASE = {"core", "errors", "support", "torch_backend"}
PURE = (  # what a protocol machine may import, with all that is in it
    *(
        "__future__",
        "collections",
        "copy",
        "dataclasses",
        "enum",
        "functools",
        "hashlib",
        "hmac",
        "itertools",
        "re",
        "types",
        "typing",
    ),
    *("msgspec", "numpy", "omnireduce.kernels", "omnireduce.protocol", "omnireduce.core", "omnireduce.errors"),
    "omnireduce.support.config.schema",
    *(f"omnireduce.support.{name}" for name in ("secret.Secret", "teams.ANYBODY", "teams.FREE", "teams.Teams")),
)  # the last ones are values; what reads the files of secrets and teams stands beside them
IMPURE_CALLS = {"open", "input", "print", "exec", "eval", "compile", "__import__"}
IMPURE_NUMPY = {  # it reads or writes files, or draws numbers that no seed gives
    *("fromfile", "genfromtxt", "lib", "load", "loadtxt", "memmap", "random", "save", "savetxt", "savez"),
    "savez_compressed",
}
JIT = "omnireduce.kernels.jit"
COMPILER = (JIT, "omnireduce.kernels.instructions")  # where the compiler can be turned off
PATHS = "omnireduce.support.files.paths"
OF_PATHS = ("abspath", "cwd", "expanduser", "expandvars", "getcwd")
ADDRESSES = "omnireduce.support.addresses"
OF_ADDRESSES = ("AF_INET", "AF_INET6", "getaddrinfo", "gethostbyname", "create_connection", "create_server")
HEAVY = ("mpi4py", "optuna", "pyverbs", "torch", "keras", "jax", "tensorflow", "needle")
MAX_FILE_LINES = 900
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL = 6
BARE_ARTICLE = re.compile(r"\ban? \{" r"type\(")
MARKERS = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b")
MACHINE_PATHS = re.compile(r"(?<![\w.~<>{}-])/(?:home|root|Users|work)/\w|\b[A-Z]:\\Users")


@cache
def tree_of(source: str) -> ast.Module:
    """Parsed once: many checks walk it."""
    return ast.parse(source)


def layer_of(name: str) -> str | None:
    """Return the layer of a dotted module or object name; None if it is not ours.

    The package `omnireduce` itself, from which users import, and the names that it exports are the face.
    """
    package, _, rest = name.partition(".")
    if package != "omnireduce":
        return None
    part, _, within = rest.partition(".")
    if part in PACKAGES:
        return part
    if part == "runtime" and (room := within.partition(".")[0]) in ("rank", "shard", "tracing"):
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
    for node in ast.walk(tree_of(source)):
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


def check_one_name(module: str, source: str) -> list[str]:
    """By the other name, which only a checkout has, Python would load the module a second time."""
    return [
        f"{module}:{line}: import {PACKAGES[folder]}, not {folder}: a wheel has no package of that name"
        for line, name in imports(module, source)
        if (folder := name.partition(".")[0]) in PACKAGES and folder != PACKAGES[folder]
    ]


def check_one_compiler(module: str, source: str) -> list[str]:
    return [
        f"{module}:{line}: import {name} only in {' and '.join(COMPILER)}, where the JIT can be turned off"
        for line, name in imports(module, source)
        if name.partition(".")[0] == "numba" and module not in COMPILER
    ]


def check_pure(module: str, source: str) -> list[str]:
    if layer_of(module) != "protocol":
        return []
    why = "a protocol machine does no I/O and reads no clock, so it may not"
    found = [
        f"{module}:{line}: {why} import {name}"
        for line, name in imports(module, source)
        if not f"{name}.".startswith(dotted(PURE)) or is_impure_numpy(name.split("."))
    ]
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            found.append(f"{module}:{node.lineno}: {why} call {node.func.id}()")
        elif isinstance(node, ast.Attribute) and (node.attr == "tofile" or is_impure_numpy(parts_of(node))):
            found.append(f"{module}:{node.lineno}: {why} use {node.attr}")
    return found


def parts_of(node: ast.Attribute) -> list[str]:
    """`np.load` as ["np", "load"]."""
    return [node.value.id if isinstance(node.value, ast.Name) else "", node.attr]


def is_impure_numpy(names: list[str]) -> bool:
    return names[0] in ("np", "numpy") and names[1:2] != [] and names[1] in IMPURE_NUMPY


def check_lengths(module: str, source: str) -> list[str]:
    lines = len(source.splitlines())
    found = [f"{module}: {lines} lines, at most {MAX_FILE_LINES}: split it"] if lines > MAX_FILE_LINES else []
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                limit = f"at most {MAX_FUNCTION_LINES}: split it"
                found.append(f"{module}:{node.lineno}: {node.name} has {length} lines, {limit}")
    return found


def check_positional(module: str, source: str) -> list[str]:
    """Of seven numbers in a row nobody sees which is which. Calls of what this project defines count, by name. A kernel
    may hand its own arguments on to another one."""
    if layer_of(module) == "kernels":
        return []
    found = []
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            many = positional(node, parameters().get(name, 0))
            if name in parameters() and many > MAX_POSITIONAL:
                what = f"{many} positional arguments of {name}, at most {MAX_POSITIONAL}"
                found.append(f"{module}:{node.lineno}: {what}: name the others, or put some together")
    return found


def positional(call: ast.Call, defined: int) -> int:
    """How many positional arguments a call has. With `*some` among them: all that are not named, out of `defined`."""
    if any(isinstance(each, ast.Starred) for each in call.args):
        return max(len(call.args), defined - len(call.keywords))
    return len(call.args)


@cache
def parameters() -> dict[str, int]:
    """How many positional parameters each function and class of this project has; of one name the fewest."""
    found: dict[str, int] = {}
    for _, source in modules():
        for node in ast.walk(tree_of(source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                many = _many_parameters(node)
                found[node.name] = min(many, found.get(node.name, many))
    return found


def _many_parameters(node: ast.FunctionDef | ast.ClassDef) -> int:
    if isinstance(node, ast.FunctionDef):
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        return len(names) - (names[:1] in (["self"], ["cls"]))
    inits = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    fields = sum(isinstance(each, ast.AnnAssign) for each in node.body)  # of a tuple, struct or dataclass
    return _many_parameters(inits[0]) if inits else fields


def modules() -> Iterator[tuple[str, str]]:
    """Name and text of every module of the project's packages."""
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield ".".join([package, *path.relative_to(ROOT / folder).with_suffix("").parts]), path.read_text("utf-8")


OLD_WORDS = re.compile(  # names of classes that docs/glossary.md gives anew
    "Aside|Announced|Asked|Deed|Dealing|Departures|Door|Doomed|Form|Gathering|Here|Leg|Lengths|Lookout|Meeting|"
    "Neighbours|Patience|Pictured|Pictures|Place|Questions|Quiet|Reception|Running|Seat|Standing|Taker|Turns|Visitor|"
    "Wanted|Way"
)


def check_standard_words(module: str, source: str) -> list[str]:
    return [
        f"{module}:{node.lineno}: {node.name} is an old word; docs/glossary.md has that of the field"
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.ClassDef) and OLD_WORDS.fullmatch(node.name)
    ]


def check_no_print(module: str, source: str) -> list[str]:
    if layer_of(module) in ("aggregator", "worker"):  # programs
        return []
    return [
        f"{module}:{node.lineno}: a library does not print; return the text or log it"
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def check_no_sleep(path: str, source: str) -> list[str]:
    if not path.startswith("tests/"):
        return []
    nodes = ast.walk(tree_of(source))
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


def dotted(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name}." for name in names)


def check_shown(path: str, source: str) -> list[str]:
    """What users see stays with python -OO, which leaves docstrings out."""
    what = "not there with python -OO: write the help as `help=` or `description=`"
    lines = [
        node.lineno
        for node in ast.walk(tree_of(source))
        if "__doc__" in (getattr(node, "id", ""), getattr(node, "attr", ""))
        or (
            isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and any(map(_is_command, node.decorator_list))
        )
    ]
    return [f"{path}:{line}: {what}" for line in lines]


def _is_command(decorator: ast.expr) -> bool:
    """Whether it makes a command of click that takes its help from the docstring."""
    return (
        isinstance(decorator, ast.Call)
        and getattr(decorator.func, "attr", "") in ("command", "group")
        and not any(each.arg == "help" for each in decorator.keywords)
    )


def check_articles(path: str, text: str) -> list[str]:
    """A message must not say "a int"."""
    what = 'use a_type(...) of omnireduce.errors: it knows "a" from "an"'
    return [f"{path}:{line}: {what}" for line, each in enumerate(text.splitlines(), 1) if BARE_ARTICLE.search(each)]


def check_paths(module: str, source: str) -> list[str]:
    if module == PATHS:
        return []
    return [
        f"{module}:{node.lineno}: {node.attr}: paths of users are read in one way, by {PATHS}"
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.Attribute) and node.attr in OF_PATHS
    ]


def check_addresses(module: str, source: str) -> list[str]:
    if module == ADDRESSES:
        return []
    return [
        f"{module}:{node.lineno}: {node.attr}: hosts are looked up and connected to in one way, by {ADDRESSES}"
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.Attribute) and node.attr in OF_ADDRESSES
    ]


Check = Callable[[str, str], list[str]]
MODULE_CHECKS: tuple[Check, ...] = (
    check_placed,
    check_direction,
    check_one_name,
    check_one_compiler,
    check_pure,
    check_lengths,
    check_positional,
    check_no_print,
    check_standard_words,
    check_paths,
    check_articles,
    check_addresses,
)
FILE_CHECKS: tuple[Check, ...] = (check_no_marker, check_no_machine_path)
