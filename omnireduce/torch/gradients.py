"""The gradients of an optimizer's parameters, which are combined as soon as backward has made them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from omnireduce.data_parallel.session import ProcessSet
from omnireduce.data_parallel.words import Average, Scaling, Sum
from omnireduce.errors import UsageError
from omnireduce.torch.handles import Handle, synchronize
from omnireduce.torch.reductions import sparse_allreduce_async, start_reduction

Named = Mapping[str, Any] | Iterable[tuple[str, Any]]


class Names:
    """Names of parameters, the same on all ranks. `given`: None to number them."""

    def __init__(self, given: Named | None) -> None:
        self._given = None if given is None else _checked(given)

    def of(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The parameters that the optimizer has now by name, in its order. Raises UsageError for one without a name."""
        own = [each for group in optimizer.param_groups for each in group["params"]]
        if self._given is None:
            return {f"parameter {i}": each for i, each in enumerate(own)}
        missing = sum(each not in self._given for each in own)
        if missing:
            raise UsageError(
                f"named_parameters: expected a name for each parameter; {missing} parameters of the optimizer have none"
            )
        return {self._given[each]: each for each in own}


def _checked(named: Named) -> dict[Tensor, str]:
    """The name of each parameter. Raises UsageError where two have the same, and for what is no name and parameter."""
    pairs = list(named.items() if isinstance(named, Mapping) else named)
    for each in pairs:
        match each:
            case (str(), Tensor()):
                continue
        raise UsageError(
            f"named_parameters has a {type(each).__name__}; expected a name and a parameter, as "
            "model.named_parameters() gives them"
        )
    if len(dict(pairs)) < len(pairs):
        raise UsageError("named_parameters: expected a name for each parameter; some are there twice")
    return {each: name for name, each in pairs}


class Way(NamedTuple):
    """How gradients are combined: see `DistributedOptimizer`."""

    how: Scaling
    compression: type[Any]
    sparse_as_dense: bool
    process_set: ProcessSet


