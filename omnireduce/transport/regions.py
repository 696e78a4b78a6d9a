"""Memory of the ranks of one host: each writes a region of its own, which the others map to read.

The regions of all ranks lie side by side in each process, so that a kernel sees one array. A region is a sealed memfd:
nobody can shrink it, and nobody but its owner, who has mapped it before the seal, can map it to write.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np

from omnireduce.dtypes import Array
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

    That of rank `me` is there from the start, and `fd` is what the others need to map it. Raises OSError.
    """

    def __init__(self, ranks: int, me: int, nbytes: int) -> None:
        self.fd = os.memfd_create("omnireduce-host", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)
            self._address = _mapped(None, ranks * nbytes, NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
            memory = (ctypes.c_uint8 * (ranks * nbytes)).from_address(self._address)
            weakref.finalize(
                memory, _libc.munmap, self._address, ranks * nbytes
            ).atexit = False  # others may still leave
            self.array: Array = np.ctypeslib.as_array(memory).reshape(ranks, nbytes)
            self._map(me, self.fd, mmap.PROT_READ | mmap.PROT_WRITE)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        except BaseException:
            self.close()
            raise
        self._me = me

    def add(self, descriptors: Sequence[int]) -> None:
        """Map the regions of all other ranks, given their descriptors, to read. Raises TransportError."""
        size = self.array.shape[1]
        try:
            for rank, fd in enumerate(descriptors):
                if rank == self._me:
                    continue
                if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != size:
                    raise TransportError(f"local rank {rank} shares no sealed memory of {size} bytes")
                self._map(rank, fd, mmap.PROT_READ)
        except OSError as error:
            raise TransportError(f"cannot map the memory of another rank of this host: {error}") from error

    def _map(self, rank: int, fd: int, protection: int) -> None:
        size = self.array.shape[1]
        _mapped(self._address + rank * size, size, protection, mmap.MAP_SHARED | FIXED, fd)

    def close(self) -> None:
        """Drop the descriptor. The memory goes with the last array that uses it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _mapped(address: int | None, size: int, protection: int, flags: int, fd: int = -1) -> int:
    """The address of new mapped memory. Raises OSError."""
    mapped = _libc.mmap(address, size, protection, flags, fd, 0)
    if mapped is None or mapped == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(mapped)
