"""Collectives under way, as torch wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from omnireduce.errors import OmniReduceError
from omnireduce.runtime.member.calls import once
from omnireduce.runtime.member.handle import Handle

NO_LIMIT = timedelta(0)


def told_to_torch(error: OmniReduceError) -> RuntimeError:
    """The error that users of torch expect."""
    found: RuntimeError = dist.DistBackendError(f"omnireduce: {error}")
    return found


class HandleWork(dist._Work):
    """The collective behind `handle`. `finish` makes its tensors of its result; it is called once.

    `callbacks` runs what waits for the future of this work. That may wait for other collectives.
    """

    def __init__(self, handle: Handle[Any], finish: Callable[[Any], Sequence[Tensor]], callbacks: Executor) -> None:
        super().__init__()
        self._handle, self._callbacks = handle, callbacks
        self._tensors = once(lambda: list(finish(handle.wait())))
        self._future = once(self._make_future)

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

    def get_future(self) -> Future[list[Tensor]]:
        return self._future()

    def _make_future(self) -> Future[list[Tensor]]:
        over: Future[None] = Future()
        # A callback that raises, not `set_exception`: that ends the process in the backward pass of torch 2.13.
        future: Future[list[Tensor]] = over.then(lambda _: self._settled(NO_LIMIT))
        self._handle.when_done(lambda: over.set_result(None), self._callbacks)
        return future
