"""Lists of steps: what is written is read, in windows of any size, and no list that a peer makes up does harm."""

from __future__ import annotations

import numpy as np
import pytest
from harness import Guarded
from hypothesis import example, given
from hypothesis import strategies as st
from oracle import indices_of_steps, steps_of

from omnireduce.kernels.index_steps import STEP_BYTES, expand_steps, list_steps
from omnireduce.kernels.merge_indices import MARK_SHIFT

LARGEST = 2**MARK_SHIFT - 1
INDICES = st.lists(
    st.integers(0, 300) | st.integers(0, LARGEST) | st.sampled_from([0, 127, 128, 2**14 - 1, 2**14, LARGEST]),
    unique=True,
    max_size=30,
).map(sorted)


def listed(indices: list[int], limit: int) -> bytes | None:
    """`indices` as steps, if these are no more than `limit` bytes and no index has a mark."""
    steps = Guarded((limit + STEP_BYTES,), np.uint8)
    result = list_steps(np.array(indices, np.int64), limit, steps.array)
    steps.check()
    return steps.array[:result].tobytes() if result else None


def expanded(steps: bytes, sizes: list[int]) -> tuple[list[int], int]:
    """Expand a list in windows of `sizes`, until one is not full. Return the indices, and the number of bytes used."""
    indices: list[int] = []
    at, number = 0, 0
    for size in sizes:
        window = Guarded((size,), np.int64)
        filled, at, number = expand_steps(np.frombuffer(steps, np.uint8), at, number, window.array)
        window.check()
        assert (window.array[filled:] == 0).all()
        indices += window.array[:filled].tolist()
        if filled < size:
            break
    return indices, at


@given(indices=INDICES, window=st.integers(1, 31))
def test_what_is_listed_is_expanded(indices: list[int], window: int) -> None:
    expected = steps_of(indices)
    assert listed(indices, len(expected)) == (expected or None)
    windows = [min(window, len(indices) - at) for at in range(0, len(indices), window)]
    assert expanded(expected, windows) == (indices, len(expected))
    assert indices_of_steps(expected) == indices


@given(indices=INDICES.filter(len))
def test_a_list_that_is_too_long_is_none(indices: list[int]) -> None:
    assert listed(indices, len(steps_of(indices)) - 1) is None


def test_marks_have_no_place_in_steps() -> None:
    assert listed([3, 5 | 1 << MARK_SHIFT], 100) is None
    assert listed([3, 5 | (2**15 - 1) << MARK_SHIFT], 100) is None


def honest(steps: bytes, size: int) -> list[int]:
    """The first `size` indices of a list, up to a step that is too long or goes too far."""
    results, index, position = list[int](), 0, 0
    for byte in steps:
        index += byte % 128 << position
        position += 7
        if byte < 128 and index <= LARGEST and len(results) < size:
            results.append(index)
            position = 0
        elif byte < 128 or position == 7 * STEP_BYTES:
            break
    return results


@given(steps=st.binary(max_size=40), size=st.integers(0, 45), window=st.integers(1, 46))
@example(steps=b"\xff" * 40, size=1, window=1)
@example(steps=b"\xff" * 6 + b"\x7f", size=1, window=1)
@example(steps=b"\x80" * 6 + b"\x00", size=1, window=1)
@example(steps=b"\x80" * 7 + b"\x00", size=1, window=1)
def test_no_list_does_harm(steps: bytes, size: int, window: int) -> None:
    result, at = expanded(steps, [min(window, size - start) for start in range(0, size, window)])
    assert result == honest(steps, size)
    assert at <= len(steps)


@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
def test_a_hundredth_of_all_takes_a_little_more_than_a_byte_for_each(ratio: float) -> None:
    rng = np.random.default_rng(1)
    indices = np.sort(rng.choice(1 << 20, int(ratio * (1 << 20)), replace=False))
    size = len(steps_of(indices.tolist())) / indices.size
    assert size <= 2