class Gradients:
    """Those of one optimizer. A hook starts to combine each gradient when backward has made it for the last time before
    a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Names, way: Way, passes: int) -> None:
        self._names, self._way, self._passes = names, way, passes
        self._parameters: dict[Tensor, str] = {}  # that have a hook
        self._passes_left: dict[Tensor, int] = {}
        self._handles: dict[Tensor, Handle] = {}  # of gradients that are combined now
        self._group_of: dict[Tensor, Sequence[Tensor]] = {}
        self._is_combined = False
        self.skips = False  # steps take the gradients as they are
        self.watch(optimizer)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Hook on to the parameters that the optimizer has now. Raises UsageError for one without a name."""
        for name, each in self._names.of(optimizer).items():
            if each.requires_grad and each not in self._parameters:
                self._parameters[each], self._passes_left[each] = name, self._passes
                each.register_post_accumulate_grad_hook(self._made)

    def put_in_groups(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Combine those of each group together. Raises UsageError for what is no parameter of the optimizer."""
        for group in groups:
            own = [each for each in group if each in self._parameters]
            if len(own) < len(group):
                raise UsageError(f"groups: {len(group) - len(own)} tensors are no parameters of the optimizer")
            self._group_of.update(dict.fromkeys(own, own))

    def split_in_groups(self, number: int) -> None:
        """Combine the gradients in so many groups."""
        own = list(self._parameters)
        self.put_in_groups([own[at::number] for at in range(min(number, len(own)))])

    def set_passes(self, passes: int) -> None:
        """From now on backward runs so often before a step."""
        self._passes = passes
        self._passes_left = dict.fromkeys(self._passes_left, passes)

    def _made(self, parameter: Tensor) -> None:
        left = self._passes_left[parameter]
        if not left or parameter in self._handles:
            raise UsageError(
                f"the gradient of '{self._parameters[parameter]}' was made more than {self._passes} times before a "
                "step; expected backward_passes_per_step to say how often"
            )
        self._passes_left[parameter] = left - 1
        if left == 1:
            self._begin(parameter)

    def _begin(self, parameter: Tensor) -> None:
        group = self._group_of.get(parameter)
        if group is None:
            self._handles[parameter] = self._start(parameter)
        elif not any(self._passes_left[each] for each in group):
            self._start_group(group)

    @torch.no_grad()
    def _start(self, parameter: Tensor) -> Handle:
        gradient, way, name = parameter.grad, self._way, self._parameters[parameter]
        assert gradient is not None
        if gradient.is_sparse:
            if not way.sparse_as_dense:
                return self._start_sparse(parameter, gradient, name)
            gradient = parameter.grad = gradient.to_dense()
        small, ctx = way.compression.compress(gradient)
        handle = start_reduction([small], [small], way.how, f"gradient.{name}", way.process_set)
        if small is gradient:
            return handle

        def put_back(_: Any) -> None:
            parameter.grad = way.compression.decompress(small, ctx)

        return handle.then(put_back)

    def _start_sparse(self, parameter: Tensor, gradient: Tensor, name: str) -> Handle:
        op, before, after = self._way.how
        if (op not in (Average, Sum)) or before != 1 or after != 1:
            raise UsageError(f"'{name}' has a sparse gradient: expected op Average or Sum, or sparse_as_dense=True")
        handle = sparse_allreduce_async(gradient, name, op, self._way.process_set)

        def put_back(found: Tensor) -> None:
            parameter.grad = found

        return handle.then(put_back)

    @torch.no_grad()
    def _start_group(self, group: Sequence[Tensor]) -> None:
        """Sparse ones go by themselves."""
        sparse = {each for each in group if each.grad is not None and each.grad.is_sparse}
        dense = [each for each in group if each not in sparse]
        self._handles.update({each: self._start(each) for each in sparse})
        if not dense:
            return
        way, name = self._way, self._parameters[group[0]]
        small = [way.compression.compress(each.grad) for each in dense]
        tensors = [each for each, _ in small]
        handle = start_reduction(tensors, tensors, way.how, f"gradients.{name}", way.process_set)

        def put_back(_: Any) -> None:
            for parameter, (tensor, ctx) in zip(dense, small, strict=True):
                if tensor is not parameter.grad:
                    parameter.grad = way.compression.decompress(tensor, ctx)

        handle = handle.then(put_back)
        self._handles.update(dict.fromkeys(dense, handle))

    @torch.no_grad()
    def combine(self) -> None:
        """Wait until all gradients are combined. One that this rank has not made counts as zeros."""
        for each in self._parameters:
            if each not in self._handles:
                if each.grad is None:
                    each.grad = torch.zeros_like(each)
                self._passes_left[each] = 0
        for each in self._parameters:
            if each not in self._handles:
                self._begin(each)
        handles, self._handles = self._handles, {}
        self._passes_left = dict.fromkeys(self._passes_left, self._passes)
        for each in {id(handle): handle for handle in handles.values()}.values():
            synchronize(each)
        self._is_combined = True

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """A hook of the optimizer."""
        no_closure(args, kwargs)
        self.watch(optimizer)
        if not self.skips and not self._is_combined:
            self.combine()
        self._is_combined = False

    def give_up(self) -> None:
        """Forget what is under way."""
        self._handles, self._is_combined = {}, False
        self._passes_left = dict.fromkeys(self._passes_left, self._passes)

    def check_idle(self) -> None:
        """Raises UsageError while gradients are combined."""
        if self._handles:
            raise UsageError("zero_grad between backward and step, while gradients are combined; call step first")


def no_closure(args: Any, kwargs: Any) -> None:
    """Raises UsageError where the arguments of a step have a closure."""
    if any(each is not None for each in (*args[1:], kwargs.get("closure"))):
        raise UsageError("step with a closure: gradients are combined before the step. Compute them first")
