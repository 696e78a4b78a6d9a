"""The cost of an exchange, counted, not timed: calls of functions, system calls, wide instructions.

The limits are the costs when they were written, and a twentieth. If a change exceeds one on purpose, raise it and say
why.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest

from omnireduce.core.descriptor import describe
from omnireduce.core.dtypes import Array, element_type
from omnireduce.core.wire.blocks import capacity
from omnireduce.kernels import nonzero_blocks, reduce
from omnireduce.protocol.collective.dense_operands import DenseTensor
from omnireduce.protocol.rank import RankMachine
from omnireduce.protocol.shard import ShardMachine
from omnireduce.runtime.driver import Driver
from omnireduce.transport.framing import StreamLink
from omnireduce.transport.shm import ShmLink

SLOTS, SLOT_BYTES, BLOCK = 3, 1 << 19, 256
# To read, and to place, are functions of their own since threads may do them. Lists have three forms: so are to list,
# and to read a list.
RANK_CALLS, SHARD_CALLS = 208, 296  # calls for an exchange of one message per rank and one result
MESSAGE_CALLS = 460  # calls for one more message per rank, and its result, on both ranks and the shard together


class Exchange(NamedTuple):
    """Two ranks and a shard in one thread, over socket pairs."""

    workers: list[Driver]
    shard: Driver

    def run(self, tensors: list[Array], counted: Callable[[str], Any]) -> None:
        """Sum `tensors` in place, with the calls of "rank 0" and of the "shard" within `counted` of that name."""
        for rank, (driver, x) in enumerate(zip(self.workers, tensors, strict=True)):
            with counted(f"rank {rank}"):
                machine = driver.machine
                assert isinstance(machine, RankMachine)
                descriptor = describe("allreduce", "", "float32", x.shape, "sum", BLOCK)
                operand = DenseTensor(x, x, descriptor.layout, element_type(x.dtype).zero_mask)
                machine.submit(descriptor, operand, time.monotonic())
                driver.push()
        for _ in range(1000):
            with counted("shard"):
                for rank in range(len(tensors)):
                    self.shard.feed(rank)
                self.shard.advance()
            for rank, driver in enumerate(self.workers):
                with counted(f"rank {rank}"):
                    driver.turn()
                    if driver.machine.deadline:  # as a thread does before it waits
                        driver.flush()
            if not any(driver.machine.deadline for driver in self.workers):
                return
        pytest.fail("the exchange does not end")


@pytest.fixture
def exchange() -> Iterator[Exchange]:
    arena, results = np.zeros((2 * SLOTS, SLOT_BYTES), np.uint8), np.zeros((SLOTS, SLOT_BYTES), np.uint8)
    workers, links = [], []
    for rank in range(2):
        near, far = socket.socketpair()
        own_slots = arena[rank * SLOTS : (rank + 1) * SLOTS]
        link, other = ShmLink(near, "shard"), ShmLink(far, f"rank {rank}")
        link.attach(own_slots, results)
        other.attach(results, own_slots)
        machine = RankMachine([(own_slots, results)], ["shard"], "me", rank=rank, scan_span=1 << 14, timeout_s=60.0)
        workers.append(Driver(machine, [link], time.monotonic))
        links.append(other)
    shard = Driver(ShardMachine(["rank 0", "rank 1"], arena, results), links, time.monotonic)
    made = Exchange(workers, shard)
    first = [np.ones(BLOCK, np.float32) for _ in range(2)]  # makes the work space, which later ones find
    made.run(first, lambda name: counting(Counter()))
    yield made
    for driver in (*workers, shard):
        for each in driver.links:
            each.close()


@contextmanager
def counting(found: Counter[str]) -> Iterator[None]:
    """Count the calls in this thread, as "" of `found`."""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            found[""] += 1

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def cost(exchange: Exchange, blocks: int, density: float = 1.0) -> dict[str, Counter[str]]:
    """The calls of an exchange of so many blocks, by "rank 0", "rank 1" and "shard"."""
    results: dict[str, Counter[str]] = {name: Counter() for name in ("rank 0", "rank 1", "shard")}
    chosen = np.random.default_rng(1).random(blocks) < density
    tensors = [np.repeat(chosen, BLOCK).astype(np.float32) for _ in range(2)]
    exchange.run([x.copy() for x in tensors], lambda name: counting(Counter()))  # later ones find its descriptor
    exchange.run(tensors, lambda name: counting(results[name]))
    assert all((x == 2 * np.repeat(chosen, BLOCK)).all() for x in tensors)
    return results


def test_an_exchange_costs_no_more_calls_than_it_did(exchange: Exchange) -> None:
    result = cost(exchange, 4)
    assert result["rank 0"][""] <= RANK_CALLS
    assert result["shard"][""] <= SHARD_CALLS


@pytest.mark.parametrize(("few", "many", "density"), [(4, 400, 1.0), (2, 400, 0.1)], ids=["runs", "indices"])
def test_a_block_costs_no_call(exchange: Exchange, few: int, many: int, density: float) -> None:
    """Two blocks are listed as indices, four as a run."""
    one, other = cost(exchange, few), cost(exchange, many, density)
    assert {name: calls[""] for name, calls in one.items()} == {name: calls[""] for name, calls in other.items()}


def test_one_more_message_costs_no_more_calls_than_it_did(exchange: Exchange) -> None:
    fitting = capacity(SLOT_BYTES, BLOCK * 4)
    one, five = (sum(calls[""] for calls in cost(exchange, n * fitting).values()) for n in (1, 5))
    assert (five - one) / 4 <= MESSAGE_CALLS


def test_an_exchange_costs_one_send_per_rank_and_direction(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last credits of an exchange leave with the next one's first message."""
    cost(exchange, 4)
    sent, write = Counter[str](), StreamLink._write

    def counted(link: StreamLink, views: Sequence[memoryview]) -> None:
        sent[link.peer] += 1
        write(link, views)

    monkeypatch.setattr(StreamLink, "_write", counted)
    cost(exchange, 4)  # two exchanges
    assert sent == {"shard": 2 * 2, "rank 0": 2, "rank 1": 2}


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have other instructions")
@pytest.mark.parametrize(
    ("kernel", "arguments", "wide"),
    [
        (nonzero_blocks._pack_run, "(u8[:,::1], u8[:,::1], b1, u8, i8, i8, i8, u8[:,::1], i8[::1], i8)", "v?por"),
        (reduce.reduce_blocks, "(i8, f4[::1], i8[:,::1], f4[:,::1], i8)", "v?addps"),
    ],
    ids=["pack", "reduce"],
)
def test_kernels_work_on_several_words_at_once(kernel: Any, arguments: str, wide: str) -> None:
    fresh = numba.njit(arguments, nogil=True, error_model="numpy")(kernel.py_func)  # one from the cache shows no code
    (code,) = fresh.inspect_asm().values()
    assert re.search(rf"\b{wide}", code)
