"""What a rank asks for, by name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Request(NamedTuple):
    """A collective that a rank is ready for. All ranks must have all of it alike."""

    name: str
    kind: str
    op: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return " ".join(str(each) for each in (self.kind, self.op, self.dtype, self.shape) if each != "")

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * np.dtype(self.dtype).itemsize

    @property
    def buffer(self) -> str:
        """Requests with the same one may share a buffer; empty: none may."""
        return f"{self.op} {self.dtype}" if self.kind == "allreduce" else ""


class Batch(NamedTuple):
    """Requests that are dealt with in one exchange. All ranks have the same batches in the same order. `error`: why this
    one fails instead, on each of them."""

    names: tuple[str, ...]
    error: str = ""


def fused(requests: Iterable[Request], most_bytes: int) -> list[Batch]:
    """Put requests into batches. Each joins the last one of its buffer, if that has `most_bytes` or less with it."""
    names: list[list[str]] = []
    open_batches: dict[str, tuple[list[str], int]] = {}
    for each in requests:
        batch, nbytes = open_batches.get(each.buffer, ([], 0)) if each.buffer else ([], 0)
        if not batch or nbytes + each.nbytes > most_bytes:
            batch, nbytes = [], 0
            names.append(batch)
        batch.append(each.name)
        open_batches[each.buffer] = batch, nbytes + each.nbytes
    return [Batch(tuple(each)) for each in names]
