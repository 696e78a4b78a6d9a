"""The gradients of an optimizer's parameters, which are combined as soon as backward has made them."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import MethodType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from omnireduce.data_parallel.horovod_names import NoneCompressor
from omnireduce.data_parallel.scaling import Average, Scaling, Sum
from omnireduce.data_parallel.session import ProcessSet, queue
from omnireduce.errors import OmniReduceError, UsageError, a_type
from omnireduce.torch.collectives import start_reduction, start_sum_of_rows
from omnireduce.torch.tensors import Handle, array_of, handle_of, synchronize

T = TypeVar("T")

Named = Mapping[str, Any] | Iterable[tuple[str, Any]]


class ParameterNames:
    """Names of parameters, the same on all ranks. `names`: None to number them."""

    def __init__(self, names: Named | None) -> None:
        self._names = None if names is None else _names_by_parameter(names)

    def parameters_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The parameters that the optimizer has now by name, in its order. Raises UsageError for one without a name."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._names is None:
            return {f"parameter {i}": parameter for i, parameter in enumerate(parameters)}
        missing = sum(parameter not in self._names for parameter in parameters)
        if missing:
            raise UsageError(
                f"named_parameters: expected a name for each parameter; {missing} parameters of the optimizer have none"
            )
        return {self._names[parameter]: parameter for parameter in parameters}


def _names_by_parameter(named: Named) -> dict[Tensor, str]:
    """The name of each parameter. Raises UsageError where two have the same, and for what is no name and parameter."""
    pairs = list(named.items() if isinstance(named, Mapping) else named)
    for pair in pairs:
        match pair:
            case (str(), Tensor()):
                continue
        raise UsageError(
            f"named_parameters has {a_type(pair)}; expected a name and a parameter, as "
            "model.named_parameters() gives them"
        )
    if len(dict(pairs)) < len(pairs):
        raise UsageError("named_parameters: expected a name for each parameter; some are there twice")
    return {parameter: name for name, parameter in pairs}


class ReductionSettings(NamedTuple):
    """A way to combine gradients: see `DistributedOptimizer`."""

    base: Scaling
    predivides: float
    compression: type[Any]
    sparse_as_dense: bool
    process_set: ProcessSet

    @property
    def scaling(self) -> Scaling:
        """For as many ranks as there are now."""
        return self.base if self.predivides == 1 else self.base.predivided(self.predivides, self.process_set.size())


class Entry:
    """A parameter: its name, how often backward makes its gradient before that is combined, and with which others."""

    __slots__ = ("gradient_name", "group", "handle", "name", "parameter", "passes_left", "sparse_dim", "version")

    def __init__(self, parameter: Tensor, name: str, passes: int) -> None:
        self.parameter, self.name, self.passes_left = parameter, name, passes
        self.gradient_name = f"gradient.{name}"
        self.group: Sequence[Entry] = ()
        self.handle: Handle | None = None  # while the gradient is combined
        self.sparse_dim = 0  # of the last gradient
        self.version = 0  # how often the gradient was changed, as torch counts, when its handle was made

    def fill(self) -> None:
        """Without a gradient it is zeros: sparse ones if the last one was sparse."""
        parameter, sparse_dim = self.parameter, self.sparse_dim
        if parameter.grad is not None:
            return
        if not sparse_dim:
            parameter.grad = torch.zeros_like(parameter)
            return
        indices, shape = torch.zeros(sparse_dim, 0, dtype=torch.int64, device=parameter.device), parameter.shape
        parameter.grad = torch.sparse_coo_tensor(indices, parameter.new_zeros(0, *shape[sparse_dim:]), shape)

    @property
    def is_sparse(self) -> bool:
        return self.parameter.grad is not None and self.parameter.grad.is_sparse

    @property
    def has_changed(self) -> bool:
        """Whether the program has changed the gradient while it was combined."""
        gradient = self.parameter.grad
        return self.handle is not None and (gradient is None or gradient._version != self.version)

    def dense_gradient(self) -> Tensor:
        """The gradient; of a sparse one a dense tensor with its numbers."""
        gradient = cast(Tensor, self.parameter.grad)
        return gradient.to_dense() if gradient.is_sparse else gradient

    def take(self, gradient: Tensor) -> None:
        """A dense gradient in place of the parameter's, which stays sparse if it is."""
        if gradient is not self.parameter.grad:
            self.parameter.grad = gradient.to_sparse(self.sparse_dim) if self.is_sparse else gradient


