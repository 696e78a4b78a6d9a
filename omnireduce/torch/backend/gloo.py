"""Collectives of gloo, which moves bytes between ranks: those that the aggregators do not serve.

Gloo takes the memory of a tensor for its values, in their order, and knows few element types. It uses the address of
a tensor on a GPU as if it were of its own memory. So it gets bytes in the processor's memory.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from omnireduce.core.dtypes import Array
from omnireduce.errors import OmniReduceError, UsageError
from omnireduce.runtime.rank.calls.single import once
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.support.exit_gate import exit_gate
from omnireduce.torch.backend.group_job import GroupJob
from omnireduce.torch.backend.work import NO_LIMIT, Completion, Pending, as_torch_error
from omnireduce.torch_backend import DEVICES

DIGEST_BYTES, BALANCE_BYTES, TEXT_BYTES = 16, 8, 232  # of a statement, 256 together
MAX_SHOWN = 4  # statements in an error
LOOK = timedelta(milliseconds=50)  # between two looks whether the process ends, while a thread waits in gloo
_HASH_FACTORS = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)  # of SplitMix64


class Sizes(NamedTuple):
    """Bytes that this rank sends to each rank in an all-to-all, and bytes that it expects from each."""

    sent: Sequence[int]
    expected: Sequence[int]


def statement(description: str, rank: int, sizes: Sizes | None = None) -> Array:
    """The statement of rank `rank`, uint8 (256,). `description` must be the same on all ranks; `sizes` must
    fit those of the others."""
    text = (
        description if sizes is None else f"{description}, bytes to each rank {sizes.sent}, from each {sizes.expected}"
    )
    digest = blake2b(description.encode(), digest_size=DIGEST_BYTES).digest()
    balance = 0 if sizes is None else _balance(rank, sizes)
    encoded = text.encode("ascii", "backslashreplace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    return np.frombuffer(digest + balance.to_bytes(BALANCE_BYTES, "little") + encoded, np.uint8)


def check_agreement(statements: Array) -> None:
    """Raises UsageError if the statements of all ranks, uint8 (size, 256), contradict each other."""
    first = statements[0].tobytes()
    if statements.tobytes() == len(statements) * first and not any(first[DIGEST_BYTES : DIGEST_BYTES + BALANCE_BYTES]):
        return  # nearly always
    digests = statements[:, :DIGEST_BYTES]
    balances = statements[:, DIGEST_BYTES : DIGEST_BYTES + BALANCE_BYTES].copy().view("<u8")
    differ = (digests != digests[0]).any()
    if not differ and not balances.sum(dtype=np.uint64):
        return
    texts = [bytes(row).rstrip(b"\0").decode("ascii") for row in statements[:, DIGEST_BYTES + BALANCE_BYTES :]]
    first_ranks: dict[str, int] = {}
    for rank, text in enumerate(texts):
        first_ranks.setdefault(text, rank)
    listing = "; ".join(f"rank {rank}: {text}" for text, rank in list(first_ranks.items())[:MAX_SHOWN])
    problem = "ranks call different collectives" if differ else "ranks send what others do not expect"
    raise UsageError(f"{problem}: {listing}{'; ...' if len(first_ranks) > MAX_SHOWN else ''}")


def _balance(rank: int, sizes: Sizes) -> int:
    ranks, own_ranks = np.arange(len(sizes.sent), dtype=np.uint64), np.full(len(sizes.sent), rank, np.uint64)
    sent, expected = (np.array(byte_counts, np.uint64) for byte_counts in sizes)
    return (_sum_of_mixed(own_ranks, ranks, sent) - _sum_of_mixed(ranks, own_ranks, expected)) % (1 << 64)


def _sum_of_mixed(sender: Array, receiver: Array, size: Array) -> int:
    """The sum, modulo 2**64, of a hash of each sender, receiver and size."""
    hashes = np.zeros_like(size)
    for part in (sender, receiver, size):
        hashes = (hashes ^ part) + _HASH_FACTORS[0]
        hashes = (hashes ^ (hashes >> np.uint64(30))) * _HASH_FACTORS[1]
        hashes = (hashes ^ (hashes >> np.uint64(27))) * _HASH_FACTORS[2]
        hashes = hashes ^ (hashes >> np.uint64(31))
    return int(hashes.sum(dtype=np.uint64))


def gloo_group(store: dist.Store, rank: int, size: int, address: str, timeout: timedelta) -> dist.ProcessGroup:
    """A process group of torch that uses gloo, which is reached at this address of this host. Empty: gloo chooses."""
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    if address:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [dist.ProcessGroupGloo.create_device(address)], timeout
        gloo = dist.ProcessGroupGloo(store, rank, size, options)
    else:
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    for device in DEVICES:
        group._register_backend(torch.device(device), kind, gloo)
    return group


class Movement(NamedTuple):
    """A collective of gloo. `description`: in words, the same on all ranks. `sizes` fit those of the other ranks.
    `begin` asks gloo for it, and `finish` returns the tensors with its results. `devices`: the GPUs of these."""

    description: str
    begin: Callable[[], dist._Work]
    finish: Callable[[], list[Tensor]]
    devices: Sequence[torch.device] = ()
    sizes: Sizes | None = None


class MovementQueue:
    """Collectives of gloo that wait until all ranks agree on them. They begin in the order in which they were started.

    Gloo tells the messages of two collectives apart by that order. A caller that needs the work of one collective waits
    for those before it. If no caller waits, a thread of `completion` does. Other threads complete the futures.
    """

    def __init__(self, job: GroupJob, completion: Completion) -> None:
        self._job, self._completion, self._future_completion = job, completion, Completion()
        self._turns = deque[_Turn]()  # that have not begun
        self._beginning = threading.RLock()  # held from the first of the turns until it has begun

    def start(self, movement: Movement, opts: Any) -> dist._Work:
        """The work of a collective of all ranks. Raises RuntimeError if they do not agree. If the collective is
        asynchronous, the work raises it."""
        limit: timedelta = max(opts.timeout, NO_LIMIT)

        def begin_agreement(communicator: Communicator) -> _Turn:
            own_statement = statement(movement.description, communicator.rank, movement.sizes)
            if not opts.asyncOp and not limit:
                statements = communicator.allgather(own_statement)
                turn = _Turn(lambda: statements, movement.begin)
            else:
                handle = communicator.allgather_async(own_statement)
                turn = _Turn(lambda: handle.wait(limit.total_seconds() or None), movement.begin)
            self._turns.append(turn)
            return turn

        turn = self._job.start(begin_agreement)
        work = GlooWork(
            lambda timeout: self._start_until(turn, timeout),
            turn.decided.is_set,
            movement.finish,
            devices=movement.devices,
            description=movement.description,
            completion=self._future_completion,
        )
        if opts.asyncOp:
            self._completion.add(Pending(lambda: self._start_until(turn), _ignore_start))
        else:
            self._start_until(turn)
        return work

    def close(self) -> None:
        """Let the threads end, once they have completed all futures."""
        self._future_completion.close()

    def refuse(self, error: Exception) -> None:
        """Let the other ranks know that this one cannot take part in the next collective, because of `error`."""

        def begin() -> dist._Work:
            raise error  # no rank can take part

        refusal = Movement(f"cannot take part: {error}", begin, list)
        with suppress(dist.DistError):  # the job is over
            self.start(refusal, dist.BarrierOptions())

    def _start_until(self, turn: _Turn, timeout: timedelta = NO_LIMIT) -> dist._Work:
        # After the timeout of an asynchronous collective, a thread of `completion` goes on with it.
        if timeout and not turn.decided.wait(timeout.total_seconds()):
            raise dist.DistBackendError(f"omnireduce: not all ranks have called it after {timeout.total_seconds():g} s")
        with self._beginning:
            while not turn.decided.is_set():
                self._turns.popleft().start()
        return turn.work()


def _ignore_start() -> None:
    """Nobody is told when a collective has begun."""


class _Turn:
    """A collective in the queue. `statements` waits for the statements of all ranks; `begin` asks gloo for it."""

    def __init__(self, statements: Callable[[], Array], begin: Callable[[], dist._Work]) -> None:
        self._statements, self._begin = statements, begin
        self._work: dist._Work | None = None
        self._error: Exception | None = None
        self.decided = threading.Event()  # it has begun, or never will

    def start(self) -> None:
        try:
            check_agreement(self._statements())
            self._work = self._begin()
        except OmniReduceError as error:
            self._error = as_torch_error(error)
        except Exception as error:
            self._error = dist.DistBackendError(f"omnireduce: {gloo_message(error)}")
        del self._statements, self._begin  # they hold tensors
        self.decided.set()

    def work(self) -> dist._Work:
        """The work of gloo. Raises RuntimeError if there is none."""
        if self._error is not None:
            raise self._error
        assert self._work is not None
        return self._work


def gloo_message(error: Exception) -> str:
    """The text of an error of gloo, without the line of gloo's source and without gloo's first exception."""
    return re.sub(r"^\[/\S+\] ", "", str(error).partition("\n Original exception")[0])


class GlooWork(dist._Work):
    """Work of gloo. `await_start` waits until gloo has begun it, with a time limit or without, and returns gloo's own
    work; `has_started` tells whether that would return at once. `finish` is called once, when the work is over, and
    returns the tensors. `description`: the collective, in words. `completion`: its threads complete the future. None:
    there is no future, as gloo has none for messages."""

    def __init__(
        self,
        await_start: Callable[[timedelta], dist._Work],
        has_started: Callable[[], bool],
        finish: Callable[[], list[Tensor]],
        *,
        description: str,
        devices: Sequence[torch.device] = (),
        completion: Completion | None = None,
    ) -> None:
        super().__init__()
        self._description, self._future_completion = description, completion
        self._await_start, self._has_started, self._finish = await_start, has_started, once(finish)
        self._waiting = threading.RLock()  # a signal handler may come on top
        self._is_over = False
        self._error: Exception | None = None
        self._devices = devices
        self._over: Future[None] | None = None  # where somebody wants to hear of it

    def is_completed(self) -> bool:
        if not self._is_over and self._has_started():
            with suppress(Exception):  # `wait` and `exception` tell that
                if self._await_start(NO_LIMIT).is_completed():
                    self.wait()
        return self._is_over

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error if self.is_completed() else None

    def _source_rank(self) -> int:
        """For `dist.recv` of any rank."""
        return int(self._await_start(NO_LIMIT)._source_rank())

    def result(self) -> list[Tensor]:
        self.wait()
        return self._finish()

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Return True once it is over. Raises RuntimeError where it failed, or takes longer than `timeout` (0: no such
        limit)."""
        with self._waiting:
            if not self._is_over:  # to wait twice for a message is to wait for another one
                try:
                    self._await(self._await_start(timeout), timeout)
                    self._finish()
                except Exception as error:
                    if not self._has_started():  # only the time of this call is over
                        raise
                    self._error = error
                self._is_over = True
        if self._error is not None:
            raise self._error
        return True

    def _await(self, work: dist._Work, timeout: timedelta) -> None:
        try:
            work.wait(timeout)
        except RuntimeError as error:
            raise dist.DistBackendError(f"omnireduce: {self._description}: {gloo_message(error)}") from error

    def get_future(self) -> Future[list[Tensor]]:
        if self._future_completion is None:
            raise dist.DistBackendError(
                f"omnireduce: no future tells the end of a wait {self._description}; call wait()"
            )
        # The callbacks do not refer to this object: the tensors are free when nobody refers to it.
        await_start, finish = self._await_start, self._finish
        if self._over is None:
            self._over = over = Future(devices=list(self._devices))
            self._future_completion.add(Pending(lambda: _await_end(await_start), lambda: over.set_result(None)))

        def finished(_: Future[None]) -> list[Tensor]:
            await_start(NO_LIMIT).get_future().wait()  # raises why gloo failed
            return finish()

        return self._over.then(finished)


def _await_end(await_start: Callable[[timedelta], dist._Work]) -> None:
    """Return when gloo has ended, or has not begun and never will. A caller that asks for the result gets the error.

    No function of Python is called in a thread of gloo: the end of the process would not wait for it.
    """
    work = await_start(NO_LIMIT)
    while not work.is_completed():
        exit_gate.check()
        with suppress(RuntimeError):
            work.wait(LOOK)
