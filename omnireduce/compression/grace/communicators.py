"""Communicators, which combine the compressed gradients of the ranks, with GRACE's names.

Allgather, Broadcast   here: each rank gets the compressed tensors of all, decompresses and adds them
AllToAll               packing_compressors.py: each rank adds one piece of all gradients, and sends it on as float32
Allreduce              service.py: compressed tensors are summed as they are, where that makes sense
Aggregator             service.py: the aggregators sum what is not zero, in the form of the codec
"""

from __future__ import annotations

import math
from typing import Any

from omnireduce.compression.grace.base import Communicator, Compressor, Memory, Tensors
from omnireduce.compression.grace.built_in_base import BuiltInCompressor, payload_like, payload_of
from omnireduce.compression.gradient_checks import name_for_all
from omnireduce.errors import UsageError
from omnireduce.runtime.rank.communicator import Communicator as Member


class BuiltInCommunicator(Communicator):
    """A communicator of this package. It refuses a compressor that does not support it."""

    def __init__(
        self, compressor: Compressor, memory: Memory, world_size: int | None = None, *, comm: Member | None = None
    ) -> None:
        super().__init__(compressor, memory, world_size, comm=comm)
        if self.name not in compressor.communicators:
            raise UsageError(
                f"{type(compressor).__name__} with communicator '{self.name}': it goes with "
                f"{', '.join(compressor.communicators)}"
            )
        if isinstance(compressor, BuiltInCompressor):
            compressor.job = self.comm

    def name_sent(self, tensor: Any, name: str) -> str:
        """`name`, with what must be the same on all ranks: tensors of another compressor would be read as wrong
        numbers."""
        size = math.prod(getattr(tensor, "shape", ()))
        return name_for_all(name, f"{self.compressor.agreed(name)} of {size} elements")


class Allgather(BuiltInCommunicator):
    """All ranks get the compressed tensors of all ranks, in one exchange."""

    name = "allgather"

    def send_receive(self, tensors: Tensors, name: str, ctx: Any) -> Any:
        received = self.exchange([payload_of(tensor) for tensor in tensors], name)
        return self.combined([self.compressor.decompress(self._like(payloads, tensors), ctx) for payloads in received])

    def exchange(self, payloads: list[Any], name: str) -> list[list[Any]]:
        """The compressed tensors of each rank."""
        return self.comm.allgather_object(payloads, name=name)

    @staticmethod
    def _like(payloads: list[Any], tensors: Tensors) -> list[Any]:
        return [payload_like(payload, tensor) for payload, tensor in zip(payloads, tensors, strict=True)]


class Broadcast(Allgather):
    """As Allgather, but with one broadcast for each rank."""

    name = "broadcast"

    def exchange(self, payloads: list[Any], name: str) -> list[list[Any]]:
        ranks = range(self.comm.size)
        return [self.comm.broadcast_object(payloads, root, name=f"{name} of {root}") for root in ranks]
