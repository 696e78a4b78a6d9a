"""Sums of gradients with compression: a selector selects a part, a codec encodes it, a memory keeps the rest."""

from __future__ import annotations

import zlib

import numpy as np

from omnireduce.compression.gradient_checks import Sum, check_gradient, check_name, name_for_all
from omnireduce.compression.memories import Memory, NoMemory, overflowing
from omnireduce.compression.selectors import Everything, Selector
from omnireduce.core.descriptor import CODED_ELEMENTS
from omnireduce.core.dtypes import ELEMENT_TYPES, Array
from omnireduce.errors import UsageError
from omnireduce.kernels.codecs.draws import block_keys, stream_key
from omnireduce.kernels.codecs.table import NONE, codec_named
from omnireduce.kernels.select import copy_blocks
from omnireduce.protocol.collective.codecs import BlockCoder
from omnireduce.runtime.rank.calls.single import check_codec
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.reported_errors import report_errors_to

STEP_BYTES = 2  # about the bytes for the number of a single element
# The work for a single element, as the bytes of blocks that take as long: over 1 Gbit/s, and in shared memory
WORK_BYTES, WORK_BYTES_IN_MEMORY = 32, 512
DECIDE_EVERY = 16  # steps: the selected part changes slowly, and a decision takes a round trip
ELEMENTS_AS = {"bf16": ELEMENT_TYPES["bfloat16"].dtype, "fp16": ELEMENT_TYPES["float16"].dtype}


