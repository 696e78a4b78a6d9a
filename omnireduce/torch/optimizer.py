"""Training without a process group, in Horovod's words: the gradients of all ranks are combined for an optimizer.

import omnireduce.torch as hvd

hvd.init()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, cast

import torch
from torch import Tensor

from omnireduce.compression.grace import Communicator as Grace
from omnireduce.data_parallel.horovod_names import Compression
from omnireduce.data_parallel.queue import QueueOp
from omnireduce.data_parallel.scaling import Average, make_scaling
from omnireduce.data_parallel.session import ProcessSet, global_process_set, session_of
from omnireduce.errors import UsageError, a_type
from omnireduce.torch.grace import GraceGradients
from omnireduce.torch.gradient_hooks import Gradients, Named, ParameterNames, ReductionSettings, StepGradients
from omnireduce.torch.sharded import ShardedOptimizer

P = ParamSpec("P")


class Distributed(torch.optim.Optimizer):
    """Class of an optimizer whose gradients are combined with those of other ranks."""

    _gradients: StepGradients

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
        self._gradients.set_passes(_check_passes(passes))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as in torch. Raises UsageError while gradients are combined."""
        self._gradients.check_idle()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as in torch. Gradients under way are waited for and dropped: for use after a fault."""
        self._gradients.settle()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch. The gradients of its parameters are combined, too. Raises UsageError for a
        parameter without a name."""
        super().add_param_group(param_group)
        self._gradients.watch(self)


def _accepts_grace_second(make: Callable[P, Any]) -> Callable[P, Any]:
    """Wrap a function, so that it accepts the order of GRACE as well: the object of GRACE as the second argument."""

    @wraps(make)
    def call(*args: Any, **named: Any) -> Any:
        if len(args) > 1 and all(hasattr(args[1], name) for name in ("compressor", "memory")):
            optimizer, grace, *remaining = args
            return make(optimizer, *remaining, grace=grace, **named)
        return make(*args, **named)

    return call


@_accepts_grace_second
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
    gradients are added by index, or as dense ones, and stay sparse. A rank outside of `process_set` steps by itself.

    `grace`: what `grace_from_params` returns, or an object of your own class of that kind. It combines gradient by
    gradient when a step begins. It may also be the second argument, as in GRACE. Optimizers may share one: what it
    keeps is that of one optimizer each. Beside it only `named_parameters` and `backward_passes_per_step` are possible.

    Raises UsageError for what is no optimizer, for names that are missing or none, for other arguments that cannot be,
    and for an optimizer that combines already, as a `ShardedOptimizer` does. A step raises it for a closure, and
    otherwise what the collectives raise.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer is {a_type(optimizer)}; expected one of torch.optim")
    if isinstance(optimizer, Distributed):
        raise UsageError("the optimizer combines gradients already; expected one that was not given here before")
    if isinstance(optimizer, ShardedOptimizer):
        raise UsageError("a ShardedOptimizer combines gradients itself; expected one of torch.optim")
    names = ParameterNames(named_parameters)
    passes = _check_passes(backward_passes_per_step)
    if grace is not None:
        unsupported = {"compression": compression is not Compression.none, "op": op is not Average}
        unsupported |= {"gradient_predivide_factor": gradient_predivide_factor != 1}
        unsupported |= {"num_groups": bool(num_groups), "groups": bool(groups)}
        unsupported |= {"sparse_as_dense": sparse_as_dense, "process_set": process_set is not global_process_set}
        for name in (name for name, is_given in unsupported.items() if is_given):
            raise UsageError(f"{name} beside grace, which combines gradients in its own way: leave {name} out")
        return _distributed(optimizer, GraceGradients(optimizer, names, grace))
    session_of()
    scaling = make_scaling(None, op)
    scaling.predivided(gradient_predivide_factor, process_set.size())  # raises what is wrong with it
    settings = ReductionSettings(scaling, gradient_predivide_factor, compression, sparse_as_dense, process_set)
    gradients = Gradients(optimizer, names, settings, passes)
    number = groups if isinstance(groups, int) else num_groups
    if number:
        gradients.split_in_groups(number)
    elif groups:
        gradients.put_in_groups(cast(Sequence[Sequence[Tensor]], groups))
    return _distributed(optimizer, gradients)


def _distributed(optimizer: torch.optim.Optimizer, gradients: StepGradients) -> Distributed:
    """The optimizer, whose steps take these gradients from now on."""
    optimizer.register_step_pre_hook(gradients.before_step)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (Distributed, kind), {"__module__": kind.__module__})
    distributed = cast(Distributed, optimizer)
    distributed._gradients = gradients
    return distributed


def _check_passes(passes: int) -> int:
    if not isinstance(passes, int) or passes < 1:
        raise UsageError(f"backward_passes_per_step {passes}: expected a whole number, 1 or more")
    return passes
