"""Tensors of torch as NumPy arrays of the same memory, in the types that the service reduces, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from omnireduce.core.dtypes import BOOL, ELEMENT_TYPES, Array, ElementType
from omnireduce.data_parallel import session
from omnireduce.data_parallel.dispatcher import Task
from omnireduce.data_parallel.session import ProcessSet, global_process_set, queue
from omnireduce.errors import UsageError, a_type
from omnireduce.torch_backend import DEVICES

T = TypeVar("T")


class Handle(NamedTuple):
    """Collectives that were started together. `finish` makes their result of those of the tasks. To call it is to
    `synchronize`."""

    tasks: tuple[Task, ...]
    finish: Callable[[list[Any]], Any]

    def then(self, change: Callable[[Any], Any]) -> Handle:
        """A handle of the same collectives whose result is `change` of this one's result."""
        return Handle(self.tasks, lambda results: change(self.finish(results)))

    def __call__(self) -> Any:
        return synchronize(self)


def handle_of(task: Task, finish: Callable[[Any], Any]) -> Handle:
    """The handle of one collective. `finish` makes its result of the result of the task."""
    return Handle((task,), lambda results: finish(results[0]))


def join_handles(handles: list[Handle]) -> Handle:
    """One handle for all of these. Its result is the list of their results."""
    counts = [len(handle.tasks) for handle in handles]

    def finish(results: list[Any]) -> list[Any]:
        remaining = iter(results)
        return [
            handle.finish([next(remaining) for _ in range(count)])
            for handle, count in zip(handles, counts, strict=True)
        ]

    return Handle(tuple(task for handle in handles for task in handle.tasks), finish)


def first(results: list[T]) -> T:
    """The only element of a list."""
    return results[0]


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return, or raise, at once."""
    return all(task.done() for task in handle.tasks)


def synchronize(handle: Handle) -> Any:
    """Wait for a collective, and return its result."""
    return handle.finish([task.wait() for task in handle.tasks])


def on_device_of(like: Tensor, array: Any) -> Tensor:
    """An array of the service as a tensor of the type and on the device of `like`."""
    tensor = tensor_of(array, like.dtype).to(like.device)
    settle([tensor])
    return tensor


def join(device: int = -1) -> int:
    """This rank has no more data: see `omnireduce.Queue.join`. Returns the rank that joined last."""
    return session.join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks have called it."""
    queue(process_set).barrier()


TORCH_TYPES: dict[torch.dtype, ElementType] = {
    getattr(torch, element.name): element for element in (*ELEMENT_TYPES.values(), BOOL)
}
_KINDS = {  # as `__array_interface__` says it, which has no names for the types of ml_dtypes
    dtype: element.dtype.str if element.is_native else np.dtype(f"u{element.itemsize}").str
    for dtype, element in TORCH_TYPES.items()
}


def detached(tensor: Tensor) -> Tensor:
    """The tensor without its graph. Raises UsageError for what is no tensor."""
    if not isinstance(tensor, Tensor):
        raise UsageError(f"{a_type(tensor)} came; expected a torch.Tensor")
    return tensor.detach()


def staged(tensor: Tensor) -> Tensor:
    """A contiguous tensor in the processor's memory with the values of `tensor`: itself, if it is one.

    Raises UsageError for what is no dense tensor.
    """
    plain = detached(tensor)
    if _is_staged(plain):
        return plain
    _check_dense(plain)
    plain = plain.resolve_conj().resolve_neg()
    return staging_buffer(plain).copy_(plain) if plain.is_cuda else plain.contiguous()


def copied(tensor: Tensor) -> Tensor:
    """A staged tensor that shares no memory with `tensor`."""
    copy = staged(tensor)
    return copy.clone() if copy.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() else copy


