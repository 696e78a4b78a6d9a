"""Would the service help? How dense arrays are in blocks, and what that means for an all-reduce of them.

The cost model is `omnireduce.console.plan.model`, of which nothing but the links counts here. For world size N, link
bandwidth B in each direction, tensor bytes S and block density D it says

    up bytes = D S, down bytes = Du S, time = L + max(D, Du) S / B      with  Du = 1 - (1 - D)**N
    dense ring all-reduce: time = Ld + 2 (N - 1) / N S / B

Du assumes that the places of the workers' non-zero blocks are independent of each other (random overlap). A greater
overlap makes Du smaller and the service faster. Du is the most that comes down. In a sum over TCP less may come,
because a worker need not be sent the blocks that it alone has, D (1 - D)**(N - 1). Each direction also carries one
header, and each block its index. L and Ld are what a collective costs however small it is (docs/performance.md): they
decide for small tensors. Processors, the latency of the network, and shards that share a link with workers do not
count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from omnireduce.compression.compressed_sums import ELEMENTS_AS, Compression, costs
from omnireduce.compression.methods import ALL, method_of
from omnireduce.compression.selectors import Everything
from omnireduce.console.plan.model import COLLECTIVE_MS, RING_MS, index_bytes, link_time_s, ring_time_s, union_density
from omnireduce.core.dtypes import Array, number_type
from omnireduce.core.wire.blocks import HEADER_BYTES, INDEX_BYTES
from omnireduce.errors import UsageError
from omnireduce.kernels.codecs.draws import block_keys
from omnireduce.kernels.codecs.table import NONE, codec_named
from omnireduce.kernels.nonzero_blocks import mark_blocks, native_chunks
from omnireduce.kernels.select import copy_blocks
from omnireduce.protocol.collective.codecs import BlockCoder

BLOCK = 256  # elements of what is encoded
FLOAT_BYTES = 4
IN_ONE_BYTE, IN_TWO = 127, 16383  # the longest steps of so many bytes


class MethodEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """One all-reduce of an array by `method`; bytes are per worker. `exact`: whatever the array is, nothing is lost.
    `lost`: the distance between the array and what is sent of it in one step, as a share of the array's norm. A memory
    would send that later."""

    method: str
    exact: bool
    wire_up_bytes: int
    wire_down_bytes: int
    time_ms: float
    speedup: float
    lost: float


def advise(
    values: Array, shape: tuple[int, ...], part: Density, *, world_size: int, link_gbps: float
) -> list[MethodEstimate]:
    """Estimates for each method that fits `values`, (elements,), of this `shape` and density: the exact ones first.

    Raises UsageError as `estimate` does.
    """
    dense = estimate([part], BLOCK, world_size=world_size, link_gbps=link_gbps)
    bytes_per_s = link_gbps * 1e9 / 8

    def method_estimate(
        method: str, up: float, down: float, lost: float | None = None, collectives: int = 1
    ) -> MethodEstimate:
        up, down = up + HEADER_BYTES, down + HEADER_BYTES
        time_ms = 1e3 * link_time_s(up, down, bytes_per_s) + COLLECTIVE_MS * collectives
        speedup = dense.dense_time_ms / time_ms
        return MethodEstimate(
            method=method,
            exact=lost is None,
            wire_up_bytes=round(up),
            wire_down_bytes=round(down),
            time_ms=time_ms,
            speedup=speedup,
            lost=lost or 0.0,
        )

    sizes = [estimate([part], size, world_size=world_size, link_gbps=link_gbps) for size in part.nonzero_blocks]
    best_size = max(sizes, key=lambda candidate: (round(candidate.speedup, 2), candidate.block_size))
    methods = [method_estimate(f"blocks of {best_size.block_size}", best_size.wire_up_bytes, best_size.wire_down_bytes)]
    if len(shape) == 2 and shape[1] > 0:
        methods.append(method_estimate("rows", *_row_bytes(values, shape, part.itemsize, world_size)))
    if number_type(values.dtype.newbyteorder("=")).is_float and part.elements:
        methods += [
            method_estimate(*lossy)
            for lossy in _lossy_methods(np.ascontiguousarray(values, np.float32), part, world_size)
        ]
    return methods


def _row_bytes(values: Array, shape: tuple[int, ...], itemsize: int, world_size: int) -> tuple[float, float]:
    """Bytes up and down of rows that are not zero, each with its number."""
    nonzero_rows = int(np.count_nonzero(values.reshape(shape).any(axis=1)))
    row_bytes = shape[1] * itemsize + INDEX_BYTES
    return nonzero_rows * row_bytes, union_density(nonzero_rows / max(1, shape[0]), world_size) * shape[0] * row_bytes


def _lossy_methods(x: Array, part: Density, world_size: int) -> Iterator[tuple[str, float, float, float, int]]:
    """For each codec and selector: its name, bytes up and down, what is lost, and how many collectives it takes."""
    norm = float(np.linalg.norm(x))
    for text in ALL:
        method = method_of(text)
        if text == NONE or not isinstance(method, Compression):
            continue
        sent, positions = _selected_part(method, x)
        lost = float(np.linalg.norm(x - sent)) / norm if norm else 0.0
        if method.selector.unit == "elements" and not isinstance(method.selector, Everything):
            value_bytes = 2 if method.codec in ELEMENTS_AS else FLOAT_BYTES
            yield (
                text,
                *_element_bytes(positions, x.size, value_bytes, world_size, method.selector.is_common),
                lost,
                2,
            )
        else:
            block_bytes = FLOAT_BYTES * BLOCK if method.codec is None else codec_named(method.codec).block_bytes(BLOCK)
            blocks = -(-x.size // BLOCK)
            block_density = (
                part.block_density(BLOCK) if isinstance(method.selector, Everything) else positions.size / blocks
            )
            up, down = (
                density * blocks * (block_bytes + INDEX_BYTES)
                for density in _up_and_down_density(block_density, world_size)
            )
            yield text, up, down, lost, 1


def _selected_part(method: Compression, x: Array) -> tuple[Array, Array]:
    """The array that is sent for `x` in one step, and the selected places."""
    positions, sent = method.selector.select(x), x
    if not isinstance(method.selector, Everything):
        sent = np.zeros_like(x)
        if method.selector.unit == "elements":
            sent[positions] = x[positions]
        else:
            copy_blocks(x, method.selector.block_size, positions, sent)
    if method.codec in ELEMENTS_AS:
        sent = sent.astype(ELEMENTS_AS[method.codec]).astype(np.float32)
    elif method.codec is not None:
        coder = BlockCoder(method.codec, codec_named(method.codec), BLOCK)
        sent = coder.round_trip(sent, block_keys(0, np.arange(-(-x.size // BLOCK))))
    return sent, positions


def _element_bytes(
    positions: Array, elements: int, value_bytes: int, world_size: int, is_common: bool
) -> tuple[float, float]:
    """Bytes up and down of single elements: with steps between them, or in blocks where these cost less."""
    if is_common:
        return positions.size * value_bytes, positions.size * value_bytes
    by_number, by_block = costs(positions, BLOCK, value_bytes).tolist()
    if by_number < by_block:
        up, down = (
            density * elements * (value_bytes + _step_bytes(density))
            for density in _up_and_down_density(positions.size / elements, world_size)
        )
    else:
        blocks, block_bytes = -(-elements // BLOCK), value_bytes * BLOCK
        block_density = by_block / block_bytes / blocks
        up, down = (
            density * blocks * (block_bytes + INDEX_BYTES)
            for density in _up_and_down_density(block_density, world_size)
        )
    return up, down


def _step_bytes(density: float) -> float:
    """The mean bytes of a step, if each element is there with this probability."""
    return 1 + (1 - density) ** IN_ONE_BYTE + (1 - density) ** IN_TWO


def _up_and_down_density(density: float, world_size: int) -> tuple[float, float]:
    return density, union_density(density, world_size)


HELPS = 1.1  # least speed-up that is worth a service of one's own


class Density(msgspec.Struct, frozen=True):
    """Counts of what is not zero in one array: elements, and for each block size blocks, a short last one included.

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
    def element_density(self) -> float:
        return self.nonzero_elements / self.elements if self.elements else 0.0

    def block_density(self, block_size: int) -> float:
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
        got = f"world size {world_size} and {link_gbps:g} Gbit/s"
        raise UsageError(f"got {got}, expected at least 2 workers and more than 0 Gbit/s")
    sent = received = up = down = 0.0
    for part in parts:
        density = part.block_density(block_size)
        union = union_density(density, world_size)
        blocks, block_bytes = part.blocks(block_size), block_size * part.itemsize
        sent, received = sent + density * blocks, received + union * blocks
        up += HEADER_BYTES + density * blocks * (block_bytes + index_bytes(density))
        down += HEADER_BYTES + union * blocks * (block_bytes + index_bytes(union))
    bytes_per_s = link_gbps * 1e9 / 8
    blocks = sum(part.blocks(block_size) for part in parts)
    collectives = sum(part.elements > 0 for part in parts)
    time_ms = 1e3 * link_time_s(up, down, bytes_per_s) + COLLECTIVE_MS * collectives
    dense_ms = 1e3 * ring_time_s(sum(part.bytes for part in parts), world_size, bytes_per_s) + RING_MS * collectives
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


def _count_groups(flags: Array, size: int) -> int:
    """The number of groups of `size` flags that have at least one set."""
    padded = np.concatenate([flags, np.zeros(-flags.size % size, np.bool_)])
    return int(np.count_nonzero(padded.reshape(-1, size).any(axis=1)))
