"""Tables that leave out their least important columns where a terminal is too narrow for all."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from omnireduce.core.wire.safe_text import shown

GAP = 2  # spaces between columns


class FittingTable:
    """A table of one line for each row. Cells are never cut. Text of peers in a cell acts neither as markup nor as a
    command to the terminal.

    `titles` of all columns; those in `left` are aligned to the left. Columns are left out in the order of `spare` until
    the others fit into the width. If they never do, the longest cells continue on the next line.
    """

    def __init__(self, titles: Sequence[str], *, left: Collection[str], spare: Sequence[str]) -> None:
        self._titles, self._left, self._spare = titles, left, spare
        self._rows: list[list[str]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, cells: Sequence[str]) -> None:
        """Add a row. Missing cells at its end are empty."""
        empty = [""] * (len(self._titles) - len(cells))
        self._rows.append([*map(shown, cells), *empty])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept = self._that_fit(options.max_width)
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
        for number in kept:
            title = self._titles[number]
            table.add_column(title, justify="left" if title in self._left else "right", overflow="fold")
        for row in self._rows:
            table.add_row(*(Text(row[number]) for number in kept))
        yield table

    def _that_fit(self, width: int) -> list[int]:
        """The numbers of the columns that are shown."""
        kept = list(range(len(self._titles)))
        widths = [max(map(cell_len, column)) for column in zip(self._titles, *self._rows, strict=True)]
        for title in self._spare:
            if sum(widths[number] for number in kept) + GAP * (len(kept) - 1) <= width:
                break
            kept = [number for number in kept if self._titles[number] != title]
        return kept
