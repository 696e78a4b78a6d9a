"""Descriptors of collectives. A descriptor describes a user's call. All ranks must make the same calls in the same
order.

Only the call is sent. Both sides derive from it the type and number of elements, and the blocks.
"""

from __future__ import annotations

import math
import zlib
from functools import cached_property, lru_cache
from typing import Any, Literal

import msgspec
import numpy as np

from omnireduce.core.block_program import BlockProgram
from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.core.dtypes import BOOL, BYTES, ELEMENT_TYPES, ElementType, element_type
from omnireduce.core.wire.blocks import EXTRA_BYTES, MAX_BLOCKS, MAX_ELEMENTS
from omnireduce.core.wire.safe_text import SHOWN, UNDECODABLE, shown
from omnireduce.errors import ProtocolError, UsageError

Kind = Literal[
    "allreduce", "allreduce_rows", "reduce_scatter", "reduce",
    "broadcast", "allgather", "gather", "scatter", "alltoall", "barrier",
    "allgather_ragged", "broadcast_object", "allgather_object", "refusal",
]  # fmt: skip
Op = Literal["sum", "mean", "min", "max", "prod", "any", "all"]
"""Operations that combine the elements of all ranks; `any` and `all` are for bool, the others for numbers."""
RowOp = Literal["sum", "mean"]
"""Operations that combine rows. A row that a rank lacks counts as zeros."""
REDUCING = ("allreduce", "allreduce_rows", "reduce_scatter", "reduce")  # the others move bytes
PACKED = ("allgather_ragged", "broadcast_object", "allgather_object")  # parts of any size, in packets
ROOTED = ("reduce", "broadcast", "gather", "scatter", "broadcast_object")
NUMBER_OPS: tuple[Op, ...] = ("sum", "mean", "min", "max", "prod")
BOOL_OPS: tuple[Op, ...] = ("any", "all")
CODED_OPS: tuple[Op, ...] = ("sum", "mean")  # the operations on float32 that codecs work with
NAME_CHARACTERS = 200
DTYPE_CHARACTERS = 60
GROUP_CHARACTERS = 40
REFUSED_BYTES = 600  # the longest reason of a refusal, in UTF-8
CODEC_CHARACTERS = 50
CODED_ELEMENTS = 1 << 14  # the largest block that a codec encodes: a shard decodes the block of all ranks in one step
MAX_SEED = (1 << 63) - 1
MAX_DIMENSIONS = 64
MAX_BLOCK_SIZE = (1 << 31) - 8
MOVED_BLOCK_BYTES = 1 << 15  # the largest block of collectives that move bytes: it fits any slot
PACKET_BYTES = 1024
MAX_PART_PACKETS = 1 << 25  # more than the largest protocol.max_part_bytes takes
REMEMBERED = 1024  # calls and their descriptors: a training loop makes the same calls again and again


def neutral_element(op: Op, dtype: np.dtype[Any]) -> Any:
    """The element of a rank without data: it changes no result, except that a mean counts it as zero."""
    if op in ("min", "max"):
        ends = (np.inf, -np.inf) if dtype.kind not in "iu" else (np.iinfo(dtype).max, np.iinfo(dtype).min)
        return ends[op == "max"]
    return 1 if op in ("prod", "all") else 0


