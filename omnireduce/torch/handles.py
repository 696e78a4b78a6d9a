"""Collectives of torch that are under way, in Horovod's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from omnireduce.data_parallel import session
from omnireduce.data_parallel.dispatcher import Task
from omnireduce.data_parallel.session import ProcessSet, global_process_set, queue
from omnireduce.torch.tensors import settle, tensor_of


class Handle(NamedTuple):
    """A collective that was started. `finish` makes its result of that of the task."""

    task: Task
    finish: Callable[[Any], Any]

    def then(self, change: Callable[[Any], Any]) -> Handle:
        """The same with another result, which `change` makes of this one's."""
        return Handle(self.task, lambda found: change(self.finish(found)))


def first(results: list[Tensor]) -> Tensor:
    """The only one."""
    return results[0]


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return, or raise, at once."""
    return handle.task.done()


def synchronize(handle: Handle) -> Any:
    """Wait for a collective, and return its result."""
    return handle.finish(handle.task.wait())


def on_device_of(like: Tensor, array: Any) -> Tensor:
    """An array of the service as a tensor of the type and on the device of `like`."""
    found = tensor_of(array, like.dtype).to(like.device)
    settle([found])
    return found


def join(device: int = -1) -> int:
    """This rank has no more data: see `omnireduce.Queue.join`. Returns the rank that joined last."""
    return session.join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks have called it."""
    queue(process_set).barrier()
