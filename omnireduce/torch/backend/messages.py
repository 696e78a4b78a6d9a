"""Messages from one rank to another, through gloo.

Gloo gives a message to whoever waits for one with its tag. One that is shorter than expected leaves a part of the
tensor as it was; one that is longer ends the process. So element type and size are a part of the tag that gloo sees,
and a message of another type or size is not taken, but for a chance of one in 16,383. Both ranks wait then, say so
after a while, and fail when the time of the group is over.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch import Tensor

from omnireduce.errors import UsageError
from omnireduce.protocol.wait_notices import WaitNotices
from omnireduce.support.logs import tagged
from omnireduce.torch.backend.gloo import GlooWork, gloo_message
from omnireduce.torch.backend.options import only_element
from omnireduce.torch.tensors import flat_bytes, put_back, result_buffer, staged, type_name

TAG_BITS, CHECK_BITS = 16, 14  # of the 31 that gloo has
LARGEST_TAG = (1 << TAG_BITS + CHECK_BITS) - 1
LOOK_S = 0.5  # between two looks whether to say that this rank waits
_log = logging.getLogger("omnireduce")


class Messages:
    """Messages of this rank, to and from the other ranks of a group of gloo."""

    def __init__(self, gloo: dist.ProcessGroup) -> None:
        self._gloo, self._wait_log = gloo, _WaitLog()

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> dist._Work:
        tensor, slot = only_element(tensors), self._slot(tensors, rank, tag)
        data = [flat_bytes(staged(tensor))]
        begin = partial(self._gloo.send, data, rank, slot)
        return self._begin_work(begin, f"to send {_describe(tensor, tag)} to rank {rank}", lambda: [tensor])

    def receive(self, tensors: Sequence[Tensor], rank: int, tag: int) -> dist._Work:
        tensor, slot = only_element(tensors), self._slot(tensors, rank, tag)
        buffer = result_buffer(tensor)
        begin = partial(self._gloo.recv, [flat_bytes(buffer)], rank, slot)
        return self._begin_work(
            begin, f"for {_describe(tensor, tag)} from rank {rank}", lambda: put_back([tensor], [buffer])
        )

    def receive_from_any(self, tensors: Sequence[Tensor], tag: int) -> dist._Work:
        tensor, slot = only_element(tensors), self._slot(tensors, None, tag)
        buffer = result_buffer(tensor)
        begin = partial(self._gloo.recv_anysource, [flat_bytes(buffer)], slot)
        return self._begin_work(
            begin, f"for {_describe(tensor, tag)} from any rank", lambda: put_back([tensor], [buffer])
        )

    def close(self) -> None:
        self._wait_log.close()

    def _begin_work(
        self, begin: Callable[[], dist._Work], description: str, finish: Callable[[], list[Tensor]]
    ) -> dist._Work:
        try:
            return _MessageWork(begin(), description, finish, self._wait_log)
        except RuntimeError as error:  # the other rank is gone
            raise _wait_error(description, error) from error

    def _slot(self, tensors: Sequence[Tensor], rank: int | None, tag: int) -> int:
        """The tag that gloo sees. Of a large tag all bits are taken: then nothing is checked.

        Raises UsageError for what cannot be.
        """
        own_rank, size = self._gloo.rank(), self._gloo.size()
        if rank is not None and not (0 <= rank < size and rank != own_rank):
            raise UsageError(
                f"a message between ranks {own_rank} and {rank} of {size}; expected another rank of the group"
            )
        if not 0 <= tag <= LARGEST_TAG:
            raise UsageError(f"tag {tag}; expected 0 to {LARGEST_TAG}")
        if tag >> TAG_BITS:
            return 1 << TAG_BITS + CHECK_BITS | tag
        kind: int = zlib.crc32(type_name(tensors[0]).encode()) + tensors[0].numel()
        return (1 + kind % ((1 << CHECK_BITS) - 1)) << TAG_BITS | tag


def _describe(tensor: Tensor, tag: int) -> str:
    return f"a message of {tensor.numel()} elements of {type_name(tensor)} with tag {tag}"


def _wait_error(description: str, error: Exception) -> Exception:
    backend_error: Exception = dist.DistBackendError(
        f"omnireduce: waited {description}; one of another element type or size is not taken: {gloo_message(error)}"
    )
    return backend_error


class _MessageWork(GlooWork):
    def __init__(
        self, work: dist._Work, description: str, finish: Callable[[], list[Tensor]], wait_log: _WaitLog
    ) -> None:
        super().__init__(lambda _: work, lambda: True, finish, description=description)
        self._wait_log = wait_log

    def _await(self, work: dist._Work, timeout: timedelta) -> None:
        with self._wait_log.waiting(self._description):
            try:
                work.wait(timeout)
            except RuntimeError as error:
                raise _wait_error(self._description, error) from error


class _WaitLog:
    """The waits of threads for messages. A thread of its own logs those that take long."""

    def __init__(self) -> None:
        self._started: dict[object, tuple[str, WaitNotices]] = {}  # descriptions, and when to log them
        self._closed = threading.Event()
        self._has_thread = False

    @contextmanager
    def waiting(self, description: str) -> Iterator[None]:
        key = object()
        self._started[key] = description, WaitNotices(time.monotonic())
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=self._watch, name="omnireduce.messages", daemon=True).start()
        try:
            yield
        finally:
            del self._started[key]

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S):
            now = time.monotonic()
            for description, reminders in list(self._started.values()):
                if waited_s := reminders.due(now):
                    _log.warning("waiting %s since %.0f s", description, waited_s, extra=tagged("message_missing"))
