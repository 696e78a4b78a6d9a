"""Process groups whose ranks are threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from local_cluster import WAIT_S, Ranks

from omnireduce.torch.backend.gloo import gloo_group
from omnireduce.torch.backend.process_group import ProcessGroup

T = TypeVar("T")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here, or a torch without CUDA")


def method(group: Any, name: str, old_name: str) -> Callable[..., Any]:
    """A method that torch 2.13 calls `name`, and earlier ones `old_name`."""
    result: Callable[..., Any] = getattr(group, name if hasattr(dist.ProcessGroup, name) else old_name)
    return result


def options(kind: str, **values: Any) -> Any:
    """Options that torch hands to a method with a collective: `kind` is "Allreduce", "Broadcast", ..."""
    result = getattr(dist, f"{kind}Options")()
    for name, value in values.items():
        setattr(result, name, value)
    return result


def start_group(size: int, function: Callable[[ProcessGroup, int], T], timeout_s: float = WAIT_S) -> Ranks:
    """Run `function(group, rank)` on `size` ranks."""
    store = dist.HashStore()

    def run(rank: int) -> T:
        group = ProcessGroup(store, rank, size, timedelta(seconds=timeout_s))
        try:
            return function(group, rank)
        finally:
            group.shutdown()

    return Ranks(size, run)


def run_group(size: int, function: Callable[[ProcessGroup, int], T]) -> list[T]:
    """`start_group`, and what each rank returned."""
    return start_group(size, function).results()


def run_gloo(size: int, function: Callable[[dist.ProcessGroup, int], T]) -> list[T]:
    """The same for gloo."""
    store = dist.HashStore()
    wait = timedelta(seconds=WAIT_S)
    return Ranks(size, lambda rank: function(gloo_group(store, rank, size, "", wait), rank)).results()
