"""A gradient on its way: what a selector selects of it, how that travels, and what a memory keeps of the rest."""

from __future__ import annotations

import zlib
from typing import Literal

import numpy as np

from omnireduce.compression.memories import Memory, NoMemory
from omnireduce.compression.selectors import Everything, Selector
from omnireduce.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.kernels.codecs.draws import block_keys, stream_key
from omnireduce.kernels.codecs.table import NONE, there_and_back
from omnireduce.kernels.select import copy_blocks
from omnireduce.runtime.member.communicator import Communicator

Sum = Literal["sum", "mean"]
ELEMENT_BYTES, ROW_BYTES = 4, 12  # of an element in a tensor, and of one that travels with its number


class Compression:
    """Sums gradients of which only a part is sent.

    `selector`: which part; `memory`: what becomes of the rest; `codec`: in which form blocks travel (None: as
    `protocol.codec` says). All ranks make the same one. What is kept differs between ranks: see `Memory.state_dict`.
    """

    def __init__(
        self, selector: Selector | None = None, memory: Memory | None = None, codec: str | None = None
    ) -> None:
        self.selector, self.memory, self.codec = selector or Everything(), memory or NoMemory(), codec
        if codec not in (None, "none") and self.selector.unit == "elements" and not self._sends_all:
            raise UsageError(
                f"codec '{codec}' with {type(self.selector).__name__}: single elements travel as float32. A codec goes "
                "with a selector of blocks, or without a selector"
            )
        self._steps: dict[str, int] = {}

    @property
    def _sends_all(self) -> bool:
        return isinstance(self.selector, Everything)

    def allreduce(self, comm: Communicator, gradient: Array, *, name: str = "", op: Sum = "mean") -> Array:
        """Replace `gradient`, float32 of any shape, by the sum or mean of what all ranks send of theirs; return it.

        `name` tells gradients apart, and is the same on all ranks. Raises what `Communicator.allreduce` raises, and
        UsageError for another dtype.
        """
        if gradient.dtype != np.float32 or not gradient.flags.c_contiguous:
            raise UsageError(f"gradient is {gradient.dtype}; expected a C-contiguous array of float32")
        flat, step = gradient.reshape(-1), self._steps.get(name, 0)
        self._steps[name] = step + 1
        x = self.memory.compensate(flat, name)
        if self._sends_all:
            self._send_all(comm, x, flat, op=op, name=name, step=step)
            return gradient
        places = self.selector.select(x, name, step)
        values = None if self.selector.unit == "blocks" else x[places]
        if values is None:
            sent = np.zeros_like(x)
            copy_blocks(x, self.selector.block_size, places, sent)
        self.memory.keep_selected(name, places, self.selector)
        if values is None:
            flat[:] = comm.allreduce(sent, op=op, name=name, block_size=self.selector.block_size, codec=self.codec)
        else:
            self._send_elements(comm, places, values, flat, op=op, name=name)
        return gradient

    def _send_all(self, comm: Communicator, x: Array, out: Array, *, op: Sum, name: str, step: int) -> None:
        """Encode all here, so that the memory knows what was sent of it: it stays the same when it is encoded again."""
        protocol = comm.config.protocol
        codec, sent = protocol.codec if self.codec is None else self.codec, x
        if codec != NONE:
            key = stream_key(protocol.codec_seed, zlib.crc32(name.encode()) + (step << 32), comm.rank)
            blocks = np.arange(-(-x.size // protocol.block_size))
            sent = there_and_back(codec, x, protocol.block_size, block_keys(key, blocks))
        elif sent is not out:
            sent = x.copy()
        self.memory.keep_rest(name, sent)
        out[:] = comm.allreduce(sent, op=op, name=name, codec=codec)

    def _send_elements(
        self, comm: Communicator, places: Array, values: Array, out: Array, *, op: Sum, name: str
    ) -> None:
        """Send single elements: with their numbers, or as a tensor of zeros where that takes fewer bytes."""
        if self.selector.is_common:
            out[:] = 0
            out[places] = comm.allreduce(values, op=op, name=name, codec="none")
            return
        most = np.array([places.size], np.int64)
        comm.allreduce(most, op="max", name=f"{name} selected")
        if int(most[0]) * ROW_BYTES >= out.size * ELEMENT_BYTES:
            out[:] = 0
            out[places] = values
            comm.allreduce(out, op=op, name=name, codec="none")
            return
        numbers, sums = comm.allreduce_rows(places, values.reshape(-1, 1), out.size, op=op, name=name)
        out[:] = 0
        out[numbers] = sums.reshape(-1)
