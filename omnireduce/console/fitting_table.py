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

    `titles` of all columns; those in `left_aligned` are aligned to the left. Columns are left out in the order of
    `dispensable` until the others fit into the width. If they never do, the longest cells continue on the next line.
    """

    def __init__(self, titles: Sequence[str], *, left_aligned: Collection[str], dispensable: Sequence[str]) -> None:
        self._titles, self._left_aligned, self._dispensable = titles, left_aligned, dispensable
        self._rows: list[list[str]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, cells: Sequence[str]) -> None:
        """Add a row. Missing cells at its end are empty."""
        empty = [""] * (len(self._titles) - len(cells))
        self._rows.append([*map(shown, cells), *empty])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = self._fitting_columns(options.max_width)
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
        for number in columns:
            title = self._titles[number]
            table.add_column(title, justify="left" if title in self._left_aligned else "right", overflow="fold")
        for row in self._rows:
            table.add_row(*(Text(row[number]) for number in columns))
        yield table

    def _fitting_columns(self, width: int) -> list[int]:
        """The numbers of the columns that are shown."""
        columns = list(range(len(self._titles)))
        widths = [max(map(cell_len, column_texts)) for column_texts in zip(self._titles, *self._rows, strict=True)]
        for title in self._dispensable:
            if sum(widths[number] for number in columns) + GAP * (len(columns) - 1) <= width:
                break
            columns = [number for number in columns if self._titles[number] != title]
        return columns
