"""Optimizers, which keep their state by parameter."""

from __future__ import annotations

from collections.abc import Sequence

from .autograd import Tensor


class Optimizer:
    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params

    def reset_grad(self) -> None:
        for param in self.params:
            param.grad = None


class SGD(Optimizer):
    def __init__(self, params: Sequence[Tensor], lr: float = 0.01, momentum: float = 0.0,
                 weight_decay: float = 0.0) -> None:  # fmt: skip
        super().__init__(params)
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.u: dict[Tensor, Tensor] = {}

    def step(self) -> None:
        for param in self.params:
            if param.grad is None:
                continue
            grad = param.grad.numpy() + self.weight_decay * param.numpy()
            if param in self.u:
                grad = self.momentum * self.u[param].numpy() + (1 - self.momentum) * grad
            self.u[param] = Tensor(grad, device=param.device, requires_grad=False)
            param.data = Tensor(param.numpy() - self.lr * grad, device=param.device)


class Adam(Optimizer):
    def __init__(self, params: Sequence[Tensor], lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.999,
                 eps: float = 1e-8, weight_decay: float = 0.0) -> None:  # fmt: skip
        super().__init__(params)
        self.lr, self.beta1, self.beta2, self.eps, self.weight_decay = lr, beta1, beta2, eps, weight_decay
        self.t = 0
        self.m: dict[Tensor, Tensor] = {}
        self.v: dict[Tensor, Tensor] = {}

    def step(self) -> None:
        self.t += 1
        for param in self.params:
            if param.grad is None:
                continue
            grad = param.grad.numpy() + self.weight_decay * param.numpy()
            m = self.m[param].numpy() if param in self.m else 0
            v = self.v[param].numpy() if param in self.v else 0
            m, v = self.beta1 * m + (1 - self.beta1) * grad, self.beta2 * v + (1 - self.beta2) * grad * grad
            self.m[param], self.v[param] = (Tensor(x, device=param.device, requires_grad=False) for x in (m, v))
            result = m / (1 - self.beta1**self.t) / ((v / (1 - self.beta2**self.t)) ** 0.5 + self.eps)
            param.data = Tensor(param.numpy() - self.lr * result, device=param.device)
