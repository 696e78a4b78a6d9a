"""Ranks that differ in what they ask of gloo get one error, all of them, before anything has begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from groups import method, options, run_group
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ReduceOp

from omnireduce.errors import UsageError
from omnireduce.torch.backend.gloo import Sizes, check_agreement, statement
from omnireduce.torch.backend.process_group import ProcessGroup

MOST = 1 << 62
tables = st.integers(1, 6).flatmap(
    lambda size: st.lists(st.lists(st.integers(0, MOST), min_size=size, max_size=size), min_size=size, max_size=size)
)


def statements(sent: list[list[int]], expected: list[list[int]]) -> Any:
    """Statements of all ranks: rank a sends `sent[a][b]` bytes to b, and b expects `expected[b][a]`."""
    made = [statement("a call", rank, Sizes(*each)) for rank, each in enumerate(zip(sent, expected, strict=True))]
    return np.stack(made)


@given(tables, st.data())
def test_sizes_that_fit_agree_and_no_others_do(sent: list[list[int]], data: st.DataObject) -> None:
    ranks = range(len(sent))
    expected = [[sent[b][a] for b in ranks] for a in ranks]
    check_agreement(statements(sent, expected))
    rank, peer = data.draw(st.sampled_from(ranks)), data.draw(st.sampled_from(ranks))
    expected[rank][peer] = data.draw(st.integers(0, MOST).filter(lambda size: size != expected[rank][peer]))
    with pytest.raises(UsageError, match="ranks send what others do not expect: rank 0: a call, bytes to each rank"):
        check_agreement(statements(sent, expected))


def test_sizes_that_are_swapped_do_not_agree() -> None:
    """Though the sums are the same."""
    with pytest.raises(UsageError):
        check_agreement(statements([[0, 4], [8, 0]], [[0, 4], [8, 0]]))
    with pytest.raises(UsageError):
        check_agreement(statements([[4, 8], [4, 8]], [[4, 8], [4, 8]]))


@given(st.text(), st.text())
def test_words_are_compared(one: str, other: str) -> None:
    made = np.stack([statement(one, 0), statement(other, 1), statement(one, 2)])
    assert made.shape == (3, 256)
    if one == other:
        check_agreement(made)
    else:
        with pytest.raises(UsageError, match="ranks call different collectives: rank 0: "):
            check_agreement(made)


def test_an_error_shows_few_of_many_statements() -> None:
    with pytest.raises(UsageError, match=r"rank 0: w0; rank 2: w2; rank 4: w4; rank 6: w6; \.\.\.$"):
        check_agreement(np.stack([statement(f"w{rank // 2 * 2}", rank) for rank in range(20)]))


def zeros(length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(length, dtype=dtype)


def gather(group: ProcessGroup, tensor: Tensor, root: int) -> Any:
    outs = [[torch.zeros_like(tensor) for _ in range(2)]] if group.getRank() == root else []
    return group.gather(outs, [tensor], options("Gather", rootRank=root))


def scatter(group: ProcessGroup, out: Tensor, root: int) -> Any:
    parts = [[torch.ones_like(out) for _ in range(2)]] if group.getRank() == root else []
    return group.scatter([out], parts, options("Scatter", rootRank=root))


def bits(group: ProcessGroup, op: object, dtype: torch.dtype) -> Any:
    return group.allreduce([zeros(3, dtype)], options("Allreduce", reduceOp=op))


def all_gather(group: ProcessGroup, tensor: Tensor) -> Any:
    return group.allgather([[torch.zeros_like(tensor), torch.zeros_like(tensor)]], [tensor])


def one_result(group: ProcessGroup, tensor: Tensor) -> Any:
    return group.allgather([[torch.zeros_like(tensor)]], [tensor])


def single(group: ProcessGroup, length: int) -> Any:
    return method(group, "all_gather_single", "_allgather_base")(zeros(2 * length), zeros(length))


def all_to_all(group: ProcessGroup, to: list[int], come: list[int], dtype: torch.dtype = torch.float32) -> Any:
    made = method(group, "all_to_all_single", "alltoall_base")
    return made(zeros(sum(come), dtype), zeros(sum(to), dtype), come, to)


def lists(group: ProcessGroup, to: list[int], come: list[int]) -> Any:
    return group.alltoall([zeros(each) for each in come], [zeros(each) for each in to])


Call = Callable[[ProcessGroup, int], Any]
KINDS = torch.float32, torch.int32
BITS = ReduceOp.BAND, ReduceOp.BXOR
DIFFERENT: list[tuple[str, Call]] = [
    ("all_gather of float32 [4]; rank 1: all_gather of int32 [4]", lambda g, r: all_gather(g, zeros(4, KINDS[r]))),
    ("all_gather of float32 [4]; rank 1: all_gather of float32 [5]", lambda g, r: all_gather(g, zeros(4 + r))),
    ("into one tensor of float32 [2]; rank 1", lambda g, r: single(g, 2 + r)),
    ("to rank 0; rank 1: gather of float32 [4] to rank 1", lambda g, r: gather(g, zeros(4), r)),
    ("gather of float32 [1] to rank 0; rank 1: gather of float32 [2]", lambda g, r: gather(g, zeros(1 + r), 0)),
    ("from rank 1; rank 1: scatter of int32 [4]", lambda g, r: scatter(g, zeros(4, KINDS[r]), 1)),
    ("to rank 0; rank 1: all_gather", lambda g, r: all_gather(g, zeros(4)) if r else gather(g, zeros(4), 0)),
    ("bytes to each rank [4, 8], from each [4, 8]", lambda g, r: all_to_all(g, [1, 2], [1, 2])),
    ("ranks send what others do not expect", lambda g, r: all_to_all(g, [2 + r] * 2, [2 + r] * 2)),
    ("all_to_all_single of int32", lambda g, r: all_to_all(g, [2, 2], [2, 2], KINDS[r])),
    ("expect: rank 0: all_to_all of float32", lambda g, r: lists(g, [1, 1], [1, 1 + r])),
    ("ReduceOp.BAND of int32 [3]; rank 1: ReduceOp.BXOR", lambda g, r: bits(g, BITS[r], torch.int32)),
    ("ReduceOp.BAND of int8 [3]; rank 1", lambda g, r: bits(g, ReduceOp.BAND, (torch.int8, torch.int16)[r])),
    ("rank 0: cannot take part: 1 tensors", lambda g, r: all_gather(g, zeros(4)) if r else one_result(g, zeros(4))),
]  # fmt: skip


@pytest.mark.usefixtures("aggregators")
def test_each_difference_is_one_error_and_the_next_call_is_sound() -> None:
    def run(group: ProcessGroup, rank: int) -> list[str]:
        results = []
        for _, call in DIFFERENT:
            with pytest.raises(RuntimeError) as caught:
                call(group, rank).wait()
            results.append(str(caught.value))
            outs = [torch.zeros(2), torch.zeros(2)]
            group.allgather([outs], [torch.full((2,), rank + 1.0)]).wait()
            assert [out.tolist() for out in outs] == [[1, 1], [2, 2]]
        return results

    ours, theirs = run_group(2, run)
    for (words, _), own, other in zip(DIFFERENT, ours, theirs, strict=True):
        assert words in other
        assert own == other or "cannot take part" in other


@pytest.mark.usefixtures("aggregators")
def test_asynchronous_ones_begin_in_the_order_of_their_starts() -> None:
    """With collectives of the service and one that fails between them; nobody waits for most of them."""

    def run(group: ProcessGroup, rank: int) -> list[Any]:
        results, works = [], []
        for number in range(20):
            outs = [torch.zeros(number), torch.zeros(number)]
            works.append(group.allgather([outs], [torch.full((number,), float(rank))]))
            works.append(group.allreduce([torch.ones(2)], options("Allreduce")))
            if number == 10:
                failed = all_gather(group, zeros(1 + rank))
            results.append(outs)
        last = options("Gather", rootRank=0, asyncOp=False)
        at_root = [torch.zeros(1), torch.zeros(1)]
        group.gather([at_root] if rank == 0 else [], [torch.ones(1)], last).wait()
        with pytest.raises(RuntimeError, match="ranks call different collectives"):
            failed.get_future().wait()
        for work in works:
            work.wait()
        return [[out.tolist() for out in outs] for outs in results]

    expected = [[[0.0] * number, [1.0] * number] for number in range(20)]
    assert run_group(2, run) == [expected] * 2


@pytest.mark.usefixtures("aggregators")
def test_what_all_ranks_refuse_leaves_the_group_sound() -> None:
    def run(group: ProcessGroup, rank: int) -> list[float]:
        sparse, x = torch.eye(2).to_sparse(), torch.ones(2)
        with pytest.raises(RuntimeError, match=r"a tensor of float32, sparse_coo \[2, 2\] on 'cpu' came"):
            group.allgather([[sparse, sparse]], [sparse])
        with pytest.raises(RuntimeError, match=r"ReduceOp.BAND does not work on tensors of float32"):
            bits(group, ReduceOp.BAND, torch.float32)
        group.allreduce([x]).wait()
        return x.tolist()  # type: ignore[no-any-return]

    assert run_group(2, run) == [[2.0, 2.0]] * 2


@pytest.mark.usefixtures("aggregators")
def test_a_refusal_reaches_a_rank_that_waits_for_a_reduction() -> None:
    def run(group: ProcessGroup, rank: int) -> str:
        with pytest.raises(RuntimeError) as caught:
            group.allreduce([zeros(3, (torch.float32, torch.float8_e5m2)[rank])]).wait()
        return str(caught.value)

    ours, theirs = run_group(2, run)
    assert "refused collective 0" in ours
    assert theirs in ours.replace("rank 1", "") or "float8_e5m2 cannot be combined" in theirs
