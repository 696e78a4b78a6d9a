"""Traces: what one rank, or one shard for one job, did at what time. Kept in memory, written to a file at the end.

A trace is a list of spans, each recorded when it ended. The classes that record are in `links`, and in the module
`traced` of either side. They are used only when `trace.folder` is set. Times are nanoseconds of the monotonic clock,
which all processes of a host share; `Origin` says how to compare them with those of another host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from omnireduce.config import Trace
from omnireduce.dtypes import Array
from omnireduce.errors import ConfigError, UsageError

log = logging.getLogger("omnireduce")
now = time.monotonic_ns
SUFFIX = ".npz"
MOST_MEMBERS = 1 << 20  # ranks, or shards, of one job
_Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class What(IntEnum):
    """What a span tells. `peer` is the shard in a rank's trace, the rank in a shard's trace, -1 where there is no
    peer."""

    COLLECTIVE = 0  # from submission to completion; detail: bytes of the tensor
    PACK = 1  # scan and copy, which are one kernel; detail: blocks
    SCATTER = 2  # detail: blocks
    MERGE = 3  # union and sum; detail: blocks
    SEND = 4  # handing output to the system
    RECEIVE = 5  # taking input from the system
    WAIT = 6  # for input: spinning, then blocked
    MESSAGE_OUT = 7  # an instant: the link began to hand a message to the peer; detail: bytes
    MESSAGE_IN = 8  # an instant: the link reported a message of the peer; detail: bytes
    CREDIT_OUT = 9  # the same for a credit; detail: slot
    CREDIT_IN = 10
    STAGE = 11  # the steps of an exchange inside a host, each with one chunk; detail: blocks or rows put there
    COMBINE = 12  # detail: blocks or rows of the result
    COLLECT = 13  # detail: blocks that are taken
    SHOW = 14  # of several hosts: results of shards, for the other ranks of the host; detail: blocks
    # Instants at the end of a collective that combines a tensor; the next COLLECTIVE is its own.
    TENSOR = 15  # detail: blocks of the tensor, also those of zeros
    BLOCK = 16  # detail: bytes of a block
    OWN = 17  # detail: blocks that this rank has brought
    UNION = 18  # detail: blocks of the result, which are those that any rank has brought


OF_TENSOR = (What.TENSOR, What.BLOCK, What.OWN, What.UNION)
SPAN = np.dtype([("what", "u1"), ("peer", "i4"), ("detail", "i8"), ("start", "i8"), ("end", "i8")])


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Whose trace it is. `boot` names the running system. `epoch_ns` added to its monotonic clock is Unix time. The
    trace was recorded from `began_ns` to `ended_ns`."""

    job: str
    kind: Literal["rank", "shard"]
    number: Annotated[int, msgspec.Meta(ge=0, le=MOST_MEMBERS)]
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MOST_MEMBERS)]
    shards: Annotated[int, msgspec.Meta(ge=1, le=MOST_MEMBERS)]
    boot: str = ""
    epoch_ns: _Nanoseconds = 0
    began_ns: _Nanoseconds = 0
    ended_ns: _Nanoseconds = 0
    missed: Annotated[int, msgspec.Meta(ge=0)] = 0  # spans that did not fit

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


def stamped(origin: Origin) -> Origin:
    """`origin` of what begins now, in this process."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    return msgspec.structs.replace(origin, boot=boot, epoch_ns=time.time_ns() - now(), began_ns=now())


def check_trace(settings: Trace) -> None:
    """Make the folder, if traces are wanted. Raises ConfigError when they could not be written there."""
    if not settings.folder:
        return
    folder = Path(settings.folder)
    wanted = "expected a folder for traces, or one that can be made"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"trace.folder: got {str(folder)!r}, {wanted}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"trace.folder: got {str(folder)!r}, {wanted}: no permission to write to it")


class Recorder:
    """Room for `settings.events` spans. When it is full it stops, counts what it misses, and says so in the end."""

    def __init__(self, settings: Trace, origin: Origin) -> None:
        self._origin = stamped(origin)
        self._path = Path(settings.folder) / f"{origin.job}-{origin.kind}{origin.number}{SUFFIX}"
        self._spans = np.empty(settings.events, SPAN)
        self._columns = [self._spans[name] for name in SPAN.names or ()]
        self._count = self._missed = 0

    def add(self, what: What, start: int, end: int, peer: int = -1, detail: int = 0) -> None:
        """Record a span. Not to be called by two threads at once."""
        i = self._count
        if i == len(self._spans):
            self._missed += 1
            return
        kinds, peers, details, starts, ends = self._columns
        kinds[i], peers[i], details[i], starts[i], ends[i] = what, peer, detail, start, end
        self._count = i + 1

    def write(self) -> None:
        """Write the file, all or nothing, in place of an older one. Raises nothing: a failure is logged."""
        origin = msgspec.structs.replace(self._origin, missed=self._missed, ended_ns=now())
        if self._missed:
            log.warning(
                "the trace of %s, job '%s', is full: it has the first %d spans and misses %d; raise trace.events",
                origin, origin.job, self._count, self._missed,
            )  # fmt: skip
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                np.savez(file, origin=np.array(msgspec.json.encode(origin).decode()), spans=self._spans[: self._count])
            partial.replace(self._path)
        except OSError as error:
            log.warning("%s: the trace cannot be written: %s", self._path, error.strerror or error)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def read_trace(path: Path) -> tuple[Origin, Array]:
    """Read a file that a recorder wrote; the spans are of dtype `SPAN`. Raises UsageError."""
    try:
        with np.load(path, allow_pickle=False) as file:
            origin, spans = msgspec.json.decode(str(file["origin"]), type=Origin), file["spans"]
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # NumPy passes on whatever comes of a damaged file
        raise UsageError(f"{path}: expected a trace, as trace.folder gets them: {error}") from None
    if spans.dtype != SPAN or spans.ndim != 1:
        got = f"{spans.dtype} {spans.shape}"
        raise UsageError(f"{path}: expected spans of {SPAN}, got {got}; was it written by another version?")
    return origin, spans
