"""Traces: timed records of the work of one rank, or of one shard for one job.

A trace is a list of spans, each recorded when it ended. During the recording it is a file that is mapped to memory,
`JOB-rankN.live`. So the records of a killed process are kept. In the end it becomes `JOB-rankN.npz`. The classes that
record are in `links`, in `runtime.rank.traced_parts` and in `runtime.shard.traced`. They are used only when
`trace.folder` or `trace.timeline` is set. Times are nanoseconds of the monotonic clock, which all processes of a host
share; `Origin` says how to compare them with the times of another host.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import mmap
import os
import time
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.errors import ConfigError, UsageError
from omnireduce.support.config import Trace
from omnireduce.support.files.output import check_writable
from omnireduce.support.files.paths import whole_path

log = logging.getLogger("omnireduce")
now = time.monotonic_ns
SUFFIX, LIVE = ".npz", ".live"
PARTS = ".parts"  # behind the name of a timeline: the folder of the files that it is made of
DYNAMIC = "DYNAMIC"
HEADER_BYTES = 4096  # header of a trace during the recording: its origin, and spaces
STEP = 1 << 15  # spans for which room on the disk is taken at once
MORE_NS = 60 * 10**9  # a killed process is taken to have lived at most this long after its last record
MAX_MEMBERS = 1 << 20  # the most ranks, or shards, of one job
_Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SpanKind(IntEnum):
    """The kinds of spans. `peer` is the shard in a rank's trace, the rank in a shard's trace, -1 if there is no
    peer."""

    COLLECTIVE = 0  # from submission to completion; detail: bytes of the tensor
    PACK = 1  # scan and copy, which are one kernel; detail: blocks
    SCATTER = 2  # detail: blocks
    MERGE = 3  # union and sum; detail: blocks
    SEND = 4  # handing output to the system
    RECEIVE = 5  # taking input from the system
    WAIT = 6  # waiting for input: spinning, then blocked
    MESSAGE_OUT = 7  # an instant: the link began to hand a message to the peer; detail: bytes
    MESSAGE_IN = 8  # an instant: the link reported a message of the peer; detail: bytes
    CREDIT_OUT = 9  # the same for a credit; detail: slot
    CREDIT_IN = 10
    STAGE = 11  # the steps of an exchange inside a host, each with one chunk; detail: blocks or rows put there
    COMBINE = 12  # detail: blocks or rows of the result
    COLLECT = 13  # detail: blocks that are taken
    SHOW = 14  # with several hosts: results of shards, for the other ranks of the host; detail: blocks
    # Instants at the end of a collective that combines a tensor. They belong to the COLLECTIVE span that follows.
    TENSOR = 15  # detail: blocks of the tensor, with blocks of zeros
    BLOCK = 16  # detail: bytes of a block
    OWN = 17  # detail: blocks that this rank has brought
    UNION = 18  # detail: blocks of the result, which any rank has brought


IN_MEMORY = (SpanKind.STAGE, SpanKind.COMBINE, SpanKind.SHOW, SpanKind.COLLECT)
WORK = (SpanKind.PACK, SpanKind.SCATTER, SpanKind.MERGE, *IN_MEMORY, SpanKind.SEND, SpanKind.RECEIVE)
OF_TENSOR = (SpanKind.TENSOR, SpanKind.BLOCK, SpanKind.OWN, SpanKind.UNION)
SPAN = np.dtype([("what", "u1"), ("peer", "i4"), ("detail", "i8"), ("start", "i8"), ("end", "i8")])


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a trace: job, and rank or shard. `boot` names the running system. `epoch_ns` plus its monotonic clock
    is Unix time. The trace was recorded from `began_ns` to `ended_ns`."""

    job: str
    kind: Literal["rank", "shard"]
    number: Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMBERS)]
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMBERS)]
    shards: Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMBERS)]
    boot: str = ""
    epoch_ns: _Nanoseconds = 0
    began_ns: _Nanoseconds = 0
    ended_ns: _Nanoseconds = 0
    missed: Annotated[int, msgspec.Meta(ge=0)] = 0  # spans that did not fit

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