class Compression:
    """Sums gradients, but sends only a part of them.

    `selector` selects the part, `memory` keeps the rest, `codec` encodes the part (None: as `protocol.codec` says).
    Single elements travel as float32, or as bf16 or fp16. All ranks make the same compression, and use it for the same
    steps. `common`: a text of further settings that must be the same on all ranks. It becomes part of the names of the
    collectives, so that ranks that differ get an error. The rests differ between ranks: see `Memory.state_dict`. Raises
    UsageError for invalid arguments, or arguments that do not go together.
    """

    def __init__(
        self,
        selector: Selector | None = None,
        memory: Memory | None = None,
        codec: str | None = None,
        *,
        common: str = "",
    ) -> None:
        self.selector = Everything() if selector is None else selector
        self.memory = NoMemory() if memory is None else memory
        if not isinstance(self.selector, Selector) or not isinstance(self.memory, Memory):
            raise UsageError(f"selector {selector!r}, memory {memory!r}: expected a Selector and a Memory, or None")
        self.codec = None if codec is None else check_codec(codec)
        if self.codec not in (None, NONE):
            self._check_together(str(codec))
        self._common = common
        self._steps: dict[str, int] = {}
        self._costs: dict[str, Array] = {}  # by gradient, the result of `costs` on the rank with the most
        self._formation: object = None  # the formation of the job in which these steps were made

    def _check_together(self, codec: str) -> None:
        if self.selector.unit == "elements" and not self._sends_all and codec not in ELEMENTS_AS:
            raise UsageError(
                f"codec '{codec}' with {type(self.selector).__name__}: single elements travel as float32, bf16 or "
                "fp16. Other codecs go with a selector of blocks, or without a selector"
            )
        if self.selector.block_size > CODED_ELEMENTS:
            raise UsageError(f"block_size {self.selector.block_size}: expected at most {CODED_ELEMENTS} with a codec")

    @property
    def _sends_all(self) -> bool:
        return isinstance(self.selector, Everything)

    def allreduce(self, comm: Communicator, gradient: Array, *, name: str, op: Sum = "mean") -> Array:
        """Replace `gradient`, float32 of any shape, by the sum or mean of the parts that all ranks send; return it.

        `name` tells gradients apart, and is the same on all ranks. If this raises, the memory is as before, and the
        step can be made again. Raises the errors of `Communicator.allreduce`, CodecError, and UsageError for another
        dtype.
        """
        if self._formation is not comm.formation:  # a rank may be new, and all must draw random numbers by one step
            self._steps, self._costs, self._formation = {}, {}, comm.formation
        with report_errors_to(comm):
            flat = check_gradient(gradient)
            step = self._steps.get(check_name(name), 0)
            x = self.memory.compensate(flat, name)
            indices = None if self._sends_all else self.selector.select(x, name, step)
        if indices is None:
            self._send_blocks(comm, x, flat, comm.config.protocol.block_size, op=op, name=name, step=step)
        elif self.selector.unit == "elements":
            self._send_elements(comm, x, indices, flat, op=op, name=name, step=step)
        else:
            selected = np.zeros_like(x)
            copy_blocks(x, self.selector.block_size, indices, selected)
            self._send_blocks(comm, selected, flat, self.selector.block_size, op=op, name=name, step=step)
        self._steps[name] = step + 1
        return gradient

    def _collective_name(self, name: str) -> str:
        return name_for_all(name, self._common) if self._common else name

    def _codec_for(self, comm: Communicator, block_size: int) -> str:
        """The codec for blocks of this size."""
        codec = comm.config.protocol.codec if self.codec is None else self.codec
        return codec if block_size <= CODED_ELEMENTS else NONE

    def _send_blocks(
        self, comm: Communicator, x: Array, out: Array, block_size: int, *, op: Sum, name: str, step: int
    ) -> None:
        """Send `x` as blocks. They are encoded here, so that the memory knows the sent values. They stay the same when
        they are encoded again."""
        protocol, codec = comm.config.protocol, self._codec_for(comm, block_size)
        sent = x
        if codec != NONE and not isinstance(self.memory, NoMemory):
            key = stream_key(protocol.codec_seed, zlib.crc32(name.encode()) + (step << 32), comm.rank)
            with report_errors_to(comm):
                coder = BlockCoder(codec, codec_named(codec), block_size)
                sent = coder.round_trip(x, block_keys(key, np.arange(-(-x.size // block_size))))
        if sent is out:
            comm.allreduce(sent, op=op, name=self._collective_name(name), block_size=block_size, codec=codec)
        else:
            comm.allreduce(sent, out=out, op=op, name=self._collective_name(name), block_size=block_size, codec=codec)
            self.memory.keep_rest(name, sent)

    def _send_elements(
        self, comm: Communicator, x: Array, indices: Array, out: Array, *, op: Sum, name: str, step: int
    ) -> None:
        """Send the elements of `x` at `indices` in float32, or rounded; the memory keeps the rounding errors."""
        codec = self._codec_for(comm, comm.config.protocol.block_size)
        if codec not in ELEMENTS_AS:
            self._sum_elements(comm, indices, x[indices], out, op=op, name=name, step=step, codec=NONE)
            self.memory.keep_selected(name, indices, self.selector)
            return
        plain = x[indices]
        with overflowing():
            values = plain.astype(ELEMENTS_AS[codec])
            plain -= values.astype(np.float32)
        self._sum_elements(comm, indices, values, out, op=op, name=name, step=step, codec=codec)
        self.memory.keep_selected(name, indices, self.selector, plain)

    def _sum_elements(
        self,
        comm: Communicator,
        indices: Array,
        values: Array,
        out: Array,
        *,
        op: Sum,
        name: str,
        step: int,
        codec: str,
    ) -> None:
        """Sum single elements: with their numbers, or in blocks filled up with zeros; the cheaper way.

        All ranks decide in the same way, by the costs of the rank with the most. They decide every DECIDE_EVERY steps.
        """
        if self.selector.is_common:  # the name shows that all ranks have drawn the same indices
            drawn = f"{self._collective_name(name)} at {zlib.crc32(indices.tobytes()):08x}"
            sums = comm.allreduce(values.astype(np.float32), op=op, name=drawn, codec=codec)
            scatter(indices, sums, out)
            return
        if step % DECIDE_EVERY == 0:
            work_bytes = WORK_BYTES_IN_MEMORY if comm.in_memory else WORK_BYTES
            own_costs = costs(indices, comm.config.protocol.block_size, values.itemsize, work_bytes)
            self._costs[name] = comm.allreduce(
                own_costs, op="max", name=f"{self._collective_name(name)} selected", block_size=8
            )
        by_number, by_block = self._costs[name]
        if by_number < by_block:
            self._sum_rows(comm, indices, values.reshape(-1, 1), out, op=op, name=name)
        else:
            scatter(indices, values, out)
            comm.allreduce(out, op=op, name=self._collective_name(name), codec=codec)

    @staticmethod
    def _sum_rows(comm: Communicator, indices: Array, rows: Array, out: Array, *, op: Sum, name: str) -> None:
        if rows.dtype == out.dtype:
            comm.allreduce_rows_into(out.reshape(-1, 1), indices, rows, op=op, name=name)
        else:
            numbers, sums = comm.allreduce_rows(indices, rows, out.size, op=op, name=name)
            scatter(numbers, sums.reshape(-1), out)


def costs(indices: Array, block_size: int, itemsize: int, work_bytes: int = WORK_BYTES) -> Array:
    """The costs to send the elements at `indices`, int64 (n,), ascending: by their numbers, and in their blocks. int64
    (2,), in bytes. An element has `itemsize` bytes."""
    blocks = np.count_nonzero(np.diff(indices // block_size)) + min(1, indices.size)
    return np.array([indices.size * (itemsize + STEP_BYTES + work_bytes), blocks * block_size * itemsize])


def scatter(indices: Array, values: Array, out: Array) -> None:
    """Write `values`, (n,), to `out`, (elements,), at `indices`, and zeros elsewhere."""
    out[:] = 0
    out[indices] = values
