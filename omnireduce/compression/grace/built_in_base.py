"""Base of this package's compressors: they work on float32, count steps, and name the selector and the codec by which
the service does the same."""

from __future__ import annotations

import sys
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from omnireduce.compression.grace.base import Compressor, Tensors, is_ours
from omnireduce.compression.selectors import Selector
from omnireduce.core.dtypes import ELEMENT_TYPES, Array
from omnireduce.errors import UsageError, a_type
from omnireduce.kernels.codecs.draws import stream_key
from omnireduce.runtime.rank.communicator import Communicator as Member

FLOATS = tuple(element.name for element in ELEMENT_TYPES.values() if element.is_float)


def is_tensor(x: object) -> bool:
    """Whether `x` is a tensor of torch."""
    return hasattr(x, "detach") and hasattr(x, "new_empty")


class GradientTemplate:
    """Kind, shape and dtype of a gradient, so that other arrays can take its form.

    `values`: its numbers, float32 (elements,), possibly in its own memory: do not write to them. `shape`, `size`: those
    of the gradient. Raises UsageError for anything but an array or a dense tensor of floats.
    """

    def __init__(self, x: Any) -> None:
        if not (isinstance(x, np.ndarray | np.generic) or is_tensor(x)):  # a sum of no dimension is a scalar
            raise UsageError(f"a gradient is {a_type(x)}; expected a numpy.ndarray or a torch.Tensor")
        dtype = str(x.dtype).removeprefix("torch.")
        is_dense = str(getattr(x, "layout", "torch.strided")) == "torch.strided"
        if getattr(x, "is_meta", False):
            raise UsageError("a gradient is on the device meta, which has no numbers; expected one of another device")
        if dtype not in FLOATS or not is_dense:
            problem = "sparse" if dtype in FLOATS else f"of {dtype}"
            raise UsageError(f"a gradient is {problem}; expected a dense gradient of {', '.join(FLOATS)}")
        self.shape = tuple(x.shape)
        self._like: Any = x.detach().new_empty(0) if is_tensor(x) else np.empty(0, x.dtype)
        plain = x.detach().cpu().float().numpy() if is_tensor(x) else x
        self.values: Array = np.ascontiguousarray(plain, np.float32).reshape(-1)
        self.size = self.values.size

    def restore(self, values: Array) -> Any:
        """`values`, float32 (elements,), in this form. A float32 array shares their memory."""
        shaped = values.reshape(self.shape)
        if not is_tensor(self._like):
            with np.errstate(over="ignore"):  # an overflow becomes infinity
                return shaped.astype(self._like.dtype, copy=False)
        result = self._like.cpu().float().new_empty(self.shape)
        result.numpy()[...] = shaped
        return result.to(self._like)

    def kind_of(self, arrays: Sequence[Array]) -> list[Any]:
        """`arrays` of any dtype in the kind of the gradient: arrays, or tensors on the processor with the same
        memory."""
        if not is_tensor(self._like):
            return list(arrays)
        return [sys.modules["torch"].from_numpy(array) for array in arrays]  # there is a tensor, so there is torch


def payload_of(x: Any) -> Any:
    """A compressed tensor in the form that travels: an array, or a plain number as it is. Raises UsageError for a
    tensor of a type that NumPy does not have."""
    if not is_tensor(x):
        return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x
    try:
        return np.ascontiguousarray(x.detach().cpu().numpy())
    except TypeError as error:
        raise UsageError(f"a compressed tensor of {x.dtype} cannot travel: {error}") from error


def payload_like(payload: Any, like: Any) -> Any:
    """The reverse: a received payload in the kind of `like`, this rank's tensor at the same place."""
    if not is_tensor(like):
        return payload
    result = like.detach().cpu().new_empty(payload.shape)
    result.numpy()[...] = payload
    return result.to(like)


class Context(NamedTuple):
    """The gradient that was compressed: its form and name, and the number of its earlier steps."""

    template: GradientTemplate
    name: str
    step: int


class BuiltInCompressor(Compressor):
    """A compressor of this package.

    `selector` and `codec` say how the service does the same: the part of a gradient that it moves, and its form. If
    both are None, the service cannot do it. `seed`, and the rank in `job`, are for random numbers.
    """

    selector: Selector | None = None
    codec: str | None = None
    job: Member | None = None
    seed = 0

    def __init__(self, average: bool = True, tensors_size_are_same: bool = True) -> None:
        super().__init__(average, tensors_size_are_same)
        self._steps: dict[str, int] = {}

    def compress(self, tensor: Any, name: str) -> tuple[Tensors, Context]:
        """The arrays or tensors that are sent, of the gradient's kind, and the context for `decompress`. Raises
        UsageError unless `tensor` is a gradient."""
        context = Context(GradientTemplate(tensor), name, self._steps.get(name, 0))
        arrays = self.encode(self.prepare(context.template.values, name), context)
        self.commit(name)
        return context.template.kind_of(arrays), context

    def decompress(self, tensors: Tensors, ctx: Context) -> Any:
        """A gradient like the one that this rank has compressed."""
        return ctx.template.restore(self.decode([payload_of(tensor) for tensor in tensors], ctx))

    def prepare(self, x: Array, name: str) -> Array:
        """The array that is encoded in place of `x`, float32 (elements,): `x` itself, or another one."""
        return x

    @abstractmethod
    def encode(self, x: Array, ctx: Context) -> Sequence[Array]:
        """The arrays that stand for `x`, float32 (elements,)."""

    @abstractmethod
    def decode(self, arrays: Sequence[Array], ctx: Context) -> Array:
        """The values that `arrays` of any rank stand for: float32 (elements,)."""

    def agreed(self, name: str) -> str:
        is_common = self.selector is not None and self.selector.is_common
        return self.parameters() + (f" at step {self._steps[name]}" if is_common else "")

    def parameters(self) -> str:
        """The class and its arguments, as a text. For a class of the user, only its name: ranks may differ in its
        other attributes."""
        if not is_ours(type(self)):
            return super().agreed("")
        values = {**(vars(self.selector) if self.selector else {}), **vars(self)}
        del values["tensors_size_are_same"]
        plain = (int, float, np.floating)
        settings = (f"{key}={value}" for key, value in values.items() if key[0] != "_" and isinstance(value, plain))
        return f"{type(self).__name__}({', '.join(settings)})"

    def commit(self, name: str) -> None:
        """The last compressed form of this gradient is sent: go on to the next step."""
        self._steps[name] = self._steps.get(name, 0) + 1

    def take_back(self, name: str) -> None:
        """Undo the last `commit`."""
        self._steps[name] -= 1

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._steps.pop(name, None)

    def key(self, ctx: Context) -> np.uint64:
        """The key of this step's random numbers, different from all other keys."""
        rank = 0 if self.job is None else self.job.rank
        return np.uint64(stream_key(self.seed, zlib.crc32(ctx.name.encode()) + (ctx.step << 32), rank))
