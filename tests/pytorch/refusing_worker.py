"""A rank of three that calls Horovod's names, of which rank 1 makes mistakes. Arguments: rank, size, job, scenarios."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import omnireduce.torch as hvd
from omnireduce import UsageError

NOT_BY_NAME = {"broadcast_parameters", "broadcast_optimizer_state", "allreduce_hook"}
ONES = torch.ones(3)
SPARSE = torch.sparse_coo_tensor([[0, 2]], torch.ones(2), (3,), check_invariants=True)
# A proper call of each name, and one that is refused.
CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "allreduce": (lambda f: f(ONES), lambda f: f(ONES, op="median")),
    "allreduce_": (lambda f: f(ONES.clone()), lambda f: f([1.0])),
    "grouped_allreduce": (lambda f: f([ONES, ONES]), lambda f: f([ONES, 1])),
    "grouped_allreduce_": (lambda f: f([ONES.clone()]), lambda f: f([])),
    "sparse_allreduce_async": (lambda f: f(SPARSE), lambda f: f(ONES)),
    "allgather": (lambda f: f(ONES), lambda f: f(torch.tensor(1.0))),
    "grouped_allgather": (lambda f: f([ONES, ONES]), lambda f: f([ONES, torch.tensor(1.0)])),
    "broadcast": (lambda f: f(ONES, 0), lambda f: f(ONES, 7)),
    "broadcast_": (lambda f: f(ONES.clone(), 0), lambda f: f("x", 0)),
    "alltoall": (lambda f: f(ONES), lambda f: f(ONES, splits=[1, 1])),
    "reducescatter": (lambda f: f(ONES), lambda f: f(ONES, op=hvd.Adasum)),
    "grouped_reducescatter": (lambda f: f([ONES, ONES]), lambda f: f([ONES, torch.tensor(1.0)])),
    "broadcast_object": (lambda f: f({"step": 7}, 1), lambda f: f(sys.stdin, 1)),
    "allgather_object": (lambda f: f({"step": 7}), lambda f: f(sys.stdin)),
}


def every_name_is_here() -> None:
    kinds = "reduce", "gather", "broadcast", "alltoall", "scatter"
    functions = {name for name in hvd.__all__ if inspect.isfunction(getattr(hvd, name))}
    public = {name for name in functions if any(kind in name for kind in kinds)}
    assert {form_of(name) for name in public} - NOT_BY_NAME == {form_of(name) for name in CALLS}


def form_of(name: str) -> str:
    return name.removesuffix("_").removesuffix("_async").removesuffix("_")


def what_one_rank_refuses() -> None:
    """The others get an error that says so. The same call without a name is sound after that, and one with a name."""
    for name, (proper, wrong) in CALLS.items():
        function = getattr(hvd, name)
        for form in (function, getattr(hvd, f"{name.removesuffix('_')}_async{'_' * name.endswith('_')}", None)):
            if form is None:
                continue
            for named in ({}, {"name": "w"}):
                with pytest.raises(Exception) as caught:  # noqa: PT011  of its own kind on the rank that refuses
                    finished((wrong if hvd.rank() == 1 else proper)(lambda *a, **k: form(*a, **k, **named)))  # noqa: B023
                if hvd.rank() != 1:
                    assert isinstance(caught.value, UsageError), (name, caught.value)
                    assert "rank 1 refused" in str(caught.value), (name, caught.value)
                finished(proper(lambda *a, **k: form(*a, **k, **named)))  # noqa: B023
    assert hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum).item() == 6


def finished(found: Any) -> None:
    if callable(found):
        found()


def a_gradient_that_cannot_be_combined() -> None:
    """Rank 1 has a sparse one, where the way to scale is not for those. The next step is sound."""
    words = torch.nn.Embedding(4, 1, sparse=hvd.rank() == 1)
    torch.nn.init.zeros_(words.weight)
    plain = torch.optim.SGD(words.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, [("w", words.weight)], gradient_predivide_factor=2.0)

    def step() -> None:
        words(torch.tensor([1])).sum().backward()
        optimizer.step()

    with pytest.raises(UsageError, match="'w' has a sparse gradient: expected op Average or Sum"):
        step()
    words.sparse, words.weight.grad = False, None
    for _ in range(2):
        step()
        optimizer.zero_grad()
    assert words.weight.flatten().tolist() == [0, -2, 0, 0]


def a_state_that_cannot_be_sent() -> None:
    """That of an optimizer of rank 1."""
    weights = [torch.nn.Parameter(torch.ones(2))]
    plain = torch.optim.SGD(weights, lr=0.5 + hvd.rank())
    with pytest.raises(UsageError, match="the state of LBFGS cannot be broadcast"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(weights) if hvd.rank() == 1 else plain)
    hvd.broadcast_optimizer_state(plain)
    assert plain.param_groups[0]["lr"] == 0.5


def a_batch_that_cannot_be_normalised() -> None:
    """That of rank 1 has no channels."""
    layer = hvd.SyncBatchNorm(3)
    with pytest.raises(UsageError, match=r"input has shape \(3,\)"):
        layer(torch.ones(3) if hvd.rank() == 1 else torch.ones(2, 3))
    assert layer(torch.full((2, 3), float(hvd.rank()))).shape == (2, 3)


def a_set_that_cannot_be() -> None:
    """That of rank 1, or other ranks. All hear it, also who is in none of them. Then the number is the same."""
    for wrong, words in (([0, 7], r"process set \[0, 7\]: expected ranks"), ([0, 2], r"process set \[0, [12]\]")):
        with pytest.raises(UsageError, match=words):
            hvd.add_process_set(wrong if hvd.rank() == 1 else [0, 1])
    some = hvd.add_process_set([0, 1])
    assert some.process_set_id == 3
    if some.included():
        assert hvd.allreduce(ONES, op=hvd.Sum, process_set=some).tolist() == [2, 2, 2]
    assert hvd.remove_process_set(some)


def main() -> None:
    rank, size, job, *scenarios = sys.argv[1:]
    torch.set_num_threads(1)
    hvd.init(rank=int(rank), size=int(size), job=job)
    for scenario in scenarios:
        sys.stderr.write(f"{scenario}\n")
        globals()[scenario]()
        hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    main()
