"""Gloo, for what the aggregators do not serve. Tensors on a GPU are staged.

Gloo takes such tensors for some collectives. For others it uses their addresses as if they were of its own memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.utils._pytree import tree_leaves, tree_map_only

from omnireduce.runtime.member.calls import once
from omnireduce.torch.tensors import put_back, staged
from omnireduce.torch.work import NO_LIMIT, gpus_of

DEVICES = ["cpu", "cuda"]


def gloo_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A process group of torch that uses gloo."""
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    for device in DEVICES:
        group._register_backend(torch.device(device), kind, gloo)
    return group


def call_gloo(group: dist.ProcessGroup, name: str, *args: Any, **kwargs: Any) -> dist._Work:
    """Call the method `name` of a group of gloo. It writes its first argument, but for `send`."""
    call = getattr(group, name)
    if not any(_is_on_gpu(each) for each in tree_leaves((args, kwargs))):
        return call(*args, **kwargs)
    tensors = _first(args, kwargs)
    args, kwargs = tree_map_only(Tensor, lambda each: staged(each) if _is_on_gpu(each) else each, (args, kwargs))
    work = call(*args, **kwargs)
    return StagedWork(work, [], []) if name == "send" else StagedWork(work, tensors, _first(args, kwargs))


def _is_on_gpu(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_cuda and not value.is_sparse  # gloo sums sparse ones there


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors of the first argument."""
    return [each for each in tree_leaves((*args, *kwargs.values())[0]) if isinstance(each, Tensor)]


class StagedWork(dist._Work):
    """A collective of gloo that writes `copies`, which then replace `tensors`, on a GPU."""

    def __init__(self, work: dist._Work, tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        super().__init__()
        self._work, self._devices = work, gpus_of(tensors)
        self._put_back = once(lambda: put_back(tensors, copies))

    def is_completed(self) -> bool:
        if not self._work.is_completed():
            return False
        with suppress(RuntimeError):  # `wait` and `exception` tell that
            self.wait()
        return True

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def source_rank(self) -> int:
        return int(self._work._source_rank())

    _source_rank = source_rank

    def result(self) -> list[Tensor]:
        self.wait()
        return self._put_back()

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        self._work.wait(timeout)
        self._put_back()
        return True

    def get_future(self) -> Future[list[Tensor]]:
        over: Future[None] = Future(devices=self._devices)  # that of gloo takes no tensors on a GPU

        copied = self._work.get_future()

        def finish(_: Future[None]) -> list[Tensor]:
            copied.wait()  # raises why gloo failed. To wait for the work would last for ever: it waits for this
            return self._put_back()

        copied.add_done_callback(lambda _: over.set_result(None))
        return over.then(finish)
