"""The tests that torch ships for its own backends, run against this one: `python -m tests.pytorch.torch_suite`.

Torch chooses by a backend's name which tests are for it. Here it chooses those of gloo, or of the backend `--like`;
then they run with `--backend`. Each test has a process of its own, which starts the ranks. Where it hangs, all of them
are killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import click

sys.path[:0] = [str(Path(__file__).parents[1])]  # as for pytest
SPARE_S = 15  # torch ends a test that hangs; what outlasts that by so much is killed
CAUSE = re.compile(r"^(?!.*Process \d+ exited with error)[\w.]*(?:Error|Exception|Timeout)\b.*", re.MULTILINE)
forks = multiprocessing.get_context("fork")  # children have all imports: torch takes seconds


class Outcome(NamedTuple):
    """Outcome of one test: "passed", "skipped" or "failed"; the reason in a line; the whole message."""

    kind: str
    why: str = ""
    text: str = ""


class Named(str):
    """The name of a backend that is, for torch's tests, also that of another one: some ask while they run."""

    like = ""
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str(self) == other or self.like == other

    def __ne__(self, other: object) -> bool:
        return not self == other


def load(backend: str, like: str, **environ: str) -> type[unittest.TestCase]:
    """Torch's tests, those for `like` chosen, with ranks that are forked and use `backend`."""
    os.environ.update(environ, BACKEND=like)  # torch reads that when it is imported
    import torch
    from torch.testing._internal.distributed import distributed_test as tests

    class Case(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(forks.Process)

    torch.set_num_threads(1)
    os.environ["BACKEND"], name = backend, Named(backend)
    name.like, tests.BACKEND = like, name
    return Case


def outcome_of(result: unittest.TestResult) -> Outcome:
    """Outcome of the single test of `result`."""
    if result.skipped:
        return Outcome("skipped", result.skipped[0][1])
    for _, text in result.failures + result.errors:
        return Outcome("failed", (CAUSE.findall(text) or text.strip().splitlines()[-1:])[0], text)
    return Outcome("passed")


def run_here(case: type[unittest.TestCase], name: str, log: Path, answer: Connection) -> None:
    """Run a test and send its outcome, in a process that leads those of the ranks. What they say goes to `log`."""
    os.setsid()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    result = unittest.TestResult()
    case(name).run(result)
    answer.send(outcome_of(result))


def run_one(case: type[unittest.TestCase], name: str, log: Path, limit_s: float) -> Outcome:
    """Run a test; after `limit_s` kill it and the processes that it has started."""
    ours, theirs = forks.Pipe(duplex=False)
    process = forks.Process(target=run_here, args=(case, name, log, theirs))
    process.start()
    theirs.close()
    assert process.pid is not None
    try:
        found: Outcome = ours.recv() if ours.poll(limit_s) else Outcome("failed", f"hangs: killed after {limit_s:g} s")
    except EOFError:
        found = Outcome("failed", "its process died")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return found._replace(text=found.text + log.read_text(errors="replace")) if found.kind == "failed" else found


def table(outcomes: dict[str, Outcome]) -> Iterator[str]:
    """Lines with the number of tests that passed, that were skipped for each reason, and each failure."""
    counts = Counter((outcome.kind, outcome.why) for outcome in outcomes.values() if outcome.kind != "failed")
    yield from (f"{count:5} {': '.join(filter(None, key))}" for key, count in sorted(counts.items()))
    failed = [f"      {name}: {outcome.why}" for name, outcome in outcomes.items() if outcome.kind == "failed"]
    yield from (f"{len(failed):5} failed", *failed)


@click.command(
    name="python -m tests.pytorch.torch_suite",
    help="Run torch's own tests against a backend; exit status 1 if one fails.",
)
@click.option("--backend", default="omnireduce", show_default=True, help="What runs them.")
@click.option("--like", default="gloo", show_default=True, help="Whose tests; mpi has others.")
@click.option("-k", "pattern", default="", help="Only tests whose names this regular expression matches.")
@click.option("--world-size", default=4, show_default=True, help="How many ranks.")
@click.option("--timeout", default=60, show_default=True, help="Seconds that a test may take.")
@click.option("-v", "verbose", is_flag=True, help="Show all that a test that failed has said.")
def main(backend: str, like: str, pattern: str, world_size: int, timeout: int, verbose: bool) -> None:
    outcomes: dict[str, Outcome] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        where = {"TEMP_DIR": folder, "INIT_METHOD": f"file://{folder}/meet", "WORLD_SIZE": str(world_size)}
        case = load(backend, like, DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(timeout), **where)
        if backend == "omnireduce":
            from local_cluster import Daemon

            os.environ["OMNIREDUCE_CLUSTER_AGGREGATORS"] = ",".join(stack.enter_context(Daemon()).addresses)
            import omnireduce.torch  # noqa: F401
        for name in filter(re.compile(pattern).search, unittest.TestLoader().getTestCaseNames(case)):
            begin = time.monotonic()
            result = outcomes[name] = run_one(case, name, Path(folder, f"{name}.log"), timeout + SPARE_S)
            click.echo(f"{result.kind:8}{time.monotonic() - begin:5.1f} s  {name}: {result.why}")
            if verbose and result.text:
                click.echo(result.text)
    click.echo("\n".join(table(outcomes)))
    sys.exit(1 if any(outcome.kind == "failed" for outcome in outcomes.values()) else 0)


if __name__ == "__main__":
    main()