class Descriptor(msgspec.Struct, frozen=True, array_like=True, dict=True, cache_hash=True):
    """One call. Raises UsageError for an impossible call. A descriptor of a peer is checked in the same way.

    `shape`: the shape of the array; (n_rows, width) for `allreduce_rows`; the shape of one item for `allgather_ragged`.
    `block_size`: in elements. `item_bytes`: the size of an element if bytes are moved, else 0. `parts`: the number of
    arrays of this shape that travel. `group`: a text that stands for the whole group if the arrays are part of a group,
    else empty. `packets`: the most packets for the part of one rank; 0 if parts do not travel in packets. `codec`: the
    name of the codec for blocks; empty: none. `seed`: the seed of the codec's random numbers. `program`: the program
    that shards run on sums before all ranks get them. `refused`: the reason of a "refusal", which takes the place of a
    call that this rank has refused; else empty.
    """

    kind: Kind
    name: str
    dtype: str
    shape: tuple[int, ...]
    op: Op = "sum"
    block_size: int = 8
    root: int = 0
    item_bytes: int = 0
    parts: int = 1
    group: str = ""
    packets: int = 0
    codec: str = ""
    seed: int = 0
    program: BlockProgram | None = None
    refused: str = ""

    def __post_init__(self) -> None:
        wrong = self._wrong_words() or self._wrong_shape() or self._wrong_numbers() or self._wrong_codec()
        wrong = wrong or self._wrong_program() or self._wrong_refusal()
        if wrong:
            raise UsageError(wrong)

    def _wrong_words(self) -> str:
        if len(self.name) > NAME_CHARACTERS:
            return f"a name of {len(self.name)} characters; expected at most {NAME_CHARACTERS}"
        if not self.name.isprintable():
            return f"a name with characters that cannot be shown: {self.name[:40]!r}"
        if len(self.group) > GROUP_CHARACTERS or not (self.group.isascii() and self.group.isprintable()):
            return f"the group {self.group[:GROUP_CHARACTERS]!r} cannot be shown"
        if self.reduces and self.dtype not in (*ELEMENT_TYPES, BOOL.name):
            return f"cannot reduce arrays of {self.dtype[:DTYPE_CHARACTERS]!r}"
        if len(self.dtype) > DTYPE_CHARACTERS or not (self.dtype.isascii() and self.dtype.isprintable()):
            return f"the dtype {self.dtype[:DTYPE_CHARACTERS]!r} cannot be shown"
        ops = self._ops
        if self.op not in ops:
            type_text = f" of {self.dtype}" if self.reduces else ""
            return f"{self.kind}{type_text} has no op {self.op}" + (
                f"; expected {' or '.join(ops)}" if len(ops) > 1 else ""
            )
        if self.op == "mean" and not self.element.is_float:
            return f"the mean of {self.dtype} is not an {self.dtype}; convert to a float type first"
        return ""

    def _wrong_shape(self) -> str:
        if len(self.shape) > MAX_DIMENSIONS:
            return f"an array of {len(self.shape)} dimensions; expected at most {MAX_DIMENSIONS}"
        # A dimension of 0 counts as 1 here, so that the other dimensions stay limited, and a text of them stays short.
        if min(self.shape, default=0) < 0 or math.prod(max(size, 1) for size in self.shape) >= MAX_ELEMENTS:
            return f"the shape {self._shape_text}: expected fewer than 2**62 elements"
        if self.kind == "allreduce_rows" and (len(self.shape) != 2 or not 1 <= self.shape[1] <= MAX_BLOCK_SIZE):
            return f"rows of shape {self._shape_text}: expected (n_rows, width), width 1 to {MAX_BLOCK_SIZE}"
        return ""

    def _wrong_numbers(self) -> str:
        if not 8 <= self.block_size <= MAX_BLOCK_SIZE or self.block_size % 8:
            return f"block_size {self.block_size}: expected a multiple of 8 from 8 to {MAX_BLOCK_SIZE}"
        minimum, maximum = (0, 0) if self.reduces else (1, MAX_BLOCK_SIZE)
        if not (minimum <= self.item_bytes <= maximum and 0 <= self.root < 1 << 32 and 1 <= self.parts < 1 << 32):
            return f"elements of {self.item_bytes} bytes, root {self.root}, {self.parts} parts: out of range"
        minimum, maximum = (1, MAX_PART_PACKETS) if self.kind in PACKED else (0, 0)
        if not minimum <= self.packets <= maximum:
            return f"parts of {self.packets} packets: expected {minimum} to {maximum}"
        if self.layout.elements >= MAX_ELEMENTS or self.layout.blocks >= MAX_BLOCKS:
            return f"{self.layout.elements} elements in {self.layout.blocks} blocks: expected fewer than 2**62 in 2**48"
        return ""

    def _wrong_codec(self) -> str:
        if not 0 <= self.seed <= MAX_SEED:
            return f"seed {self.seed}: expected 0 to {MAX_SEED}"
        if not self.codec:
            return "a seed without a codec" if self.seed else ""
        if len(self.codec) > CODEC_CHARACTERS or not (self.codec.isascii() and self.codec.isprintable()):
            return f"the codec {self.codec[:CODEC_CHARACTERS]!r}: expected up to {CODEC_CHARACTERS} ASCII characters"
        if self.kind != "allreduce" or self.dtype != "float32" or self.op not in CODED_OPS:
            return f"no codec works on {self}: expected an allreduce of float32, {' or '.join(CODED_OPS)}"
        if self.block_size > CODED_ELEMENTS:
            return f"block_size {self.block_size}: expected at most {CODED_ELEMENTS} with a codec"
        return ""

    def _wrong_program(self) -> str:
        if self.program is None:
            return ""
        kinds = ("allreduce", "allreduce_rows")
        if self.kind not in kinds or self.dtype != "float32" or self.op not in CODED_OPS or self.codec:
            return f"no block program works on {self}: expected an allreduce of float32, {' or '.join(CODED_OPS)}"
        if self.layout.block_size > self.program.max_elements:
            limit = f"expected at most {self.program.max_elements} with this program"
            return f"blocks of {self.layout.block_size} elements: {limit}"
        if len(self.encoded) > EXTRA_BYTES:
            return f"a name and a program of {len(self.encoded)} bytes; expected at most {EXTRA_BYTES}"
        return ""

    def _wrong_refusal(self) -> str:
        if (self.kind == "refusal") != bool(self.refused) or (self.refused and self.name):
            return f"{self.kind} '{self.name}', refused because of {self.refused[:40]!r}: expected a refusal, unnamed"
        if len(self.refused.encode()) > REFUSED_BYTES or not self.refused.isprintable():
            return f"refused because of {self.refused[:40]!r}: expected up to {REFUSED_BYTES} bytes that can be shown"
        return ""

    @property
    def _ops(self) -> tuple[Op, ...]:
        if not self.reduces:
            return ("sum",)
        if self.kind == "allreduce_rows":  # a missing row counts as zeros: min, max and prod would have to read them
            return () if self.dtype == BOOL.name else ("sum", "mean")
        return BOOL_OPS if self.dtype == BOOL.name else NUMBER_OPS

    @property
    def reduces(self) -> bool:
        """Whether numbers are combined. Otherwise bytes are moved: as a sum to which all ranks except one
        contribute zeros."""
        return self.kind in REDUCING

    @cached_property
    def summed_by_host(self) -> bool:
        """Whether each host sends a single sum, if a job runs on several hosts. In float16 that sum could be infinite
        although the result is not. A refusal is each rank's own."""
        return not self.element.has_short_range and not self.refused

    @property
    def has_rows(self) -> bool:
        """Whether ranks bring numbered rows, or packets, and not a whole tensor."""
        return self.kind == "allreduce_rows" or self.kind in PACKED

    @cached_property
    def element(self) -> ElementType:
        """The type of the elements that travel."""
        return element_type(self.dtype if self.reduces else BYTES)

    @cached_property
    def layout(self) -> Layout:
        """The elements that travel, and their blocks."""
        elements = math.prod(self.shape)
        if self.kind == "allreduce_rows":
            return Layout(elements, self.shape[1])
        if self.reduces:
            return Layout(elements, self.block_size)
        if self.kind in PACKED:
            return Layout(self.parts * self.packets * PACKET_BYTES, PACKET_BYTES)
        block_bytes = min(self.block_size * self.item_bytes, MOVED_BLOCK_BYTES) // 8 * 8
        return Layout(elements * self.item_bytes * self.parts, block_bytes)

    @cached_property
    def block_bytes(self) -> int:
        """The size of a block that travels."""
        return self.layout.block_size * self.element.itemsize

    @cached_property
    def encoded(self) -> bytes:
        """The bytes that travel, at most EXTRA_BYTES."""
        packed = msgspec.msgpack.encode(self)
        assert len(packed) <= EXTRA_BYTES or self.program is not None, f"a descriptor of {len(packed)} bytes"
        return packed

    @property
    def _shape_text(self) -> str:
        return str(tuple(self.shape))[:SHOWN]

    @cached_property
    def _text(self) -> str:
        if self.refused:
            return f"a call that was refused: {self.refused}"
        text = self.kind + (f" '{self.name}'" if self.name else "")
        text += f" of a group, {self.group}:" if self.group else ""
        if self.kind == "barrier":
            return text
        if self.kind == "allreduce_rows":
            return f"{text} of {self.dtype}, n_rows {self.shape[0]}, width {self.shape[1]}, {self.op}"
        if self.kind == "allgather_ragged":
            text += f" of {self.dtype}, each of its items {self._shape_text}"
        elif self.kind in PACKED:
            text += f" of {self.dtype}"
        else:
            text += f" of {self.dtype} {self._shape_text}"
        text += f", {self.op}" if self.reduces else ""
        text += f", codec {self.codec}" if self.codec else ""
        text += f", through a program of {len(self.program)} instructions" if self.program is not None else ""
        return f"{text}, root {self.root}" if self.kind in ROOTED else text

    def __str__(self) -> str:
        return self._text


