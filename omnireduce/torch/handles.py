"""Collectives of torch that are under way, in Horovod's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from omnireduce.data_parallel import session
from omnireduce.data_parallel.session import ProcessSet, global_process_set, queue
from omnireduce.data_parallel.tasks import Task
from omnireduce.torch.tensors import settle, tensor_of

T = TypeVar("T")


class Handle(NamedTuple):
    """Collectives that were started together. `finish` makes their result of those of the tasks. To call it is to
    `synchronize`."""

    tasks: tuple[Task, ...]
    finish: Callable[[list[Any]], Any]

    def then(self, change: Callable[[Any], Any]) -> Handle:
        """The same with another result, which `change` makes of this one's."""
        return Handle(self.tasks, lambda results: change(self.finish(results)))

    def __call__(self) -> Any:
        return synchronize(self)


def handle_of(task: Task, finish: Callable[[Any], Any]) -> Handle:
    """That of one collective, whose result `finish` makes of that of the task."""
    return Handle((task,), lambda results: finish(results[0]))


def joined(handles: list[Handle]) -> Handle:
    """All of them in one, whose result is the list of theirs."""
    ends = [len(handle.tasks) for handle in handles]

    def finish(results: list[Any]) -> list[Any]:
        left = iter(results)
        return [handle.finish([next(left) for _ in range(many)]) for handle, many in zip(handles, ends, strict=True)]

    return Handle(tuple(task for handle in handles for task in handle.tasks), finish)


def first(results: list[T]) -> T:
    """The only one."""
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
