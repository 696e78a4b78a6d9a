"""An older checkout of the service and this one in turns: what a change costs, or gains.

Both run at the same time, on the same host or hosts. In each round both have a turn, in changing order, so that
whatever else the machine does meets both. A ratio is the median of all rounds' ratios. All processes start anew several
times, because where they and their memory come to lie is a matter of luck that lasts: how far the starts are apart says
what a ratio is worth.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.contest.cases import Case, Setup
from benchmarks.contest.contest import OWN_METHODS, Contest, Entrant
from benchmarks.contest.memory import measure
from benchmarks.contest.shaped import OPEN, PORT, Setting
from benchmarks.harness.environments import HERE, Tree
from benchmarks.harness.group import Group, PeerError, daemon, service_group
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.support.printing import carriers_text

Trees = Sequence[tuple[str, Tree]]  # with what each is called

BEFORE, AFTER = "before", "after"
STARTS = 4


class CaseComparison(NamedTuple):
    """Medians of a case, in `unit`, and the ratio of this checkout to the older one: below 1 it takes less. The ratios
    of half of the starts lie in `middle`. `carried_by`: what carried the tensors of this checkout."""

    name: str
    unit: str
    before: float
    after: float
    ratio: float
    middle: tuple[float, float] | None = None
    carried_by: str = ""

    def __str__(self) -> str:
        spread_text = "" if self.middle is None else "  half of the starts {:.3f} to {:.3f}".format(*self.middle)
        carried = f"  carried by {self.carried_by}" if self.carried_by else ""
        change = f"{self.before:8.4g} -> {self.after:8.4g} {self.unit}"
        return f"{self.name:60} {change}  ratio {self.ratio:.3f}{spread_text}{carried}"


def checkout(root: Path) -> Tree:
    """An older checkout, with the environment that its `make` made. Its ranks take orders as those of this one do.
    Raises UsageError where there is none."""
    root = root.resolve()
    python = root / ".venv" / "bin" / "python"
    if not (python.exists() and (root / "benchmarks" / "rank.py").exists()):
        raise UsageError(f"{root}: expected a checkout of omnireduce; run `make .venv/.ready` in it first")
    return Tree(root, python)


def compare(cases: Iterable[Case], older: Tree, starts: int = STARTS) -> Iterator[CaseComparison]:
    """Compare on this host. Raises PeerError when something fails, or a result is wrong."""
    for (setup, memory), group in itertools.groupby(cases, key=lambda case: (case.setup, case.kind == "memory")):
        if memory:
            yield from _compare_memory(group, older)
        else:
            yield from compare_in_turns(partial(_on_this_host, setup), older, list(group), starts)


def compare_shaped(
    setting: Setting, cases: Sequence[Case], older: Tree, starts: int = STARTS
) -> Iterator[CaseComparison]:
    """As `compare`, between hosts with shaped links. Raises TestbedError, too, where there can be no such hosts."""
    return compare_in_turns(partial(_between_hosts, setting), older, cases, starts)


def compare_in_turns(
    start: Callable[[Trees], AbstractContextManager[Contest]], older: Tree, cases: Sequence[Case], starts: int = STARTS
) -> Iterator[CaseComparison]:
    """Compare the entrants BEFORE and AFTER in all contests together. Raises PeerError when one fails, or its result is
    wrong."""
    trees = [(BEFORE, older), (AFTER, HERE)]
    times: dict[Case, list[Array]] = {case: [] for case in cases}
    carriers = dict[Case, str]()
    for number in range(starts):
        with start(trees if number % 2 else trees[::-1]) as contest:
            for case in cases:
                results = contest.run(case).results
                before, after = results[BEFORE], results[AFTER]
                _check(case, before.wrong, after.wrong)
                times[case].append(np.array([before.ms, after.ms]))
                carriers[case] = carriers_text(after.carried)
    for case, pairs_of_starts in times.items():
        low, high = np.percentile([np.median(new / old) for old, new in pairs_of_starts], (25, 75)).tolist()
        old, new = np.hstack(pairs_of_starts)
        old_ms, new_ms, ratio = (float(np.median(samples)) for samples in (old, new, new / old))
        yield CaseComparison(case.name, "ms", old_ms, new_ms, ratio, middle=(low, high), carried_by=carriers[case])


@contextmanager
def _on_this_host(setup: Setup, trees: Trees) -> Iterator[Contest]:
    with ExitStack() as stack:
        entrants = []
        for name, tree in trees:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="omnireduce-bench-"))
            shards = stack.enter_context(daemon(setup.shards, tree=tree))
            ranks = service_group(
                setup.ranks, folder, shards.addresses, *tree.supported_settings(setup.settings), tree=tree,
                carrier=setup.transport if tree == HERE else "",
            )  # fmt: skip
            entrants += _entrants(name, stack.enter_context(ranks))
        yield Contest(entrants)


@contextmanager
def _between_hosts(setting: Setting, trees: Trees) -> Iterator[Contest]:
    with ExitStack() as stack:
        rank_hosts, shard_hosts = stack.enter_context(setting.testbed())
        entrants = []
        for number, (name, tree) in enumerate(trees):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="omnireduce-bench-"))
            addresses = []
            for host in shard_hosts:
                listen = f"{host.address}:{PORT + number}"
                shards = stack.enter_context(daemon(1, OPEN, listen=listen, prefix=host.prefix, tree=tree))
                addresses += shards.addresses
            prefixes = [host.prefix for host in rank_hosts]
            ranks = service_group(
                setting.ranks, folder, addresses, "transport.kind=tcp", prefixes=prefixes, tree=tree,
                carrier=setting.carrier if tree == HERE else "",
            )  # fmt: skip
            entrants += _entrants(name, stack.enter_context(ranks))
        yield Contest(entrants)


def _entrants(name: str, group: Group) -> list[Entrant]:
    return [Entrant(replace(method, label=name), group) for method in OWN_METHODS]


def _check(case: Case, *wrong: int) -> None:
    for name, elements in zip((BEFORE, AFTER), wrong, strict=True):
        if elements:
            raise PeerError(name, f"gave {elements} wrong elements: {case.name}")


def _compare_memory(cases: Iterable[Case], older: Tree) -> Iterator[CaseComparison]:
    for case in cases:
        before, after = (measure(case, tree) for tree in (older, HERE))
        _check(case, before.wrong, after.wrong)
        for process, old, new in (("worker", before.worker, after.worker), ("shard", before.shard, after.shard)):
            yield CaseComparison(f"{case.name}: {process}", "MiB", old, new, new / old, carried_by=after.carried_by)
