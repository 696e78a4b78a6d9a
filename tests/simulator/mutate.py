"""Puts a deliberate bug into the product, in this process only, and hunts it with the simulator in a child.

Imports nothing of the product: a mutation changes a module's source while it is imported for the first time.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from multiprocessing.connection import Connection
from types import CodeType, ModuleType
from typing import Any

from .mutations import BY_NAME, MUTATIONS, Mutation

__all__ = ["BY_NAME", "MUTATIONS", "Hunt", "Mutation", "hunt", "hunt_all", "install", "mutated"]
SILENT_S = 150.0  # of real time after which a child hangs: longer than one run may take
KERNELS = "omnireduce.kernels."


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
        if fullname != self._mutation.module:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(self._mutation, spec.origin)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, mutation: Mutation, path: str) -> None:
        super().__init__(mutation.module, path)
        self._mutation = mutation

    def get_code(self, fullname: str) -> CodeType:
        """Compiled from the changed source: the cached bytecode is that of the right one."""
        source = mutated(self._mutation, self.get_data(self.path).decode())
        return compile(source, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        if not self.name.startswith(KERNELS):
            super().exec_module(module)
            return
        import numba

        from omnireduce.kernels import jit

        uncached: Any = numba.njit(nogil=True, error_model="numpy")  # the cache on disk is for the right kernels
        kernel, jit.kernel = jit.kernel, uncached
        try:
            super().exec_module(module)
        finally:
            jit.kernel = kernel


@dataclass(frozen=True)
class Hunt:
    """How a mutation came out: by which seed it was caught (None if not at all), with which verdict."""

    mutation: Mutation
    seed: int | None
    verdict: str
    seconds: float

    def __str__(self) -> str:
        caught = "NOT CAUGHT" if self.seed is None else f"seed {self.seed}"
        return (
            f"{self.mutation.name:<42} {caught:>10} of {self.mutation.within:<5} {self.seconds:6.1f} s  {self.verdict}"
        )


def hunt(mutation: Mutation) -> Hunt:
    """Run seeds from 0 on in a child process that has the bug, until one fails or `mutation.within` are done."""
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_hunt_here, args=(theirs, mutation), daemon=True)
    child.start()
    theirs.close()
    try:
        seed, verdict = _last(ours)
    finally:
        child.kill()
        child.join()
        ours.close()
    return Hunt(mutation, seed, verdict, time.monotonic() - started)


def _last(child: Connection) -> tuple[int | None, str]:
    """What the child finds. Before each run it says of which seed that is: a bug may also hang or kill it."""
    seed = None
    try:
        while child.poll(SILENT_S):
            seed, verdict = child.recv()
            if verdict is not None:
                return seed, verdict
        return seed, "stuck: the process hangs"
    except EOFError:
        return seed, "the process dies"


def _hunt_here(parent: Connection, mutation: Mutation) -> None:
    install(mutation)
    from .campaign import Task, run_task

    for seed in range(mutation.within):
        found = run_task(Task(seed, mutation.fault), lambda seed=seed: parent.send((seed, None))).found
        if found:
            parent.send((seed, found[0].partition("\n")[0]))
            return
    parent.send((None, ""))


def hunt_all(processes: int, say: Callable[[str], None]) -> bool:
    """Hunt every mutation and say how each came out; return whether all were caught."""
    started, missed = time.monotonic(), []
    with ThreadPoolExecutor(processes) as pool:
        for found in pool.map(hunt, MUTATIONS):
            say(str(found))
            if found.seed is None:
                missed.append(found.mutation.name)
    say(f"{len(MUTATIONS)} mutations, {len(missed)} not caught, {time.monotonic() - started:.0f} s")
    return not missed


def misfits() -> Iterator[str]:
    """What is wrong with the table of mutations: each must fit the product, and change what it does."""
    for mutation in MUTATIONS:
        try:
            compile(mutated(mutation, source_of(mutation)), mutation.module, "exec", dont_inherit=True)
        except (MutationError, SyntaxError) as error:
            yield f"{mutation.name}: {error}"
