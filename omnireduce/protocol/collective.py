"""A collective, as the parts of a worker's machine know it."""

from __future__ import annotations

from dataclasses import dataclass

from omnireduce.descriptor import Descriptor
from omnireduce.protocol.operands import Operand


@dataclass(slots=True)
class Collective:
    """One collective under way on this worker."""

    number: int
    descriptor: Descriptor
    operand: Operand
    parts_left: int  # shards, and the host, from which results are still to come
