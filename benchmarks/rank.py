"""One rank of a competitor.

    python -m benchmarks.rank PEER SOCKET OPTIONS

The controller says `case` (which data) or `round` (fill, barrier, exchange, check). The answer to a round is what it
took on this rank: seconds of each exchange, processor seconds and bytes of one, wrong elements. Of what does not count
its bytes, such as MPI, it also says what the sockets have received.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from benchmarks.contest.peers import FACTORIES, Peer
from benchmarks.harness.carriers import count_socket_bytes
from benchmarks.harness.orders import Order, serve
from benchmarks.peak_memory import forget_peak, memory_mib
from omnireduce.console.bench.data import Dataset
from omnireduce.core.dtypes import Array


class Rank:
    """The data of the present case, and the peer that exchanges it."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def case(
        self, elements: int, density: float, overlap: str, distribution: str, block_size: int, seed: int
    ) -> dict[str, Any]:
        """Make the data of a case."""
        size = self._peer.size
        self._data = Dataset(
            elements, dtype="float32", block_size=block_size, density=density, overlap=overlap, op="sum",
            world_size=size, seed=seed, distribution=distribution,
        )  # fmt: skip
        self._tensor = np.ones(elements, np.float32)
        self._row = block_size
        data = self._data
        return {
            "density": data.density,
            "union_density": data.union_density,
            "others_density": data.others_density,
        }

    def round(self, kind: str, method: str, number: int, check: bool, repeats: int = 1) -> dict[str, Any]:
        """Exchange the tensor of round `number`, `repeats` times; `seconds` has one entry for each."""
        peer = self._peer
        self._data.fill(peer.rank, number, self._tensor)
        original = self._tensor.copy() if repeats > 1 else self._tensor
        run = self._rows(method) if kind == "rows" else lambda: peer.dense[method](self._tensor)
        forget_peak()
        before_mib = memory_mib("VmRSS")
        peer.barrier()
        before, processor_s, seconds = peer.wire_bytes(), 0.0, list[float]()
        with count_socket_bytes() as carried:
            for _ in range(repeats):
                if repeats > 1:
                    self._tensor[:] = original
                processor, start = time.process_time(), time.perf_counter()
                result = run()
                seconds.append(time.perf_counter() - start)
                processor_s += time.process_time() - processor
        wire_bytes, peak_mib = peer.wire_bytes() - before, memory_mib("VmHWM")
        carried_entry = {} if method in peer.counted else {"carried": carried}
        return carried_entry | {
            "seconds": seconds,
            "cpu": processor_s / repeats,
            "wire_bytes": (wire_bytes // repeats).tolist(),
            "peak_mib": peak_mib - before_mib,
            "wrong": self._data.wrong(number, self._as_dense(result)) if check else 0,
        }

    def _rows(self, method: str) -> Any:
        rows = self._tensor.reshape(-1, self._row)
        numbers = np.flatnonzero(rows.any(axis=1))
        values, run = rows[numbers], self._peer.rows[method]
        return lambda: run(numbers, values, len(rows))

    def _as_dense(self, result: Array | tuple[Array, Array]) -> Array:
        """A result of rows as a dense tensor."""
        if not isinstance(result, tuple):
            return result
        self._tensor[:] = 0
        self._tensor.reshape(-1, self._row)[result[0]] = result[1]
        return self._tensor


def main() -> None:
    name, path, options = sys.argv[1:]

    def start() -> tuple[int, dict[str, Order]]:
        peer = FACTORIES[name](json.loads(options))
        rank = Rank(peer)
        return peer.rank, {"case": rank.case, "round": rank.round}

    serve(path, start)


if __name__ == "__main__":
    main()
