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
        return self.name, self.kind, self.op, tuple(tuple(part) for part in self.parts), self.terms

    @classmethod
    def told(cls, words: Any) -> Request:
        """The request, from what `said` returned on another rank."""
        name, kind, op, parts, terms = words
        return cls(name, kind, op, tuple(TensorType(dtype, tuple(shape)) for dtype, shape in parts), terms)

    def __str__(self) -> str:
        shown = [str(part) for part in self.parts[:6]] + ["…"] * (len(self.parts) > 6)
        return " ".join(text for text in (self.kind, self.op, ", ".join(shown), self.terms) if text)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts. A request of rows counts 0, because nobody knows how many rows there are."""
        if self.kind == "rows":
            return 0
        return sum(part.elements * np.dtype(part.dtype).itemsize for part in self.parts)

    @property
    def combined_by(self) -> Op:
        """The operation of the service. It has no mean of integers: they are added, and the sum is divided then."""
        divides = self.op == "mean" and any(np.dtype(part.dtype).kind in "iu" for part in self.parts)
        return "sum" if divides else cast(Op, self.op)

    @property
    def shares(self) -> str:
        """A key: requests with the same key may share an exchange. With an empty key a request shares none."""
        if self.kind == "rows":
            return f"rows {self.op}"
        dtypes = {part.dtype for part in self.parts}
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
    for request in requests:
        batch, nbytes = last.get(request.shares, ([], 0)) if request.shares and most_bytes else ([], 0)
        if not batch or nbytes + request.nbytes > most_bytes:
            batch, nbytes = [], 0
            names.append(batch)
        batch.append(request.name)
        last[request.shares] = batch, nbytes + request.nbytes
    return [Batch(tuple(batch)) for batch in names]
