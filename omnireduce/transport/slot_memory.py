"""Slot memory: anonymous files that several processes of one host can map, and that leave nothing behind.

Memory gets its pages on first use. An aggregator touches no slots in advance: otherwise all jobs would wait while a job
joins. A worker touches its own slots before it begins, if it will use them: see `touch`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.errors import TransportError

FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE of Linux 5.1
NO_ACCESS = 0  # PROT_NONE
FIXED, NO_RESERVE = 0x10, 0x4000  # MAP_FIXED, MAP_NORESERVE
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | FUTURE_WRITE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Regions:
    """The regions of `ranks` ranks, each of `nbytes`, a multiple of the page size: `array`, uint8 (ranks, nbytes).

    The region of rank `own_rank` is mapped from the start. The other ranks need its descriptor `fd` to map it. Raises
    OSError.
    """

    def __init__(self, ranks: int, own_rank: int, nbytes: int) -> None:
        self.fd = os.memfd_create("omnireduce-host", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)
            self._address = _map_memory(
                None, ranks * nbytes, NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
            )
            memory = (ctypes.c_uint8 * (ranks * nbytes)).from_address(self._address)
            weakref.finalize(
                memory, _libc.munmap, self._address, ranks * nbytes
            ).atexit = False  # others may still leave
            self.array: Array = np.ctypeslib.as_array(memory).reshape(ranks, nbytes)
            self._map(own_rank, self.fd, mmap.PROT_READ | mmap.PROT_WRITE)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        except BaseException:
            self.close()
            raise
        self._own_rank = own_rank

    def add(self, descriptors: Sequence[int]) -> None:
        """Map the regions of all other ranks, by their descriptors, to read them. Raises TransportError."""
        size = self.array.shape[1]
        try:
            for rank, fd in enumerate(descriptors):
                if rank == self._own_rank:
                    continue
                if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != size:
                    raise TransportError(f"local rank {rank} shared something else than sealed memory of {size} bytes")
                self._map(rank, fd, mmap.PROT_READ)
        except OSError as error:
            raise TransportError(f"cannot map the memory of another rank of this host: {error}") from error

    def _map(self, rank: int, fd: int, protection: int) -> None:
        size = self.array.shape[1]
        _map_memory(self._address + rank * size, size, protection, mmap.MAP_SHARED | FIXED, fd)

    def close(self) -> None:
        """Close the descriptor. The memory is freed with the last array that uses it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _map_memory(address: int | None, size: int, protection: int, flags: int, fd: int = -1) -> int:
    """The address of new mapped memory. Raises OSError."""
    mapped = _libc.mmap(address, size, protection, flags, fd, 0)
    if mapped is None or mapped == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(mapped)


TOUCHED_BYTES = 64 << 20  # a worker touches memory up to this size; it may use only little of larger memory
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it


class Region:
    """`rows` slots of `slot_bytes` each, backed by a memfd of fixed size; `slots` is uint8 (rows, slot bytes)."""

    def __init__(self, rows: int, slot_bytes: int) -> None:
        size = rows * slot_bytes
        self.fd = os.memfd_create("omnireduce", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            # a peer that shrinks the file would kill this process by SIGBUS: the seal prevents that
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.slots = _map(self.fd, 0, size).reshape(rows, slot_bytes)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Close the file. The mapping is removed with the last array that uses it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.slots = np.zeros((0, 0), np.uint8)


def map_slots(fd: int, first: int, rows: int, slot_bytes: int) -> Array:
    """Map slots `first` … `first + rows - 1` of a peer's region; uint8 (rows, slot bytes).

    Raises TransportError, for example if the file is not sealed: a peer that shrinks it would kill this process by
    SIGBUS.
    """
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise TransportError("the peer's shared memory is not sealed: the peer could shrink it during its use")
        if os.fstat(fd).st_size < (first + rows) * slot_bytes:
            raise TransportError(f"the peer's shared memory is smaller than {first + rows} slots of {slot_bytes} bytes")
        return _map(fd, first * slot_bytes, rows * slot_bytes).reshape(rows, slot_bytes)
    except OSError as error:
        raise TransportError(f"cannot map the peer's shared memory: {error}") from error


def private_slots(rows: int, slot_bytes: int) -> Array:
    """Slots for this process alone, uint8 (rows, slot bytes)."""
    memory = mmap.mmap(-1, rows * slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.uint8).reshape(rows, slot_bytes)


def touch(slots: Array) -> None:
    """Give all of these slots their pages now, so that the first messages need not wait for them. Does nothing if they
    take more than TOUCHED_BYTES, or if the system cannot do it."""
    memory: object = slots
    while isinstance(memory, np.ndarray):
        memory = memory.base
    mapping = getattr(memory, "obj", None)
    if isinstance(mapping, mmap.mmap) and len(mapping) <= TOUCHED_BYTES:
        with contextlib.suppress(OSError):
            mapping.madvise(MADV_POPULATE_WRITE)


def _map(fd: int, offset: int, size: int) -> Array:
    return np.frombuffer(mmap.mmap(fd, size, flags=mmap.MAP_SHARED, offset=offset), np.uint8)