def staging_buffer(tensor: Tensor) -> Tensor:
    """A contiguous tensor in the processor's memory, of the shape of `tensor`, for values that come later.

    For one on a GPU it is pinned: the device copies from and to it by itself.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def result_buffer(tensor: Tensor) -> Tensor:
    """A contiguous tensor in the processor's memory for results of the shape of `tensor`: itself, if it is staged.

    Raises UsageError for what is no dense tensor.
    """
    plain = detached(tensor)
    if _is_staged(plain):
        return plain
    _check_dense(plain)
    return staging_buffer(plain)


def _is_staged(tensor: Tensor) -> bool:
    """Whether the memory of a tensor is the processor's, and has its values in their order."""
    is_dense = tensor.layout is torch.strided and tensor.is_cpu and not tensor.is_quantized
    return is_dense and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _check_dense(tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type not in DEVICES:
        raise UsageError(
            f"a tensor of {described(tensor)} on '{tensor.device}' came; expected a dense one on {' or '.join(DEVICES)}"
        )


def type_name(tensor: Tensor) -> str:
    """The element type, such as "float32", and the layout if the tensor is not dense."""
    layout = "" if tensor.layout == torch.strided else f", {str(tensor.layout).removeprefix('torch.')}"
    return str(tensor.dtype).removeprefix("torch.") + layout


def described(tensor: Tensor) -> str:
    """Element type and shape."""
    return f"{type_name(tensor)} {list(tensor.shape)}"


def put_back(tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> list[Tensor]:
    """Replace each tensor by its staged copy, unless that shares its memory. Returns the tensors, once it is done."""
    for tensor, copy in zip(tensors, copies, strict=True):
        if tensor.data_ptr() != copy.data_ptr():
            tensor.detach().copy_(copy)
    settle(tensors)
    return list(tensors)


def gpus_of(tensors: Sequence[Tensor]) -> list[torch.device]:
    """The GPUs of these tensors."""
    return list({tensor.device for tensor in tensors if tensor.is_cuda})


def settle(tensors: Sequence[Tensor]) -> None:
    """Wait until the GPUs have finished the work of this thread: another thread may use the tensors in another
    stream."""
    for device in gpus_of(tensors):
        torch.cuda.current_stream(device).synchronize()


class _Memory:
    """The memory of a tensor, as NumPy asks for it. An array of it keeps this object, and so the tensor, alive.

    Not `Tensor.numpy`: no tensor that shares the memory can be resized after that, and programs of torch do that.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Tensor, kind: str) -> None:
        data = tensor.data_ptr(), False
        self.__array_interface__ = {"version": 3, "shape": tuple(tensor.shape), "typestr": kind, "data": data}
        self._tensor = tensor


def array_of(tensor: Tensor) -> Array:
    """The memory of a staged tensor as an array of its numbers. Complex ones are pairs, in one more dimension.

    Raises UsageError for an element type that NumPy does not have.
    """
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kind = _KINDS.get(plain.dtype)
    if kind is None:
        raise UsageError(f"a tensor of {described(tensor)} came; cast it to a type that NumPy has, too")
    array = np.asarray(_Memory(plain, kind)) if plain.numel() else np.empty(tuple(plain.shape), kind)
    return array.view(TORCH_TYPES[plain.dtype].dtype)


def tensor_of(array: Array, dtype: torch.dtype) -> Tensor:
    """The reverse of `array_of`, for a tensor of `dtype`."""
    if not array.size:  # NumPy says strides of 0, which are no pairs for torch
        return torch.empty(array.shape[:-1] if dtype.is_complex else array.shape, dtype=dtype)
    element = TORCH_TYPES.get(dtype)
    if element is not None and not element.is_native:
        return torch.from_numpy(array.view(_KINDS[dtype])).view(dtype)
    tensor = torch.from_numpy(array)
    return torch.view_as_complex(tensor) if dtype.is_complex else tensor


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a staged tensor, uint8 (bytes,)."""
    return tensor.view(-1).view(torch.uint8)


def bytes_of(tensor: Tensor) -> Array:
    """The memory of a staged tensor as an array of bytes, uint8 (bytes,)."""
    return array_of(flat_bytes(tensor))
