"""Training without a process group, in Horovod's words: gradients are combined when an optimizer makes its step.

import omnireduce.torch as hvd

hvd.init()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), grace=grc)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from omnireduce.compression.grace import Communicator as Grace
from omnireduce.errors import UsageError
from omnireduce.logs import start_logs
from omnireduce.runtime.member import world
from omnireduce.runtime.member.communicator import Communicator
from omnireduce.torch.tensors import array_of, put_back, staged

Named = Mapping[str, Any] | Iterable[tuple[str, Any]]
_combining: WeakSet[torch.optim.Optimizer] = WeakSet()
_numbers: WeakKeyDictionary[Grace, count[int]] = WeakKeyDictionary()  # of the optimizers that share a memory


def init(config: Any = None, **named: Any) -> Communicator:
    """As `omnireduce.init`. Where `log.level` is "debug", and the script has no logging of its own, the log lines of
    this rank go to standard error."""
    found = world.init(config, **named)
    if found.config.log.level == "debug" and not logging.getLogger().handlers:
        start_logs(found.config.log, rank=found.rank)
    return found


def allreduce(tensor: Tensor, average: bool = True, name: str = "") -> Tensor:
    """The mean of `tensor` over all ranks, or its sum: a tensor like it. Raises what `omnireduce.allreduce` raises."""
    found = tensor.detach().clone()
    _combine(world.running(), [found], name, "mean" if average else "sum")
    return found


@torch.no_grad()
def broadcast_parameters(params: Named, root_rank: int = 0) -> None:
    """Replace tensors by those of the root: `model.state_dict()`, or `model.named_parameters()`. What is no tensor
    stays as it is. Raises what `omnireduce.broadcast` raises."""
    pairs = params.items() if isinstance(params, Mapping) else params
    for name, tensor in pairs:
        if isinstance(tensor, Tensor):
            copy = staged(tensor)
            world.running().broadcast(array_of(copy), root_rank, name=f"broadcast {name}")
            put_back([tensor], [copy])


def DistributedOptimizer(  # noqa: N802  Horovod's name
    optimizer: torch.optim.Optimizer, named_parameters: Named | None = None, grace: Grace | None = None
) -> torch.optim.Optimizer:
    """Let `optimizer` combine the gradients of all ranks before each of its steps, and return it.

    `named_parameters`: names of all its parameters, the same on all ranks; None: they are numbered. Those of parameters
    that it gets later, by `add_param_group`, may be among them. `grace`: what `grace_from_params` returns, which
    combines gradient by gradient; None: all are averaged at once. Optimizers may share one: what it keeps is that of
    one optimizer each. A parameter without a gradient counts as one whose gradient is zero: others may have one.

    Raises UsageError for what is no optimizer, for names that are missing or none, and for an optimizer that combines
    already. A step raises it for a parameter without a name, for a closure and for sparse gradients, and otherwise what
    the collectives raise.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer is a {type(optimizer).__name__}; expected one of torch.optim")
    if grace is not None and not isinstance(grace, Grace):
        raise UsageError(f"grace is a {type(grace).__name__}; expected what grace_from_params returns")
    if optimizer in _combining:
        raise UsageError("the optimizer combines gradients already; expected one that was not given here before")
    names = None if named_parameters is None else _names(named_parameters)
    gradients = Gradients(names, grace, world.running() if grace is None else grace.comm)
    gradients.of(optimizer)  # raises what is wrong with the names
    optimizer.register_step_pre_hook(gradients.before_step)
    _combining.add(optimizer)
    return optimizer


class Gradients:
    """The gradients of the parameters of an optimizer. `names`: of each parameter; None: they are numbered.

    A memory knows gradients by their names. So those of all but the first optimizer that shares it have a number more.
    """

    def __init__(self, names: dict[Tensor, str] | None, grace: Grace | None, comm: Communicator) -> None:
        self._names, self._grace, self._comm = names, grace, comm
        self._number: int | None = None

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Combine them: a hook of the optimizer."""
        if any(each is not None for each in (*args[1:], kwargs.get("closure"))):
            raise UsageError("step with a closure: gradients are combined before the step. Compute them first")
        found = {name: self._gradient(name, each) for name, each in self.of(optimizer).items() if each.requires_grad}
        if self._grace is None:
            _combine(self._comm, list(found.values()), "gradients", "mean")
            return
        if self._number is None:
            self._number = next(_numbers.setdefault(self._grace, count()))
        beside = f" of optimizer {self._number}" if self._number else ""
        for name, gradient in found.items():
            gradient.copy_(self._grace.step(gradient, name + beside))

    def of(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The parameters that the optimizer has now by name, in its order. Raises UsageError for one without a name."""
        own = [each for group in optimizer.param_groups for each in group["params"]]
        if self._names is None:
            return {f"parameter {i}": each for i, each in enumerate(own)}
        missing = sum(each not in self._names for each in own)
        if missing:
            raise UsageError(
                f"named_parameters: expected a name for each parameter; {missing} parameters of the optimizer have none"
            )
        return {self._names[each]: each for each in own}

    @staticmethod
    def _gradient(name: str, parameter: Tensor) -> Tensor:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            raise UsageError(f"parameter '{name}' has a sparse gradient: expected nn.Embedding(sparse=False)")
        return parameter.grad


def _combine(comm: Communicator, tensors: list[Tensor], name: str, op: Any) -> None:
    copies = [staged(each) for each in tensors]
    comm.allreduce([array_of(each) for each in copies], op=op, name=name)
    put_back(tensors, copies)


def _names(named: Named) -> dict[Tensor, str]:
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
