"""Layouts: where the elements of a value lie, and which layouts go together. The checker reads these tables.

    Local        each rank has a value of its own
    Replicated   all ranks have the same value
    Sliced       rank i has the i-th part of one value, cut along its first dimension
    Sliced_2     the same, cut along its last dimension

Parts are those of `numpy.array_split`: the first `size % ranks` of them have one row more. So any size can be cut.

A Replicated and a Sliced value mean the same tensor: they differ only in which rank has which of its elements. A Local
value is one tensor for each rank. The rewrites rest on this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum


class Layout(Enum):
    """Layout of a value: where its elements lie."""

    LOCAL = "Local"
    REPLICATED = "Replicated"
    SLICED = "Sliced"
    SLICED_2 = "Sliced_2"

    def __repr__(self) -> str:
        return self.value

    @property
    def is_sliced(self) -> bool:
        return self in (Layout.SLICED, Layout.SLICED_2)

    def axis(self, dimensions: int) -> int:
        """The number of the dimension along which a sliced value with so many dimensions is cut."""
        return 0 if self is Layout.SLICED else dimensions - 1


Local, Replicated, Sliced, Sliced_2 = Layout.LOCAL, Layout.REPLICATED, Layout.SLICED, Layout.SLICED_2

Rule = Layout | str
"""The layout of a result, or why there is none."""

_LOCAL_AND_SLICED = (
    "a Local value is another one on each rank, and of a {sliced} one each rank has a part: ReduceScatter the Local "
    "one, or AllGather the {sliced} one, first"
)
_CUT_DIFFERENTLY = "one is cut along its first dimension, the other along its last: AllGather one of them first"

POINTWISE: Mapping[tuple[Layout, Layout], Rule] = {
    (Local, Local): Local,
    (Local, Replicated): Local,
    (Local, Sliced): _LOCAL_AND_SLICED.format(sliced="Sliced"),
    (Local, Sliced_2): _LOCAL_AND_SLICED.format(sliced="Sliced_2"),
    (Replicated, Local): Local,
    (Replicated, Replicated): Replicated,
    (Replicated, Sliced): Sliced,
    (Replicated, Sliced_2): Sliced_2,
    (Sliced, Local): _LOCAL_AND_SLICED.format(sliced="Sliced"),
    (Sliced, Replicated): Sliced,
    (Sliced, Sliced): Sliced,
    (Sliced, Sliced_2): _CUT_DIFFERENTLY,
    (Sliced_2, Local): _LOCAL_AND_SLICED.format(sliced="Sliced_2"),
    (Sliced_2, Replicated): Sliced_2,
    (Sliced_2, Sliced): _CUT_DIFFERENTLY,
    (Sliced_2, Sliced_2): Sliced_2,
}

_CUT_ON_ONE_SIDE = (
    "the dimension that is summed is cut on one side only: make the left factor Sliced_2 and the right one Sliced, or "
    "AllGather the one that is cut"
)
_ROWS_AND_COLUMNS = (
    "rows of the left factor and columns of the right one are cut, so that a rank could make one corner of the result "
    "only: AllGather one of them first"
)

MATMUL: Mapping[tuple[Layout, Layout], Rule] = {
    (Local, Local): Local,
    (Local, Replicated): Local,
    (Local, Sliced): _LOCAL_AND_SLICED.format(sliced="Sliced"),
    (Local, Sliced_2): _LOCAL_AND_SLICED.format(sliced="Sliced_2"),
    (Replicated, Local): Local,
    (Replicated, Replicated): Replicated,
    (Replicated, Sliced): _CUT_ON_ONE_SIDE,
    (Replicated, Sliced_2): Sliced_2,
    (Sliced, Local): _LOCAL_AND_SLICED.format(sliced="Sliced"),
    (Sliced, Replicated): Sliced,
    (Sliced, Sliced): _CUT_ON_ONE_SIDE,
    (Sliced, Sliced_2): _ROWS_AND_COLUMNS,
    (Sliced_2, Local): _LOCAL_AND_SLICED.format(sliced="Sliced_2"),
    (Sliced_2, Replicated): _CUT_ON_ONE_SIDE,
    (Sliced_2, Sliced): Local,  # the ranks' partial sums
    (Sliced_2, Sliced_2): _CUT_ON_ONE_SIDE,
}

_NOT_WHOLE = (
    "each rank has a part of the new value only, and the tensor wants all of it: write AllGather around the value"
)
_NOT_ALIKE = "the new value is another one on each rank: AllReduce, ReduceScatter or Broadcast it first"

UPDATE: Mapping[tuple[Layout, Layout], Rule] = {  # of the tensor, and of its new value
    (Local, Local): Local,
    (Local, Replicated): Local,
    (Local, Sliced): _NOT_WHOLE,
    (Local, Sliced_2): _NOT_WHOLE,
    (Replicated, Local): _NOT_ALIKE,
    (Replicated, Replicated): Replicated,
    (Replicated, Sliced): _NOT_WHOLE,
    (Replicated, Sliced_2): _NOT_WHOLE,
    (Sliced, Local): _NOT_ALIKE,
    (Sliced, Replicated): Sliced,
    (Sliced, Sliced): Sliced,
    (Sliced, Sliced_2): _CUT_DIFFERENTLY,
    (Sliced_2, Local): _NOT_ALIKE,
    (Sliced_2, Replicated): Sliced_2,
    (Sliced_2, Sliced): _CUT_DIFFERENTLY,
    (Sliced_2, Sliced_2): Sliced_2,
}

_SAME_EVERYWHERE = "all ranks have the same value, so there is nothing to {do}"
_NOTHING_TO_ADD = "each rank has another part, so there is nothing to {do}"

MOVES: Mapping[str, Mapping[Layout, Rule]] = {
    "AllReduce": {
        Local: Replicated,
        Replicated: _SAME_EVERYWHERE.format(do="reduce"),
        Sliced: _NOTHING_TO_ADD.format(do="reduce") + ": AllGather gives the whole",
        Sliced_2: _NOTHING_TO_ADD.format(do="reduce") + ": AllGather gives the whole",
    },
    "ReduceScatter": {
        Local: Sliced,
        Replicated: _SAME_EVERYWHERE.format(do="reduce"),
        Sliced: _NOTHING_TO_ADD.format(do="reduce"),
        Sliced_2: _NOTHING_TO_ADD.format(do="reduce"),
    },
    "AllGather": {
        Local: "the ranks' values are no parts of one: AllReduce or Broadcast it",
        Replicated: _SAME_EVERYWHERE.format(do="gather"),
        Sliced: Replicated,
        Sliced_2: Replicated,
    },
    "Broadcast": {
        Local: Replicated,
        Replicated: _SAME_EVERYWHERE.format(do="broadcast"),
        Sliced: "the root has one part only: AllGather gives the whole",
        Sliced_2: "the root has one part only: AllGather gives the whole",
    },
    "Send": {layout: layout for layout in Layout},
    "Recv": {layout: layout for layout in Layout},
    "Norm": {Local: Local, Replicated: Replicated, Sliced: Replicated, Sliced_2: Replicated},
    "ReduceTensor": {Local: Local, Replicated: Replicated, Sliced: Replicated, Sliced_2: Replicated},
}


def folded(table: Mapping[tuple[Layout, Layout], Rule], layouts: Sequence[Layout]) -> Rule:
    """The layout of a result of several operands, by a table for two operands; or why there is none."""
    rule: Rule = layouts[0]
    for layout in layouts[1:]:
        if isinstance(rule, Layout):
            rule = table[rule, layout]
    return rule


def bounds(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Start and end of the part of `rank` in a dimension of `size`, by the rule of `numpy.array_split`."""
    base, extra = divmod(size, ranks)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)