class StepGradients(ABC):
    """The gradients that a step of one optimizer takes. `skips`: steps take them as they are."""

    skips = False
    _is_combined = False

    @abstractmethod
    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Know the parameters that the optimizer has now. Raises UsageError for one without a name."""

    @abstractmethod
    def combine(self) -> None:
        """Combine all gradients, and wait for that. A gradient that this rank has not made counts as zeros."""

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """A hook of the optimizer."""
        no_closure(args, kwargs)
        self.watch(optimizer)
        if not self.skips and not self._is_combined:
            self.combine()
        self._is_combined = False

    @abstractmethod
    def set_passes(self, passes: int) -> None:
        """From now on backward runs so often before a step."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for what is under way, whatever becomes of it, and forget it."""

    @abstractmethod
    def check_idle(self) -> None:
        """Raises UsageError while gradients are combined."""


def call_on_gradient(parameter: Tensor, method: Callable[[T], None], argument: T) -> None:
    """Call `method` with `argument` whenever backward has made the gradient of `parameter`. The hook does not keep the
    object of the method, which goes when the program has dropped its optimizer."""
    reference = weakref.WeakMethod(method)

    def hook(_: Tensor) -> None:
        live_method = reference()
        if live_method is not None:
            live_method(argument)

    handle = parameter.register_post_accumulate_grad_hook(hook)
    weakref.finalize(cast(MethodType, method).__self__, handle.remove).atexit = False


