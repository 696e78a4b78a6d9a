"""A collective under way, as the parts of a rank's machine know it."""

from __future__ import annotations

from dataclasses import dataclass, field

from omnireduce.core.descriptor import Descriptor
from omnireduce.kernels.codecs.base import Codec
from omnireduce.kernels.codecs.draws import stream_key
from omnireduce.protocol.collective.dense_operands import HostSum, Operand, RowBlocks
from omnireduce.protocol.collective.row_operands import RowSum


def sum_of_host(operand: Operand) -> HostSum | RowSum:
    """The operand that shards get from a host. `operand` belongs to one rank of the host."""
    return RowSum(operand) if isinstance(operand.blocks, RowBlocks) else HostSum(operand)


@dataclass(slots=True, eq=False)
class Collective:
    """One collective under way on this rank. `sender`: the rank's number at the shards. `host_sum`: the operand
    that shards get from a host of several ranks, in place of one rank's operand. `codec` encodes its blocks, and `key`
    is the key of the codec's random numbers."""

    number: int
    descriptor: Descriptor
    operand: Operand
    sender: int
    parts_left: int = 0  # shards, and exchanges in the host, from which results are still to come
    host_sum: HostSum | RowSum | None = None
    codec: Codec | None = None
    sent: Operand = field(init=False)  # the operand that goes to the shards
    key: int = 0

    def __post_init__(self) -> None:
        self.sent = self.operand if self.host_sum is None else self.host_sum

    def use(self, codec: Codec) -> None:
        """Encode the blocks with `codec` on their way."""
        self.codec, self.key = codec, stream_key(self.descriptor.seed, self.number, self.sender)

    def __str__(self) -> str:
        return f"collective {self.number} ({self.descriptor})"
