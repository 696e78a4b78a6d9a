"""Collectives of gloo with staged tensors. No GPU is needed: any tensor that is not contiguous is staged, too."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import options, run_gloo
from local_cluster import WAIT_S
from torch import Tensor

from omnireduce.torch.gloo import StagedWork, call_gloo

SHAPE = (4, 3)
Group = dist.ProcessGroup


def strided(x: Tensor) -> Tensor:
    """The same values, not contiguous."""
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def part(rank: int) -> Tensor:
    return torch.arange(12.0).reshape(SHAPE) + 100 * rank


def empty(*shape: int) -> Tensor:
    return strided(torch.full(shape or SHAPE, -1.0))


PARTS, SUM = [part(0), part(1)], part(0) + part(1)


def allreduce(group: Group, rank: int) -> list[Tensor]:
    x = strided(part(rank))
    call_gloo(group, "allreduce", [x], options("Allreduce")).wait()
    return [x - SUM]


def reduce(group: Group, rank: int) -> list[Tensor]:
    x = strided(part(rank))
    call_gloo(group, "reduce", [x], options("Reduce", rootRank=1)).wait()
    return [x - SUM] if rank == 1 else []


def broadcast(group: Group, rank: int) -> list[Tensor]:
    x = strided(part(rank))
    call_gloo(group, "broadcast", [x], options("Broadcast", rootRank=1)).wait()
    return [x - part(1)]


def allgather(group: Group, rank: int) -> list[Tensor]:
    found = [empty(), empty()]
    call_gloo(group, "allgather", [found], [strided(part(rank))]).wait()
    return [mine - theirs for mine, theirs in zip(found, PARTS, strict=True)]


def allgather_base(group: Group, rank: int) -> list[Tensor]:
    found = empty(8, 3)
    call_gloo(group, "_allgather_base", found, part(rank)).wait()
    return [found - torch.cat(PARTS)]


def own_part_of_the_output(group: Group, rank: int) -> list[Tensor]:
    found = empty(8, 3)
    found[4 * rank : 4 * rank + 4] = part(rank)
    call_gloo(group, "_allgather_base", found, found[4 * rank : 4 * rank + 4]).wait()
    return [found - torch.cat(PARTS)]


def gather(group: Group, rank: int) -> list[Tensor]:
    found = [empty(), empty()] if rank == 1 else []
    call_gloo(
        group, "gather", [found] if rank == 1 else [], [strided(part(rank))], options("Gather", rootRank=1)
    ).wait()
    return [mine - theirs for mine, theirs in zip(found, PARTS, strict=False)]


def scatter(group: Group, rank: int) -> list[Tensor]:
    found, dealt = empty(), [[strided(part(0)), part(1)]] if rank == 0 else []
    call_gloo(group, "scatter", [found], dealt, options("Scatter", rootRank=0)).wait()
    return [found - part(rank)]


def reduce_scatter(group: Group, rank: int) -> list[Tensor]:
    found = empty(2, 3)
    call_gloo(group, "_reduce_scatter_base", found, strided(part(rank))).wait()
    return [found - SUM[2 * rank : 2 * rank + 2]]


def alltoall(group: Group, rank: int) -> list[Tensor]:
    found = empty()
    call_gloo(group, "alltoall_base", found, strided(part(rank)), [], []).wait()
    return [found - torch.cat([each[2 * rank : 2 * rank + 2] for each in PARTS])]


def message(group: Group, rank: int) -> list[Tensor]:
    if rank == 0:
        call_gloo(group, "send", [strided(part(0))], 1, 7).wait()
        return []
    found = empty()
    work = call_gloo(group, "recv_anysource", [found], 7)
    work.wait()
    assert work._source_rank() == 0
    return [found - part(0)]


COLLECTIVES = (
    allreduce, reduce, broadcast, allgather, allgather_base, own_part_of_the_output, gather, scatter,
    reduce_scatter, alltoall, message,
)  # fmt: skip


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_results_are_in_the_tensors(collective: Callable[[Group, int], list[Tensor]]) -> None:
    """Each returns how far its results are from what they should be."""
    found = [each for of_rank in run_gloo(2, collective) for each in of_rank]
    assert found
    assert not any(each.any() for each in found)


def staged_sum(group: Group) -> tuple[StagedWork, Tensor]:
    x = torch.ones(5)
    copy = x.clone()
    return StagedWork(group.allreduce([copy], options("Allreduce")), [x], [copy]), x


def test_each_way_to_wait() -> None:
    def run(group: Group, rank: int) -> list[Any]:
        waited, x = staged_sum(group)
        assert waited.wait()
        in_future, y = staged_sum(group)
        [found] = in_future.get_future().wait()
        assert found is y
        assert in_future.wait()
        asked, z = staged_sum(group)
        [found] = asked.result()
        assert found is z
        polled, p = staged_sum(group)
        until = time.monotonic() + WAIT_S
        while not polled.is_completed():
            assert time.monotonic() < until
        assert polled.is_success()
        assert polled.exception() is None
        return [x.tolist(), y.tolist(), z.tolist(), p.tolist()]

    assert run_gloo(2, run) == [[[2.0] * 5] * 4] * 2


def test_a_message_is_waited_for_once() -> None:
    """With gloo alone a second wait is one for the next message."""

    def run(group: Group, rank: int) -> list[float]:
        x = strided(part(0))
        name, other = ("send", 1) if rank == 0 else ("recv", 0)
        work = call_gloo(group, name, [x], other, 7)
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.wait()
        later = torch.ones(2)
        group.allreduce([later], options("Allreduce")).wait()
        return later.tolist()

    assert run_gloo(2, run) == [[2.0, 2.0]] * 2


def test_a_failure_is_told() -> None:
    """The other rank is gone, now or soon."""

    def run(group: Group, rank: int) -> None:
        if rank == 0:
            x = strided(torch.ones(3))
            with pytest.raises(RuntimeError):
                call_gloo(group, "recv", [x], 1, 7).wait()
            with pytest.raises(RuntimeError):
                staged_sum(group)[0].get_future().wait()

    run_gloo(2, run)


def test_what_becomes_of_a_work_that_failed() -> None:
    def run(group: Group, rank: int) -> None:
        x = torch.ones(2)
        work = StagedWork(group.allreduce([x.clone()], options("Allreduce")), [x], [torch.ones(3)])  # has no room there
        for _ in range(2):
            with pytest.raises(RuntimeError, match="size of tensor"):
                work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), RuntimeError)

    run_gloo(1, run)


def test_named_tensors_that_have_to_be_staged_are_refused() -> None:
    def run(group: Group, rank: int) -> None:
        with pytest.raises(TypeError, match="allgather: tensors on a GPU, or not contiguous, are taken by position"):
            call_gloo(group, "allgather", input_tensors=[empty()], output_tensors=[[empty()]])

    run_gloo(1, run)
