"""Messages from one rank to another, through gloo.

Gloo gives a message to whoever waits for one with its tag. One that is shorter than expected leaves a part of the
tensor as it was; one that is longer ends the process. So element type and size are a part of the tag that gloo sees,
and a message of another type or size is not taken, but for a chance of one in 16,383. Both ranks wait then, say so
after a while, and fail when the time of the group is over.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from omnireduce.errors import UsageError
from omnireduce.protocol.reminders import Reminders
from omnireduce.support.logs import tagged
from omnireduce.torch.gloo import GlooWork, said_by_gloo
from omnireduce.torch.tensors import flat_bytes, put_back, room_of, staged, type_name

T = TypeVar("T")
Method = Callable[..., Any]
_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}  # of options, by the words for them


def only(given: Sequence[T]) -> T:
    """The element of a list of one: torch has lists where a process once had several GPUs. Raises UsageError."""
    if len(given) != 1:
        raise UsageError(f"{len(given)} of them came in a list; expected one")
    return given[0]


def options_of(kind: type, words: Sequence[str], args: Sequence[Any], named: dict[str, Any]) -> Any:
    """The options of this kind among the arguments of a call, or else options made of its arguments `words`."""
    given = named.get("opts", args[0] if args else None)
    if isinstance(given, kind):
        return given
    options = kind()
    for word, value in {**dict(zip(words, args, strict=False)), **named}.items():
        if value is not None:
            setattr(options, _FIELDS[word], value)
    return options


def forms(kind: type, *words: str) -> Callable[[Method], Method]:
    """Lets a method `(self, tensors, opts)`, whose options are of `kind`, also take one tensor for a list of one, and
    the arguments `words` for the options."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, tensors: list[Tensor] | Tensor, *args: Any, **named: Any) -> Any:
            listed = [tensors] if isinstance(tensors, Tensor) else tensors
            return method(self, listed, options_of(kind, words, args, named))

        return call

    return decorate


def forms_of_two(kind: type, *words: str) -> Callable[[Method], Method]:
    """The same for a method `(self, outs, tensors, opts)`. Where one of the two is a tensor, both become lists of
    one."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, outs: Any, tensors: Any, *args: Any, **named: Any) -> Any:
            opts = options_of(kind, words, args, named)
            if isinstance(outs, Tensor) or isinstance(tensors, Tensor):
                outs, tensors = [outs], [tensors]
            return method(self, outs, tensors, opts)

        return call

    return decorate


allreduce_forms = forms(c10d.AllreduceOptions, "op", "timeout")
coalesced_forms = forms(c10d.AllreduceCoalescedOptions)
reduce_forms = forms(c10d.ReduceOptions, "root", "op", "timeout")
broadcast_forms = forms(c10d.BroadcastOptions, "root", "timeout")
all_gather_forms = forms_of_two(c10d.AllgatherOptions, "timeout")
gather_forms = forms_of_two(c10d.GatherOptions, "root", "timeout")
scatter_forms = forms_of_two(c10d.ScatterOptions, "root", "timeout")
reduce_scatter_forms = forms_of_two(c10d.ReduceScatterOptions, "op", "timeout")


TAG_BITS, CHECK_BITS = 16, 14  # of the 31 that gloo has
LARGEST_TAG = (1 << TAG_BITS + CHECK_BITS) - 1
LOOK_S = 0.5  # between two looks whether to say that this rank waits
_log = logging.getLogger("omnireduce")


class Messages:
    """Messages of this rank, to and from the other ranks of a group of gloo."""

    def __init__(self, gloo: dist.ProcessGroup) -> None:
        self._gloo, self._waits = gloo, _Waits()

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> dist._Work:
        tensor, slot = only(tensors), self._slot(tensors, rank, tag)
        own = [flat_bytes(staged(tensor))]
        begin = partial(self._gloo.send, own, rank, slot)
        return self._begun(begin, f"to send {_shown(tensor, tag)} to rank {rank}", lambda: [tensor])

    def receive(self, tensors: Sequence[Tensor], rank: int, tag: int) -> dist._Work:
        tensor, slot = only(tensors), self._slot(tensors, rank, tag)
        room = room_of(tensor)
        begin = partial(self._gloo.recv, [flat_bytes(room)], rank, slot)
        return self._begun(begin, f"for {_shown(tensor, tag)} from rank {rank}", lambda: put_back([tensor], [room]))

    def receive_from_any(self, tensors: Sequence[Tensor], tag: int) -> dist._Work:
        tensor, slot = only(tensors), self._slot(tensors, None, tag)
        room = room_of(tensor)
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
    """What threads wait for. Another thread says so where it takes long."""

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
