"""Memory for results is lent, never taken back from someone who still looks at it."""

from __future__ import annotations

import numpy as np

from omnireduce.runtime.rank.calls.single import Pool


def test_memory_is_lent_again_once_nobody_refers_to_it() -> None:
    pool = Pool()
    first = pool.take(1000)
    first[:] = 7
    view = first[8:16].view(np.float32)  # refers to the whole
    del first
    second = pool.take(1000)
    assert not np.shares_memory(second, view)
    del view
    assert np.all(pool.take(900) == 7)


def test_a_free_array_that_is_too_small_is_let_go() -> None:
    pool = Pool()
    pool.take(10)
    assert pool.take(2000).size == 2000
    assert pool.take(10).size == 2000
