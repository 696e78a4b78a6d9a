"""Options of a collective, as torch hands them to a group: as an object, or as arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from omnireduce.errors import UsageError

T = TypeVar("T")
Method = Callable[..., Any]
_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}  # of options, by the words for them


def only(given: Sequence[T]) -> T:
    """The element of a list of one: torch has lists where a process once had several GPUs. Raises UsageError."""
    if len(given) != 1:
        raise UsageError(f"{len(given)} of them came in a list; expected one")
    return given[0]


def options_of(kind: type, words: Sequence[str], args: Sequence[Any], named: dict[str, Any]) -> Any:
    """The options of this kind among the arguments of a call, or else options made of its arguments `words`."""
    given = named.get("opts", args[0] if args else None)
    if isinstance(given, kind):
        return given
    options = kind()
    for word, value in {**dict(zip(words, args, strict=False)), **named}.items():
        if value is not None:
            setattr(options, _FIELDS[word], value)
    return options


def forms(kind: type, *words: str) -> Callable[[Method], Method]:
    """Lets a method `(self, tensors, opts)`, whose options are of `kind`, also take one tensor for a list of one, and
    the arguments `words` for the options."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, tensors: list[Tensor] | Tensor, *args: Any, **named: Any) -> Any:
            listed = [tensors] if isinstance(tensors, Tensor) else tensors
            return method(self, listed, options_of(kind, words, args, named))

        return call

    return decorate


def forms_of_two(kind: type, *words: str) -> Callable[[Method], Method]:
    """The same for a method `(self, outs, tensors, opts)`. Where one of the two is a tensor, both become lists of
    one."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, outs: Any, tensors: Any, *args: Any, **named: Any) -> Any:
            opts = options_of(kind, words, args, named)
            if isinstance(outs, Tensor) or isinstance(tensors, Tensor):
                outs, tensors = [outs], [tensors]
            return method(self, outs, tensors, opts)

        return call

    return decorate


allreduce_forms = forms(c10d.AllreduceOptions, "op", "timeout")
coalesced_forms = forms(c10d.AllreduceCoalescedOptions)
reduce_forms = forms(c10d.ReduceOptions, "root", "op", "timeout")
broadcast_forms = forms(c10d.BroadcastOptions, "root", "timeout")
all_gather_forms = forms_of_two(c10d.AllgatherOptions, "timeout")
gather_forms = forms_of_two(c10d.GatherOptions, "root", "timeout")
scatter_forms = forms_of_two(c10d.ScatterOptions, "root", "timeout")
reduce_scatter_forms = forms_of_two(c10d.ReduceScatterOptions, "op", "timeout")
