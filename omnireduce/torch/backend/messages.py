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
from omnireduce.protocol.reminders import Reminders
from omnireduce.support.logs import tagged
from omnireduce.torch.backend.gloo import GlooWork, said_by_gloo
from omnireduce.torch.backend.options import only_element
from omnireduce.torch.tensors import flat_bytes, put_back, result_buffer, staged, type_name

TAG_BITS, CHECK_BITS = 16, 14  # of the 31 that gloo has
LARGEST_TAG = (1 << TAG_BITS + CHECK_BITS) - 1
LOOK_S = 0.5  # between two looks whether to say that this rank waits
_log = logging.getLogger("omnireduce")


class Messages:
    """Messages of this rank, to and from the other ranks of a group of gloo."""

    def __init__(self, gloo: dist.ProcessGroup) -> None:
        self._gloo, self._waits = gloo, _Waits()

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> dist._Work:
        tensor, slot = only_element(tensors), self._slot(tensors, rank, tag)
        own = [flat_bytes(staged(tensor))]
        begin = partial(self._gloo.send, own, rank, slot)
        return self._begun(begin, f"to send {_shown(tensor, tag)} to rank {rank}", lambda: [tensor])

    def receive(self, tensors: Sequence[Tensor], rank: int, tag: int) -> dist._Work:
        tensor, slot = only_element(tensors), self._slot(tensors, rank, tag)
        room = result_buffer(tensor)
        begin = partial(self._gloo.recv, [flat_bytes(room)], rank, slot)
        return self._begun(begin, f"for {_shown(tensor, tag)} from rank {rank}", lambda: put_back([tensor], [room]))

    def receive_from_any(self, tensors: Sequence[Tensor], tag: int) -> dist._Work:
        tensor, slot = only_element(tensors), self._slot(tensors, None, tag)
        room = result_buffer(tensor)
        begin = partial(self._gloo.recv_anysource, [flat_bytes(room)], slot)
        return self._begun(begin, f"for {_shown(tensor, tag)} from any rank", lambda: put_back([tensor], [room]))

    def close(self) -> None:
        self._waits.close()

    def _begun(self, begin: Callable[[], dist._Work], words: str, finish: Callable[[], list[Tensor]]) -> dist._Work:
        try:
            return _MessageWork(begin(), words, finish, self._waits)
        except RuntimeError as error:  # the other rank is gone
            raise _in_vain(words, error) from error

    def _slot(self, tensors: Sequence[Tensor], rank: int | None, tag: int) -> int:
        """The tag that gloo sees. Of a large tag all bits are taken: then nothing is checked.

        Raises UsageError for what cannot be.
        """
        own, size = self._gloo.rank(), self._gloo.size()
        if rank is not None and not (0 <= rank < size and rank != own):
            raise UsageError(f"a message between ranks {own} and {rank} of {size}; expected another rank of the group")
        if not 0 <= tag <= LARGEST_TAG:
            raise UsageError(f"tag {tag}; expected 0 to {LARGEST_TAG}")
        if tag >> TAG_BITS:
            return 1 << TAG_BITS + CHECK_BITS | tag
        kind: int = zlib.crc32(type_name(tensors[0]).encode()) + tensors[0].numel()
        return (1 + kind % ((1 << CHECK_BITS) - 1)) << TAG_BITS | tag


def _shown(tensor: Tensor, tag: int) -> str:
    return f"a message of {tensor.numel()} elements of {type_name(tensor)} with tag {tag}"


def _in_vain(words: str, error: Exception) -> Exception:
    backend_error: Exception = dist.DistBackendError(
        f"omnireduce: waited {words}; one of another element type or size is not taken: {said_by_gloo(error)}"
    )
    return backend_error


class _MessageWork(GlooWork):
    def __init__(self, work: dist._Work, words: str, finish: Callable[[], list[Tensor]], waits: _Waits) -> None:
        super().__init__(lambda _: work, lambda: True, finish, words=words)
        self._waits = waits

    def _await(self, work: dist._Work, timeout: timedelta) -> None:
        with self._waits.waiting(self._words):
            try:
                work.wait(timeout)
            except RuntimeError as error:
                raise _in_vain(self._words, error) from error


class _Waits:
    """Waits of threads for messages. Another thread logs those that take long."""

    def __init__(self) -> None:
        self._begun: dict[object, tuple[str, Reminders]] = {}  # words, and when to say them
        self._closed = threading.Event()
        self._has_thread = False

    @contextmanager
    def waiting(self, words: str) -> Iterator[None]:
        key = object()
        self._begun[key] = words, Reminders(time.monotonic())
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=self._watch, name="omnireduce.messages", daemon=True).start()
        try:
            yield
        finally:
            del self._begun[key]

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S):
            now = time.monotonic()
            for words, reminders in list(self._begun.values()):
                if waited_s := reminders.due(now):
                    _log.warning("waiting %s since %.0f s", words, waited_s, extra=tagged("message_missing"))
