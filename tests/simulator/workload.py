"""Collectives whose results are exact in every order of addition, their data and their oracle."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from omnireduce.dtypes import ELEMENT_TYPES, Array
from omnireduce.layout import Layout
from omnireduce.protocol.operands import DenseTensor, Operand
from omnireduce.protocol.rows import Pool, RowSet
from omnireduce.wire import Descriptor

FUNCTIONS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
DTYPES = ("float32", "float32", "float64", "float16", "bfloat16", "int32", "uint8")


@dataclass(frozen=True)
class Collective:
    """One collective of a job; the data of every rank follow from `seed`."""

    kind: str
    op: str
    dtype: str
    elements: int
    block_size: int
    density: float
    seed: int
    root: int = -1  # the only rank that contributes, -1 for all

    def descriptor(self) -> Descriptor:
        kind: Any = self.kind
        op: Any = self.op
        return Descriptor(kind, f"x{self.seed}", op, self.dtype, self.elements, self.block_size)


def draw_collective(rng: random.Random, ranks: int) -> Collective:
    """Mostly small tensors of many small blocks; sometimes blocks so large that few fit a slot."""
    kind = rng.choices(["allreduce", "rows", "broadcast", "barrier"], [8, 2, 1, 1])[0]
    dtype = rng.choice(DTYPES)
    if kind == "barrier":
        return Collective(kind, "sum", "uint8", 0, 8, 0.0, rng.randrange(1 << 30))
    large = rng.random() < 0.2
    block_size = rng.choice([1024, 2048]) if large else rng.choice([8, 16, 64])
    blocks = rng.choice([1, 5, 12, 20]) if large else rng.choice([0, 1, 2, 17, 40, 150])
    elements = blocks * block_size - (rng.randrange(block_size) if blocks and kind != "rows" else 0)
    op = rng.choice(["sum", "sum", "min", "max", "prod"]) if kind == "allreduce" else "sum"
    if op == "sum" and dtype in ("float32", "float64") and rng.random() < 0.3:
        op = "mean"
    density = rng.choice([0.0, 0.05, 0.3, 1.0])
    root = rng.randrange(ranks) if kind == "broadcast" else -1
    return Collective(kind, op, dtype, elements, block_size, density, rng.randrange(1 << 30), root)


def contribution(what: Collective, rank: int) -> Array:
    """What `rank` brings: small integers in the non-zero blocks, here and there a -0 elsewhere. (elements,)"""
    dtype = ELEMENT_TYPES[what.dtype].dtype
    data = np.zeros(what.elements, dtype)
    if what.root in (-1, rank):
        rng = np.random.default_rng([what.seed, rank])
        low = 0 if what.dtype == "uint8" else -3
        values = rng.integers(low, 4, what.elements)
        blocks = np.repeat(rng.random(-(-what.elements // what.block_size)) < what.density, what.block_size)
        data[:] = np.where(blocks[: what.elements], values, 0)
        if what.elements and ELEMENT_TYPES[what.dtype].is_float and data[-1] == 0:
            data[-1] = -0.0
    return data


@functools.lru_cache(maxsize=256)
def expected(what: Collective, ranks: int) -> Array:
    """The oracle: all contributions combined in rank order by NumPy."""
    parts = [contribution(what, rank) for rank in range(ranks)]
    total = functools.reduce(FUNCTIONS[what.op], parts)
    return total / np.asarray(ranks, total.dtype) if what.op == "mean" else total


class Work:
    """One rank's part in a collective: the operand that the machine works on, and a look at the result."""

    def __init__(self, what: Collective, rank: int, shards: int, stripe_blocks: int) -> None:
        self.what = what
        self._data = contribution(what, rank)
        self.layout = Layout(what.elements, what.block_size, shards, stripe_blocks)
        self.operand: Operand
        if what.kind == "rows":
            rows = self._data.reshape(-1, what.block_size)
            numbers = np.flatnonzero((rows != 0).any(axis=1))
            self.operand = RowSet(numbers, np.ascontiguousarray(rows[numbers]), self.layout, Pool())
        else:
            mask = ELEMENT_TYPES[what.dtype].zero_mask
            source = self._data if what.root in (-1, rank) else None
            self.operand = DenseTensor(source, self._data, self.layout, mask)

    def result(self) -> Array:
        if not isinstance(self.operand, RowSet):
            return self._data
        numbers, values = self.operand.result
        full = np.zeros((self.layout.blocks, self.what.block_size), self._data.dtype)
        full[numbers] = values
        return full.reshape(-1)
