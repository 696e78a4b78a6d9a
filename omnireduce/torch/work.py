"""Collectives under way, as torch wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from omnireduce.errors import OmniReduceError
from omnireduce.runtime.member.calls import once
from omnireduce.runtime.member.handle import Handle
from omnireduce.torch.completion import Completion, Pending

NO_LIMIT = timedelta(0)


def told_to_torch(error: OmniReduceError) -> RuntimeError:
    """The error that users of torch expect."""
    found: RuntimeError = dist.DistBackendError(f"omnireduce: {error}")
    return found


class HandleWork(dist._Work):
    """The collective behind `handle`. `finish` makes its tensors of its result; it is called once, in whatever thread.

    A thread of `completion` goes on with the collective until it is done.
    """

    def __init__(self, handle: Handle[Any], finish: Callable[[Any], Sequence[Tensor]], completion: Completion) -> None:
        super().__init__()
        self._handle = handle
        self._tensors = once(lambda: list(finish(handle.wait())))
        self._over: Future[None] = Future()
        self._future = once(self._make_future)
        if handle.done():
            self._over.set_result(None)
        else:
            completion.add(Pending(self._await_end, lambda: self._over.set_result(None)))

    def is_completed(self) -> bool:
        return self._handle.done()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> RuntimeError | None:
        """Why the collective failed; None if it did not, or is under way."""
        try:
            if self.is_completed():
                self._settled(NO_LIMIT)
        except RuntimeError as error:
            return error
        return None

    def result(self) -> list[Tensor]:
        return self._settled(NO_LIMIT)

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Return True once the collective is done. Raises RuntimeError that says why it failed, or that it takes longer
        than `timeout` (0: no such limit)."""
        self._settled(timeout)
        return True

    def _settled(self, timeout: timedelta) -> list[Tensor]:
        try:
            self._handle.wait(timeout.total_seconds() or None)
            return self._tensors()
        except OmniReduceError as error:
            raise told_to_torch(error) from error
        except TimeoutError as error:
            raise dist.DistBackendError(f"omnireduce: {error} after {timeout.total_seconds():g} s") from error

    def _await_end(self) -> None:
        with suppress(OmniReduceError):  # who asks for the result is told
            self._handle.wait()

    def get_future(self) -> Future[list[Tensor]]:
        return self._future()

    def _make_future(self) -> Future[list[Tensor]]:
        # A callback that raises, not `set_exception`: that ends the process in the backward pass of torch 2.13.
        return self._over.then(lambda _: self._settled(NO_LIMIT))
