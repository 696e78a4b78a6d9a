"""Tensors, and the gradients of what was computed with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .backend import Device, NDArray

Backward = Callable[[np.ndarray], tuple[Any, ...]]  # takes the gradient of the result, returns those of the inputs


class Tensor:
    def __init__(
        self, array: Any, *, device: Device | None = None, dtype: str = "float32", requires_grad: bool = True
    ) -> None:
        values = array.numpy() if isinstance(array, Tensor) else np.asarray(array, dtype)
        self._set(NDArray(values, device), (), None, requires_grad)

    def _set(self, data: NDArray, inputs: tuple[Tensor, ...], backward: Backward | None, requires_grad: bool) -> None:
        self.cached_data, self.inputs, self._backward, self.requires_grad = data, inputs, backward, requires_grad

    @classmethod
    def make_const(cls, data: NDArray) -> Tensor:
        result = Tensor.__new__(Tensor)
        result._set(data, (), None, False)
        return result

    @staticmethod
    def make(values: np.ndarray, inputs: tuple[Tensor, ...], backward: Backward) -> Tensor:
        result = Tensor.__new__(Tensor)
        result._set(NDArray(values, inputs[0].device), inputs, backward, any(each.requires_grad for each in inputs))
        return result

    def realize_cached_data(self) -> NDArray:
        return self.cached_data

    @property
    def data(self) -> Tensor:
        return Tensor.make_const(self.cached_data)

    @data.setter
    def data(self, value: Tensor) -> None:
        assert isinstance(value, Tensor)
        assert value.dtype == self.dtype
        self.cached_data = value.realize_cached_data()

    def detach(self) -> Tensor:
        return self.data

    @property
    def shape(self) -> tuple[int, ...]:
        return self.cached_data.shape

    @property
    def dtype(self) -> str:
        return self.cached_data.dtype

    @property
    def device(self) -> Device:
        return self.cached_data.device

    def numpy(self) -> np.ndarray:
        return self.cached_data.numpy()

    def backward(self) -> None:
        """Give all tensors that this one was computed with their `grad`."""
        order: list[Tensor] = []
        seen: set[int] = set()

        def visit(x: Tensor) -> None:
            if id(x) not in seen and x.requires_grad:
                seen.add(id(x))
                for each in x.inputs:
                    visit(each)
                order.append(x)

        visit(self)
        self.grad = Tensor.make_const(NDArray(np.ones(self.shape, np.float32)))
        results: dict[int, Tensor] = {id(self): self.grad}
        for each in reversed(order):
            each.grad = results[id(each)]
            if each._backward is None:
                continue
            for x, part in zip(each.inputs, each._backward(each.grad.cached_data.array()), strict=True):
                if x.requires_grad:
                    own = each.grad if part is each else Tensor.make_const(
                        part if isinstance(part, NDArray) else NDArray(part))  # fmt: skip
                    results[id(x)] = results[id(x)] + own if id(x) in results else own

    def __add__(self, other: Tensor | float) -> Tensor:
        """A summand of the sum's shape gets the gradient of the sum itself, no copy."""
        if not isinstance(other, Tensor):
            return Tensor.make(self._array + np.float32(other), (self,), lambda grad: (grad,))
        made = Tensor.make(self._array + other._array, (self, other), lambda grad: ())
        made._backward = lambda grad: tuple(
            made if each.shape == made.shape else _summed(grad, each.shape) for each in (self, other)
        )
        return made

    def __mul__(self, other: Tensor | float) -> Tensor:
        if not isinstance(other, Tensor):
            return Tensor.make(self._array * np.float32(other), (self,), lambda grad: (grad * np.float32(other),))
        left, right = self._array, other._array
        return Tensor.make(
            left * right,
            (self, other),
            lambda grad: (_summed(grad * right, left.shape), _summed(grad * left, right.shape)),
        )

    __radd__, __rmul__ = __add__, __mul__

    def __sub__(self, other: Tensor | float) -> Tensor:
        return self + other * -1.0

    def __matmul__(self, other: Tensor) -> Tensor:
        """The gradient of the weights is a transpose: it does not lie in one piece."""
        left, right = self._array, other._array
        return Tensor.make(left @ right, (self, other), lambda grad: (grad @ right.T, NDArray(grad.T @ left).permute()))

    def relu(self) -> Tensor:
        array = self._array
        return Tensor.make(np.maximum(array, 0), (self,), lambda grad: (grad * (array > 0),))

    def mean(self) -> Tensor:
        array = self._array
        return Tensor.make(np.mean(array, keepdims=True).reshape(1), (self,),
                           lambda grad: (np.full_like(array, grad[0] / array.size),))  # fmt: skip

    @property
    def _array(self) -> np.ndarray:
        return self.cached_data.array()


def _summed(grad: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The gradient of what was broadcast from this shape."""
    extra = tuple(range(grad.ndim - len(shape)))
    grad = grad.sum(extra)
    return grad.sum(tuple(at for at, each in enumerate(shape) if each == 1 and grad.shape[at] != 1), keepdims=True)
