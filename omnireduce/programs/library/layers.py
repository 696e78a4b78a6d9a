"""Layers of which several ranks, or several groups of them, compute a part each."""

from __future__ import annotations

from omnireduce.programs.communication import AllReduce, Recv, Send
from omnireduce.programs.expressions import Dropout, Float32, Int32, Tensor, Variable
from omnireduce.programs.layouts import Local, Replicated, Sliced, Sliced_2
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.whole_tensor_operations import MatMul, Summation

P, SEED = 0.1, 2024


def model_parallel(*, p: float = P, seed: int = SEED) -> Pipeline:
    """The second half of a layer in the way of Megatron-LM: out = Dropout(x @ weight + bias) + residual.

    Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model parallelism", 2019. Each
    rank has some of the K columns of `x`, (T, K), and as many rows of `weight`, (K, H): its product is a partial sum.
    Inputs: x, weight, bias (H), residual (T, H), and t, the number of the step.
    """
    tokens, inner, hidden, t = (Variable(Int32, name) for name in ("T", "K", "H", "t"))
    x = Tensor(Float32, (tokens, inner), Sliced_2, "x")
    weight = Tensor(Float32, (inner, hidden), Sliced, "weight")
    bias = Tensor(Float32, hidden, Replicated, "bias")
    residual = Tensor(Float32, (tokens, hidden), Replicated, "residual")
    product = MatMul(x, weight)
    total = AllReduce(Summation, product)
    out = Dropout(total + bias, p, seed=seed, step=t) + residual
    return Pipeline("model-parallel", [x, weight, bias, residual, t], [out])


def pipeline_parallel(*, p: float = P, seed: int = SEED) -> Pipeline:
    """The border between two groups of ranks: the first one adds up its partial sums, the second one goes on with
    out = Dropout(sum + bias) + residual.

    Inputs: partial (T, H), Local, in group 0; bias (H), residual (T, H) in group 1; t, the number of the step.
    """
    tokens, hidden, t = (Variable(Int32, name) for name in ("T", "H", "t"))
    partial = Tensor(Float32, (tokens, hidden), Local, "partial", group=0)
    bias = Tensor(Float32, hidden, Replicated, "bias", group=1)
    residual = Tensor(Float32, (tokens, hidden), Replicated, "residual", group=1)
    total = AllReduce(Summation, partial)
    sent = Send(total, to=1)
    received = Recv(sent)
    out = Dropout(received + bias, p, seed=seed, step=t) + residual
    return Pipeline("pipeline-parallel", [partial, bias, residual, t], [out])
