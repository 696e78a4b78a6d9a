"""AllToAll: each rank adds one piece of the gradient, and gives it to all.

Rank r sends piece p of its gradient, compressed, to rank p, and gets piece r of all. The sums of a piece travel as
float32, so that nothing is rounded twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from omnireduce.compression.grace.base import Compressor, Memory, Tensors
from omnireduce.compression.grace.communicators import Collective
from omnireduce.compression.grace.forms import GradientTemplate
from omnireduce.runtime.rank.communicator import Communicator as Member
from omnireduce.runtime.rank.refusals import told_to_others


class AllToAll(Collective):
    """Each rank adds one piece of the gradient, and gives it to all."""

    name = "alltoall"

    def __init__(
        self, compressor: Compressor, memory: Memory, world_size: int | None = None, *, comm: Member | None = None
    ) -> None:
        super().__init__(compressor, memory, world_size, comm=comm)
        self._pieces = self.compressor = InPieces(compressor, self.comm)

    def send_receive(self, tensors: Tensors, name: str, ctx: tuple[GradientTemplate, list[Any]]) -> Any:
        form, contexts = ctx
        own, rank = len(tensors) // self.world_size, self.comm.rank
        with told_to_others(self.comm):
            columns = [np.stack([tensors[own * piece + i] for piece in range(self.world_size)]) for i in range(own)]
        received = [self.comm.alltoall(column, name=f"{name} {i}") for i, column in enumerate(columns)]
        parts = [[column[sender] for column in received] for sender in range(self.world_size)]
        compressor = self._pieces.compressor
        with told_to_others(self.comm):
            mine = np.ascontiguousarray(self.combined([compressor.decompress(part, contexts[rank]) for part in parts]))
        whole = self.comm.allgather(mine, name=f"{name} sums")
        return form.restore(whole.reshape(-1)[: form.size])


class InPieces(Compressor):
    """Compresses as many pieces of a gradient as there are ranks, of equal size, each by itself."""

    def __init__(self, compressor: Compressor, comm: Member) -> None:
        super().__init__(compressor.average)
        self.compressor, self._comm = compressor, comm

    def compress(self, tensor: Any, name: str) -> tuple[Tensors, tuple[GradientTemplate, list[Any]]]:
        form = GradientTemplate(tensor)
        pieces = np.zeros((self._comm.size, -(-form.size // self._comm.size)), np.float32)
        pieces.reshape(-1)[: form.size] = form.values
        names = self._pieces_of(name)
        made = [self.compressor.compress(piece, own) for piece, own in zip(pieces, names, strict=True)]
        return [compressed for tensors, _ in made for compressed in tensors], (form, [ctx for _, ctx in made])

    def decompress(self, tensors: Tensors, ctx: tuple[GradientTemplate, list[Any]]) -> Any:
        form, contexts = ctx
        own = len(tensors) // len(contexts)
        pieces = [
            self.compressor.decompress(tensors[own * i : own * i + own], context) for i, context in enumerate(contexts)
        ]
        return form.restore(np.concatenate(pieces)[: form.size])

    def aggregate(self, tensors: Sequence[Any]) -> Any:
        return self.compressor.aggregate(tensors)

    def agreed(self, name: str) -> str:
        return self.compressor.agreed(name)

    def take_back(self, name: str) -> None:
        for piece_name in self._pieces_of(name):
            self.compressor.take_back(piece_name)

    def forget(self, names: Iterable[str]) -> None:
        self.compressor.forget(piece for name in names for piece in self._pieces_of(name))

    def _pieces_of(self, name: str) -> list[str]:
        return [f"{name}/{i}" for i in range(self._comm.size)]
