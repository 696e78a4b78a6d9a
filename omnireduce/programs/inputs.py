"""Inputs that must be the same on all ranks. A run compares them, beside its first exchange, by a checksum of 8 bytes.

Numbers and Replicated tensors are assumed to be the same on all ranks: what is computed from them is not exchanged. If
ranks differed in them, they would go on with different weights. In a program for several groups, each group compares
its own inputs: it does not wait for another group.
"""

from __future__ import annotations

from collections.abc import Iterable

from omnireduce.dtypes import Array
from omnireduce.kernels.checksum import checksum
from omnireduce.programs.expressions import Input
from omnireduce.programs.layouts import Layout
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.placement import Sizes
from omnireduce.protocol.collective.operands import as_writable


def given_alike(pipeline: Pipeline, sizes: Sizes, given: Iterable[tuple[Input, Array]]) -> list[tuple[str, str]]:
    """Names and values for `check_alike`: the program, its sizes, numbers and Replicated tensors."""
    inputs = [
        (input_node.name, _said(array)) for input_node, array in given if input_node.type.layout is Layout.REPLICATED
    ]
    return [
        ("the program", pipeline.digest),
        *((variable.name, str(size)) for variable, size in sizes.items()),
        *inputs,
    ]


def _said(array: Array) -> str:
    """A number as text, or the dtype, shape and checksum of a tensor."""
    if not array.shape:
        return str(array[()])
    return f"{array.dtype}{list(array.shape)}, checksum {checksum(as_writable(array)).hex()}"
