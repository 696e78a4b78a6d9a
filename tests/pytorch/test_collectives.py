"""Each collective against gloo's, which is the oracle: the same bits for the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import method, options, run_gloo, run_group
from local_cluster import Daemon
from torch import Tensor
from torch.distributed import ReduceOp

from omnireduce.torch import ProcessGroup

pytestmark = pytest.mark.usefixtures("aggregators")

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.int32, torch.int64, torch.uint8)
OTHERS = (torch.bool, torch.complex64, torch.complex128)
OPS = {
    "sum": ReduceOp.SUM,
    "mean": ReduceOp.AVG,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "prod": ReduceOp.PRODUCT,
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.clone().t(),
    "strided": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "part": lambda x: torch.cat([x, x])[1 : 1 + len(x)],
}
Group = Any  # ours or gloo's


def packed(group: Group, x: Tensor) -> Tensor:
    """Argument for `group` in place of `x`: gloo needs values that lie in memory in their order."""
    return x if isinstance(group, ProcessGroup) else x.contiguous()


def values(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (7, 13)) -> Tensor:
    """Small numbers, most of them zero, of which sums, means of two and four, and products are exact."""
    chance = torch.Generator().manual_seed(rank)
    result = torch.randint(0, 3, shape, generator=chance) * (torch.rand(shape, generator=chance) < 0.3)
    if dtype.is_complex:
        return torch.complex(result.double(), -result.double()).to(dtype)
    return result.to(dtype)


def same(ours: Any, theirs: Any) -> None:
    """Both have the same tensors on each rank."""
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        if isinstance(our, Tensor):
            assert our.dtype == their.dtype
            assert torch.equal(our, their), (our, their)
        else:
            same(our, their)


def compare(size: int, function: Callable[[Group, int], Any]) -> None:
    same(run_group(size, function), run_gloo(size, function))


def cases() -> list[tuple[torch.dtype, str]]:
    results = [(dtype, name) for dtype in FLOATS for name in OPS]
    results += [(dtype, name) for dtype in INTEGERS for name in OPS if name != "mean"]
    return results + [(dtype, name) for dtype in (torch.complex64, torch.complex128) for name in ("sum", "mean")]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_allreduce_of_every_type_and_layout(size: int) -> None:
    """One group for all cases. A mean of three or five is not exact, and left out."""

    def run(group: Group, rank: int) -> list[Tensor]:
        results = []
        for dtype, name in cases():
            if name == "mean" and size not in (1, 2, 4):
                continue
            for change in LAYOUTS.values():
                x = packed(group, change(values(rank, dtype)))
                group.allreduce([x], options("Allreduce", reduceOp=OPS[name])).wait()
                results.append(x)
        return results

    compare(size, run)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (100_003,)], ids=str)
def test_shapes(shape: tuple[int, ...]) -> None:
    def run(group: Group, rank: int) -> list[Tensor]:
        x, y, z = (values(rank, torch.float32, shape) for _ in range(3))
        group.allreduce([x], options("Allreduce")).wait()
        group.broadcast([y], options("Broadcast", rootRank=1)).wait()
        group.reduce([z], options("Reduce", rootRank=1)).wait()
        return [x, y, z] if rank == 1 else [x, y]

    compare(2, run)


@pytest.mark.parametrize("root", [0, 2])
def test_from_and_to_one_rank(root: int) -> None:
    def run(group: Group, rank: int) -> list[Any]:
        results: list[Any] = []
        for dtype in (*FLOATS, *INTEGERS, *OTHERS):
            for change in LAYOUTS.values():
                results.append(packed(group, change(values(rank, dtype))))
                group.broadcast(results[-1:], options("Broadcast", rootRank=root)).wait()
        kept = packed(group, values(rank, torch.float32).t())
        group.reduce([kept], options("Reduce", rootRank=root)).wait()
        parts = [torch.empty(7, 13) for _ in range(3)]
        group.gather(
            [parts] if rank == root else [], [values(rank, torch.float32)], options("Gather", rootRank=root)
        ).wait()
        mine = torch.empty(7, 13)
        sent = [[values(10 + number, torch.float32) for number in range(3)]] if rank == root else []
        group.scatter([mine], sent, options("Scatter", rootRank=root)).wait()
        return [*results, mine, *([kept, *parts] if rank == root else [])]

    compare(3, run)


def test_from_all_to_all() -> None:
    def run(group: Group, rank: int) -> list[Tensor]:
        x = values(rank, torch.float32, (6, 4))
        parts = [torch.empty(6, 4) for _ in range(3)]
        group.allgather([parts], [x]).wait()
        whole, part, dealt = torch.empty(18, 4), torch.empty(2, 4), torch.empty(6, 4)
        method(group, "all_gather_single", "_allgather_base")(whole, x).wait()
        method(group, "reduce_scatter_single", "_reduce_scatter_base")(part, x).wait()
        method(group, "all_to_all_single", "alltoall_base")(dealt, x, [], []).wait()
        many = [values(rank, torch.float32), values(rank, torch.float32, (5,))]
        group.allreduce_coalesced(many, dist.AllreduceCoalescedOptions()).wait()
        group.barrier().wait()
        return [*parts, whole, part, dealt, *many]

    compare(3, run)


def test_from_one_to_another() -> None:
    def run(group: Group, rank: int) -> list[Tensor]:
        x = values(rank, torch.float32)
        if rank == 0:
            group.send([x], 1, 7).wait()
        else:
            group.recv([x], 0, 7).wait()
        return [x]

    compare(2, run)


def coordinates(rank: int, dtype: torch.dtype, dense: tuple[int, ...], nnz: int) -> Tensor:
    """A sparse tensor of 5 x 6 rows, some of them twice."""
    chance = torch.Generator().manual_seed(rank)
    indices = torch.stack(
        [torch.randint(0, 5, (nnz,), generator=chance), torch.randint(0, 6, (nnz,), generator=chance)]
    )
    size = (5, 6, *dense)
    return torch.sparse_coo_tensor(indices, values(rank, dtype, (nnz, *dense)), size, check_invariants=True)


@pytest.mark.parametrize("dense", [(), (4,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.complex64], ids=str)
def test_sparse_tensors(dense: tuple[int, ...], dtype: torch.dtype) -> None:
    """Different numbers of rows, some repeated; rank 2 has none. The oracle is the sum of dense tensors."""
    rows = [9, 4, 0]

    def run(group: Group, rank: int) -> Tensor:
        x = coordinates(rank, dtype, dense, rows[rank])
        group.allreduce([x], options("Allreduce")).wait()
        assert x.is_sparse
        assert x.is_coalesced()
        return x.to_dense()

    dense_ones = [coordinates(rank, dtype, dense, rows[rank]).to_dense() for rank in range(3)]
    expected = dense_ones[0] + dense_ones[1] + dense_ones[2]
    same(run_group(3, run), [expected] * 3)


def test_sparse_tensors_of_inference() -> None:
    def run(group: Group, rank: int) -> Tensor:
        with torch.inference_mode():
            x = coordinates(rank, torch.float32, (4,), 3)
            group.allreduce([x], options("Allreduce", asyncOp=True)).wait()
            return x.to_dense()

    same(run_group(1, run), [coordinates(0, torch.float32, (4,), 3).to_dense()])


def test_the_default_device_may_be_another_one() -> None:
    def run(group: Group, rank: int) -> list[Tensor]:
        x, rows = torch.ones(3), coordinates(rank, torch.float32, (4,), 3)
        with torch.device("meta"):
            group.allreduce([x], options("Allreduce")).wait()
            group.allreduce([rows], options("Allreduce")).wait()
        return [x, rows.to_dense()]

    same(run_group(1, run), [[torch.ones(3), coordinates(0, torch.float32, (4,), 3).to_dense()]])


def test_a_group_of_threads_of_this_process_is_served_by_the_aggregators(aggregators: Daemon) -> None:
    def run(group: Group, rank: int) -> tuple[int, str]:
        group.allreduce([torch.ones(3)], options("Allreduce")).wait()
        return group._job.join().statistics().collectives, group.getBackendName()

    assert run_group(2, run) == [(1, "omnireduce")] * 2


def test_options_need_not_be_given() -> None:
    """Torch's methods have several forms; DDP uses that with one tensor, when a rank has no batches."""

    def run(group: Group, rank: int) -> list[Tensor]:
        x = [values(rank, torch.float32) for _ in range(8)]
        works = [
            group.allreduce(x[:1]),
            group.allreduce(x[1]),
            group.allreduce(x[2], ReduceOp.MAX),
            group.allreduce(x[3:4], op=ReduceOp.MIN),
            group.allreduce_coalesced(x[4:5]),
            group.broadcast(x[5], root=1),
            group.broadcast(x[6:7]),
            group.barrier(),
        ]
        for work in works:
            work.wait()
        group.reduce(x[7], 1, ReduceOp.MAX).wait()
        return x if rank == 1 else x[:7]

    compare(3, run)
