"""Memories with GRACE's names, made of the memories of this library. `state_dict` gives the content of a memory, which
differs between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from omnireduce.compression import memories
from omnireduce.compression.grace.base import Compressor, Memory, Tensors
from omnireduce.compression.grace.built_in_base import GradientTemplate
from omnireduce.errors import UsageError


class WrappedMemory(Memory):
    """A memory that lets `wrapped`, a memory of this library, do the work."""

    def __init__(self, wrapped: memories.Memory) -> None:
        self.wrapped = wrapped

    def compensate(self, tensor: Any, name: str) -> Any:
        template = GradientTemplate(tensor)
        return template.restore(self.wrapped.compensate(template.values, name).copy())

    def update(self, tensor: Any, name: str, compressor: Compressor, tensor_compressed: Tensors, ctx: Any) -> None:
        self.wrapped.keep_rest(name, GradientTemplate(compressor.decompress(tensor_compressed, ctx)).values)

    def forget(self, names: Iterable[str]) -> None:
        self.wrapped.forget(names)

    def state_dict(self) -> memories.State:
        """A copy of all that is kept, for `load_state_dict`."""
        return self.wrapped.state_dict()

    def load_state_dict(self, saved: memories.State) -> None:
        """Go on with a copy from `state_dict`. Raises UsageError if it is from another kind of memory."""
        self.wrapped.load_state_dict(saved)


class NoneMemory(WrappedMemory):
    """Keeps nothing."""

    def __init__(self) -> None:
        super().__init__(memories.NoMemory())

    def compensate(self, tensor: Any, name: str) -> Any:
        return tensor

    def update(self, tensor: Any, name: str, compressor: Compressor, tensor_compressed: Tensors, ctx: Any) -> None: ...


class ResidualMemory(WrappedMemory):
    """`beta` times the rest, plus `gamma` times the gradient: see `Residual`."""

    def __init__(self, beta: float = 1.0, gamma: float = 1.0) -> None:
        super().__init__(memories.Residual(beta, gamma))


class EFSignSGDMemory(ResidualMemory):
    """The rest, plus `lr` times the gradient. `EFSignSGDCompressor` divides the sum by `lr` again."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(1.0, lr)


class DgcMemory(WrappedMemory):
    """A momentum of each element until it is sent: see `DgcMomentum`.

    `gradient_clipping`: the norm to which a larger gradient is scaled down, or False. GRACE's True takes the norm of
    the gradients of all ranks, which would cost one more exchange.
    """

    def __init__(self, momentum: float = 0.9, gradient_clipping: float | bool = False) -> None:
        if gradient_clipping is True:
            raise UsageError(
                "gradient_clipping True: expected False, or the norm above which a gradient is scaled down"
            )
        super().__init__(memories.DgcMomentum(momentum, None if gradient_clipping is False else gradient_clipping))


class PowerSGDMemory(ResidualMemory):
    """The rest that the factors leave out. The communicator keeps the factors of the last step, the same on all
    ranks."""
