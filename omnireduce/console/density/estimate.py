"""Would the service help? How dense arrays are in blocks, and what that means for an all-reduce of them.

The estimate for world size N, link bandwidth B in each direction, tensor bytes S, block density D:

    up bytes = D S, down bytes = Du S, time = L + max(D, Du) S / B      with  Du = 1 - (1 - D)**N
    dense ring all-reduce: time = Ld + 2 (N - 1) / N S / B              (Patarasu and Yuan 2009)

Du assumes that the places of the workers' non-zero blocks are independent of each other (random overlap). A greater
overlap makes Du smaller and the service faster. Du is the most that comes down. In a sum over TCP less may come,
because a worker need not be sent the blocks that it alone has, D (1 - D)**(N - 1). Each direction also carries one
header, and each block its index, or each run of blocks two numbers where that is less; these numbers include both. L
and Ld are what a collective costs however small it is, as measured on one host (docs/performance.md): they decide for
small tensors. Left out are computation, the latency of the network, and shards that share a link with workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from omnireduce.dtypes import Array, number_type
from omnireduce.errors import UsageError
from omnireduce.kernels.density import mark_blocks, native_chunks
from omnireduce.wire.blocks import HEADER_BYTES

INDEX_BYTES = 8  # that travel with each block; with each run of blocks instead, where that is less, twice as many
COLLECTIVE_MS, DENSE_COLLECTIVE_MS = 0.3, 0.03  # L and Ld: messages and wake-ups
HELPS = 1.1  # least speed-up that is worth a service of one's own


class Density(msgspec.Struct, frozen=True):
    """How much of one array is not zero: elements, and for each block size blocks, a short last one included.

    Zeros are +0 and -0, decided on the bits: NaN is data.
    """

    elements: int
    itemsize: int
    nonzero_elements: int
    nonzero_blocks: dict[int, int]

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize

    def blocks(self, block_size: int) -> int:
        return -(-self.elements // block_size)

    @property
    def of_elements(self) -> float:
        return self.nonzero_elements / self.elements if self.elements else 0.0

    def of_blocks(self, block_size: int) -> float:
        return self.nonzero_blocks[block_size] / self.blocks(block_size) if self.elements else 0.0


class Estimate(msgspec.Struct, frozen=True):
    """One all-reduce of each array, one after another, as the module's formulas have it; bytes are per worker."""

    block_size: int
    density: float
    union_density: float
    wire_up_bytes: int
    wire_down_bytes: int
    time_ms: float
    dense_time_ms: float
    speedup: float

    @property
    def helps(self) -> bool:
        return self.speedup >= HELPS


def measure(values: Array, block_sizes: Sequence[int]) -> Density:
    """Count the non-zero elements and blocks of `values`, (elements,), in one pass.

    `values` may be of any dtype that the service reduces, in any byte order. `block_sizes`: elements, multiples of 8.
    Raises UsageError for another dtype.
    """
    kind = number_type(values.dtype.newbyteorder("="))
    unit = math.gcd(*block_sizes)
    units = np.zeros(-(-values.size // unit), np.bool_)
    bits = np.dtype(f"u{kind.itemsize}")
    mask = bits.type(int(kind.zero_mask) & int(np.iinfo(bits).max))
    nonzero = 0
    for first, chunk in native_chunks(values, kind, unit):
        nonzero += int(np.count_nonzero(chunk.view(bits) & mask))
        mark_blocks(chunk, kind, unit, units[first:])
    counts = {size: _count_groups(units, size // unit) for size in block_sizes}
    return Density(values.size, kind.itemsize, nonzero, counts)


def estimate(parts: Sequence[Density], block_size: int, *, world_size: int, link_gbps: float) -> Estimate:
    """The all-reduce of all `parts`, one after another, over links of `link_gbps` Gbit/s each way.

    Raises UsageError for fewer than 2 workers or no bandwidth.
    """
    if world_size < 2 or not link_gbps > 0:
        given = f"world size {world_size} and {link_gbps:g} Gbit/s"
        raise UsageError(f"got {given}, expected at least 2 workers and more than 0 Gbit/s")
    sent = received = up = down = 0.0
    for part in parts:
        density = part.of_blocks(block_size)
        union = union_density(density, world_size)
        blocks, block_bytes = part.blocks(block_size), block_size * part.itemsize
        sent, received = sent + density * blocks, received + union * blocks
        up += HEADER_BYTES + density * blocks * (block_bytes + _index_bytes(density))
        down += HEADER_BYTES + union * blocks * (block_bytes + _index_bytes(union))
    bytes_per_ms = link_gbps * 1e6 / 8
    blocks = sum(part.blocks(block_size) for part in parts)
    collectives = sum(part.elements > 0 for part in parts)
    time_ms = max(up, down) / bytes_per_ms + COLLECTIVE_MS * collectives
    dense_ms = 2 * (world_size - 1) / world_size * sum(part.bytes for part in parts) / bytes_per_ms
    dense_ms += DENSE_COLLECTIVE_MS * collectives
    return Estimate(
        block_size=block_size,
        density=sent / blocks if blocks else 0.0,
        union_density=received / blocks if blocks else 0.0,
        wire_up_bytes=round(up),
        wire_down_bytes=round(down),
        time_ms=time_ms,
        dense_time_ms=dense_ms,
        speedup=dense_ms / time_ms if time_ms else 0.0,
    )


def union_density(density: float, world_size: int) -> float:
    """The density of the union of all workers, if each has this density, at independent places."""
    return float(1 - (1 - density) ** world_size)


def _index_bytes(density: float) -> float:
    """What each block carries beside its data: of blocks in random places, one in 1 / (1 - `density`) begins a run."""
    return INDEX_BYTES * min(1.0, 2 * (1 - density))


def _count_groups(flags: Array, size: int) -> int:
    """How many groups of `size` flags have one set."""
    padded = np.concatenate([flags, np.zeros(-flags.size % size, np.bool_)])
    return int(np.count_nonzero(padded.reshape(-1, size).any(axis=1)))
