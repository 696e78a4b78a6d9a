"""Options of a collective. Torch hands them to a process group as an object, or as single arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from omnireduce.errors import UsageError

T = TypeVar("T")
Method = Callable[..., Any]
_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}  # fields of options, by the argument's name


def only_element(elements: Sequence[T]) -> T:
    """The element of a list of one: torch has lists where a process once had several GPUs. Raises UsageError."""
    if len(elements) != 1:
        raise UsageError(f"{len(elements)} of them came in a list; expected one")
    return elements[0]


def options_of(kind: type, names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The options of this kind among the arguments of a call, or else options made of its arguments `names`."""
    candidate = kwargs.get("opts", args[0] if args else None)
    if isinstance(candidate, kind):
        return candidate
    options = kind()
    for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
        if value is not None:
            setattr(options, _FIELDS[name], value)
    return options


def forms(kind: type, *names: str) -> Callable[[Method], Method]:
    """Lets a method `(self, tensors, opts)`, whose options are of `kind`, also take one tensor for a list of one, and
    the arguments `names` for the options."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, tensors: list[Tensor] | Tensor, *args: Any, **kwargs: Any) -> Any:
            tensor_list = [tensors] if isinstance(tensors, Tensor) else tensors
            return method(self, tensor_list, options_of(kind, names, args, kwargs))

        return call

    return decorate


def forms_of_two(kind: type, *names: str) -> Callable[[Method], Method]:
    """As `forms`, for a method `(self, outs, tensors, opts)`. If one of the two is a tensor, both become lists of
    one."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, outs: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            opts = options_of(kind, names, args, kwargs)
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
