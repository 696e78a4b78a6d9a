"""Communicators, which combine the compressed gradients of the ranks, with GRACE's names.

Allgather, Broadcast   each rank gets the compressed tensors of all, decompresses and adds them
Allreduce              compressed tensors are summed as they are, where that makes sense
Aggregator             the aggregators sum what is not zero, in the form of the codec
AllToAll               packing_compressors.py: each rank adds one piece of all gradients, and sends it on as float32
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from omnireduce.compression import memories
from omnireduce.compression.compressed_sums import Compression
from omnireduce.compression.grace.base import Communicator, Compressor, Memory, Tensors, is_ours, owner_of
from omnireduce.compression.grace.built_in_base import BuiltInCompressor, GradientTemplate, payload_like, payload_of
from omnireduce.compression.grace.lowrank import PowerSGDCompressor
from omnireduce.compression.grace.memories import WrappedMemory
from omnireduce.compression.gradient_checks import Sum, name_for_all
from omnireduce.compression.powersgd import PowerSgd
from omnireduce.compression.selectors import Selector
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.kernels.codecs.table import NONE
from omnireduce.runtime.rank.communicator import Communicator as Member
from omnireduce.runtime.rank.reported_errors import report_errors_to


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


class Aggregator(BuiltInCommunicator):
    """The aggregators sum what the compressor selects, block by block in the form of its codec. The codec's random
    numbers follow from `protocol.codec_seed`: a `seed` of the compressor is refused.

    For a compressor or memory of the user, the compressed gradient is decompressed here and summed; blocks of zeros do
    not travel.
    """

    name = "aggregator"

    def __init__(
        self, compressor: Compressor, memory: Memory, world_size: int | None = None, *, comm: Member | None = None
    ) -> None:
        super().__init__(compressor, memory, world_size, comm=comm)
        if not is_ours(owner_of(type(compressor), "aggregate")):
            raise UsageError(
                f"{type(compressor).__name__} aggregates in its own way, which the service does not know: it goes with "
                "allgather, broadcast"
            )
        self._service = _service(compressor, memory)
        if self._service is None and isinstance(compressor, PowerSGDCompressor):
            raise UsageError(_no_factors_text(compressor))
        if isinstance(self._service, Compression) and isinstance(compressor, BuiltInCompressor) and compressor.seed:
            raise UsageError(
                f"{type(compressor).__name__} with seed {compressor.seed} and communicator '{self.name}': the service "
                "draws from protocol.codec_seed. Set that, and leave seed at 0"
            )

    def step(self, tensor: Any, name: str) -> Any:
        if self._service is None:
            return super().step(tensor, name)
        self.say_called()
        with report_errors_to(self.comm):
            template = GradientTemplate(tensor)
            sums = template.values.reshape(template.shape).copy()
        self._service.allreduce(self.comm, sums, name=name, op=_op(self.compressor))
        return self.compressor.aggregate([template.restore(sums)])

    def forget(self, names: Iterable[str]) -> None:
        name_list = list(names)
        super().forget(name_list)
        if isinstance(self._service, PowerSgd):
            self._service.forget(name_list)

    def send_receive(self, tensors: Tensors, name: str, ctx: Any) -> Any:
        with report_errors_to(self.comm):
            template = GradientTemplate(self.compressor.decompress(tensors, ctx))
            sums = np.empty_like(template.values)
        self.comm.allreduce(template.values, out=sums, op=_op(self.compressor), name=name)
        return self.compressor.aggregate([template.restore(sums)])


class Allreduce(Aggregator):
    """Compressed tensors are summed as they are. For compressors of this package the service does the same."""

    name = "allreduce"

    def send_receive(self, tensors: Tensors, name: str, ctx: Any) -> Any:
        sums = []
        for i, tensor in enumerate(tensors):
            payload = payload_of(tensor)
            total = self.comm.allreduce(payload, out=np.empty_like(payload), name=f"{name} {i}", codec=NONE)
            sums.append(payload_like(total, tensor))
        return self.combined([self.compressor.decompress(sums, ctx)])


def _op(compressor: Compressor) -> Sum:
    return "mean" if compressor.average else "sum"


def _no_factors_text(compressor: PowerSGDCompressor) -> str:
    """The text that says why the service does not make factors for this compressor."""
    name = type(compressor).__name__
    if is_ours(type(compressor)):
        return f"{name} goes with the memories of omnireduce: take PowerSGDMemory"
    return (
        f"{name} is a class of your own. Factors are summed while they are made, by the service itself: take "
        "PowerSGDCompressor, or a class that derives from Compressor"
    )


def _service(compressor: Compressor, memory: Memory) -> Compression | PowerSgd | None:
    """The part of the library that does the work of both; None if compressor and memory must do it step by step."""
    if not (isinstance(compressor, BuiltInCompressor) and is_ours(type(compressor))):
        return None
    if not (isinstance(memory, WrappedMemory) and is_ours(type(memory))):
        return None
    if isinstance(compressor, PowerSGDCompressor):
        return PowerSgd(compressor.compress_rank, memory.wrapped, compressor.seed)
    if compressor.selector is None and compressor.codec is None:
        return None
    return Compression(
        compressor.selector,
        PreparingMemory(compressor, memory.wrapped),
        compressor.codec or NONE,
        common=compressor.parameters(),
    )


class PreparingMemory(memories.Memory):
    """A memory behind a compressor: it keeps gradients that the compressor has prepared, and tells it when they were
    sent."""

    def __init__(self, compressor: BuiltInCompressor, wrapped: memories.Memory) -> None:
        super().__init__()
        self._compressor, self._memory = compressor, wrapped

    def compensate(self, gradient: Array, name: str) -> Array:
        return self._compressor.prepare(self._memory.compensate(gradient, name), name)

    def keep_selected(
        self, name: str, indices: Array, selector: Selector, rounding_errors: Array | None = None
    ) -> None:
        self._memory.keep_selected(name, indices, selector, rounding_errors)
        self._compressor.commit(name)

    def keep_rest(self, name: str, sent: Array) -> None:
        self._memory.keep_rest(name, sent)
        self._compressor.commit(name)
