"""The timing of a model's layers, in a CSV file as SwitchML's dnn_benchmark reads it.

Each line has layer_index, numel, forward_pass_ns, backward_pass_ns: the layers in the order of the forward pass. A
first line with these names may stand before them.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from omnireduce.errors import UsageError
from omnireduce.files.output import write_file
from omnireduce.files.paths import read_text

LARGEST = 2**40


class Layer(NamedTuple):
    """`numel`: elements of its gradient; the passes take so many nanoseconds."""

    layer_index: int
    numel: int
    forward_pass_ns: int
    backward_pass_ns: int


MOST = 10_000  # layers
HEADER = ", ".join(Layer._fields)


def read_layers(path: str | Path) -> list[Layer]:
    """The layers in a file. Raises UsageError with the number of the line that is wrong."""
    text = read_text(path, expected="a CSV file", error=UsageError)
    try:
        rows = list(csv.reader(text.split("\n"), skipinitialspace=True))
    except csv.Error as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    layers = list[Layer]()
    for number, row in enumerate(rows, 1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or (number == 1 and tuple(cells) == Layer._fields):
            continue
        layer = _layer(f"{path}:{number}", cells)
        if layers and layer.layer_index != layers[-1].layer_index + 1:
            expected = f"expected {layers[-1].layer_index + 1}: one after the other, as the forward pass has them"
            raise UsageError(f"{path}:{number}: layer_index: got {layer.layer_index}, {expected}")
        layers.append(layer)
        if len(layers) > MOST:
            raise UsageError(f"{path}:{number}: more than {MOST} layers, expected a model that can be trained")
    if not layers:
        raise UsageError(f"{path}: has no layers, expected lines of {HEADER}")
    return layers


def _layer(where: str, cells: Sequence[str]) -> Layer:
    if len(cells) != len(Layer._fields):
        raise UsageError(f"{where}: got {len(cells)} values, expected {len(Layer._fields)}: {HEADER}")
    values = []
    for name, cell, least in zip(Layer._fields, cells, (0, 1, 0, 0), strict=True):
        if not (re.fullmatch("[0-9]{1,13}", cell) and least <= int(cell) <= LARGEST):
            raise UsageError(f"{where}: {name}: got {cell!r}, expected a whole number from {least} to 2^40")
        values.append(int(cell))
    return Layer(*values)


def write_layers(layers: Sequence[Layer], path: str | Path) -> None:
    """Write a file that `read_layers` reads. Raises UsageError where that is not possible."""
    lines = [HEADER, *(", ".join(map(str, layer)) for layer in layers)]
    write_file("\n".join([*lines, ""]).encode(), path)
