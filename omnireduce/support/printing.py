"""Printing by the programs: one console, and numbers in few characters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rich.console import Console
from rich.table import Table

TABLE_WIDTH = 100  # characters, if there is no terminal


def make_console(*, quiet: bool = False) -> Console:
    """A console on standard output that is wide enough for the tables, on a terminal or not.

    It prints all text unchanged: `omnireduce[mpi]` is no markup.
    """
    console = Console(quiet=quiet, highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.width = max(TABLE_WIDTH, console.width if console.is_terminal else 0)
    return console


def table_of(titles: Sequence[str], *, left: Collection[str] = (), no_wrap: bool = True) -> Table:
    """A table without lines. Columns are aligned to the right, those in `left` to the left. With `no_wrap` a cell stays
    on one line."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, justify="left" if title in left else "right", no_wrap=no_wrap)
    return table


def carriers_text(carried: Mapping[str, int]) -> str:
    """The transports that carried these bytes: "tcp", "memory+tcp", "nothing". A transport that carried less than a
    hundredth of them is left out."""
    threshold = sum(carried.values()) / 100
    return "+".join(sorted(kind for kind, nbytes in carried.items() if nbytes > threshold)) or "nothing"


def short_count(value: float) -> str:
    """A count or number of bytes in at most six characters: 950, 1.20k, 104.9M."""
    if value < 1000:
        return f"{value:.0f}"
    for suffix in ("k", "M", "G", "T"):
        value /= 1000
        if value < 999.95:
            return f"{value:.4g}{suffix}"
    return f"{value / 1000:.4g}P"


def short_time(milliseconds: float) -> str:
    """Milliseconds in about six characters: 0.0123, 6.712, 1234."""
    return f"{milliseconds:.4f}" if milliseconds < 1 else f"{milliseconds:.{max(0, 4 - _digits(milliseconds))}f}"


def duration(seconds: float) -> str:
    """A time in a few characters: 0.3 s, 12 s, 5 min, 3.2 h, 12 d."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def density_text(density: float) -> str:
    """A density in six characters: 1, 0.0199, 4.2e-05."""
    return f"{density:g}" if density in (0, 1) else f"{density:.4f}" if density >= 0.001 else f"{density:.0e}"


def times_text(factor: float) -> str:
    """A speed-up in at most six characters: 0.95x, 12.3x, >1000x."""
    return f"{factor:.2f}x" if factor < 9.995 else f"{factor:.1f}x" if factor < 999.5 else ">1000x"


def _digits(value: float) -> int:
    return len(str(int(value)))
