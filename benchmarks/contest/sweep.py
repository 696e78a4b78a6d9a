"""Runs many cases on one host; the failure of a competitor, or of a case, costs no more than itself."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.contest.cases import SHARDS, Case, Setup
from benchmarks.contest.contest import contest
from benchmarks.contest.memory import measure
from benchmarks.contest.outcomes import Outcome, memory_outcome, outcome
from benchmarks.harness.group import PeerError


def sweep(cases: Iterable[Case], peers: Sequence[str]) -> Iterator[Outcome]:
    """Measure the cases; yield what became of each. One in which the service fails is left out, and said to be.

    Where a competitor fails, the case is measured again without it. Raises PeerError when the service does not start.
    """
    for (setup, memory), group in itertools.groupby(cases, key=lambda case: (case.setup, case.kind == "memory")):
        if memory:
            yield from _measure_memory(group)
        else:
            yield from _contests(setup, deque(group), peers)


def _contests(setup: Setup, remaining: deque[Case], peers: Sequence[str]) -> Iterator[Outcome]:
    """After every failure all processes are started anew: the others may wait for what will not come."""
    if setup.shards != SHARDS:
        peers = ()  # about shards only
    absent: set[str] = set()  # during the next case
    while remaining:
        with contest(setup, [name for name in peers if name not in absent]) as running:
            while remaining:
                case = remaining.popleft()
                try:
                    measured = running.run(case)
                except PeerError as error:
                    if error.name in peers:
                        _complain(f"{case.name}, again without {error.name}: {error}")
                        absent.add(error.name)
                        remaining.appendleft(case)
                    else:
                        _complain(f"LEFT OUT: {case.name}: {error}")
                        absent.clear()
                    break
                yield outcome(measured)
                if absent:
                    absent.clear()
                    break


def _measure_memory(cases: Iterable[Case]) -> Iterator[Outcome]:
    for case in cases:
        try:
            yield memory_outcome(measure(case))
        except PeerError as error:
            _complain(f"LEFT OUT: {case.name}: {error}")


def _complain(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")
