"""Choices from products of parameters, where each combination costs a real cluster.

A fault that needs two parameters to show is met by every pair of their values once. Combinations of three and more are
left to the tests of the pure parts, which have the whole product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of the product of these values, so few that each pair of two parameters' values just still occurs."""
    rows = list(product(*(range(len(choice)) for choice in values)))
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while missing:
        row = max(rows, key=lambda row: len(missing.intersection(_pairs(row))))
        missing.difference_update(_pairs(row))
        chosen.append(tuple(choice[number] for choice, number in zip(values, row, strict=True)))
    return chosen


def _pairs(row: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    return combinations(enumerate(row), 2)
