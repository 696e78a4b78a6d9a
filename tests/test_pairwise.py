"""Choices of parameters: every pair of values occurs, in few rows."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from pairwise import pairwise
from transports import KINDS, MEMORY, TRANSPORTS, by_transports


@pytest.mark.parametrize(
    ("values", "limit"),
    [([[1, 2], [3, 4, 5]], 6), ([[1, 2, 3]] * 4, 12), ([[1, 2], "abc", [None, ()], [0.5]], 7), ([[1, 2]] * 7, 10)],
)
def test_each_pair_of_values_occurs_in_a_row_of_the_product(values: list[list[object]], limit: int) -> None:
    rows = pairwise(*values)
    assert set(rows) <= set(product(*values))
    assert len(set(rows)) == len(rows) <= limit
    for i, j in combinations(range(len(values)), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(values[i], values[j]))


def test_a_single_parameter_has_all_its_values() -> None:
    assert by_transports(["x"]) == [("x", way) for way in TRANSPORTS]


def test_each_case_goes_in_memory_and_by_a_transport_and_the_first_one_by_all() -> None:
    rows = by_transports("abcdef")
    assert {way for case, way in rows if case == "a"} == set(TRANSPORTS)
    for case in "bcdef":
        one, other = (way for each, way in rows if each == case)
        assert one == MEMORY
        assert other in KINDS
    assert {way for case, way in rows if case != "a"} == set(TRANSPORTS)
    assert by_transports("ab", KINDS) == [*(("a", kind) for kind in KINDS), ("b", KINDS[0])]
