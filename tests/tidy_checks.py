"""The checks of test_tidy.py: properties that no library knows. A check takes a module's name or a file's path and its
text, and returns one message per violation.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
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

PURE = (  # modules that a protocol machine may import, with their submodules
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
    *(f"omnireduce.support.{name}" for name in ("secret.Secret", "teams.ANYBODY", "teams.NO_LIMITS", "teams.Teams")),
)  # the last ones are values; what reads the files of secrets and teams stands beside them
IMPURE_CALLS = {"open", "input", "print", "exec", "eval", "compile", "__import__"}
IMPURE_NUMPY = {  # it reads or writes files, or draws numbers that no seed gives
    *("fromfile", "genfromtxt", "lib", "load", "loadtxt", "memmap", "random", "save", "savetxt", "savez"),
    "savez_compressed",
}
PATHS = "omnireduce.support.files.paths"
OF_PATHS = ("abspath", "cwd", "expanduser", "expandvars", "getcwd")
HEAVY = ("mpi4py", "optuna", "pyverbs", "torch", "keras", "jax", "tensorflow", "needle")
BARE_ARTICLE = re.compile(r"\ban? \{" r"type\(")
MACHINE_PATHS = re.compile(r"(?<![\w.~<>{}-])/(?:home|root|Users|work)/\w|\b[A-Z]:\\Users")


@cache
def tree_of(source: str) -> ast.Module:
    """Parsed once: many checks walk it."""
    return ast.parse(source)


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


def check_pure(module: str, source: str) -> list[str]:
    if not module.startswith("omnireduce.protocol."):
        return []
    why = "a protocol machine does no I/O and reads no clock, so it may not"
    results = [
        f"{module}:{line}: {why} import {name}"
        for line, name in imports(module, source)
        if not f"{name}.".startswith(dotted(PURE)) or is_impure_numpy(name.split("."))
    ]
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            results.append(f"{module}:{node.lineno}: {why} call {node.func.id}()")
        elif isinstance(node, ast.Attribute) and (node.attr == "tofile" or is_impure_numpy(parts_of(node))):
            results.append(f"{module}:{node.lineno}: {why} use {node.attr}")
    return results


def parts_of(node: ast.Attribute) -> list[str]:
    """`np.load` as ["np", "load"]."""
    return [node.value.id if isinstance(node.value, ast.Name) else "", node.attr]


def is_impure_numpy(names: list[str]) -> bool:
    return names[0] in ("np", "numpy") and names[1:2] != [] and names[1] in IMPURE_NUMPY


def modules() -> Iterator[tuple[str, str]]:
    """Name and text of every module of the project's packages."""
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield ".".join([package, *path.relative_to(ROOT / folder).with_suffix("").parts]), path.read_text("utf-8")


OLD_WORDS = re.compile(  # names of classes that docs/glossary.md gives anew
    r"^ *class _?(Aside|Announced|Asked|Deed|Dealing|Departures|Door|Doomed|Form|Gathering|Here|Leg|Lengths|Lookout|"
    r"Meeting|Member|Neighbours|Patience|Pictured|Pictures|Place|Questions|Quiet|Reception|Running|Seat|Standing|Taker|Turns|"
    r"Visitor|Wanted|Way)\b"
)


def check_standard_words(path: str, text: str) -> list[str]:
    why = "an old word; docs/glossary.md has that of the field"
    return [f"{path}:{line}: {why}: {definition}" for line, definition in matches(OLD_WORDS, text)]


PROSE = re.compile(r'"""(?:[^\\]|\\.)*?"""|#[^\n]*', re.DOTALL)  # docstrings and comments
QUOTED_NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`")
NAMES_OF_OTHERS = {"vmap", "optax", "chain", "stdio"}  # which the code itself does not use


def names_of_code(sources: Iterable[str]) -> set[str]:
    """All words of the code, its strings included, but not of its docstrings and comments."""
    return {word for source in sources for word in re.findall(r"\w+", PROSE.sub(" ", source))}


def check_quoted_names(path: str, source: str, names: set[str]) -> list[str]:
    """A name in backquotes in a docstring or comment is a name of the code: a renaming must reach the words, too."""
    return [
        f"{path}: `{quoted}`: no code has this name; was it renamed?"
        for prose in PROSE.findall(source)
        for quoted in QUOTED_NAME.findall(prose)
        if not names.issuperset(part for part in quoted.split(".") if part)
    ]


def check_no_machine_path(path: str, text: str) -> list[str]:
    why = "this path exists on one machine only"
    return [f"{path}:{line}: {why}: {match}" for line, match in matches(MACHINE_PATHS, text)]


def matches(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if pattern.search(line):
            yield number, line.strip()


def dotted(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name}." for name in names)


def check_shown(path: str, source: str) -> list[str]:
    """Uses of docstrings as text for users: python -OO leaves docstrings out."""
    if "__doc__" not in source and "click" not in source:
        return []
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
        and not any(keyword.arg == "help" for keyword in decorator.keywords)
    )


def check_articles(path: str, text: str) -> list[str]:
    """A message must not say "a int"."""
    what = 'use a_type(...) of omnireduce.errors: it knows "a" from "an"'
    return [f"{path}:{line}: {what}" for line, each in enumerate(text.splitlines(), 1) if BARE_ARTICLE.search(each)]


def check_paths(module: str, source: str) -> list[str]:
    if module == PATHS or not any(f".{name}" in source for name in OF_PATHS):
        return []
    return [
        f"{module}:{node.lineno}: {node.attr}: paths of users are read in one way, by {PATHS}"
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.Attribute) and node.attr in OF_PATHS
    ]


Check = Callable[[str, str], list[str]]
MODULE_CHECKS: tuple[Check, ...] = (check_pure, check_paths, check_articles)
FILE_CHECKS: tuple[Check, ...] = (check_no_machine_path, check_standard_words)
