"""The forms in which torch calls the collectives of a group: with options, or with their words one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

Method = Callable[..., Any]


def made(kind: type, **fields: Any) -> Any:
    """Options of torch; what is None stays as torch has it."""
    options = kind()
    for name, value in fields.items():
        if value is not None:
            setattr(options, name, value)
    return options


def all_forms(kind: type, words: Callable[..., Any]) -> Callable[[Method], Method]:
    """Lets a method `(self, tensors, opts)`, whose options are of `kind`, take one tensor for a list of one, too, and
    in place of the options whatever `words` makes them of."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, tensors: list[Tensor] | Tensor, *args: Any, **named: Any) -> Any:
            opts = named["opts"] if "opts" in named else args[0] if args and isinstance(args[0], kind) else None
            listed = [tensors] if isinstance(tensors, Tensor) else tensors
            return method(self, listed, words(*args, **named) if opts is None else opts)

        return call

    return decorate


allreduce_forms = all_forms(
    dist.AllreduceOptions, lambda op=None, timeout=None: made(dist.AllreduceOptions, reduceOp=op, timeout=timeout)
)
coalesced_forms = all_forms(dist.AllreduceCoalescedOptions, lambda: made(dist.AllreduceCoalescedOptions))
reduce_forms = all_forms(
    dist.ReduceOptions,
    lambda root=None, op=None, timeout=None: made(dist.ReduceOptions, rootRank=root, reduceOp=op, timeout=timeout),
)
broadcast_forms = all_forms(
    dist.BroadcastOptions, lambda root=None, timeout=None: made(dist.BroadcastOptions, rootRank=root, timeout=timeout)
)
