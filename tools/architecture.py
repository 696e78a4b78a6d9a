"""Draws docs/architecture.svg, the picture of the service in the README: `python tools/architecture.py`.

It needs matplotlib, the extra `plot`.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

OUT = Path(__file__).resolve().parent.parent / "docs" / "architecture.svg"
STYLE = {"svg.hashsalt": "omnireduce", "svg.fonttype": "none", "font.size": 10}  # the same bytes each time
BLOCKS = 12
WORKERS = ((1, 4), (4, 9), (6, 9))  # the blocks that are not zero, of each worker's tensor
SHARD_OF = tuple(block // 3 % 2 for block in range(BLOCKS))  # stripes of three blocks are dealt to two shards
COLOURS = ("#4477aa", "#ee7733")  # of the shards
ZERO, LINE = "#eeeeee", "#555555"
CELL = 0.28


def box(axes: Axes, x: float, y: float, width: float, height: float, title: str) -> None:
    """A part of the service: a process."""
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor="white", edgecolor=LINE))
    axes.text(x + width / 2, y + height - 0.14, title, ha="center", va="top", weight="bold")


def blocks(axes: Axes, x: float, y: float, filled: frozenset[int], shard: int | None = None) -> None:
    """A tensor as a row of blocks, from the left; of a `shard` only what belongs to it."""
    for block in range(BLOCKS):
        if shard in (None, SHARD_OF[block]):
            colour = COLOURS[SHARD_OF[block]] if block in filled else ZERO
            axes.add_patch(Rectangle((x + block * CELL, y), CELL, CELL, facecolor=colour, edgecolor="white"))


def arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """Blocks on their way, there and back."""
    style = "Simple,tail_width=0.8,head_width=5,head_length=6"
    axes.add_patch(FancyArrowPatch(begin, end, arrowstyle=style, color=colour, connectionstyle="arc3,rad=0.06"))
    axes.add_patch(FancyArrowPatch(end, begin, arrowstyle=style, color=colour, connectionstyle="arc3,rad=0.06"))


def draw() -> Figure:
    """Three workers, two shards of an aggregator, and what moves between them."""
    figure = Figure(figsize=(9, 3.7))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 10), ylim=(0, 4.1))
    axes.set_axis_off()
    box_width, union = 0.4 + BLOCKS * CELL, frozenset(block for filled in WORKERS for block in filled)
    for shard, colour in enumerate(COLOURS):
        y = 2.2 - shard * 1.5
        box(axes, 6.0, y, box_width, 1.05, f"aggregator, shard {shard}")
        blocks(axes, 6.2, y + 0.3, union, shard)
        for worker in range(len(WORKERS)):
            arrow(axes, (0.25 + box_width, 2.95 - worker * 1.15), (5.95, y + 0.5), colour)
    for worker, filled in enumerate(WORKERS):
        y = 2.55 - worker * 1.15
        box(axes, 0.2, y, box_width, 0.85, f"worker, rank {worker}")
        blocks(axes, 0.4, y + 0.15, frozenset(filled))
    axes.text(
        4.98, 3.78, "there: blocks that are not zero\nback: the sums of all such blocks", ha="center", va="center"
    )
    axes.text(
        6.0 + box_width / 2,
        0.2,
        "a stripe of blocks belongs to one shard,\nwhich adds them in the order of ranks",
        ha="center",
    )
    return figure


def main() -> None:
    """Write the picture."""
    with mpl.rc_context(STYLE):
        draw().savefig(OUT, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
