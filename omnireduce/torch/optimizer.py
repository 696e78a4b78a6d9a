"""Training without a process group, in Horovod's words: the gradients of all ranks are combined for an optimizer.

import omnireduce.torch as hvd

hvd.init()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from omnireduce.compression.grace import Communicator as Grace
from omnireduce.data_parallel.queue import QueueOp
from omnireduce.data_parallel.session import ProcessSet, global_process_set, session_of
from omnireduce.data_parallel.words import Average, scaling
from omnireduce.errors import UsageError
from omnireduce.torch.compression import Compression
from omnireduce.torch.gradients import Gradients, Named, ParameterNames, Way, no_closure
from omnireduce.torch.sharded import ShardedOptimizer

_numbers: WeakKeyDictionary[Grace, count[int]] = WeakKeyDictionary()  # of the optimizers that share a memory


class Distributed(torch.optim.Optimizer):
    """What an optimizer can do beside its own once its gradients are those of all ranks."""

    _gradients: Gradients

    def synchronize(self) -> None:
        """Wait until all gradients are combined; the next `step` takes them as they are then."""
        self._gradients.watch(self)
        self._gradients.combine()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In this block `step` takes the gradients as they are. For after `synchronize`, and a change of gradients."""
        self._gradients.skips = True
        try:
            yield
        finally:
            self._gradients.skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on backward runs so often before a step. Raises UsageError for less than once."""
        self._gradients.set_passes(_at_least_once(passes))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As before. Raises UsageError while gradients are combined."""
        self._gradients.check_idle()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As before. Gradients that are under way are waited for, and given up: for after a fault."""
        self._gradients.settle()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As before; the new parameters' gradients are combined, too. Raises UsageError for one without a name."""
        super().add_param_group(param_group)
        self._gradients.watch(self)


def DistributedOptimizer(  # noqa: N802  Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Named | None = None,
    compression: type[Any] = Compression.none,
    backward_passes_per_step: int = 1,
    op: QueueOp = Average,
    *,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    grace: Grace | None = None,
) -> Any:
    """Let `optimizer` combine the gradients of all ranks, and return it: it is a `Distributed`, too.

    Each gradient starts on its way when `backward` has made it, for the `backward_passes_per_step`th time; `step` waits
    for all. A parameter without a gradient counts as one whose gradient is zero: others may have one.

    `named_parameters`: names of all its parameters, the same on all ranks; None: they are numbered. Those of parameters
    that it gets later, by `add_param_group`, may be among them. `op`: Average, Sum, Min, Max, Product or Adasum.
    `gradient_predivide_factor` divides before the sum; the rest of the mean is divided after it. `groups`: lists of
    parameters whose gradients are combined together, or how many groups there shall be (also `num_groups`). Sparse
    gradients are added by index, and stay sparse, unless `sparse_as_dense`. `grace`: what `grace_from_params` returns,
    which combines gradient by gradient when a step begins; then the words before do not count. Optimizers may share
    one: what it keeps is that of one optimizer each.

    Raises UsageError for what is no optimizer, for names that are missing or none, for other arguments that cannot be,
    and for an optimizer that combines already, as a `ShardedOptimizer` does. A step raises it for a closure, and
    otherwise what the collectives raise.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer is a {type(optimizer).__name__}; expected one of torch.optim")
    if grace is not None and not isinstance(grace, Grace):
        raise UsageError(f"grace is a {type(grace).__name__}; expected what grace_from_params returns")
    if isinstance(optimizer, Distributed) or getattr(optimizer, "_omnireduce_grace", None):
        raise UsageError("the optimizer combines gradients already; expected one that was not given here before")
    if isinstance(optimizer, ShardedOptimizer):
        raise UsageError("a ShardedOptimizer combines gradients itself; expected one of torch.optim")
    names = ParameterNames(named_parameters)
    if grace is not None:
        return _with_grace(optimizer, names, grace)
    session_of()
    how = scaling(None, op)
    how.predivided(gradient_predivide_factor, process_set.size())  # raises what is wrong with it
    way = Way(how, gradient_predivide_factor, compression, sparse_as_dense, process_set)
    gradients = Gradients(optimizer, names, way, _at_least_once(backward_passes_per_step))
    number = groups if isinstance(groups, int) else num_groups
    if number:
        gradients.split_in_groups(number)
    elif groups:
        gradients.put_in_groups(cast(Sequence[Sequence[Tensor]], groups))
    optimizer.register_step_pre_hook(gradients.before_step)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (Distributed, kind), {"__module__": kind.__module__})
    made = cast(Distributed, optimizer)
    made._gradients = gradients
    return made


def _at_least_once(passes: int) -> int:
    if not isinstance(passes, int) or passes < 1:
        raise UsageError(f"backward_passes_per_step {passes}: expected a whole number, 1 or more")
    return passes


def _with_grace(optimizer: torch.optim.Optimizer, names: ParameterNames, grace: Grace) -> torch.optim.Optimizer:
    names.of(optimizer)  # raises what is wrong with them
    optimizer.register_step_pre_hook(GraceGradients(names, grace).before_step)
    optimizer._omnireduce_grace = grace
    return optimizer


class GraceGradients:
    """The gradients of an optimizer, which `grace` combines.

    A memory knows gradients by their names. So those of all but the first optimizer that shares it have a number more.
    """

    def __init__(self, names: ParameterNames, grace: Grace) -> None:
        self._names, self._grace = names, grace
        self._number: int | None = None

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Combine them: a hook of the optimizer."""
        no_closure(args, kwargs)
        found = {name: _dense(name, each) for name, each in self._names.of(optimizer).items() if each.requires_grad}
        if self._number is None:
            self._number = next(_numbers.setdefault(self._grace, count()))
        beside = f" of optimizer {self._number}" if self._number else ""
        for name, gradient in found.items():
            gradient.copy_(self._grace.step(gradient, name + beside))


def _dense(name: str, parameter: Tensor) -> Tensor:
    """The gradient: zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if parameter.grad.is_sparse:
        raise UsageError(f"parameter '{name}' has a sparse gradient: expected nn.Embedding(sparse=False)")
    return parameter.grad