describe = lru_cache(REMEMBERED)(Descriptor)  # makes a descriptor, or returns the descriptor of an earlier equal call

_decoder = msgspec.msgpack.Decoder(Descriptor)


@lru_cache(REMEMBERED)
def decode_descriptor(data: bytes) -> Descriptor:
    """Decode and check a peer's descriptor. Raises ProtocolError."""
    try:
        return _decoder.decode(data)
    except UNDECODABLE as error:
        raise ProtocolError(f"malformed descriptor: {shown(str(error)[:SHOWN])}") from None


def distinguish(first: Descriptor, second: Descriptor) -> tuple[str, str]:
    """Both descriptors in words. If the words are equal, a difference that they do not show is added."""
    if str(first) != str(second) or first == second:
        return str(first), str(second)
    texts = list(zip(_unshown(first), _unshown(second), strict=True))
    first_fact, second_fact = next(
        ((first_fact, second_fact) for first_fact, second_fact in texts if first_fact != second_fact), texts[0]
    )
    return f"{first}, {first_fact}", f"{second}, {second_fact}"


def _unshown(descriptor: Descriptor) -> list[str]:
    """Facts that the text of a descriptor may not show. Of a long shape it shows only the beginning."""
    return [
        f"block_size {descriptor.block_size}",
        f"protocol.max_part_bytes in KiB, rounded up, {descriptor.packets}",
        f"{len(descriptor.shape)} dimensions",
        *(
            f"dimension {index} is {size}"
            for index, size in enumerate((*descriptor.shape, *[0] * MAX_DIMENSIONS)[:MAX_DIMENSIONS])
        ),
        f"elements of {descriptor.item_bytes} bytes",
        f"{descriptor.parts} parts",
        f"root {descriptor.root}",
        f"seed {descriptor.seed}",
        f"scalars {[] if descriptor.program is None else descriptor.program.numbers}"[:SHOWN],
        f"{descriptor.program}"[:SHOWN],
    ]


def dtype_text(dtype: np.dtype[Any]) -> str:
    """The text of a dtype for a descriptor, which has little room: a structure with many fields becomes a checksum."""
    text = str(dtype)
    if len(text) <= DTYPE_CHARACTERS and text.isascii():
        return text
    return f"a structure of {dtype.itemsize} bytes, checksum {zlib.crc32(text.encode()):08x}"
