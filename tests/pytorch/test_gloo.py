"""Collectives of gloo with staged tensors. No GPU is needed: copies of tensors are staged anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import options, run_gloo

from omnireduce.torch.gloo import StagedWork


def staged_sum(group: dist.ProcessGroup) -> tuple[StagedWork, torch.Tensor]:
    x = torch.ones(5)
    copy = x.clone()
    return StagedWork(group.allreduce([copy], options("Allreduce")), [x], [copy]), x


def test_the_result_is_in_the_tensor() -> None:
    def run(group: dist.ProcessGroup, rank: int) -> list[Any]:
        waited, x = staged_sum(group)
        assert waited.wait()
        in_future, y = staged_sum(group)
        [found] = in_future.get_future().wait()
        assert found is y
        asked, z = staged_sum(group)
        [found] = asked.result()
        assert found is z
        polled, p = staged_sum(group)
        while not polled.is_completed():
            pass
        assert polled.is_success()
        return [x.tolist(), y.tolist(), z.tolist(), p.tolist()]

    assert run_gloo(2, run) == [[[2.0] * 5] * 4] * 2


def test_a_failure_is_told() -> None:
    """The other rank is gone, now or soon."""

    def run(group: dist.ProcessGroup, rank: int) -> None:
        if rank == 0:
            x, copy = torch.ones(3), torch.ones(3)
            with pytest.raises(RuntimeError):
                StagedWork(group.recv([copy], 1, 7), [x], [copy]).wait()
            with pytest.raises(RuntimeError):
                staged_sum(group)[0].get_future().wait()

    run_gloo(2, run)


def test_who_sent_is_known() -> None:
    def run(group: dist.ProcessGroup, rank: int) -> tuple[int, float]:
        x = torch.full((3,), float(rank))
        if rank == 1:
            StagedWork(group.send([x], 0, 7), [], []).wait()
            return 1, 1.0
        copy = x.clone()
        work = StagedWork(group.recv_anysource([copy], 7), [x], [copy])
        work.wait()
        return work._source_rank(), float(x[0])

    assert run_gloo(2, run) == [(1, 1.0)] * 2
