"""Tensors on a GPU, staged through pinned memory."""

from __future__ import annotations

import pytest
import torch
from groups import options, run_group

from omnireduce.torch import ProcessGroup

pytestmark = [
    pytest.mark.usefixtures("aggregators"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here, or a torch without CUDA"),
]


@pytest.mark.parametrize("waits", [True, False], ids=["waited for", "not waited for"])
def test_tensors_on_a_gpu(waits: bool) -> None:
    def run(group: ProcessGroup, rank: int) -> list[list[float]]:
        found = []
        for x in (torch.ones(5), torch.ones(3, 2).t(), torch.ones(4, dtype=torch.bfloat16)):
            on_gpu = x.cuda() * (rank + 1)
            group.allreduce([on_gpu], options("Allreduce", asyncOp=not waits)).wait()
            group.broadcast([on_gpu], options("Broadcast", rootRank=1, asyncOp=not waits)).wait()
            found.append(on_gpu.flatten().tolist())
        return found

    assert run_group(2, run) == [[[3.0] * 5, [3.0] * 6, [3.0] * 4]] * 2


def test_sparse_tensors_on_a_gpu() -> None:
    def run(group: ProcessGroup, rank: int) -> list[list[float]]:
        x = torch.sparse_coo_tensor([[rank, 3]], torch.ones(2, 2), (4, 2), check_invariants=True).cuda()
        group.allreduce([x], options("Allreduce")).wait()
        found: list[list[float]] = x.to_dense().tolist()
        return found

    assert run_group(2, run) == [[[1, 1], [1, 1], [0, 0], [2, 2]]] * 2
