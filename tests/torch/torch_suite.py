"""The tests that torch ships for its own backends, run against this one: `python -m tests.torch.torch_suite`.

Torch chooses by a backend's name which tests are for it. Here it chooses as for gloo, or as for the backend `--like`;
then they run with `--backend`. Each test runs in a process of its own, which starts the ranks. Where it hangs, all of
them are killed.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import click

sys.path[:0] = [str(Path(__file__).parents[1])]

from local_cluster import Daemon  # noqa: E402

SPARE_S = 15  # torch ends a test that hangs; what outlasts that by so much is killed
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
CAUSE = re.compile(r"^[\w.]*(?:Error|Exception|Timeout)\b.*", re.MULTILINE)
forks = multiprocessing.get_context("fork")  # what is imported is there: torch takes seconds


class Outcome(NamedTuple):
    """Of one test: `PASSED`, `SKIPPED` or `FAILED`, why, and the whole message."""

    kind: str
    why: str = ""
    text: str = ""


def load(like: str, world_size: int, timeout_s: int, folder: str) -> ModuleType:
    """Torch's tests, those for `like` chosen. They read their settings from the environment when they are imported."""
    os.environ.update(
        BACKEND=like, WORLD_SIZE=str(world_size), TEMP_DIR=folder, INIT_METHOD=f"file://{folder}/meet",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(timeout_s),
    )  # fmt: skip
    import torch
    from torch.testing._internal.distributed import distributed_test

    torch.set_num_threads(1)
    return distributed_test


def case_of(tests: ModuleType, backend: str) -> type[unittest.TestCase]:
    """The class of the tests, whose ranks use `backend` and are forked."""

    class Case(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(forks.Process)

    tests.BACKEND = os.environ["BACKEND"] = backend  # type: ignore[attr-defined]
    return Case


def outcome_of(result: unittest.TestResult) -> Outcome:
    """What has become of the one test of `result`."""
    if result.skipped:
        return Outcome(SKIPPED, result.skipped[0][1])
    for _, text in result.failures + result.errors:
        causes = [line for line in CAUSE.findall(text) if not re.search(r"Process \d+ exited with error", line)]
        return Outcome(FAILED, (causes or text.strip().splitlines()[-1:])[0], text)
    return Outcome(PASSED)


def run_here(case: type[unittest.TestCase], name: str, log: str, answer: Connection) -> None:
    """Run a test and send its outcome, in a process that leads those of the ranks. What they say goes to `log`."""
    os.setsid()
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    result = unittest.TestResult()
    case(name).run(result)
    answer.send(outcome_of(result))


def run_one(case: type[unittest.TestCase], name: str, limit_s: float, folder: str) -> Outcome:
    """Run a test; after `limit_s` kill it and the processes it has started."""
    log = Path(folder, f"{name}.log")
    ours, theirs = forks.Pipe(duplex=False)
    process = forks.Process(target=run_here, args=(case, name, str(log), theirs))
    process.start()
    theirs.close()
    try:
        found: Outcome = ours.recv() if ours.poll(limit_s) else Outcome(FAILED, f"hangs: killed after {limit_s:g} s")
    except EOFError:
        found = Outcome(FAILED, "its process died")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
    process.join()
    return found._replace(text=found.text + log.read_text(errors="replace")) if found.kind == FAILED else found


def table(outcomes: dict[str, Outcome]) -> str:
    """How many passed and were skipped for which reason, and which failed with what."""
    counts = Counter((each.kind, each.why) for each in outcomes.values() if each.kind != FAILED)
    lines = [f"{count:5} {kind}{f': {why}' if why else ''}" for (kind, why), count in sorted(counts.items())]
    failed = [f"{name}: {each.why}" for name, each in outcomes.items() if each.kind == FAILED]
    return "\n".join([*lines, f"{len(failed):5} {FAILED}", *(f"      {line}" for line in failed)])


def run(given: argparse.Namespace) -> dict[str, Outcome]:
    """Run the tests, one after another; return what became of each."""
    outcomes = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        case = case_of(load(given.like, given.world_size, given.timeout, folder), given.backend)
        if given.backend == "omnireduce":
            daemon = stack.enter_context(Daemon())
            os.environ["OMNIREDUCE_CLUSTER_AGGREGATORS"] = ",".join(daemon.addresses)
            import omnireduce.torch  # noqa: F401
        for name in filter(re.compile(given.k).search, unittest.TestLoader().getTestCaseNames(case)):
            begin = time.monotonic()
            found = outcomes[name] = run_one(case, name, given.timeout + SPARE_S, folder)
            click.echo(f"{found.kind:8}{time.monotonic() - begin:5.1f} s  {name}: {found.why}")
            if given.v and found.text:
                click.echo(found.text)
    return outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if a test has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.torch.torch_suite", description="Torch's own tests.")
    parser.add_argument("--backend", default="omnireduce")
    parser.add_argument("--like", default="gloo", metavar="BACKEND", help="whose tests (gloo); mpi has others")
    parser.add_argument("-k", default="", metavar="PATTERN", help="only tests whose names it matches, as a regex")
    parser.add_argument("--world-size", type=int, default=4, help="how many ranks (4)")
    parser.add_argument("--timeout", type=int, default=60, help="seconds a test may take (60)")
    parser.add_argument("-v", action="store_true", help="show all of what a test that failed has said")
    outcomes = run(parser.parse_args(argv))
    click.echo(table(outcomes))
    return int(any(each.kind == FAILED for each in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
