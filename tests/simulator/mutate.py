"""Puts a deliberate bug into the product, in this process only, and hunts it in a child: with the simulator, or a test.

Imports nothing of the product: a mutation changes a module's source while it is imported for the first time.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from .mutations import BY_NAME, MUTATIONS, Mutation

__all__ = ["BY_NAME", "MUTATIONS", "Hunt", "Mutation", "hunt", "hunt_all", "install", "mutated"]
SILENT_S = 150.0  # a child hangs if it is silent for so long, in real time; a run takes less
KERNELS = "omnireduce.kernels."
JIT = KERNELS + "compiling.jit"
ROOT = Path(__file__).parents[2]


class MutationError(Exception):
    """A mutation does not fit the product as it is now."""


def mutated(mutation: Mutation, source: str) -> str:
    """The module's source with the bug. Raises MutationError unless the snippet to change is there exactly once."""
    if source.count(mutation.old) != 1:
        raise MutationError(f"'{mutation.name}': {mutation.module} has its snippet {source.count(mutation.old)} times")
    return source.replace(mutation.old, mutation.new)


def source_of(mutation: Mutation) -> str:
    """The source of the module that the mutation changes, as it is on disk."""
    spec = importlib.util.find_spec(mutation.module)
    assert spec is not None
    assert isinstance(spec.loader, SourceFileLoader)
    return spec.loader.get_data(spec.loader.path).decode()


def install(mutation: Mutation) -> None:
    """Let the module that `mutation` changes be imported with the bug. Raises MutationError if that is too late."""
    if mutation.module in sys.modules:
        raise MutationError(f"{mutation.module} is imported already")
    sys.meta_path.insert(0, _Finder(mutation))


class _Finder(MetaPathFinder):
    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        loader: Callable[[str], SourceFileLoader]
        if fullname == self._mutation.module:
            loader = partial(_Loader, self._mutation)
        elif fullname == JIT and self._mutation.module.startswith(KERNELS):
            loader = partial(_Uncached, JIT)
        else:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = loader(spec.origin)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, mutation: Mutation, path: str) -> None:
        super().__init__(mutation.module, path)
        self._mutation = mutation

    def get_code(self, fullname: str) -> CodeType:
        """Compiled from the changed source: the cached bytecode is that of the right one."""
        source = mutated(self._mutation, self.get_data(self.path).decode())
        return compile(source, self.path, "exec", dont_inherit=True)


class _Uncached(SourceFileLoader):
    """Lets every kernel be compiled in this process: the cache on disk is for the right ones, and for their callers."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        vars(module)["_on_disk"] = lambda compiled, *_: compiled


@dataclass(frozen=True)
class Hunt:
    """Outcome of a mutation: the run or test that caught it ("" if none did), and its verdict."""

    mutation: Mutation
    caught_by: str
    verdict: str
    seconds: float

    def __str__(self) -> str:
        limit = "" if self.mutation.test else f" of {self.mutation.within}"
        how = f"{self.caught_by or 'NOT CAUGHT'}{limit}"
        return f"{self.mutation.name:<42} {how:<18} {self.seconds:6.1f} s  {self.verdict}"


def hunt(mutation: Mutation) -> Hunt:
    """Hunt it in a child process that has the bug: by its test, or by its seeds until one fails."""
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_hunt_here, args=(theirs, mutation), daemon=True)
    child.start()
    theirs.close()
    try:
        caught_by, verdict = _last(ours)
    finally:
        child.kill()
        child.join()
        ours.close()
    return Hunt(mutation, caught_by, verdict, time.monotonic() - started)


def _last(child: Connection) -> tuple[str, str]:
    """Last run of the child, and its verdict. The child names each run before it starts: a bug may hang or kill it."""
    run = ""
    try:
        while child.poll(SILENT_S):
            run, verdict = child.recv()
            if verdict is not None:
                return run, verdict
        return run, "stuck: the process hangs"
    except EOFError:
        return run, "the process dies"


def _hunt_here(parent: Connection, mutation: Mutation) -> None:
    install(mutation)
    parent.send(_failing_test(mutation.test) if mutation.test else _failing_seed(mutation, parent))


def _failing_seed(mutation: Mutation, parent: Connection) -> tuple[str, str]:
    from .campaign import Task, run_task

    for seed in range(mutation.first, mutation.first + mutation.within):
        run = f"seed {seed}"
        result = run_task(Task(seed, mutation.fault), lambda run=run: parent.send((run, None))).found
        if result:
            return run, result[0].partition("\n")[0]
    return "", ""


def _failing_test(test: str) -> tuple[str, str]:
    """Raises MutationError if pytest cannot run `test`: that shows nothing."""
    seen = _Failures()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        code = pytest.main([str(ROOT / test), "-p", "no:cacheprovider"], plugins=[seen])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise MutationError(f"pytest cannot run {test}: {code!r}")
    return ("its test", seen.names[0]) if seen.names else ("", "")


class _Failures:
    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.when == "call":
            self.names.append(report.nodeid.rpartition("::")[2])


def hunt_all(processes: int, say: Callable[[str], None]) -> bool:
    """Hunt every mutation and say how each came out; return whether all were caught."""
    started, missed = time.monotonic(), []
    with ThreadPoolExecutor(processes) as pool:
        for hunt_result in pool.map(hunt, MUTATIONS):
            say(str(hunt_result))
            if not hunt_result.caught_by:
                missed.append(hunt_result.mutation.name)
    say(f"{len(MUTATIONS)} mutations, {len(missed)} not caught, {time.monotonic() - started:.0f} s")
    return not missed


def misfits() -> Iterator[str]:
    """Faults in the table of mutations: each must fit the product's source, and compile; the test that it names must
    exist. The module whose cache is turned off must exist, too."""
    if importlib.util.find_spec(JIT) is None:
        yield f"no module {JIT}"
    for mutation in MUTATIONS:
        path, _, test = mutation.test.partition("::")
        if test and f"def {test.rpartition('::')[2].partition('[')[0]}(" not in (ROOT / path).read_text():
            yield f"{mutation.name}: {path} has no {test}"
        try:
            compile(mutated(mutation, source_of(mutation)), mutation.module, "exec", dont_inherit=True)
        except (MutationError, SyntaxError) as error:
            yield f"{mutation.name}: {error}"
