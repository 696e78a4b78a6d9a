"""Profile of a rank: the number of calls of each collective, their bytes, and their time.

The table has the form of a well-known profile of MPI. The time of a collective goes from its start until it is complete
on this rank, including waits for others.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from omnireduce.runtime.tracing.trace import now

MAX_SIZES = 4096  # the sizes that are counted separately
# The most sizes shown for one routine; if there are more, sizes between two powers of two are added up.
SHOWN_SIZES = 40
WIDTH = 92
RULE = "-" * WIDTH
NOTE = """\
time: from the start of a call until it is complete or has failed, on this rank. Calls that
are under way at the same time count separately. total communication time: the time with at
least one call under way. sent bytes: the bytes that this rank sent since the previous call
was complete; in memory, the bytes that a wire would have carried."""


@dataclass
class Tally:
    """Calls of one routine: their number, their bytes and nanoseconds in all, the bytes that this rank sent meanwhile,
    and the number of calls that have failed."""

    calls: int = 0
    nbytes: int = 0
    ns: int = 0
    sent: int = 0
    failed: int = 0

    def add(self, other: Tally) -> None:
        self.calls, self.nbytes, self.ns = self.calls + other.calls, self.nbytes + other.nbytes, self.ns + other.ns
        self.sent, self.failed = self.sent + other.sent, self.failed + other.failed

    @property
    def cells(self) -> list[str]:
        return [str(self.calls), f"{self.nbytes / self.calls:.1f}", f"{self.ns / 1e9:.3f}", str(self.sent)]


class Profile:
    """Collectives of one rank. Any thread may call its methods."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._began = now()
        self._tallies: dict[tuple[str, int], Tally] = {}
        self._under_way, self._since, self._busy_ns = 0, 0, 0

    def begin(self, at: int) -> None:
        """A collective is started; `at`: nanoseconds of the monotonic clock."""
        with self._lock:
            if not self._under_way:
                self._since = at
            self._under_way += 1

    def end(self, kind: str, tally: Tally, at: int) -> None:
        """A collective of this kind is over. `tally` is added to the profile."""
        with self._lock:
            self._under_way -= 1
            if not self._under_way:
                self._busy_ns += at - self._since
            key = kind, tally.nbytes
            if key not in self._tallies and len(self._tallies) >= MAX_SIZES:
                key = kind, _power(tally.nbytes)
            self._tallies.setdefault(key, Tally()).add(tally)

    def abandon(self) -> None:
        """In a forked child: another thread of the parent may have had the lock."""
        self._lock = threading.RLock()

    def text(self) -> str:
        """The tables."""
        with self._lock:
            at = now()
            busy_ns = self._busy_ns + (at - self._since if self._under_way else 0)
            sizes = dict(self._tallies)
        routines: dict[str, Tally] = {}
        for (kind, _), tally in sorted(sizes.items()):
            routines.setdefault(kind, Tally()).add(tally)
        heading, *body = _table("Routine", [(kind.capitalize(), tally) for kind, tally in routines.items()])
        failed = sum(tally.failed for tally in routines.values())
        lines = [RULE, heading, RULE, *body, RULE, *_totals(busy_ns, at - self._began, failed), "", NOTE]
        for kind in routines:
            routine_sizes = [(size, tally) for (routine, size), tally in sorted(sizes.items()) if routine == kind]
            lines += ["", *_table(kind.capitalize(), [("", tally) for tally in _shown_tallies(routine_sizes)])]
        return "\n".join(lines) + "\n"


def _table(name: str, rows: Sequence[tuple[str, Tally]]) -> list[str]:
    """The lines of a table."""
    from rich.console import Console  # a rank that makes no profile need not load it
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="", expand=True)
    table.add_column(name, width=24, no_wrap=True)
    for heading in ("#calls", "avg. bytes", "time(sec)", "sent bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for routine, tally in rows:
        table.add_row(routine, *tally.cells)
    console = Console(width=WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def _totals(busy_ns: int, elapsed_ns: int, failed: int) -> Iterable[str]:
    times = os.times()
    rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    yield f"total communication time = {busy_ns / 1e9:.3f} seconds."
    yield f"total elapsed time       = {elapsed_ns / 1e9:.3f} seconds."
    yield f"user cpu time            = {times.user:.3f} seconds."
    yield f"system time              = {times.system:.3f} seconds."
    yield f"max resident set size    = {rss_mib:.3f} MiB."
    if failed:
        yield f"calls that failed        = {failed}."
    yield f"written at               = {time.strftime('%Y-%m-%d %H:%M:%S')}."


def _shown_tallies(sizes: Sequence[tuple[int, Tally]]) -> list[Tally]:
    if len(sizes) <= SHOWN_SIZES:
        return [tally for _, tally in sizes]
    by_power: dict[int, Tally] = {}
    for size, tally in sizes:
        by_power.setdefault(_power(size), Tally()).add(tally)
    return list(by_power.values())


def _power(size: int) -> int:
    """The smallest power of two that is not less than `size`."""
    return 1 << max(0, size - 1).bit_length() if size else 0
