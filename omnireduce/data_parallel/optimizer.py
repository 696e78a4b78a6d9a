"""An optimizer whose gradients are averaged over all ranks before each step, whatever its framework."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.data_parallel.adapters import Adapter, ArrayAdapter, named_tensors
from omnireduce.data_parallel.averaging import Averaging, Part, exchangeable, leaves, rebuilt, scale
from omnireduce.data_parallel.dataset_loader import Loader
from omnireduce.data_parallel.default_communicator import communicator
from omnireduce.errors import UsageError, a_type
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.reported_errors import report_errors_to

OWN_ATTRIBUTES = ("opt", "_adapter", "_comm", "_loader", "_named", "_names", "_parameters", "_parts", "_averaging")
# Attributes of optimizers that all ranks must have alike
NUMBERS = ("lr", "learning_rate", "rate", "momentum", "weight_decay", "beta1", "beta2", "betas", "eps")


class DistributedOptimizer:
    """`opt`, whose `step` first averages the gradients of all ranks, in one exchange. It has all attributes of `opt`;
    setting one sets that of `opt`.

    `parameters`: what it trains, as `broadcast_parameters` takes it; by default `opt.params` or `opt.parameters`. All
    ranks have the same. `loader`: that of `partition_dataset`, whose batches may be of different sizes: then each rank
    counts by its samples, so that the mean is that of one process with all of them. Without it, all ranks count alike.
    `adapter`: how tensors are read, for frameworks that are not known here. `comm`: instead of the global communicator.

    Each parameter has its gradient in `grad`, an array of its shape, or None. Averages are written into the memory of
    the gradients. If parameters are arrays, which have no such attribute, `step` takes the gradients, and hands their
    averages on to `opt.step`: in the same lists, tuples and dicts as the parameters. A gradient that is missing on some
    ranks counts as zeros there; one that is missing on all stays missing. At the first step in a job ranks compare
    their parameters, the kind of `opt` and its numbers, such as `lr`: all get a UsageError where they differ.

    Raises UsageError for an optimizer without `step` or without parameters.
    """

    def __init__(
        self,
        opt: Any,
        parameters: Any = None,
        *,
        loader: Loader | None = None,
        adapter: Adapter | None = None,
        comm: Communicator | None = None,
    ) -> None:
        if not callable(getattr(opt, "step", None)):
            raise UsageError(f"opt is {a_type(opt)}, which has no step(): expected an optimizer")
        if isinstance(opt, DistributedOptimizer):
            raise UsageError("the optimizer averages gradients already: expected one that was not given here before")
        communicator(comm)
        self.opt, self._loader, self._comm = opt, loader, comm
        self._adapter = ArrayAdapter() if adapter is None else adapter
        trained = parameters_of(opt) if parameters is None else parameters
        self._parameters = list(trained) if isinstance(trained, Iterator) else trained
        self._named = named_tensors(self._parameters, self._adapter)
        if not self._named:
            raise UsageError("the optimizer has no parameters: expected one or more, in its params or as parameters=")
        self._names = [name for name, _ in self._named]
        values = [self._adapter.read(tensor) for _, tensor in self._named]
        self._parts = [Part(array.dtype, array.shape) for array in values]
        self._averaging = Averaging(self._names, self._parts, self._terms)

    def __getattr__(self, name: str) -> Any:
        if name in OWN_ATTRIBUTES:  # not set yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.opt, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OWN_ATTRIBUTES:
            object.__setattr__(self, name, value)
        else:
            setattr(self.opt, name, value)

    def _terms(self) -> list[tuple[str, str]]:
        """Settings that all ranks must have alike, beside parameters: with other numbers weights would drift apart."""
        numbers = [(name, getattr(self.opt, name, None)) for name in NUMBERS]
        return [
            ("loader", "none" if self._loader is None else "given"),
            ("optimizer", type(self.opt).__name__),
            *((name, _describe_number(value)) for name, value in numbers),
        ]

    def step(self, *gradients: Any) -> Any:
        """Average the gradients, and let the optimizer take its step; return what it returns. All ranks call this
        equally often.

        `gradients`: none, for parameters that have them, or one argument with all of them. Raises UsageError for
        gradients that do not fit; AbortedError when another rank has failed; and what the optimizer raises.
        """
        if not gradients:
            self.average_gradients()
            return self.opt.step()
        with report_errors_to(communicator(self._comm)):
            if len(gradients) > 1:
                raise UsageError(f"step got {len(gradients)} arguments: expected the gradients as one, a list or dict")
        return self.opt.step(self._average_nested(gradients[0]))

    def average_gradients(self) -> None:
        """Replace the gradients of the parameters by their means over all ranks, as `step` does before it: for what
        comes between, such as clipping; the step is `opt.opt.step()` then."""
        with report_errors_to(communicator(self._comm)):
            for name, tensor in self._named:
                if isinstance(tensor, np.ndarray):
                    raise UsageError(f"'{name}' is an array, which has no gradient: expected step(gradients)")
        tensors = [getattr(tensor, "grad", None) for _, tensor in self._named]
        averages, copied = self._average_tensors(tensors)
        for at, ((_, parameter), before, after) in enumerate(zip(self._named, tensors, averages, strict=True)):
            if after is not None and (before is None or at in copied):
                kind = self._adapter.gradient_kind if before is None else self._adapter.kind(before)
                parameter.grad = self._adapter.make(kind, after, parameter)

    def _average_nested(self, gradients: Any) -> Any:
        """The averages of gradients that come in lists, tuples and dicts."""
        with report_errors_to(communicator(self._comm)):
            tensors = list(leaves(gradients, self._parameters, self._adapter))
            if len(tensors) != len(self._named):
                raise UsageError("an array comes twice in the parameters: expected each once for step(gradients)")
        averages, _ = self._average_tensors(tensors)
        return rebuilt(iter(averages), self._parameters, self._adapter)

    def _average_tensors(self, tensors: Sequence[Any]) -> tuple[list[Array | None], set[int]]:
        """The average of each gradient, and the indices of those that are not in the memory of their tensor."""
        comm = communicator(self._comm)
        with report_errors_to(comm):
            gradients, copied = exchangeable(tensors, self._names, self._parts, self._adapter)
            if self._loader is not None and self._loader.share != 1.0:
                scale(gradients, self._loader.share, copied)
        return self._averaging.average(gradients, comm), copied


def _describe_number(value: object) -> str:
    """A number, or several, in the words that all ranks have for it: 1 is 1.0."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_describe_number, value))})"
    return repr(float(value)) if isinstance(value, int | float | np.integer | np.floating) else "nothing"


def parameters_of(opt: Any) -> Any:
    """The parameters of an optimizer: its `params`, or `parameters`, which may be a method."""
    params = getattr(opt, "params", None)
    if params is None:
        params = getattr(opt, "parameters", [])
    return params() if callable(params) else params
