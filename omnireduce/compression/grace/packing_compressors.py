"""Compressors that send all elements, each in few bits.

The codecs of the service pack the elements, and a tensor is a single block. On the service the same codec packs block
by block, so each block has its own scale.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from omnireduce.compression.grace.base import Compressor, Memory, Tensors
from omnireduce.compression.grace.built_in_base import BuiltInCompressor, Context, GradientTemplate
from omnireduce.compression.grace.communicators import BuiltInCommunicator
from omnireduce.compression.gradient_checks import check_seed
from omnireduce.compression.memories import finite, overflowing
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.kernels.codecs.draws import block_keys, fill_uniform
from omnireduce.kernels.codecs.means import MEANS_BYTES
from omnireduce.kernels.codecs.table import NONE, codec_named
from omnireduce.runtime.rank.calls.arguments import whole_number
from omnireduce.runtime.rank.communicator import Communicator as Member
from omnireduce.runtime.rank.reported_errors import report_errors_to


class AllToAll(BuiltInCommunicator):
    """Each rank adds one piece of the gradient, and gives it to all."""

    name = "alltoall"

    def __init__(
        self, compressor: Compressor, memory: Memory, world_size: int | None = None, *, comm: Member | None = None
    ) -> None:
        super().__init__(compressor, memory, world_size, comm=comm)
        self._pieces = self.compressor = PiecewiseCompressor(compressor, self.comm)

    def send_receive(self, tensors: Tensors, name: str, ctx: tuple[GradientTemplate, list[Any]]) -> Any:
        template, contexts = ctx
        per_piece, rank = len(tensors) // self.world_size, self.comm.rank
        with report_errors_to(self.comm):
            columns = [
                np.stack([tensors[per_piece * piece + i] for piece in range(self.world_size)]) for i in range(per_piece)
            ]
        received = [self.comm.alltoall(column, name=f"{name} {i}") for i, column in enumerate(columns)]
        parts = [[column[sender] for column in received] for sender in range(self.world_size)]
        compressor = self._pieces.compressor
        with report_errors_to(self.comm):
            own_piece = np.ascontiguousarray(
                self.combined([compressor.decompress(part, contexts[rank]) for part in parts])
            )
        whole_gradient = self.comm.allgather(own_piece, name=f"{name} sums")
        return template.restore(whole_gradient.reshape(-1)[: template.size])


class PiecewiseCompressor(Compressor):
    """Compresses as many pieces of a gradient as there are ranks, of equal size, each by itself."""

    def __init__(self, compressor: Compressor, comm: Member) -> None:
        super().__init__(compressor.average)
        self.compressor, self._comm = compressor, comm

    def compress(self, tensor: Any, name: str) -> tuple[Tensors, tuple[GradientTemplate, list[Any]]]:
        template = GradientTemplate(tensor)
        pieces = np.zeros((self._comm.size, -(-template.size // self._comm.size)), np.float32)
        pieces.reshape(-1)[: template.size] = template.values
        names = self._piece_names(name)
        compressed_pieces = [
            self.compressor.compress(piece, piece_name) for piece, piece_name in zip(pieces, names, strict=True)
        ]
        return [compressed for tensors, _ in compressed_pieces for compressed in tensors], (
            template,
            [ctx for _, ctx in compressed_pieces],
        )

    def decompress(self, tensors: Tensors, ctx: tuple[GradientTemplate, list[Any]]) -> Any:
        template, contexts = ctx
        per_piece = len(tensors) // len(contexts)
        pieces = [
            self.compressor.decompress(tensors[per_piece * i : per_piece * i + per_piece], context)
            for i, context in enumerate(contexts)
        ]
        return template.restore(np.concatenate(pieces)[: template.size])

    def aggregate(self, tensors: Sequence[Any]) -> Any:
        return self.compressor.aggregate(tensors)

    def agreed(self, name: str) -> str:
        return self.compressor.agreed(name)

    def take_back(self, name: str) -> None:
        for piece_name in self._piece_names(name):
            self.compressor.take_back(piece_name)

    def forget(self, names: Iterable[str]) -> None:
        self.compressor.forget(piece for name in names for piece in self._piece_names(name))

    def _piece_names(self, name: str) -> list[str]:
        return [f"{name}/{i}" for i in range(self._comm.size)]


ALL_COMMUNICATORS = ("allreduce", "allgather", "broadcast", "aggregator")
PIECEWISE_COMMUNICATORS = ("allgather", "broadcast", "alltoall", "aggregator")
WORD = 8  # elements: the size of a block is a multiple of it


class NoneCompressor(BuiltInCompressor):
    """All elements as float32."""

    communicators, codec = ALL_COMMUNICATORS, NONE

    def __init__(self) -> None:
        super().__init__()

    def encode(self, x: Array, ctx: Context) -> Sequence[Array]:
        return [x.copy()]

    def decode(self, arrays: Sequence[Array], ctx: Context) -> Array:
        return arrays[0]


class FP16Compressor(BuiltInCompressor):
    """All elements as float16."""

    communicators, codec = ALL_COMMUNICATORS, "fp16"

    def __init__(self) -> None:
        super().__init__()

    def encode(self, x: Array, ctx: Context) -> Sequence[Array]:
        with overflowing():
            return [x.astype(np.float16)]

    def decode(self, arrays: Sequence[Array], ctx: Context) -> Array:
        return arrays[0].astype(np.float32)


class PackingCompressor(BuiltInCompressor):
    """A compressor that encodes a tensor by a codec."""

    codec: str

    def encode(self, x: Array, ctx: Context) -> Sequence[Array]:
        if not x.size:
            return [np.empty(0, np.uint8)]
        values = np.zeros((1, _block_size(x.size)), np.float32)
        values[0, : x.size] = x
        codec = codec_named(self.codec)
        encoded = np.empty((1, codec.block_bytes(values.size)), np.uint8)
        codec.encode(values, encoded, block_keys(int(self.key(ctx)), np.arange(1)))
        return [encoded[0]]

    def decode(self, arrays: Sequence[Array], ctx: Context) -> Array:
        values = np.empty((1, _block_size(ctx.template.size)), np.float32)
        if ctx.template.size:
            codec_named(self.codec).decode(arrays[0].reshape(1, -1), values)
        return values[0, : ctx.template.size]


def _block_size(size: int) -> int:
    return -(-size // WORD) * WORD


class NaturalCompressor(PackingCompressor):
    """Powers of two, rounded at random. `seed`: see `Aggregator`."""

    communicators, codec = PIECEWISE_COMMUNICATORS, "natural"

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = check_seed(seed)


class TernGradCompressor(PackingCompressor):
    """-1, 0 or 1 times the largest magnitude, rounded at random; before, elements are clipped.

    The limit is 2.5 times the root mean square. GRACE takes the deviation from the mean. That is zero if all elements
    are equal, so that nothing would be sent. `seed`: see `Aggregator`.
    """

    communicators, codec, LIMIT = PIECEWISE_COMMUNICATORS, "ternary", 2.5

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = check_seed(seed)

    def prepare(self, x: Array, name: str) -> Array:
        limit = np.float32(self.LIMIT * float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))) if x.size else 0
        return np.clip(x, -limit, limit) if np.isfinite(limit) else x


class SignCompressor(PackingCompressor):
    """Signs, with a value for each of the two: `means`, over all elements.

    The codec leaves zeros at the end out of its means, because they may only fill the block up. On the service it does
    so in each block.
    """

    def encode(self, x: Array, ctx: Context) -> Sequence[Array]:
        (packed,) = super().encode(x, ctx)
        if x.size:
            with overflowing():
                packed[:MEANS_BYTES] = np.array(self.means(x.astype(np.float64)), np.float32).view(np.uint8)
        return [packed]

    @abstractmethod
    def means(self, x: Array) -> tuple[float, float]:
        """The values for the elements of `x`, float64 (elements,), below zero, and for the others."""


class OneBitCompressor(SignCompressor):
    """Signs, with the mean of the elements of each. With `Aggregator` see `SignCompressor`."""

    codec = "onebit"

    def __init__(self) -> None:
        super().__init__()

    def means(self, x: Array) -> tuple[float, float]:
        below = x < 0
        negatives = np.count_nonzero(below)
        return x[below].sum() / max(negatives, 1), x[~below].sum() / max(x.size - negatives, 1)


class EFSignSGDCompressor(SignCompressor):
    """Signs times the mean magnitude. Its memory multiplies the gradient by `lr`; the sum is divided by `lr`. With
    `Aggregator` see `SignCompressor`."""

    codec = "scaled_sign"

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.learning_rate = float(finite(lr, "lr"))
        if self.learning_rate <= 0:
            raise UsageError(f"lr {lr!r}: expected a number above 0")

    def means(self, x: Array) -> tuple[float, float]:
        mean = np.abs(x).mean()
        return -mean, mean

    def aggregate(self, tensors: Sequence[Any]) -> Any:
        return sum(tensors) / self.learning_rate


class SignSGDCompressor(PackingCompressor):
    """Signs; the result is the sign of most ranks, or 1 if there are as many of each."""

    codec = "sign"

    def __init__(self) -> None:
        super().__init__(average=False)

    def aggregate(self, tensors: Sequence[Any]) -> Any:
        template = GradientTemplate(sum(tensors))
        return template.restore(np.where(template.values < 0, np.float32(-1), np.float32(1)))


class SignumCompressor(SignSGDCompressor):
    """Signs of a momentum: `momentum` times the last momentum, plus 1 - `momentum` times the gradient."""

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = finite(momentum, "momentum")
        self._momenta: dict[str, Array] = {}
        self._next: dict[str, Array] = {}
        self._previous: dict[str, Array] = {}

    def prepare(self, x: Array, name: str) -> Array:
        last = self._momenta.get(name, x)
        if last.size != x.size:
            raise UsageError(f"gradient '{name}' has {x.size} elements; it had {last.size} before")
        with overflowing():
            self._next[name] = self.momentum * last + (1 - self.momentum) * x
        return self._next[name]

    def commit(self, name: str) -> None:
        super().commit(name)
        if name in self._momenta:
            self._previous[name] = self._momenta[name]
        self._momenta[name] = self._next.pop(name)

    def take_back(self, name: str) -> None:
        super().take_back(name)
        del self._momenta[name]
        if name in self._previous:
            self._momenta[name] = self._previous.pop(name)

    def forget(self, names: Iterable[str]) -> None:
        name_list = list(names)
        super().forget(name_list)
        for momenta in (self._momenta, self._next, self._previous):
            for name in name_list:
                momenta.pop(name, None)


class QSGDCompressor(BuiltInCompressor):
    """`quantum_num` levels of the norm of each bucket of `bucket_size` elements, rounded at random: an int8 each.

    A bucket whose norm is not finite becomes NaN. The service has 127 levels of the largest element of each block, and
    with another `quantum_num` moves the decompressed gradient. `seed`: see `Aggregator`.
    """

    communicators, LEVELS = PIECEWISE_COMMUNICATORS, 127

    def __init__(self, quantum_num: int = 127, bucket_size: int = 128, seed: int = 0) -> None:
        super().__init__()
        self.quantum_num, self.bucket_size = (
            whole_number(quantum_num, "quantum_num"),
            whole_number(bucket_size, "bucket_size"),
        )
        if not 1 <= self.quantum_num <= self.LEVELS or self.bucket_size < 1:
            raise UsageError(
                f"quantum_num {quantum_num}, bucket_size {bucket_size}: expected 1 to {self.LEVELS}, and 1 or more"
            )
        self.codec = "qsgd" if self.quantum_num == self.LEVELS else None
        self.seed = check_seed(seed)

    def encode(self, x: Array, ctx: Context) -> Sequence[Array]:
        buckets = np.zeros((-(-x.size // self.bucket_size), self.bucket_size), np.float32)
        buckets.reshape(-1)[: x.size] = x
        random = np.empty(buckets.size, np.float32)
        fill_uniform(self.key(ctx), random)
        with overflowing(), np.errstate(divide="ignore"):
            norms = np.sqrt(np.square(buckets, dtype=np.float64).sum(axis=1)).astype(np.float32)
            scaled = np.abs(buckets, dtype=np.float64) / norms[:, None] * self.quantum_num
        scaled[~(np.isfinite(norms) & (norms > 0))] = 0
        below = np.floor(scaled)
        levels = np.minimum(below + (random.reshape(scaled.shape) < scaled - below), self.quantum_num)
        return [norms, np.copysign(levels, buckets).astype(np.int8).reshape(-1)[: x.size]]

    def decode(self, arrays: Sequence[Array], ctx: Context) -> Array:
        norms, levels = arrays
        with overflowing():
            scale = np.repeat(norms / np.float32(self.quantum_num), self.bucket_size)[: levels.size]
            values: Array = scale * levels.astype(np.float32)
        return values
