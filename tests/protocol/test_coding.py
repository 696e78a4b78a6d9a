"""Blocks that travel encoded, from workers to aggregators and back, against an oracle that encodes block by block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coded_blocks import ORACLES
from harness import InprocCluster, slot_bytes_for
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_results, bits
from samples import Array, sparse_tensor

from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.core.descriptor import Descriptor
from omnireduce.core.dtypes import element_type
from omnireduce.errors import CodecError, ProtocolError, UsageError
from omnireduce.kernels.codecs import base
from omnireduce.kernels.codecs.base import Codec
from omnireduce.kernels.codecs.draws import SUM, block_keys, stream_key
from omnireduce.kernels.codecs.table import BUILT_IN
from omnireduce.protocol.collective.codecs import BlockCoder, codec_and_key
from omnireduce.protocol.collective.dense_operands import DenseTensor

NAMES = tuple(BUILT_IN)
SEEDS = st.integers(0, 2**32 - 1)


def sum_of_coded(codec: str, tensors: list[Array], block_size: int, op: str, seed: int, number: int) -> Array:
    """Each block of each rank there and back, their sum, which is divided once, and this there and back."""
    ranks, elements = len(tensors), tensors[0].size
    padded = [np.pad(tensor, (0, -elements % block_size)).reshape(-1, block_size) for tensor in tensors]
    result = np.zeros_like(padded[0])
    for block in range(len(result)):
        total, anybody = np.zeros(block_size, np.float32), False
        for rank, each in enumerate(padded):
            if (each[block].view(np.uint32) << 1).any():  # a bit that is no sign
                anybody = True
                with np.errstate(all="ignore"):
                    total += ORACLES[codec](each[block], key_of(seed, number, rank, block))
        if anybody:
            with np.errstate(all="ignore"):
                total = total / np.float32(ranks) if op == "mean" else total
            result[block] = ORACLES[codec](total, key_of(seed, number, SUM, block))
    return result.reshape(-1)[:elements]


def key_of(seed: int, number: int, sender: int, block: int) -> int:
    return int(block_keys(stream_key(seed, number, sender), np.array([block]))[0])


@pytest.mark.parametrize("codec", NAMES)
@settings(deadline=None)
@given(data=st.data(), seed=SEEDS)
def test_all_ranks_get_what_the_oracle_says(codec: str, data: st.DataObject, seed: int) -> None:
    block_size = data.draw(st.sampled_from([8, 16, 40]))
    elements = data.draw(st.integers(0, 600))
    block_bytes = BUILT_IN[codec].block_bytes(block_size)
    cluster = InprocCluster(
        world_size=data.draw(st.integers(1, 4)),
        shards=data.draw(st.integers(1, 3)),
        slots=data.draw(st.integers(2, 4)),
        slot_bytes=slot_bytes_for(data.draw(st.integers(1, 6)), 4 * block_size),
        scan_span=data.draw(st.integers(1, 20)),
        stripe_blocks=data.draw(st.integers(1, 6)),
        message_bytes=data.draw(st.none() | st.integers(1, 5 * block_bytes)),
        seed=data.draw(SEEDS),
    )
    rng, op = np.random.default_rng(seed), data.draw(st.sampled_from(["sum", "mean"]))
    for number in range(2):
        inputs = [
            sparse_tensor(rng, "float32", elements, block_size, rng.random(), awkward=0.1)
            for _ in range(cluster.world_size)
        ]
        before = [each.copy() for each in inputs]
        results = []
        for rank, x in enumerate(inputs):
            out = np.full(elements, 3, np.float32) if rank % 2 else None
            results.append(cluster.allreduce(rank, x, out, op=op, block_size=block_size, codec=codec, seed=seed))
        cluster.run()
        assert_results(results, sum_of_coded(codec, before, block_size, op, seed, number))
        assert all(bits(x) == bits(old) for x, old in list(zip(inputs, before, strict=True))[1::2])


@pytest.mark.parametrize("codec", ["int8", "my:Odd"])
def test_a_tensor_of_many_pieces(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed, and by a user's codec encoded and decoded, a few blocks at a time; over shards, in spans that end within
    a piece."""
    monkeypatch.setitem(BUILT_IN, "my:Odd", Odd())
    monkeypatch.setitem(ORACLES, "my:Odd", lambda block, key: block)
    monkeypatch.setattr(base, "PIECE_ELEMENTS", 3 * 8)
    cluster = InprocCluster(world_size=2, shards=2, slot_bytes=slot_bytes_for(20, 32), scan_span=7, stripe_blocks=5)
    inputs = [sparse_tensor(np.random.default_rng(rank), "float32", 403, 8, 0.7) for rank in range(2)]
    before = [each.copy() for each in inputs]
    results = [cluster.allreduce(rank, x, codec=codec) for rank, x in enumerate(inputs)]
    cluster.run()
    assert_results(results, sum_of_coded(codec, before, 8, "sum", 0, 0))


