"""The baseline: mpi4py's `Allreduce`. MPI is imported here only, and only when a baseline is made.

A program calls `finalize` when all went well, and not when it failed. mpi4py by itself would end MPI at any exit. That
waits for the other ranks, which may wait for this one. When a process exits without `finalize`, mpirun ends the others.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from omnireduce.core.dtypes import Array, element_type
from omnireduce.errors import UsageError
from omnireduce.support.extras import install

_OPS = {"sum": "SUM", "mean": "SUM", "min": "MIN", "max": "MAX", "prod": "PROD"}


class MpiAllreduce:
    """MPI's all-reduce among the same processes, as `mpirun` started them.

    `rank` and `size` are what the launcher says; MPI must see the same. Raises UsageError, naming `command`,
    if the workers were not started by the mpirun of the MPI that mpi4py uses, or if there is no mpi4py.
    """

    def __init__(self, rank: int, size: int, *, command: str) -> None:
        try:
            import mpi4py

            mpi4py.rc.finalize = False
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py without an MPI library
            reason = " ".join(str(error).split())
            raise UsageError(f"the comparison with MPI needs mpi4py ({reason}): {install('mpi4py', 'mpi')}") from None
        self._mpi: Any = MPI
        self._world: Any = MPI.COMM_WORLD
        if (self._world.Get_rank(), self._world.Get_size()) != (rank, size):
            raise UsageError(
                f"this is rank {rank} of {size}, but to MPI it is rank {self._world.Get_rank()} of "
                f"{self._world.Get_size()}; use the mpirun of {MPI.get_vendor()[0]}: {command}"
            )

    def supports(self, array: Array) -> bool:
        """Whether MPI has a type for the array's elements: it has none for 16-bit floats."""
        return not element_type(array.dtype).is_narrow

    def out_of_place(self, array: Array, result: Array, op: str) -> float:
        """Reduce `array` into `result`; return the seconds that it took on this rank."""
        return self._timed(array, result, op)

    def in_place(self, array: Array, op: str) -> float:
        """Reduce `array` in place; return the seconds that it took on this rank."""
        return self._timed(self._mpi.IN_PLACE, array, op)

    def _timed(self, send: Any, result: Array, op: str) -> float:
        mpi_op = getattr(self._mpi, _OPS[op])
        self._world.Barrier()
        start = time.perf_counter()
        self._world.Allreduce(send, result, mpi_op)
        if op == "mean":
            result /= self._world.size
        return time.perf_counter() - start


def finalize() -> None:
    """End MPI if it was started. All its ranks call this, because each waits for the others."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and not mpi.Is_finalized():
        mpi.Finalize()
