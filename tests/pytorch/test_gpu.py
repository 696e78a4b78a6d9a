"""Tensors on a GPU, staged through pinned memory, against gloo and tensors in the processor's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from groups import method, needs_gpu, options, run_gloo, run_group
from test_collectives import FLOATS, INTEGERS, LAYOUTS, OPS, OTHERS, cases, coordinates, same, values
from torch import Tensor

from omnireduce.torch import ProcessGroup

pytestmark = [pytest.mark.usefixtures("aggregators"), needs_gpu]
Group = Any


def on_device(group: Group, x: Tensor) -> Tensor:
    """`x` on the GPU for our group; for gloo the oracle, a plain one."""
    return x.cuda() if isinstance(group, ProcessGroup) else x.contiguous()


def compare(size: int, function: Any) -> None:
    """Ours on a GPU has what gloo has without. Streams of their own: each rank is a thread."""

    def run(group: Group, rank: int) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = function(group, rank)
            return [result.cpu() for result in results]

    same(run_group(size, run), run_gloo(size, function))


@pytest.mark.parametrize("waits", [True, False], ids=["waited for", "not waited for"])
def test_reductions_and_broadcasts(waits: bool) -> None:
    def run(group: Group, rank: int) -> list[Tensor]:
        results = []
        for dtype, name in cases():
            for change in LAYOUTS.values():
                x = on_device(group, change(values(rank, dtype)))
                group.allreduce([x], options("Allreduce", reduceOp=OPS[name], asyncOp=not waits)).wait()
                results.append(x)
        for dtype in (*FLOATS, *INTEGERS, *OTHERS):
            x = on_device(group, values(rank, dtype))
            group.broadcast([x], options("Broadcast", rootRank=1, asyncOp=not waits)).wait()
            results.append(x)
        return results

    compare(2, run)


def test_a_collective_waits_for_what_the_stream_computes() -> None:
    """The values are not there yet when the collective is started, and are used right after it."""

    def run(group: ProcessGroup, rank: int) -> float:
        with torch.cuda.stream(torch.cuda.Stream()):
            works, tensors = [], []
            for _ in range(5):
                x = torch.ones(1000, 1000, device="cuda")
                for _ in range(20):
                    x = x @ x / 1000
                tensors.append(x)
                works.append(group.allreduce([x], options("Allreduce", asyncOp=True)))
            for work in works:
                work.wait()
            return float(torch.stack(tensors).sum())

    assert run_group(2, run) == [1e7, 1e7]


def test_futures_hold_tensors_on_a_gpu() -> None:
    def run(group: ProcessGroup, rank: int) -> list[list[float]]:
        results = []
        for is_async in (True, False):
            x = torch.ones(5, device="cuda")
            future = group.allreduce([x], options("Allreduce", asyncOp=is_async)).get_future()
            results.append(future.then(lambda done: done.value()[0] * 2).wait().tolist())
        return results

    assert run_group(2, run) == [[[4.0] * 5] * 2] * 2


def test_what_goes_through_gloo() -> None:
    def run(group: Group, rank: int) -> list[Tensor]:
        x = on_device(group, values(rank, torch.float32, (6, 4)))
        parts = [on_device(group, torch.empty(6, 4)) for _ in range(2)]
        group.allgather([parts], [x]).wait()
        whole, part, dealt = (on_device(group, torch.empty(shape, 4)) for shape in (12, 3, 6))
        method(group, "all_gather_single", "_allgather_base")(whole, x).wait()
        method(group, "reduce_scatter_single", "_reduce_scatter_base")(part, x).wait()
        method(group, "all_to_all_single", "alltoall_base")(dealt, x, [], []).wait()
        mine = on_device(group, torch.empty(6, 4))
        group.scatter([mine], [[x, x + 1]] if rank == 0 else [], options("Scatter", rootRank=0)).wait()
        gathered = [on_device(group, torch.empty(6, 4)) for _ in range(2)]
        group.gather([gathered] if rank == 0 else [], [x], options("Gather", rootRank=0)).wait()
        passed = x.clone()
        if rank == 0:
            group.send([passed], 1, 7).wait()
        else:
            group.recv([passed], 0, 7).wait()
        flags = on_device(group, values(rank, torch.bool))
        group.allreduce([flags], options("Allreduce", reduceOp=OPS["max"])).wait()
        return [*parts, whole, part, dealt, mine, passed, flags, *(gathered if rank == 0 else [])]

    compare(2, run)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.complex64], ids=str)
def test_sparse_tensors(dtype: torch.dtype) -> None:
    def run(group: ProcessGroup, rank: int) -> Tensor:
        x = coordinates(rank, dtype, (4,), [9, 0][rank]).cuda()
        group.allreduce([x], options("Allreduce")).wait()
        assert x.is_cuda
        assert x.is_coalesced()
        return x.cpu().to_dense()

    expected = coordinates(0, dtype, (4,), 9).to_dense()
    same(run_group(2, run), [expected] * 2)
