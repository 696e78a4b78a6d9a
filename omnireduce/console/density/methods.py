"""Estimates for each method of compression: the bytes that it sends for an array, and the loss of one step.

Bytes, unions and times are computed as in `estimate`: for blocks, rows, encoded blocks, or single elements with steps
between them. The array is really selected from and encoded. As there, the places of the workers are assumed to be
independent, except where all workers draw the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from omnireduce.compression.compressed import ELEMENTS_AS, Compression, costs
from omnireduce.compression.methods import ALL, method_of
from omnireduce.compression.selectors import Everything
from omnireduce.console.density.estimate import COLLECTIVE_MS, INDEX_BYTES, Density, estimate, union_density
from omnireduce.dtypes import Array, number_type
from omnireduce.kernels.codecs.draws import block_keys
from omnireduce.kernels.codecs.table import NONE, codec_named
from omnireduce.kernels.select import copy_blocks
from omnireduce.protocol.collective.codecs import Coder
from omnireduce.wire.blocks import HEADER_BYTES

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
    bytes_per_ms = link_gbps * 1e6 / 8

    def estimated(
        method: str, up: float, down: float, lost: float | None = None, collectives: int = 1
    ) -> MethodEstimate:
        up, down = up + HEADER_BYTES, down + HEADER_BYTES
        time_ms = max(up, down) / bytes_per_ms + COLLECTIVE_MS * collectives
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
    best = max(sizes, key=lambda candidate: (round(candidate.speedup, 2), candidate.block_size))
    methods = [estimated(f"blocks of {best.block_size}", best.wire_up_bytes, best.wire_down_bytes)]
    if len(shape) == 2 and shape[1] > 0:
        methods.append(estimated("rows", *_rows(values, shape, part.itemsize, world_size)))
    if number_type(values.dtype.newbyteorder("=")).is_float and part.elements:
        methods += [estimated(*lossy) for lossy in _lossy(np.ascontiguousarray(values, np.float32), part, world_size)]
    return methods


def _rows(values: Array, shape: tuple[int, ...], itemsize: int, world_size: int) -> tuple[float, float]:
    """Bytes up and down of rows that are not zero, each with its number."""
    own = int(np.count_nonzero(values.reshape(shape).any(axis=1)))
    row_bytes = shape[1] * itemsize + INDEX_BYTES
    return own * row_bytes, union_density(own / max(1, shape[0]), world_size) * shape[0] * row_bytes


def _lossy(x: Array, part: Density, world_size: int) -> Iterator[tuple[str, float, float, float, int]]:
    """For each codec and selector: its name, bytes up and down, what is lost, and how many collectives it takes."""
    norm = float(np.linalg.norm(x))
    for text in ALL:
        method = method_of(text)
        if text == NONE or not isinstance(method, Compression):
            continue
        sent, places = _sent(method, x)
        lost = float(np.linalg.norm(x - sent)) / norm if norm else 0.0
        if method.selector.unit == "elements" and not isinstance(method.selector, Everything):
            value_bytes = 2 if method.codec in ELEMENTS_AS else FLOAT_BYTES
            yield (text, *_elements(places, x.size, value_bytes, world_size, method.selector.is_common), lost, 2)
        else:
            block_bytes = FLOAT_BYTES * BLOCK if method.codec is None else codec_named(method.codec).block_bytes(BLOCK)
            blocks = -(-x.size // BLOCK)
            own = part.of_blocks(BLOCK) if isinstance(method.selector, Everything) else places.size / blocks
            up, down = (density * blocks * (block_bytes + INDEX_BYTES) for density in _own_and_all(own, world_size))
            yield text, up, down, lost, 1


def _sent(method: Compression, x: Array) -> tuple[Array, Array]:
    """The array that is sent for `x` in one step, and the selected places."""
    places, sent = method.selector.select(x), x
    if not isinstance(method.selector, Everything):
        sent = np.zeros_like(x)
        if method.selector.unit == "elements":
            sent[places] = x[places]
        else:
            copy_blocks(x, method.selector.block_size, places, sent)
    if method.codec in ELEMENTS_AS:
        sent = sent.astype(ELEMENTS_AS[method.codec]).astype(np.float32)
    elif method.codec is not None:
        coder = Coder(method.codec, codec_named(method.codec), BLOCK)
        sent = coder.there_and_back(sent, block_keys(0, np.arange(-(-x.size // BLOCK))))
    return sent, places


def _elements(places: Array, elements: int, value_bytes: int, world_size: int, is_common: bool) -> tuple[float, float]:
    """Bytes up and down of single elements: with steps between them, or in blocks where these cost less."""
    if is_common:
        return places.size * value_bytes, places.size * value_bytes
    by_number, by_block = costs(places, BLOCK, value_bytes).tolist()
    if by_number < by_block:
        up, down = (
            density * elements * (value_bytes + _step_bytes(density))
            for density in _own_and_all(places.size / elements, world_size)
        )
    else:
        blocks, block_bytes = -(-elements // BLOCK), value_bytes * BLOCK
        in_blocks = by_block / block_bytes / blocks
        up, down = (density * blocks * (block_bytes + INDEX_BYTES) for density in _own_and_all(in_blocks, world_size))
    return up, down


def _step_bytes(density: float) -> float:
    """The mean bytes of a step, if each element is there with this probability."""
    return 1 + (1 - density) ** IN_ONE_BYTE + (1 - density) ** IN_TWO


def _own_and_all(density: float, world_size: int) -> tuple[float, float]:
    return density, union_density(density, world_size)
