"""What a rank asks for, by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Request(NamedTuple):
    """A collective that a rank is ready for.

    `terms`: what all ranks must have alike, in words. `buffer`: requests with the same one may share a buffer; empty:
    none may. `nbytes`: what it takes there.
    """

    name: str
    terms: str
    buffer: str = ""
    nbytes: int = 0


class Batch(NamedTuple):
    """Requests that are dealt with in one exchange. All ranks have the same batches in the same order. `error`: why this
    one fails instead, on each of them."""

    names: tuple[str, ...]
    error: str = ""


def fused(requests: Iterable[Request], most_bytes: int) -> list[Batch]:
    """Put requests into batches: each joins the last batch of its buffer, if that has less than `most_bytes` with it."""
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
