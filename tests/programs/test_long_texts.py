"""Programs whose formulas are deep, or long."""

from __future__ import annotations

import pytest

from omnireduce import UsageError
from omnireduce.programs import Float32, Pipeline, Replicated, Tensor, Update
from omnireduce.programs.expressions import LONGEST_TEXT, Expression, Int32


def squared(times: int) -> Pipeline:
    x = Tensor(Float32, 10, Replicated, "x")
    values: list[Expression] = [x]
    for _ in range(times):
        values.append(values[-1] * values[-1])
    return Pipeline("squared", [x], [Update(x, values[-1])])


def test_what_is_used_twice_again_and_again_is_written_once() -> None:
    """Written out it would have 2**40 factors. The stages have names, as others use them twice."""
    assert len(str(squared(40))) < 40 * LONGEST_TEXT
    x = Tensor(Float32, 10, Replicated, "x")
    value: Expression = x
    for _ in range(40):
        value = value * value
    with pytest.raises(UsageError, match="Cast one of them"):
        value + Tensor(Int32, 10, Replicated, "y")


def test_a_long_chain_is_cut() -> None:
    x = Tensor(Float32, 10, Replicated, "x")
    value: Expression = x
    for _ in range(3000):
        value = value + 1.0
    text = str(Pipeline("chain", [x], [Update(x, value)]))
    assert "..." in text
    assert len(text) < 3 * LONGEST_TEXT