class Odd(Codec):
    """Does what it is told."""

    def __init__(self, **does: Any) -> None:
        self._does = does

    def block_bytes(self, block_size: int) -> int:
        result: int = self._does.get("block_bytes", 4 * block_size)
        return result

    def encode(self, values: Array, encoded: Array, keys: Array) -> None:
        if "encode" in self._does:
            raise ArithmeticError(self._does["encode"])
        encoded[:] = values.view(np.uint8)
        values[:] = 7  # as it may

    def add(self, encoded: Array, where: Array, totals: Array) -> None:
        if "add" in self._does:
            raise LookupError(self._does["add"])
        totals[where] += encoded.view(np.float32)


@pytest.mark.parametrize("nbytes", [0, -1, 33, 8.0, None])
def test_a_block_takes_a_number_of_bytes_that_can_be(nbytes: object) -> None:
    with pytest.raises(CodecError, match=r"does not say how many bytes 8 elements take; expected an int from 1 to 32"):
        BlockCoder("my:Odd", Odd(block_bytes=nbytes), 8)


def test_an_error_of_a_codec_says_which_one_it_is() -> None:
    x, key = np.ones(8, np.float32), 0
    operand = DenseTensor(x, x, Layout(8, 8), element_type(x.dtype).zero_mask)
    rows, indices = np.zeros((1, 32), np.uint8), np.zeros(1, np.int64)
    with pytest.raises(CodecError, match="the codec 'my:Odd' failed: ArithmeticError: too hard"):
        BlockCoder("my:Odd", Odd(encode="too hard"), 8).pack(operand, 0, 0, 9, rows, indices, key)
    with pytest.raises(CodecError, match="the codec 'my:Odd' failed: LookupError: lost"):
        BlockCoder("my:Odd", Odd(add="lost"), 8).put(operand, rows, indices)


def test_a_shard_knows_only_some_codecs() -> None:
    unknown = Descriptor("allreduce", "", "float32", (8,), codec="my:Odd")
    with pytest.raises(ProtocolError, match=r"'my:Odd' is not known here; expected bf16, .* aggregator.codecs"):
        codec_and_key(unknown, BUILT_IN, 0, 0)
    assert codec_and_key(unknown, {"my:Odd": (odd := Odd())}, 3, 4) == (odd, stream_key(0, 3, 4))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": "float64"}, "expected an allreduce of float32"),
        ({"op": "max"}, "expected an allreduce of float32, sum or mean"),
        ({"kind": "reduce_scatter"}, "expected an allreduce of float32"),
        ({"block_size": 1 << 15}, "expected at most 16384 with a codec"),
        ({"codec": "x" * 51}, "up to 50 ASCII characters"),
        ({"codec": "b\u00e4:C"}, "up to 50 ASCII characters"),
        ({"seed": -1}, "seed -1: expected 0 to"),
        ({"codec": "", "seed": 1}, "a seed without a codec"),
    ],
)
def test_calls_that_no_codec_works_on(changed: dict[str, Any], message: str) -> None:
    possible: dict[str, Any] = {"kind": "allreduce", "name": "", "dtype": "float32", "shape": (8,), "codec": "int8"}
    Descriptor(**possible)
    with pytest.raises(UsageError, match=message):
        Descriptor(**(possible | changed))
