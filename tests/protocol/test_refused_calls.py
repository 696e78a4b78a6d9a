"""Refusals as the machines see them: those of all ranks are over like a barrier; those of some end the job."""

from __future__ import annotations

import numpy as np
import pytest
from harness import InprocCluster
from hypothesis import given, settings
from hypothesis import strategies as st

from omnireduce.core.descriptor import Descriptor
from omnireduce.core.dtypes import BYTES, Array
from omnireduce.errors import ProtocolError
from omnireduce.protocol.collective.dense_operands import DenseTensor
from omnireduce.protocol.collective.ragged_parts import COUNT_BYTES, RaggedParts, packed, packed_refusal
from omnireduce.runtime.rank.calls.single import Pool

SHAPES: dict[str, list[list[int]]] = {  # the ranks of each host
    "by shards": [],
    "in memory": [[0, 1, 2, 3]],
    "of two hosts": [[0, 2], [1, 3]],
}
RANKS, ELEMENTS = 4, 300


def refuse(cluster: InprocCluster, rank: int, why: str) -> None:
    empty = np.zeros(0, BYTES)
    descriptor = Descriptor("refusal", "", "uint8", (0,), item_bytes=1, refused=why)
    cluster.submit(
        rank, descriptor, DenseTensor(empty, empty, cluster.sharding.layout(descriptor), descriptor.element.zero_mask)
    )


def of_shape(shape: str, shards: int) -> InprocCluster:
    return InprocCluster(RANKS, shards=shards, slot_bytes=1 << 13, hosts=SHAPES[shape])


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=40, deadline=None)
@given(
    shards=st.integers(1, 3),
    refused=st.lists(st.booleans(), min_size=1, max_size=6),
    dtypes=st.lists(st.sampled_from(["float32", "float16"]), min_size=6, max_size=6),
)
def test_what_all_refuse_is_over(shape: str, shards: int, refused: list[bool], dtypes: list[str]) -> None:
    """Each with a reason of its own, between calls that all make, of which several are under way."""
    cluster, results = of_shape(shape, shards), list[Array]()
    for at, is_refused in enumerate(refused):
        for rank in range(RANKS):
            if is_refused:
                refuse(cluster, rank, "because " * (1 + rank % 3))
            else:
                results.append(cluster.allreduce(rank, np.full(ELEMENTS, 1 + rank, dtypes[at])))
    cluster.run()
    assert all(x.tolist() == [10] * ELEMENTS for x in results)


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=40, deadline=None)
@given(
    shards=st.integers(1, 3),
    refusing=st.sets(st.integers(0, RANKS - 1), min_size=1, max_size=RANKS - 1),
    dtype=st.sampled_from(["float32", "float16"]),
    before=st.integers(0, 2),
    has_rows=st.booleans(),
    elements=st.sampled_from([1, ELEMENTS]),
)
def test_what_some_refuse_ends_the_job(
    shape: str, shards: int, refusing: set[int], dtype: str, before: int, has_rows: bool, elements: int
) -> None:
    """All ranks read of one that has refused, and why, whichever shard says so first: a small tensor takes part in one
    shard only. No tensor is touched but those of hosts, which add up theirs before they know of others."""
    cluster, brought = of_shape(shape, shards), list[tuple[int, Array]]()
    for _ in range(before):
        for rank in range(RANKS):
            refuse(cluster, rank, f"{rank} as all others")
    for rank in range(RANKS):
        if rank in refusing:
            refuse(cluster, rank, f"x of {rank} is a list")
        elif has_rows:
            cluster.rows(rank, np.arange(3), np.ones((3, 8), dtype), 20)
        else:
            brought.append((rank, cluster.allreduce(rank, np.full(elements, 1 + rank, dtype))))
        for _ in range(2):
            cluster.allreduce(rank, np.full(ELEMENTS, 7, dtype))  # is under way, too
    cluster.settle()
    culprits = cluster.culprits()
    assert culprits <= {f"rank {rank} (host h{rank}, pid {100 + rank})" for rank in refusing}
    for end in cluster.worker_ends:
        assert end is not None
        assert end.cause is not None
        rank = end.cause.culprit[len("rank ")]
        assert end.cause.reason.startswith(f"refused collective {before}, which rank ")
        assert end.cause.reason.endswith(f": x of {rank} is a list")
        assert end.cause.mismatch
    if shape != "of two hosts":
        assert all(x.tolist() == [1 + rank] * elements for rank, x in brought)
    cluster.check_guards()


def unpacked(rows: Array) -> RaggedParts:
    limit = 4
    cluster = InprocCluster(2)
    descriptor = Descriptor("allgather_ragged", "", "uint8", (), item_bytes=1, parts=2, packets=limit)
    own_packets = packed(np.arange(9, dtype=np.uint8))
    layout = cluster.sharding.layout(descriptor)
    packets = RaggedParts(
        own_packets, own_packets[:0, 0], layout, Pool().take, rank=0, senders=range(2), max_packets=limit
    )
    numbers = np.concatenate((np.arange(len(own_packets)), limit + np.arange(len(rows))))
    packets.put(np.concatenate((own_packets, rows)), numbers, np.zeros(len(numbers), np.bool_), False)
    packets.finish()
    return packets


@given(why=st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=150).filter(str.isprintable))
def test_a_part_may_say_why_it_is_missing(why: str) -> None:
    result = unpacked(packed_refusal(why))
    assert result.refused == {1: why}
    assert [part.tolist() for part in result.parts] == [list(range(9)), []]


@pytest.mark.parametrize("content", [b"", b"a\nb", b"\xff\xfe", b"x" * 601, b"x" * 1500])
def test_what_is_no_reason(content: bytes) -> None:
    rows = packed(np.frombuffer(content, np.uint8))
    rows.reshape(-1)[-COUNT_BYTES:].view(np.uint64)[0] |= np.uint64(1 << 63)
    with pytest.raises(ProtocolError, match="a refusal of rank 1"):
        unpacked(rows)