def stamped(origin: Origin) -> Origin:
    """`origin` with the system and clock of this process, for a trace that begins now."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    return msgspec.structs.replace(origin, boot=boot, epoch_ns=time.time_ns() - now(), began_ns=now())


def trace_folder(settings: Trace) -> str:
    """The folder for traces; empty: none are recorded."""
    wants_timeline = settings.timeline not in ("", DYNAMIC)
    return settings.folder or (settings.timeline + PARTS if wants_timeline else "")


def with_folder(settings: Trace) -> Trace:
    """`settings` with the folder that `trace_folder` gives."""
    return msgspec.structs.replace(settings, folder=trace_folder(settings))


def check_trace(settings: Trace) -> None:
    """Make the folders, if traces or profiles are wanted. Raises ConfigError when they, or a timeline, could not be
    written there."""
    if settings.timeline not in ("", DYNAMIC):
        try:
            check_writable(settings.timeline)
        except UsageError as error:
            raise ConfigError(f"trace.timeline: {error}") from None
    if settings.folder:
        _check_folder("trace.folder", settings.folder)
    elif trace_folder(settings):
        _check_folder("trace.timeline", trace_folder(settings))
    if profile_folder(settings):
        _check_folder("trace.profile", profile_folder(settings))


def profile_folder(settings: Trace) -> str:
    """The folder for profiles; empty: none are made. Raises UsageError if the current folder is gone."""
    if settings.profile in ("", "0"):
        return ""
    return str(whole_path("." if settings.profile == "1" else settings.profile))


def _check_folder(key: str, name: str) -> None:
    folder, content = Path(name), "profiles" if key == "trace.profile" else "traces"
    expected = f"expected a folder for {content}, or one that can be made"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{key}: got {str(folder)!r}, {expected}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{key}: got {str(folder)!r}, {expected}: no permission to write to it")


class _Live:
    """A file in `path` that has room for `events` spans, and takes room on the disk step by step. Raises OSError."""

    def __init__(self, path: Path, origin: Origin, events: int) -> None:
        self._path, self.room = path.with_name(f".{path.name}.{os.getpid()}.partial"), 0
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            header = msgspec.json.encode(origin).ljust(HEADER_BYTES)
            os.posix_fallocate(self._file, 0, HEADER_BYTES)
            os.ftruncate(self._file, HEADER_BYTES + events * SPAN.itemsize)
            os.pwrite(self._file, header, 0)
            mapped = mmap.mmap(self._file, HEADER_BYTES + events * SPAN.itemsize)
            self.spans: Array = np.frombuffer(mapped, SPAN, events, HEADER_BYTES)
            self.grow()
            self._path = self._path.replace(path)  # an older file is not overwritten: a process may have mapped it
        except BaseException:
            self.close()
            raise

    def grow(self) -> None:
        """Take room on the disk for more spans: without it a write to the mapped file would kill the process. Raises
        OSError."""
        more = min(STEP, self.spans.size - self.room)
        size = SPAN.itemsize
        os.posix_fallocate(self._file, HEADER_BYTES + self.room * size, more * size)
        self.room += more

    def close(self) -> None:
        """Remove the file. Its mapping stays valid."""
        os.close(self._file)
        with contextlib.suppress(OSError):
            self._path.unlink()


class Recorder:
    """Records up to `settings.events` spans. When it is full, it counts the spans that it misses, and says so in the
    end."""

    def __init__(self, settings: Trace, origin: Origin) -> None:
        self._origin = stamped(origin)
        self._path = Path(settings.folder) / f"{origin.job}-{origin.kind}{origin.number}{SUFFIX}"
        self._live: _Live | None = None
        try:
            self._live = _Live(self._path.with_suffix(LIVE), self._origin, settings.events)
            self._spans, self._room = self._live.spans, self._live.room
        except (OSError, OverflowError, ValueError):  # no room on the disk, or a file system that cannot map
            self._spans, self._room = np.empty(settings.events, SPAN), settings.events
        self._columns = [self._spans[name] for name in SPAN.names or ()]
        self._count = self._missed = 0

    def add(self, kind: SpanKind, start: int, end: int, peer: int = -1, detail: int = 0) -> None:
        """Record a span. Two threads must not call this at once."""
        i = self._count
        if i == self._room and not self._grow():
            self._missed += 1
            return
        kinds, peers, details, starts, ends = self._columns
        kinds[i], peers[i], details[i], starts[i] = kind, peer, detail, start
        ends[i] = end  # last: a reader of the file takes only spans that have an end
        self._count = i + 1

    def _grow(self) -> bool:
        if self._live is None or self._missed or self._room == len(self._spans):
            return False
        try:
            self._live.grow()
        except OSError:
            return False
        self._room = self._live.room
        return True

    def write(self) -> None:
        """Write the file, all or nothing; it replaces an older file. Raises nothing: a failure is logged."""
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
        self.discard()

    def discard(self) -> None:
        """Remove the live file. A written trace stays."""
        if self._live is not None:
            self._live.close()
            self._live = None


def read_trace(path: Path) -> tuple[Origin, Array]:
    """Read a file that a recorder wrote, or records in; the spans are of dtype `SPAN`. Raises UsageError."""
    try:
        if path.suffix == LIVE:
            return _read_live(path)
        with np.load(path, allow_pickle=False) as file:
            origin, spans = msgspec.json.decode(str(file["origin"]), type=Origin), file["spans"]
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # NumPy raises errors of any kind for a damaged file
        raise UsageError(f"{path}: expected a trace, as trace.folder gets them: {error}") from None
    if spans.dtype != SPAN or spans.ndim != 1:
        got = f"{spans.dtype} {spans.shape}"
        raise UsageError(f"{path}: expected spans of {SPAN}, got {got}; was it written by another version?")
    return origin, spans


def _read_live(path: Path) -> tuple[Origin, Array]:
    with path.open("rb") as file:
        origin = msgspec.json.decode(file.read(HEADER_BYTES), type=Origin)
    mapped = np.memmap(path, SPAN, "r", HEADER_BYTES)
    ends = mapped["end"]
    count = bisect.bisect_left(range(len(ends)), True, key=lambda i: bool(ends[i] == 0))
    spans = np.array(mapped[:count])
    last = int(spans["end"].max(initial=origin.began_ns))
    return msgspec.structs.replace(origin, ended_ns=last + MORE_NS), spans
