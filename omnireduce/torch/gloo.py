"""Gloo, for what the aggregators do not serve. Tensors on a GPU, and those that are not contiguous, are staged.

Gloo takes tensors on a GPU for some collectives. For others it uses their addresses as if they were of its own memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.utils._pytree import tree_leaves, tree_map_only

from omnireduce.runtime.member.calls import once
from omnireduce.torch.tensors import DEVICES, flat_bytes, gpus_of, put_back, room_for, staged
from omnireduce.torch.work import NO_LIMIT

READ_FIRST = ("allreduce", "allreduce_coalesced", "reduce", "broadcast", "send")  # they read their first argument


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
    """Call the method `name` of a group of gloo, which writes its first argument, but for `send`. Raises TypeError for
    tensors that are named, where they have to be staged."""
    call = getattr(group, name)
    if not any(_has_to_be_staged(each) for each in tree_leaves((args, kwargs))):
        return call(*args, **kwargs)
    if _tensors(kwargs):
        raise TypeError(f"{name}: tensors on a GPU, or not contiguous, are taken by position, not by name")
    make = staged if name in READ_FIRST else room_for
    first = _with_copies(args[:1], make)
    work = call(*first, *_with_copies(args[1:], staged), **kwargs)
    return StagedWork(work, [], []) if name == "send" else StagedWork(work, _tensors(args[:1]), _tensors(first))


def combine_bits(
    group: dist.ProcessGroup, copies: Sequence[Tensor], opts: Any, results: Sequence[Tensor], targets: Sequence[Tensor]
) -> dist._Work:
    """Combine staged tensors of all ranks in place, bit by bit, and put `results`, which are parts of them, into
    `targets`."""
    plain = dist.AllreduceCoalescedOptions()
    plain.reduceOp, plain.timeout = opts.reduceOp, opts.timeout
    work = group.allreduce_coalesced([flat_bytes(each) for each in copies], plain)  # of bytes: gloo lacks some types
    return StagedWork(work, targets, results)


def _has_to_be_staged(value: object) -> bool:
    """Gloo takes the memory of a tensor for its values, in their order. It sums sparse tensors by itself."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return value.is_cuda or not value.is_contiguous() or value.is_conj() or value.is_neg()


def _with_copies(args: Any, make: Callable[[Tensor], Tensor]) -> Any:
    return tree_map_only(Tensor, lambda each: make(each) if _has_to_be_staged(each) else each, args)


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


class StagedWork(dist._Work):
    """A collective of gloo that writes `copies`, which then replace `tensors`."""

    def __init__(self, work: dist._Work, tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        super().__init__()
        self._work, self._devices = work, gpus_of(tensors)
        self._put_back = once(lambda: put_back(tensors, copies))
        self._waiting = threading.RLock()  # a signal handler may come on top
        self._is_over = False
        self._error: Exception | None = None

    def is_completed(self) -> bool:
        if not self._is_over and self._work.is_completed():
            with suppress(Exception):  # `wait` and `exception` tell that
                self.wait()
        return self._is_over

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error if self.is_completed() else None

    def _source_rank(self) -> int:
        """For `dist.recv` of any rank."""
        return int(self._work._source_rank())

    def result(self) -> list[Tensor]:
        self.wait()
        return self._put_back()

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Return True once it is over. Raises what gloo raises."""
        with self._waiting:
            if not self._is_over:  # to wait twice for a message is to wait for another one
                try:
                    self._work.wait(timeout)
                    self._put_back()
                except Exception as error:
                    self._error = error
                self._is_over = True
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Future[list[Tensor]]:
        over: Future[None] = Future(devices=self._devices)
        copied = self._work.get_future()

        def finish(_: Future[None]) -> list[Tensor]:
            copied.wait()  # raises why gloo failed. To wait for the work would last for ever: it waits for this
            return self._put_back()

        copied.add_done_callback(lambda _: over.set_result(None))
        return over.then(finish)
