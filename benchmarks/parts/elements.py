"""The cost of a sum of single elements of a gradient: on the service, and by an all-gather of the same selection.

Four ranks on hosts with shaped links have each selected a part of the elements, by their magnitudes. The service sums
them by their numbers. The all-gather is gloo's, of values (float32) and numbers (int64, as torch.topk gives them, or
int32); each rank then adds what all have sent. Both begin with a selection and end with a dense sum on each rank.

The links are slow, because users select elements for slow links. From 100 Mbit/s on, two processors are the bound of
eight hosts. Messages are short, so that results come back while the rest goes up.

Gradients of ranks have a common part, because the ranks train one model. Here each gradient is the sum of a common part
and a part of its own, of equal variance. `apart` has no common part.

`python -m benchmarks.parts.elements SOCKET OPTIONS` is one rank of it.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contest.shaped import INTERFACE, group_between
from benchmarks.harness.carriers import count_socket_bytes
from benchmarks.harness.orders import connect, serve_turns
from benchmarks.harness.verdicts import at_least, show_verdicts
from omnireduce.compression import Compression, Selector, TopK
from omnireduce.core.dtypes import Array

RANKS, ELEMENTS, RATIOS = 4, 1 << 22, (0.01, 0.1)
RATE, MESSAGE_BYTES = "50mbit", 1 << 17
TOGETHER, APART = "a common part", "apart"
SERVICE, BF16, GATHERED, GATHERED_32 = "service", "service, bf16", "all-gather", "all-gather, int32"
VARIANTS = (SERVICE, BF16, GATHERED, GATHERED_32)
MIN_SPEEDUP = 2.0  # times as fast as an all-gather
LARGEST = 1000  # of the values, which are whole numbers: their sums are exact


class FixedSelection(Selector):
    """A selection that was made before, so that only the exchange is timed."""

    def __init__(self, positions: Array) -> None:
        self._positions = positions

    def choose(self, x: Array, name: str, step: int) -> Array:
        return self._positions


class Rank:
    """One rank, of the service and of gloo."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        settings = [setting for setting in options["set"] if not setting.startswith("store=")]
        [store] = [setting.removeprefix("store=") for setting in options["set"] if setting.startswith("store=")]
        self._comm = connect(options | {"set": settings})
        dist.init_process_group("gloo", init_method=store, rank=options["rank"], world_size=options["size"])
        self._compressions: dict[tuple[str, float, str], Compression] = {}
        self._gradients = {
            (kind, ratio): self._draw_selections(kind, ratio) for kind in (TOGETHER, APART) for ratio in RATIOS
        }

    def _draw_selections(self, kind: str, ratio: float) -> list[tuple[Array, Array]]:
        """The places and values that each rank has selected."""
        common = np.random.default_rng(7).standard_normal(ELEMENTS, np.float32) if kind == TOGETHER else 0
        selected = []
        for rank in range(self._comm.size):
            x = common + np.random.default_rng([7, rank]).standard_normal(ELEMENTS, np.float32)
            positions = TopK(ratio).select(x.astype(np.float32))
            selected.append((positions, np.clip(np.rint(x[positions] * 8), -LARGEST, LARGEST).astype(np.float32)))
        return selected

    def turn(self, kind: str, ratio: float, variant: str) -> dict[str, Any]:
        """Milliseconds of one exchange, and how many elements of its result are wrong."""
        selected = self._gradients[kind, ratio]
        positions, values = selected[self._comm.rank]
        gradient = np.zeros(ELEMENTS, np.float32)
        gradient[positions] = values
        self._comm.barrier()
        with count_socket_bytes() as carried:
            begin = time.perf_counter()
            if variant in (SERVICE, BF16):
                codec, key = "bf16" if variant == BF16 else "none", (kind, ratio, variant)
                compression = self._compressions.setdefault(key, Compression(FixedSelection(positions), codec=codec))
                summed = compression.allreduce(self._comm, gradient, name=f"{kind} {ratio} {codec}", op="sum")
            else:
                summed = self._sum_by_all_gather(
                    positions, values, np.dtype(np.int32 if variant == GATHERED_32 else np.int64)
                )
            ms = (time.perf_counter() - begin) * 1e3
        expected = np.zeros(ELEMENTS, np.float32)
        for rank_positions, rank_values in selected:
            expected[rank_positions] += rank_values
        wrong = int(np.count_nonzero(summed != expected)) if variant != BF16 else 0  # bf16 rounds
        union = int(np.count_nonzero(expected))
        return {"ms": ms, "wrong": wrong, "union": union} | ({} if variant in (SERVICE, BF16) else {"carried": carried})

    def _sum_by_all_gather(self, positions: Array, values: Array, index_type: np.dtype[Any]) -> Array:
        import torch
        import torch.distributed as dist

        tensors = torch.from_numpy(positions.astype(index_type)), torch.from_numpy(values)
        gathered = [[torch.empty_like(tensor) for _ in range(self._comm.size)] for tensor in tensors]
        for tensor, buffers in zip(tensors, gathered, strict=True):
            dist.all_gather(buffers, tensor)
        total = torch.zeros(ELEMENTS)
        for rank_positions, rank_values in zip(*gathered, strict=True):
            total.index_add_(0, rank_positions, rank_values)
        summed: Array = total.numpy()
        return summed


def measure(console: Console, turns: int, rate: str) -> bool:
    """Let the variants take turns; return whether the aim is met. Raises PeerError where one fails or gives a wrong
    sum, TestbedError where there can be no hosts with shaped links, ImportError without torch."""
    import torch.distributed  # noqa: F401  the ranks have the same environment

    cases = [(kind, ratio) for ratio in RATIOS for kind in (TOGETHER, APART)]
    orders = {
        (*case, variant): {"kind": case[0], "ratio": case[1], "variant": variant}
        for case in cases
        for variant in VARIANTS
    }
    with tempfile.TemporaryDirectory(prefix="omnireduce-bench-") as folder:
        sets = f"protocol.tcp_message_bytes={MESSAGE_BYTES}", f"store=file://{folder}/gloo-store"
        with group_between(rate, RANKS, *sets, program=("benchmarks.parts.elements",)) as group:
            rows = group.in_turns(turns, orders)
    ms = {key: float(np.median([row["ms"] for row in variant_rows])) for key, variant_rows in rows.items()}
    for kind, ratio in cases:
        union = rows[kind, ratio, SERVICE][0]["union"] / ELEMENTS
        table = Table(box=None)
        case_text = f"{RANKS} ranks, {rate}, {ELEMENTS} elements, {ratio:.0%} each"
        table.add_column(f"{case_text}; {kind}: {union:.2%} of any")
        for title in ("ms", "service is faster", "carried by"):
            table.add_column(title, justify="right")
        for variant in VARIANTS:
            variant_ms, service_ms = ms[kind, ratio, variant], ms[kind, ratio, SERVICE]
            table.add_row(variant, f"{variant_ms:.1f}", f"{variant_ms / service_ms:.2f}", group.carrier_of(variant))
        console.print(table, "")
    service_ms, gathered_ms = (ms[TOGETHER, RATIOS[0], variant] for variant in (SERVICE, GATHERED))
    verdict = at_least(f"elements, {RATIOS[0]:.0%}, {TOGETHER}", service_ms, GATHERED, gathered_ms, MIN_SPEEDUP)
    show_verdicts(console, [verdict])
    return bool(verdict.met)


if __name__ == "__main__":
    serve_turns(Rank)
