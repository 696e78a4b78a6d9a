"""The competitors, as seen by one rank: the service, MPI, gloo, and sparse exchanges built on the last two.

Each class joins its ranks when it is made, and offers methods by name. `dense` methods take the tensor and return the
result, possibly the same array; `rows` methods take row numbers (int64, ascending), rows (n, row length) and the number
of rows, and return the union's row numbers and sums. Only the process that needs one imports its library.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.contest.loopback import Carrier
from omnireduce.core.dtypes import Array

BLOCK_BYTES = 1024  # of the scan
Dense = Callable[[Array], Array]
Rows = Callable[[Array, Array, int], tuple[Array, Array]]


class Peer(ABC):
    """One rank of one competitor."""

    rank: int
    size: int
    dense: dict[str, Dense]
    rows: dict[str, Rows]
    counted: tuple[str, ...] = ()  # the methods of which it counts itself what carries their bytes

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks are here."""

    def wire_bytes(self) -> Array:
        """Bytes so far, if it knows them: sent, received, then exchanged with each shard; int64."""
        return np.zeros(2, np.int64)


class Service(Peer):
    """omnireduce, and two bounds. `scan` only reads the tensor, block by block: what no sparse exchange can save.
    `carry` only takes it up and down again over TCP: see `benchmarks.contest.loopback`."""

    counted = ("allreduce", "scan")

    def __init__(self, options: dict[str, Any]) -> None:
        import omnireduce as omni
        from omnireduce.kernels.nonzero_blocks import nonzero_blocks

        config = omni.load_config(overrides=options["set"], environ={})
        self._comm = omni.connect(config, job=options["job"], rank=options["rank"], size=options["size"])
        self.rank, self.size = self._comm.rank, self._comm.size

        def scan(tensor: Array) -> Array:
            words = tensor.view(np.uint64).reshape(-1, BLOCK_BYTES // 8)
            nonzero_blocks(words, np.uint64(0x7FFFFFFF7FFFFFFF), np.empty(len(words), np.bool_))
            return tensor

        carrier = Carrier(options["echoes"])

        def carry(tensor: Array) -> Array:
            carrier.carry(tensor, tensor)
            return tensor

        self.dense = {"allreduce": self._comm.allreduce, "scan": scan, "carry": carry}
        self.rows = {"allreduce": lambda numbers, values, n: self._comm.allreduce_rows(numbers, values, n)}

    def barrier(self) -> None:
        self._comm.barrier()

    def wire_bytes(self) -> Array:
        statistics = self._comm.statistics()
        return np.array([statistics.sent_bytes, statistics.received_bytes, *statistics.shard_bytes])


class Mpi(Peer):
    """mpi4py on the MPI of this environment, and AGsparse on it: see `benchmarks.contest.peers`."""

    def __init__(self, options: dict[str, Any]) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._world: Any = MPI.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        self._result = np.zeros(0, np.float32)
        gather = AGsparse(self._world)
        self.dense = {"out of place": self._out_of_place, "in place": self._in_place, "agsparse": gather.elements}
        self.rows = {"agsparse": gather.rows}

    def barrier(self) -> None:
        self._world.Barrier()

    def _in_place(self, tensor: Array) -> Array:
        self._world.Allreduce(self._mpi.IN_PLACE, tensor)
        return tensor

    def _out_of_place(self, tensor: Array) -> Array:
        if self._result.size != tensor.size:
            self._result = np.ones_like(tensor)
        self._world.Allreduce(tensor, self._result)
        return self._result


class Gloo(Peer):
    """torch.distributed with gloo, dense and with sparse COO tensors."""

    def __init__(self, options: dict[str, Any]) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = options["interface"]
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._torch: Any = torch
        self._dist: Any = dist
        self.rank, self.size = options["rank"], options["size"]
        dist.init_process_group("gloo", init_method=options["store"], rank=self.rank, world_size=self.size)
        self.dense = {"allreduce": self._allreduce}
        self.rows = {"sparse": self._sparse}

    def barrier(self) -> None:
        self._dist.barrier()

    def _allreduce(self, tensor: Array) -> Array:
        self._dist.all_reduce(self._torch.from_numpy(tensor))
        return tensor

    def _sparse(self, numbers: Array, values: Array, n_rows: int) -> tuple[Array, Array]:
        torch = self._torch
        indices, rows = torch.from_numpy(numbers).unsqueeze(0), torch.from_numpy(values)
        shape = (n_rows, values.shape[1])
        tensor = torch.sparse_coo_tensor(indices, rows, shape, is_coalesced=True, check_invariants=False)
        self._dist.all_reduce(tensor)
        total = tensor.coalesce()
        return total.indices()[0].numpy(), total.values().numpy()


FACTORIES: dict[str, Callable[[dict[str, Any]], Peer]] = {"service": Service, "mpi": Mpi, "gloo": Gloo}


class AGsparse:
    """The exchange among the ranks of an mpi4py communicator. A result is valid until the next exchange."""

    def __init__(self, world: Any) -> None:
        self._world, self._size = world, world.Get_size()
        self._buffers: dict[str, Array] = {}

    def elements(self, tensor: Array) -> Array:
        """Sum tensors element by element, in place."""
        mask = np.not_equal(tensor, 0, out=self._buffer("mask", tensor.shape, np.bool_))
        indices = np.flatnonzero(mask)  # many times as fast as of the tensor itself
        positions = self._buffer("places", indices.shape, np.int32)
        positions[:] = indices
        values = np.take(tensor, indices, out=self._buffer("values", indices.shape, tensor.dtype), mode="clip")
        counts = self._counts(indices.size)
        all_positions, parts = self._gather("every place", positions, counts), self._gather("parts", values, counts)
        tensor[indices] = 0
        ends = np.cumsum(counts)
        for end, count in zip(ends, counts, strict=True):  # of each rank: every place at most once
            rank_positions = all_positions[end - count : end]
            sums = np.take(
                tensor, rank_positions, out=self._buffer("sums", rank_positions.shape, tensor.dtype), mode="clip"
            )
            tensor[rank_positions] = np.add(sums, parts[end - count : end], out=sums)
        return tensor

    def rows(self, numbers: Array, values: Array, n_rows: int) -> tuple[Array, Array]:
        """Sum rows; return the union's row numbers and sums."""
        counts = self._counts(numbers.size)
        all_numbers, parts = self._gather("every number", numbers, counts), self._gather("rows", values, counts)
        union, first, positions = np.unique(all_numbers, return_index=True, return_inverse=True)
        shape = (union.size, values.shape[1])
        result = np.take(parts, first, axis=0, out=self._buffer("union", shape, values.dtype), mode="clip")
        # rows that an earlier rank has as well
        repeated = np.flatnonzero(first[positions] != np.arange(all_numbers.size))
        # of each rank: every row at most once
        for rank_rows in np.split(repeated, np.searchsorted(repeated, np.cumsum(counts[:-1]))):
            shape = (rank_rows.size, values.shape[1])
            added = np.take(parts, rank_rows, axis=0, out=self._buffer("more", shape, values.dtype), mode="clip")
            targets = positions[rank_rows]
            sums = np.take(result, targets, axis=0, out=self._buffer("row sums", shape, values.dtype), mode="clip")
            result[targets] = np.add(sums, added, out=sums)
        return union, result

    def _counts(self, count: int) -> Array:
        counts = np.empty(self._size, np.int64)
        self._world.Allgather(np.array([count]), counts)
        return counts

    def _gather(self, name: str, part: Array, counts: Array) -> Array:
        width = part.shape[1] if part.ndim > 1 else 1
        gathered = self._buffer(name, (int(counts.sum()), *part.shape[1:]), part.dtype)
        self._world.Allgatherv(part, (gathered, counts * width))
        return gathered

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Memory that is kept under this name, and grows."""
        size = int(np.prod(shape))
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size or buffer.dtype != dtype:
            buffer = self._buffers[name] = np.ones(size + size // 4, dtype)  # written, so that its pages are there
        return buffer[:size].reshape(shape)