class Gradients(StepGradients):
    """Gradients of one optimizer. A hook starts to combine each gradient when backward has made it for the last time
    before a step."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: ParameterNames, settings: ReductionSettings, passes: int
    ) -> None:
        self._names, self._settings, self._passes = names, settings, passes
        self._is_plain = settings.compression is NoneCompressor
        self._entries: dict[Tensor, Entry] = {}  # of parameters that have a hook
        self.watch(optimizer)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Hook on to the parameters that the optimizer has now, unless this rank is outside of the process set. Raises
        UsageError for one without a name."""
        is_member = self._settings.process_set.included()
        for name, parameter in self._names.parameters_of(optimizer).items():
            if is_member and parameter.requires_grad and parameter not in self._entries:
                entry = self._entries[parameter] = Entry(parameter, name, self._passes)
                call_on_gradient(parameter, self.note_gradient, entry)

    def put_in_groups(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Combine those of each group together. Raises UsageError for what is no parameter of the optimizer."""
        for group in groups if self._settings.process_set.included() else ():
            entries = [self._entries[tensor] for tensor in group if tensor in self._entries]
            if len(entries) < len(group):
                raise UsageError(f"groups: {len(group) - len(entries)} tensors are no parameters of the optimizer")
            for entry in entries:
                if entry.group or entries.count(entry) > 1:
                    raise UsageError(f"groups: parameter '{entry.name}' is there twice; expected each in one group")
            for entry in entries:
                entry.group = entries

    def split_in_groups(self, number: int) -> None:
        """Combine the gradients in so many groups."""
        parameters = list(self._entries)
        self.put_in_groups([parameters[at::number] for at in range(min(number, len(parameters)))])

    def set_passes(self, passes: int) -> None:
        """From now on backward runs so often before a step."""
        self._passes = passes
        for entry in self._entries.values():
            entry.passes_left = passes

    def note_gradient(self, entry: Entry) -> None:
        """Backward has made a gradient. Raises UsageError where it was made too often."""
        if entry.passes_left < 1 or entry.handle is not None:
            raise UsageError(
                f"the gradient of '{entry.name}' was made too often before a step: expected {self._passes} times, as "
                "backward_passes_per_step says"
            )
        entry.passes_left -= 1
        if not entry.passes_left:
            self._begin(entry)

    def _begin(self, entry: Entry) -> None:
        if not entry.group:
            self._start([entry], entry.gradient_name)
        elif not any(member.passes_left for member in entry.group):
            self._start(entry.group, f"gradients.{entry.group[0].name}")

    def _start(self, entries: Sequence[Entry], name: str) -> None:
        """Combine gradients together; sparse ones go by themselves."""
        try:
            self._start_each(entries, name)
        except Exception as error:
            remaining = [entry.gradient_name for entry in entries if entry.is_sparse and entry.handle is None]
            queue(self._settings.process_set).refuse(error, name, *remaining)
            for entry in entries:
                entry.passes_left = self._passes  # backward may run again
            raise

    def _start_each(self, entries: Sequence[Entry], name: str) -> None:
        gradient, (op, prescale, postscale) = entries[0].parameter.grad, self._settings.scaling
        for entry in entries:
            entry.version = cast(Tensor, entry.parameter.grad)._version
        is_alone = self._is_plain and len(entries) == 1 and gradient is not None
        if is_alone and gradient.dtype is torch.float32 and gradient.is_cpu and gradient.is_contiguous():
            array, process_queue = array_of(gradient.detach()), queue(self._settings.process_set)
            task = process_queue.allreduce_async(array, name=name, op=op, prescale=prescale, postscale=postscale)
            entries[0].handle = handle_of(task, _discard_result)
            return
        with torch.no_grad():
            for entry in entries:
                if entry.is_sparse:
                    entry.sparse_dim = cast(Tensor, entry.parameter.grad).sparse_dim()
                    if not self._settings.sparse_as_dense:
                        entry.handle = self._start_sparse(entry)
            self._start_dense([entry for entry in entries if entry.handle is None], name)

    def _start_sparse(self, entry: Entry) -> Handle:
        (op, prescale, postscale), gradient = self._settings.scaling, cast(Tensor, entry.parameter.grad)
        if (op not in (Average, Sum)) or prescale != 1 or postscale != 1:
            raise UsageError(
                f"'{entry.name}' has a sparse gradient: expected op Average or Sum, or sparse_as_dense=True"
            )
        handle = start_sum_of_rows(gradient, op, entry.gradient_name, self._settings.process_set)

        def put_back(combined: Tensor) -> None:
            entry.parameter.grad = combined

        return handle.then(put_back)

    def _start_dense(self, entries: Sequence[Entry], name: str) -> None:
        if not entries:
            return
        settings = self._settings
        small = [settings.compression.compress(entry.dense_gradient()) for entry in entries]
        tensors = [tensor for tensor, _ in small]
        handle = start_reduction(tensors, tensors, settings.scaling, name, settings.process_set)

        def put_back(_: Any) -> None:
            for entry, (tensor, ctx) in zip(entries, small, strict=True):
                entry.take(settings.compression.decompress(tensor, ctx))

        handle = handle.then(put_back)
        for entry in entries:
            entry.handle = handle

    @torch.no_grad()
    def combine(self) -> None:
        """Wait until all gradients are combined. A gradient that this rank has not made counts as zeros. Raises
        UsageError where one was changed meanwhile."""
        entries = list(self._entries.values())
        changed = [entry.name for entry in entries if entry.has_changed]
        left = [entry for entry in entries if entry.handle is None]
        for entry in left:
            entry.fill()
            entry.passes_left = 0
        for entry in left:
            if entry.handle is None:  # else it was started with its group
                self._begin(entry)
        handles = {id(entry.handle): entry.handle for entry in entries}
        self.give_up()
        for handle in handles.values():
            synchronize(cast(Handle, handle))
        if changed:
            raise UsageError(
                f"the gradient of '{changed[0]}' was changed while it was combined: expected synchronize() of the "
                "optimizer before gradients are clipped or scaled, and its step() within skip_synchronize()"
            )
        self._is_combined = True

    def settle(self) -> None:
        """Wait for what is under way, whatever becomes of it, and forget it."""
        for entry in self._entries.values():
            if entry.handle is not None:
                for task in entry.handle.tasks:
                    with suppress(OmniReduceError):
                        task.wait()
        self.give_up()

    def give_up(self) -> None:
        """Forget what is under way."""
        self._is_combined = False
        for entry in self._entries.values():
            entry.handle, entry.passes_left = None, self._passes

    def check_idle(self) -> None:
        """Raises UsageError while gradients are combined."""
        if any(entry.handle is not None for entry in self._entries.values()):
            raise UsageError("zero_grad between backward and step, while gradients are combined; call step first")


def _discard_result(_: object) -> None:
    """The gradient has its result."""


def no_closure(args: Any, kwargs: Any) -> None:
    """Raises UsageError where the arguments of a step have a closure."""
    if any(closure is not None for closure in (*args[1:], kwargs.get("closure"))):
        raise UsageError("step with a closure: gradients are combined before the step. Compute them first")
