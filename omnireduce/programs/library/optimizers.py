"""Parameter updates of data-parallel training. Each rank has a gradient of its own; the update uses their sum.

A program is for one tensor of N elements. LAMB's norms are of that tensor: a layer is a run of its own.
"""

from __future__ import annotations

from omnireduce.core.hyperparameters import (
    ADAM_EPS,
    BETAS,
    LAMB_EPS,
    WEIGHT_DECAY,
    bias_correction,
    check_betas,
    number_in_range,
)
from omnireduce.programs.communication import AllReduce
from omnireduce.programs.expressions import Cast, Expression, Float32, Float64, Int32, Ite, Sqrt, Tensor, Variable
from omnireduce.programs.layouts import Local, Replicated
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.whole_tensor_operations import Norm, Summation, Update


def sgd() -> Pipeline:
    """Stochastic gradient descent: w - lr * g. Inputs: g and w, float32 of N elements, and lr."""
    size, lr = Variable(Int32, "N"), Variable(Float32, "lr")
    g = Tensor(Float32, size, Local, "g")
    w = Tensor(Float32, size, Replicated, "w")
    g1 = AllReduce(Summation, g)
    weights = w - lr * g1
    w1 = Update(w, weights)
    return Pipeline("sgd", [g, w, lr], [w1])


def adam(*, betas: tuple[float, float] = BETAS, eps: float = ADAM_EPS, weight_decay: float = 0.0) -> Pipeline:
    """Adam: Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015. With `weight_decay` it is AdamW:
    Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.

    Inputs: g, w, m and v, float32 of N elements; lr; t, the number of the step, from 1 on. m and v are 0 at first.
    Raises UsageError for numbers that cannot be.
    """
    betas, eps, weight_decay = _check_numbers(betas, eps, weight_decay)
    size, lr, t = Variable(Int32, "N"), Variable(Float32, "lr"), Variable(Int32, "t")
    g = Tensor(Float32, size, Local, "g")
    w, m, v = (Tensor(Float32, size, Replicated, name) for name in ("w", "m", "v"))
    g1 = AllReduce(Summation, g)
    mean = betas[0] * m + (1 - betas[0]) * g1
    square = betas[1] * v + (1 - betas[1]) * (g1 * g1)
    correction1, correction2 = _correction(betas[0], t), _correction(betas[1], t)
    step = lr * (mean / correction1) / (Sqrt(square / correction2) + eps)
    weights = w * (1 - lr * weight_decay) - step if weight_decay else w - step
    w1, m1, v1 = Update(w, weights), Update(m, mean), Update(v, square)
    return Pipeline("adam", [g, w, m, v, lr, t], [w1, m1, v1])


def lamb(*, betas: tuple[float, float] = BETAS, eps: float = LAMB_EPS, weight_decay: float = WEIGHT_DECAY) -> Pipeline:
    """LAMB: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020, algorithm
    2, where phi is the identity. If a norm is 0, the trust ratio is 1.

    Inputs: those of `adam`. Raises UsageError for numbers that cannot be.
    """
    betas, eps, weight_decay = _check_numbers(betas, eps, weight_decay)
    size, lr, t = Variable(Int32, "N"), Variable(Float32, "lr"), Variable(Int32, "t")
    g = Tensor(Float32, size, Local, "g")
    w, m, v = (Tensor(Float32, size, Replicated, name) for name in ("w", "m", "v"))
    g1 = AllReduce(Summation, g)
    mean = betas[0] * m + (1 - betas[0]) * g1
    square = betas[1] * v + (1 - betas[1]) * (g1 * g1)
    correction1, correction2 = _correction(betas[0], t), _correction(betas[1], t)
    step = (mean / correction1) / (Sqrt(square / correction2) + eps) + weight_decay * w
    size_of_weights, size_of_step = Norm(w), Norm(step)
    ratio = Ite(size_of_weights > 0, Ite(size_of_step > 0, size_of_weights / size_of_step, 1), 1)
    weights = w - lr * ratio * step
    w1, m1, v1 = Update(w, weights), Update(m, mean), Update(v, square)
    return Pipeline("lamb", [g, w, m, v, lr, t], [w1, m1, v1])


def _check_numbers(betas: object, eps: object, weight_decay: object) -> tuple[tuple[float, float], float, float]:
    return check_betas(betas), number_in_range("eps", eps), number_in_range("weight_decay", weight_decay)


def _correction(beta: float, t: Variable) -> Expression:
    """The bias correction after `t` steps: computed in float64, and rounded once."""
    return Cast(Float32, bias_correction(beta, Cast(Float64, t)))
