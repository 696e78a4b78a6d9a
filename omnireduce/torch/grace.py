"""GRACE in a training with torch.

As a hook of DistributedDataParallel, `model.register_comm_hook(grc.state, grc.hook)`: one exchange for each bucket.
For an optimizer, `DistributedOptimizer(optimizer, grace=grc)`: one for each gradient, when a step begins.
"""
# Annotations are not postponed here: torch compares those of a hook with its own classes.

from itertools import count
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from omnireduce.compression.grace import Communicator, PowerSGDCompressor
from omnireduce.compression.grace.base import class_text
from omnireduce.errors import UsageError, a_type
from omnireduce.runtime.rank.reported_errors import report_errors_to
from omnireduce.torch.gradient_hooks import ParameterNames, StepGradients
from omnireduce.torch.tensors import gpus_of


class Buckets:
    """The buckets that a communicator has seen. Their names are the same on all ranks, whose buckets come in one
    order."""

    def __init__(self) -> None:
        self._numbers = count()
        self._parameters: dict[str, list[ref[Tensor]]] = {}

    def name_of(self, parameters: list[Tensor], state: Communicator) -> str:
        """The name of the bucket of these parameters, in this order.

        A new bucket replaces all buckets that had some of them, and those whose parameters are gone. The state that
        `state` keeps for these is dropped.
        """
        parameter_ids = [id(parameter) for parameter in parameters]
        for name, references in self._parameters.items():
            if [id(reference()) for reference in references] == parameter_ids:
                return name
        for name, references in list(self._parameters.items()):
            if any(reference() is None or id(reference()) in parameter_ids for reference in references):
                del self._parameters[name]
                state.forget([name, *(_gradient_name(name, i) for i in range(len(references)))])
        name = f"bucket {next(self._numbers)}"
        self._parameters[name] = [ref(parameter) for parameter in parameters]
        return name


def _gradient_name(bucket: str, number: int) -> str:
    return f"{bucket}, gradient {number}"


_buckets: WeakKeyDictionary[Communicator, Buckets] = WeakKeyDictionary()


def grace_hook(state: Communicator, bucket: dist.GradBucket) -> Future[Tensor]:
    """Combine a bucket as `state`, what `grace_from_params` returns, says. With PowerSGD its gradients go one by one:
    they are the matrices.

    A memory knows a gradient by the parameters of the bucket and their order. DistributedDataParallel makes its buckets
    anew after the first step: where they change, what was kept of that step is lost. Raises UsageError for a sparse
    gradient.
    """
    buffer = bucket.buffer()
    with report_errors_to(state.comm):
        if buffer.is_sparse:
            raise UsageError("a sparse gradient cannot be compressed: expected nn.Embedding(sparse=False)")
    name = _buckets.setdefault(state, Buckets()).name_of(bucket.parameters(), state)
    if isinstance(state.compressor, PowerSGDCompressor):
        for i, gradient in enumerate(bucket.gradients()):
            gradient.copy_(state.step(gradient, _gradient_name(name, i)))
    else:
        buffer.copy_(state.step(buffer, name))
    future: Future[Tensor] = Future(devices=gpus_of([buffer]))
    future.set_result(buffer)
    return future


Communicator.hook_of_torch = staticmethod(grace_hook)  # the library does not know torch


_numbers: "WeakKeyDictionary[Communicator, count[int]]" = WeakKeyDictionary()  # of the optimizers that share a memory


class GraceGradients(StepGradients):
    """The gradients of an optimizer, which `grace` combines.

    A memory knows gradients by their names. So those of all but the first optimizer that shares it have a number more.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: ParameterNames, grace: Communicator) -> None:
        if not isinstance(grace, Communicator):
            raise UsageError(
                f"grace is {a_type(grace)}; expected what grace_from_params returns, or an object whose class "
                f"derives from {class_text(Communicator)}"
            )
        self._names, self._grace = names, grace
        self._number: int | None = None
        self.watch(optimizer)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        self._parameters = {
            name: parameter
            for name, parameter in self._names.parameters_of(optimizer).items()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def combine(self) -> None:
        with report_errors_to(self._grace.comm):
            gradients = {name: _dense(name, parameter) for name, parameter in self._parameters.items()}
        if self._number is None:
            self._number = next(_numbers.setdefault(self._grace, count()))
        suffix = f" of optimizer {self._number}" if self._number else ""
        for name, gradient in gradients.items():
            gradient.copy_(self._grace.step(gradient, name + suffix))
        self._is_combined = True

    def set_passes(self, passes: int) -> None:
        """However often it runs: what has come together is combined when a step begins."""

    def settle(self) -> None:
        self._is_combined = False

    def check_idle(self) -> None:
        """Do nothing: a hook's gradients are never under way while other code runs."""


def _dense(name: str, parameter: Tensor) -> Tensor:
    """The gradient: zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if parameter.grad.is_sparse:
        raise UsageError(f"parameter '{name}' has a sparse gradient: expected nn.Embedding(sparse=False)")
    return parameter.grad
