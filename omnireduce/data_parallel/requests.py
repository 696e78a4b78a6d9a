"""Requests, the collectives that ranks ask for by name, and batches of requests that share an exchange."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import numpy as np

from omnireduce.descriptor import Op

REFUSAL = "refusal"  # the kind of what takes the place of a collective that a rank has refused; why is in its terms
JOIN = "(join)"  # the name of the request of a rank that has no more data
WITHOUT_DATA = ("allreduce", "rows")  # kinds that a rank which has no more data does not hold up


class TensorType(NamedTuple):
    """Dtype and shape of an array of a request."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


class Request(NamedTuple):
    """A collective that a rank is ready for. All its fields must be the same on all ranks.

    `kind`: "allreduce", "rows", "allgather" … `terms`: in words, what else must be the same.
    """

    name: str
    kind: str
    op: str = ""
    parts: tuple[TensorType, ...] = ()
    terms: str = ""

    def said(self) -> tuple[Any, ...]:
        """The request as plain data, for other ranks."""
        return self.name, self.kind, self.op, tuple(tuple(each) for each in self.parts), self.terms

    @classmethod
    def told(cls, words: Any) -> Request:
        """The request, from what `said` returned on another rank."""
        name, kind, op, parts, terms = words
        return cls(name, kind, op, tuple(TensorType(dtype, tuple(shape)) for dtype, shape in parts), terms)

    def __str__(self) -> str:
        shown = [str(each) for each in self.parts[:6]] + ["…"] * (len(self.parts) > 6)
        return " ".join(each for each in (self.kind, self.op, ", ".join(shown), self.terms) if each)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts. A request of rows counts 0, because nobody knows how many rows there are."""
        if self.kind == "rows":
            return 0
        return sum(each.elements * np.dtype(each.dtype).itemsize for each in self.parts)

    @property
    def combined_by(self) -> Op:
        """The operation of the service. It has no mean of integers: they are added, and the sum is divided then."""
        divides = self.op == "mean" and any(np.dtype(each.dtype).kind in "iu" for each in self.parts)
        return "sum" if divides else cast(Op, self.op)

    @property
    def shares(self) -> str:
        """A key: requests with the same key may share an exchange. With an empty key a request shares none."""
        if self.kind == "rows":
            return f"rows {self.op}"
        dtypes = {each.dtype for each in self.parts}
        return f"{self.op} {dtypes.pop()}" if self.kind == "allreduce" and len(dtypes) == 1 else ""


class Batch(NamedTuple):
    """Requests that share one exchange. All ranks have the same batches in the same order.

    `error`: why the batch fails instead, on all ranks.
    """

    names: tuple[str, ...]
    error: str = ""


def fused(requests: Iterable[Request], most_bytes: int) -> list[Batch]:
    """Put requests into batches. Each joins the last batch that it may share, if that then has at most `most_bytes`.
    If `most_bytes` is 0, each request has a batch of its own."""
    names: list[list[str]] = []
    last: dict[str, tuple[list[str], int]] = {}
    for each in requests:
        batch, nbytes = last.get(each.shares, ([], 0)) if each.shares and most_bytes else ([], 0)
        if not batch or nbytes + each.nbytes > most_bytes:
            batch, nbytes = [], 0
            names.append(batch)
        batch.append(each.name)
        last[each.shares] = batch, nbytes + each.nbytes
    return [Batch(tuple(each)) for each in names]
