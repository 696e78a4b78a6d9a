"""Collectives, the data that every rank brings, and the oracle: any values at all, reduced in rank order by NumPy."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from omnireduce.core.block_program import FIRST_COLUMN, Assembly, BlockProgram, Operation
from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.core.descriptor import REDUCING, Descriptor, describe
from omnireduce.core.dtypes import ELEMENT_TYPES, Array
from omnireduce.protocol.collective.block_programs import ProgrammedTensor, Totals
from omnireduce.protocol.collective.dense_operands import DenseTensor, Operand
from omnireduce.protocol.collective.row_operands import RowSet, RowsInto
from omnireduce.runtime.rank.calls.single import Pool
from tests.oracle import is_number, reduce_by_tree
from tests.program_oracle import add, dropped
from tests.samples import sparse_tensor

Tree = Any  # a rank, or a tuple of trees that are summed in order
KINDS = {
    "allreduce": 8,
    "allreduce_rows": 3,
    "broadcast": 1,
    "allgather": 1,
    "barrier": 1,
}  # and how often each is drawn
WITHOUT_DATA = ("barrier", "refusal")
STATE_BYTES = 1 << 19  # more than the states of a job take
EXACT, LARGEST_EXACT = ("bf16", "fp16", "int8"), 127  # codecs that send integers of up to so much as they are
GUARD, GUARD_BYTE = 512, 0xA5  # bytes around every target, to see what is written outside
JUNK_BYTE = 0x5A  # old contents of a target that only takes a result


def twice(*, every: bool) -> BlockProgram:
    """Twice the sum, by way of a state that is zero before, and of which every collective makes a new one."""
    code = Assembly()
    code.add(Operation.ADD, FIRST_COLUMN, 0)
    code.add(Operation.ADD, FIRST_COLUMN, 0)
    code.add(Operation.COPY, 0, FIRST_COLUMN)
    code.add(Operation.FILL, 1, 0, 1.0)
    code.add(Operation.ADD_TO_TOTAL, 1)
    return code.program(7, 1, 0, every_block=every, totals=1, drops=True)


PROGRAMS = {"union": twice(every=False), "every": twice(every=True)}


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
    folded: bool = False  # as many elements, in another shape
    awkward: float = 0.0  # the share of blocks with NaN, infinities, subnormals or the limits of integers
    launch: int = 0  # launches bring other data to what looks the same
    codec: str = ""  # a codec that sends small integers exactly, so that the oracle need not know it
    program: str = ""  # one of PROGRAMS, for a sum of float32

    def descriptor(self, rank: int = 0) -> Descriptor:
        kind: Any = self.kind
        if kind == "refusal":
            return Descriptor(kind, "", "uint8", (0,), item_bytes=1, refused=f"rank {rank} has reason {self.seed % 3}")
        op: Any = self.op
        rows = self.elements // self.block_size, self.block_size
        shape = rows if kind == "allreduce_rows" else (1, self.elements) if self.folded else (self.elements,)
        item_bytes = 0 if kind in REDUCING else 1
        program = PROGRAMS.get(self.program)
        return describe(
            kind, f"x{self.seed}", self.dtype, shape, op, self.block_size, 0, item_bytes,
            codec=self.codec, program=program,
        )  # fmt: skip

    def __str__(self) -> str:
        where = "" if self.root < 0 else f" from rank {self.root}"
        codec = f", codec {self.codec}" if self.codec else ""
        codec += f", program {self.program}" if self.program else ""
        return f"{self.kind}{where} {self.op} {self.dtype}[{self.elements}], blocks of {self.block_size}{codec}"


def refusal(seed: int) -> Collective:
    """A placeholder for a call that a rank refuses. Each rank has a reason of its own."""
    return Collective("refusal", "sum", "uint8", 0, 8, 0.0, seed)


def draw_collective(rng: random.Random, ranks: int) -> Collective:
    """Mostly small tensors of many small blocks; sometimes blocks so large that few fit a slot."""
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    seed = rng.randrange(1 << 30)
    if kind == "barrier":
        return Collective(kind, "sum", "uint8", 0, 8, 0.0, seed)
    large = rng.random() < 0.2
    block_size = rng.choice([1024, 2048]) if large else rng.choice([8, 16, 64])
    blocks = rng.choice([1, 5, 12, 20]) if large else rng.choice([0, 1, 2, 17, 40, 150])
    elements = blocks * block_size - (rng.randrange(block_size) if blocks and kind != "allreduce_rows" else 0)
    if kind in ("broadcast", "allgather"):
        root = rng.randrange(ranks) if kind == "broadcast" else -1
        return Collective(kind, "sum", "uint8", elements, block_size, rng.choice([0.05, 1.0]), seed, root)
    if kind == "allreduce" and rng.random() < 0.2:
        codec, density = rng.choice(EXACT), rng.choice([0.0, 0.05, 0.3, 1.0])
        return Collective(kind, "sum", "float32", elements, block_size, density, seed, codec=codec)
    dtype = rng.choice(["float32", *ELEMENT_TYPES])
    ops = ["sum", "sum", "min", "max", "prod", *(["mean"] if ELEMENT_TYPES[dtype].is_float else [])]
    op = rng.choice(ops) if kind == "allreduce" else "sum"
    density, awkward = rng.choice([0.0, 0.05, 0.3, 1.0]), rng.choice([0.0, 0.0, 0.2])
    return Collective(kind, op, dtype, elements, block_size, density, seed, awkward=awkward)


@functools.lru_cache(maxsize=256)
def _contribution(what: Collective, rank: int, ranks: int) -> Array:
    dtype = ELEMENT_TYPES[what.dtype].dtype
    if what.root not in (-1, rank):
        return np.zeros(what.elements, dtype)
    rng = np.random.default_rng([what.seed, rank, *[what.launch] * (what.launch > 0)])
    data = sparse_tensor(rng, what.dtype, what.elements, what.block_size, what.density, what.awkward)
    if what.codec:
        largest = max(1, LARGEST_EXACT // ranks)
        data = np.where(data != 0, rng.integers(-largest, largest + 1, what.elements), data).astype(dtype)
    if what.kind == "allgather":  # a rank brings its own part
        parts = np.array_split(np.arange(what.elements), ranks)
        others = np.ones(what.elements, np.bool_)
        others[parts[rank]] = False
        data[others] = 0
    return data


def contribution(what: Collective, rank: int, ranks: int) -> Array:
    """Contribution of `rank` of `ranks`: numbers in some blocks, zeros and a few -0 in the others. (elements,)"""
    return _contribution(what, rank, ranks).copy()


@functools.lru_cache(maxsize=256)
def expected(what: Collective, ranks: int, sums: Tree = ()) -> Array:
    """The oracle: all contributions combined by NumPy, in rank order, or as `sums` says."""
    brought = [_contribution(what, rank, ranks) for rank in range(ranks)]
    result = reduce_by_tree(sums or tuple(range(ranks)), brought, what.op)
    with np.errstate(all="ignore"):
        if what.program:
            result = dropped(result.astype(np.float64))  # a program works on this
        return add(result, result) if what.program else result


def tree_of(places: Mapping[int, tuple[tuple[int, ...], int]]) -> Tree:
    """Ranks that are summed together. `places` has the relays of each rank, nearest last, and its host, or -1."""
    groups: dict[tuple[str, int], dict[int, tuple[tuple[int, ...], int]]] = {}
    for rank, (way, host) in sorted(places.items()):
        key = ("relay", way[0]) if way else ("host", host) if host >= 0 else ("rank", rank)
        groups.setdefault(key, {})[rank] = way[1:], -1 if not way else host
    return tuple(tree_of(group) if kind != "rank" else rank for (kind, rank), group in groups.items())


def wrong_elements(found: Array, oracle: Array) -> int:
    """Number of elements that differ: NaN equals NaN, and -0 equals +0. -1 for another shape or dtype."""
    if found.shape != oracle.shape or found.dtype != oracle.dtype:
        return -1
    with np.errstate(invalid="ignore"):
        return int(np.count_nonzero((found != oracle) & (is_number(found) | is_number(oracle))))


class Work:
    """One rank's part in a collective: the operand that the machine works on, and a look at the result.

    Half of the ranks let the result replace what they bring, the others have it put elsewhere.
    """

    def __init__(self, what: Collective, rank: int, ranks: int, layout: Layout, pool: Pool) -> None:
        self.what, self.layout = what, layout
        self._brought = contribution(what, rank, ranks)
        self._memory = np.full(self._brought.nbytes + 2 * GUARD, GUARD_BYTE, np.uint8)
        self._target = self._memory[GUARD : GUARD + self._brought.nbytes].view(self._brought.dtype)
        self._target.view(np.uint8)[:] = JUNK_BYTE
        self._source: Array | None = None  # an array that is only read
        self.totals = Totals(1)
        self.operand: Operand
        if what.kind == "allreduce_rows":
            rows = self._brought.reshape(-1, what.block_size)
            with np.errstate(invalid="ignore"):  # signalling NaN
                numbers = np.flatnonzero((rows != 0).any(axis=1))
            rows_of_rank = numbers, np.ascontiguousarray(rows[numbers]), self.layout, pool.take
            is_dense = (what.seed + rank) % 2 == 1
            self.operand = (
                RowsInto(*rows_of_rank, out=self._target.reshape(rows.shape)) if is_dense else RowSet(*rows_of_rank)
            )
        else:
            self.operand = self._dense(rank)

    def _dense(self, rank: int) -> Operand:
        what, mask = self.what, ELEMENT_TYPES[self.what.dtype].zero_mask
        if what.root not in (-1, rank) or what.kind in WITHOUT_DATA:
            return DenseTensor(None, self._target, self.layout, mask)
        if what.program:
            self._target[:] = 0  # blocks that nobody brings stay so
            self._source = self._brought.copy()
            return ProgrammedTensor(self._source, self._target, self.layout, mask, self.totals)
        if what.kind == "allreduce" and (what.seed + rank) % 2:
            self._source = self._brought.copy()
            return DenseTensor(self._source, self._target, self.layout, mask)
        self._target[:] = self._brought
        return DenseTensor(self._target, self._target, self.layout, mask)

    def result(self) -> Array:
        if type(self.operand) is not RowSet:
            return self._target
        numbers, values = self.operand.result
        full = np.zeros((self.layout.blocks, self.what.block_size), self._brought.dtype)
        full[numbers] = values
        return full.reshape(-1)

    def damage(self) -> str:
        """Memory that was written but must not be, or a wrong total; "" if all is right."""
        if self.what.program == "every" and self.totals.sums[0] != self.what.elements:
            return f"a program has counted {self.totals.sums[0]} of {self.what.elements} elements"
        outside: Sequence[Array] = (self._memory[:GUARD], self._memory[-GUARD:])
        if any((each != GUARD_BYTE).any() for each in outside):
            return "memory beside the target was written"
        if self._source is not None and self._source.tobytes() != self._brought.tobytes():
            return "an array that is only read was written"
        if type(self.operand) is RowSet and (np.diff(self.operand.result[0]) <= 0).any():
            return "row numbers do not ascend"
        return ""
