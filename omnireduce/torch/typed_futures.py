"""Futures whose value is a list of tensors for torch's C++, too.

What Python puts into a future is an object of Python for C++. DistributedDataParallel takes that, but not in its
built-in hook FP16_COMPRESS, which ends with an internal error. A function of TorchScript returns a future of the type
that it wants.
"""
# Annotations are not postponed here: TorchScript reads them.

import warnings
from functools import cache
from typing import Any, List  # noqa: UP035 - TorchScript knows no other

import torch
from torch import Tensor


def _after(over: torch.jit.Future[int], tensors: List[Tensor]) -> List[Tensor]:  # noqa: UP006
    torch.jit.wait(over)
    return tensors


def _begin(over: torch.jit.Future[int], tensors: List[Tensor]) -> torch.jit.Future[List[Tensor]]:  # noqa: UP006
    return torch.jit.fork(_after, over, tensors)


@cache
def _compiled() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that torch.jit is old: nothing else makes such a future
        return torch.jit.script(_begin)


def typed_future(over: Any, tensors: List[Tensor]) -> Any:  # noqa: UP006
    """A future that has these tensors, or the error of the future `over`, once that is complete."""
    return _compiled()(over, tensors)
