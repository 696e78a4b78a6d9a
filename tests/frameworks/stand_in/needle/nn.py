"""Modules, which find their parameters among their attributes."""

from __future__ import annotations

from typing import Any

import numpy as np

from .autograd import Tensor
from .backend import Device


class Parameter(Tensor):
    pass


def _parameters(x: Any) -> list[Tensor]:
    if isinstance(x, Parameter):
        return [x]
    if isinstance(x, Module):
        return x.parameters()
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ()
    return [parameter for part in parts for parameter in _parameters(part)]


class Module:
    def __init__(self) -> None:
        self.training = True

    def parameters(self) -> list[Tensor]:
        return _parameters(self.__dict__)

    def train(self) -> None:
        self._set_training(True)

    def eval(self) -> None:
        self._set_training(False)

    def _set_training(self, training: bool) -> None:
        self.training = training
        for each in self.__dict__.values():
            for module in each if isinstance(each, list | tuple) else [each]:
                if isinstance(module, Module):
                    module._set_training(training)

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)  # type: ignore[attr-defined]


class Linear(Module):
    def __init__(self, in_features: int, out_features: int, bias: bool = True,
                 device: Device | None = None, dtype: str = "float32") -> None:  # fmt: skip
        super().__init__()
        bound = (6 / in_features) ** 0.5
        self.weight = Parameter(np.random.uniform(-bound, bound, (in_features, out_features)), device=device)
        self.bias = Parameter(np.zeros((1, out_features)), device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        result = x @ self.weight
        return result if self.bias is None else result + self.bias


class ReLU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


class Sequential(Module):
    def __init__(self, *modules: Module) -> None:
        super().__init__()
        self.modules = modules

    def forward(self, x: Tensor) -> Tensor:
        for module in self.modules:
            x = module(x)
        return x


class Residual(Module):
    def __init__(self, fn: Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x) + x


class BatchNorm1d(Module):
    def __init__(self, dim: int, eps: float = 1e-5, momentum: float = 0.1,
                 device: Device | None = None, dtype: str = "float32") -> None:  # fmt: skip
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight, self.bias = Parameter(np.ones(dim), device=device), Parameter(np.zeros(dim), device=device)
        self.running_mean = Tensor(np.zeros(dim), device=device, requires_grad=False)
        self.running_var = Tensor(np.ones(dim), device=device, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        array = x._array
        mean, var = (
            (array.mean(0), array.var(0)) if self.training else (self.running_mean.numpy(), self.running_var.numpy())
        )
        if self.training:
            for kept, new in ((self.running_mean, mean), (self.running_var, var)):
                kept.data = Tensor((1 - self.momentum) * kept.numpy() + self.momentum * new, device=x.device)
        scale = 1 / np.sqrt(var + self.eps)
        normal = (array - mean) * scale

        def backward(grad: np.ndarray) -> tuple[np.ndarray]:
            centred = grad - grad.mean(0) - normal * (grad * normal).mean(0) if self.training else grad
            return (centred * scale,)

        return Tensor.make(normal, (x,), backward) * self.weight + self.bias


class Embedding(Module):
    def __init__(self, num_embeddings: int, embedding_dim: int,
                 device: Device | None = None, dtype: str = "float32") -> None:  # fmt: skip
        super().__init__()
        self.weight = Parameter(np.random.standard_normal((num_embeddings, embedding_dim)), device=device)

    def forward(self, x: Tensor) -> Tensor:
        numbers = x.numpy().astype(np.int64)

        def backward(grad: np.ndarray) -> tuple[np.ndarray]:
            result = np.zeros(self.weight.shape, np.float32)
            np.add.at(result, numbers, grad)
            return (result,)

        return Tensor.make(self.weight._array[numbers], (self.weight,), backward)


class SoftmaxLoss(Module):
    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        array, right = logits._array, (np.arange(logits.shape[0]), y.numpy().astype(np.int64))
        shifted = array - array.max(1, keepdims=True)
        sums = np.exp(shifted).sum(1, keepdims=True)

        def backward(grad: np.ndarray) -> tuple[np.ndarray]:
            result = np.exp(shifted) / sums
            result[right] -= 1
            return (result * (grad[0] / np.float32(len(result))),)

        return Tensor.make((np.log(sums[:, 0]) - shifted[right]).mean(keepdims=True), (logits,), backward)
