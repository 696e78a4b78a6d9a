"""Peers that send anything at all: the error names them, nothing raises, and no memory outside is touched.

Guard bytes around slots and tensors see wrong writes; the same tests as plain Python see wrong indices.
"""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from harness import Guarded, InprocCluster, slot_bytes_for
from hypothesis import example, given, settings
from hypothesis import strategies as st
from messages import HEADER, MESSAGES
from samples import Array, sparse_tensor

from benchmarks.harness.inproc import InprocLink
from omnireduce.core.descriptor import Descriptor, decode_descriptor
from omnireduce.core.wire.blocks import (
    HEADER_BYTES,
    capacity,
    message_extra,
    message_list,
    message_steps,
    read_header,
    seal,
)
from omnireduce.core.wire.control import (
    Aborted,
    Cause,
    ControlMessage,
    Leave,
    decode_control,
    encode_control,
)
from omnireduce.errors import ProtocolError
from omnireduce.transport.base import Control, Received

SEEDS = st.integers(0, 2**32 - 1)
INTERESTING = [0, 1, 2, 7, 8, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 1]
RANK_1 = "rank 1 (host h1, pid 101)"
NESTED = b"\x82\xa4type\xa5Leave\xa1x" + b"\x91" * 60000 + b"\xc0"
NOT_TEXT = b"\x82\xa4type\xa7Refused\xa6reason\xa2\xff\xfe"


def signed(word: int) -> int:
    """The number whose 64 bits these are."""
    return (word + 2**63) % 2**64 - 2**63


def mutated(rng: random.Random, data: bytes) -> bytes:
    """`data` with bytes changed, cut off, repeated or appended."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            changed[at:at] = rng.randbytes(rng.randint(1, 9))
        else:
            changed[at:at] = changed[:at]
    return bytes(changed)


# decoding


@given(
    body=st.binary(max_size=60) | st.sampled_from(list(MESSAGES.values())).flatmap(lambda m: st.just(encode_control(m)))
)
@example(body=NESTED)
@example(body=NOT_TEXT)
def test_control_bytes_decode_or_are_refused(body: bytes) -> None:
    try:
        message = decode_control(body)
    except ProtocolError:
        return
    assert decode_control(encode_control(message)) == message


@settings(max_examples=300)
@given(seed=SEEDS, message=st.sampled_from(list(MESSAGES.values())))
def test_mutated_control_messages_decode_or_are_refused(seed: int, message: ControlMessage) -> None:
    test_control_bytes_decode_or_are_refused.hypothesis.inner_test(  # type: ignore[attr-defined]
        mutated(random.Random(seed), encode_control(message))
    )


@settings(max_examples=300)
@given(seed=SEEDS)
def test_mutated_descriptors_decode_or_are_refused(seed: int) -> None:
    data = Descriptor("allreduce_rows", "name", "float32", (2**40, 128)).encoded
    try:
        descriptor = decode_descriptor(mutated(random.Random(seed), data))
    except ProtocolError:
        return
    assert 0 <= descriptor.layout.blocks < 2**62
    assert descriptor.block_bytes > 0


def descriptor_bytes(**changes: object) -> bytes:
    fields = msgspec.structs.asdict(Descriptor("allreduce", "w", "float32", (5, 2)))
    assert fields.keys() >= changes.keys()
    return msgspec.msgpack.encode(list((fields | changes).values()))


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "other"},
        {"op": "xor"},
        {"dtype": "complex64"},
        {"dtype": "int8", "op": "mean"},
        {"dtype": "float32\n"},
        {"dtype": "x" * 61, "kind": "broadcast", "item_bytes": 1},
        {"dtype": "\x1b[2J", "kind": "broadcast", "item_bytes": 1},
        {"dtype": "é", "kind": "allgather", "item_bytes": 1},
        {"op": "max", "kind": "broadcast", "item_bytes": 1},
        {"op": "max", "kind": "allreduce_rows"},
        {"shape": [-1]},
        {"shape": [2**62]},
        {"shape": [2**31, 2**31]},
        {"shape": [2**63, 2**63] * 32},
        {"shape": [0, 2**62]},
        {"shape": [0, 2**40, 2**40]},
        {"shape": [1] * 65},
        {"shape": [1.5]},
        {"shape": 5},
        {"shape": None},
        {"shape": [[1]]},
        {"shape": [2**52], "block_size": 8},
        {"shape": [5], "kind": "allreduce_rows"},
        {"shape": [5, 0], "kind": "allreduce_rows"},
        {"shape": [5, 2, 1], "kind": "allreduce_rows"},
        {"shape": [0, 2**31], "kind": "allreduce_rows"},
        {"shape": [2**48, 2], "kind": "allreduce_rows"},
        {"kind": "broadcast"},
        {"kind": "broadcast", "item_bytes": -1},
        {"kind": "broadcast", "item_bytes": 2**31},
        {"kind": "broadcast", "item_bytes": 2**30, "shape": [2**32]},
        {"kind": "allgather", "item_bytes": 8, "parts": 0},
        {"kind": "allgather", "item_bytes": 8, "parts": 2**32},
        {"kind": "allgather", "item_bytes": 2**30, "parts": 2**31, "shape": [2]},
        {"kind": "broadcast", "item_bytes": 8, "root": -1},
        {"kind": "broadcast", "item_bytes": 8, "root": 2**32},
        {"item_bytes": 4},
        {"block_size": 12},
        {"block_size": 0},
        {"block_size": -8},
        {"block_size": 2**31},
        {"name": "n" * 201},
        {"name": 7},
    ],
)
def test_descriptors_out_of_range_are_refused(changes: dict[str, object]) -> None:
    decode_descriptor(descriptor_bytes())
    with pytest.raises(ProtocolError):
        decode_descriptor(descriptor_bytes(**changes))


@settings(max_examples=200)
@given(
    words=st.tuples(*[st.sampled_from(INTERESTING) | st.integers(0, 2**64 - 1)] * 8),
    nbytes=st.integers(0, 600),
    slot_bytes=st.sampled_from([64, 128, 256, 512]),
)
def test_a_header_that_is_admitted_describes_what_lies_in_the_slot(
    words: tuple[int, ...], nbytes: int, slot_bytes: int
) -> None:
    slot = np.zeros(slot_bytes, np.uint8)
    HEADER.pack_into(slot.data, 0, words[0], signed(words[1]), *[word % 2**32 for word in words[2:]])
    try:
        header = read_header(slot, nbytes)
    except ProtocolError:
        return
    assert HEADER_BYTES <= nbytes <= slot_bytes
    listed = (message_steps if header.steps else message_list)(slot, header).nbytes
    assert listed == (header.steps or 16 * header.runs or 8 * header.block_count) <= 8 * header.block_count
    assert len(message_extra(slot, header)) == header.extra_bytes
    present = header.block_count - header.left_out
    assert present >= 0
    assert HEADER_BYTES + present * header.block_bytes + listed + header.extra_bytes <= nbytes


# whole clusters with one peer that tampers with its messages


def tamper(rng: random.Random, slot: Array, nbytes: int) -> int:
    """Change a message in its slot; return the length to claim."""
    try:
        header = read_header(slot, nbytes)
    except ProtocolError:
        return nbytes  # changed before: all ranks read results from one slot
    indices = np.empty(0, np.int64) if header.steps else message_list(slot, header)
    kind = rng.randrange(7)
    if kind == 0:
        slot[rng.randrange(HEADER.size)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        fields = [field % 2**64 for field in header]
        at = rng.randrange(len(fields))
        changed = rng.choice([*INTERESTING, fields[at] + 1, fields[at] - 1])
        fields[at] = changed % (2**64 if at < 2 else 2**32)
        HEADER.pack_into(slot.data, 0, fields[0], signed(fields[1]), *fields[2:])
    elif kind == 2 and indices.size:
        value = rng.choice([*INTERESTING, int(indices[-1]), int(indices[0]), int(indices[-1]) + 1])
        indices.view(np.uint64)[rng.randrange(indices.size)] = value % 2**64  # an index may be negative by now
    elif kind == 3 and header.extra_bytes:
        start = nbytes - header.extra_bytes
        slot[start + rng.randrange(header.extra_bytes)] ^= 1 << rng.randrange(8)
    elif kind == 4:
        return rng.choice([0, 1, 63, 64, nbytes - 1, nbytes + 1, slot.size, slot.size + 1, 2**32 - 1])
    elif kind == 5:
        slot[:] = np.frombuffer(rng.randbytes(slot.size), np.uint8)
    elif kind == 6:
        slot[:nbytes] = np.frombuffer(rng.randbytes(nbytes), np.uint8)
    return nbytes


def tampered_run(seed: int, down: bool) -> InprocCluster:
    """Two collectives on three ranks; rank 1 (or, with `down`, the only aggregator) tampers with some messages."""
    rng = random.Random(seed)
    block_size, dtype = 8, rng.choice(["float32", "bfloat16", "int8"])
    cluster = InprocCluster(
        3,
        shards=1 if down else rng.randint(1, 2),
        slots=rng.randint(2, 3),
        slot_bytes=slot_bytes_for(rng.randint(1, 6), 64),
        scan_span=rng.randint(1, 30),
        seed=seed,
    )
    after, chance = rng.randint(0, 6), rng.choice([0.05, 0.5])

    def change(shard: int, rank: int, is_down: bool, slot: Array, nbytes: int) -> int:
        nonlocal after
        if is_down != down or (rank != 1 and not down):
            return nbytes
        after -= 1
        return tamper(rng, slot, nbytes) if after < 0 and rng.random() < chance else nbytes

    cluster.tamper = change
    data = np.random.default_rng(seed)
    for elements in (rng.randint(0, 400), rng.randint(0, 400)):
        for rank in range(3):
            guard = Guarded((elements,), sparse_tensor(data, dtype, 0, 8, 1).dtype)
            cluster.guards.append(guard)
            guard.array[:] = sparse_tensor(data, dtype, elements, block_size, 0.7)
            cluster.allreduce(rank, guard.array, block_size=block_size)
    cluster.settle()
    cluster.check_guards()
    return cluster


def named(cluster: InprocCluster) -> set[str]:
    return {end.cause.culprit for end in cluster.worker_ends if end is not None and end.cause is not None}


@settings(max_examples=300)
@given(seed=SEEDS)
def test_a_worker_that_tampers_is_named(seed: int) -> None:
    cluster = tampered_run(seed, down=False)
    causes = [end.cause for end in cluster.worker_ends if end is not None and end.cause is not None]
    for cause in causes:
        if "a result that does not fit" in cause.reason:
            # Rank 1's frontier was raised on the way: it is shown results that it has not packed, and sees nobody else.
            assert cause.culprit.startswith("aggregator")
        else:
            assert cause.culprit in {RANK_1, "ranks 0 and 1", "ranks 1 and 2"}


def test_a_frontier_raised_on_the_way_ends_the_job() -> None:
    """The seed that showed it: no rank takes the result of a block that it has not packed."""
    assert named(tampered_run(16107, down=False)) == {"aggregator 127.0.0.1:7400"}


@settings(max_examples=300)
@given(seed=SEEDS)
def test_an_aggregator_that_tampers_is_named(seed: int) -> None:
    cluster = tampered_run(seed, down=True)
    # a rank that saw the change first may tell the aggregator, which passes its words on
    assert named(cluster) <= {"aggregator 127.0.0.1:7400"}


def test_tampering_is_noticed_at_all() -> None:
    noticed = [named(tampered_run(seed, down)) for seed in range(20) for down in (False, True)]
    assert sum(bool(each) for each in noticed) > 10


@pytest.mark.parametrize("body", [NESTED, NOT_TEXT, b"", b"\xc1", b"\x00" * 100])
def test_undecodable_control_bytes_name_the_peer(body: bytes) -> None:
    cluster = InprocCluster(2, shards=2)
    cluster.down[0][1].deliver(Control(body))
    cluster.settle()
    assert cluster.culprits() == {RANK_1}
    cluster = InprocCluster(2, shards=2)
    cluster.up[0][1].deliver(Control(body))
    cluster.settle()
    assert cluster.culprits() == {"aggregator 127.0.0.1:7401"}


@given(seed=SEEDS, message=st.sampled_from(list(MESSAGES.values())), down=st.booleans())
def test_mutated_control_messages_raise_nothing(seed: int, message: ControlMessage, down: bool) -> None:
    rng = random.Random(seed)
    cluster = InprocCluster(2, shards=2)
    for rank in range(2):
        cluster.allreduce(rank, np.ones(600, np.float32))
    for driver in cluster.worker_drivers:
        driver.turn()
    body = mutated(rng, encode_control(message)) if rng.random() < 0.8 else encode_control(message)
    for _ in range(rng.randint(1, 2)):
        (cluster.up[1][0] if down else cluster.down[0][1]).deliver(Control(body))
    cluster.settle()
    cluster.check_guards()


def test_the_words_of_a_peer_are_bounded() -> None:
    """The cause that one rank gives goes to all others, in a message of limited length."""
    cluster = InprocCluster(2, shards=2)
    cluster.up[1][0].send_control(encode_control(Leave(Cause("x" * 10_000, "y" * 50_000))))
    cluster.settle()
    assert cluster.culprits() == {RANK_1}
    longest = Cause("\U0001f600" * 4096, "\U0001f600" * 4096)
    assert len(encode_control(Aborted(longest))) < 65000
    assert decode_control(encode_control(Aborted(longest))) == Aborted(longest)


@pytest.mark.parametrize("nbytes", [0, 63, 65, 2**32 - 1])
@pytest.mark.parametrize("down", [False, True])
def test_lengths_that_cannot_be(nbytes: int, down: bool) -> None:
    cluster = InprocCluster(2, shards=2)
    for rank in range(2):
        cluster.allreduce(rank, np.ones(600, np.float32))
    (cluster.up[1][0] if down else cluster.down[0][1]).deliver(Received(0, nbytes))
    cluster.settle()
    assert cluster.culprits() == {"aggregator 127.0.0.1:7400" if down else RANK_1}


@pytest.mark.parametrize("block_bytes", [0, 1, 8, 64])
@pytest.mark.parametrize("down", [False, True])
def test_blocks_of_another_size_name_the_peer(block_bytes: int, down: bool) -> None:
    cluster = InprocCluster(2, shards=2)
    for rank in range(2):
        cluster.allreduce(rank, np.ones(6000, np.float32))
        cluster.worker_drivers[rank].advance()
    first = Descriptor("allreduce", "", "float32", (6000,)).encoded
    cluster.aggregator_drivers[0].feed(0)
    link = cluster.up[1][0] if down else cluster.down[0][1]
    slot = 0 if down else 1  # the last free slot goes first
    count = min(100, capacity(4096, block_bytes))  # more than the slot has room for in blocks of 32 bytes
    nbytes = seal(link.receive_slots[slot], 0, 128, np.arange(count), block_bytes, b"" if down else first)
    link._waiting_events.clear()
    link.deliver(Received(slot, nbytes))
    cluster.settle()
    assert cluster.culprits() == {"aggregator 127.0.0.1:7400" if down else RANK_1}


@pytest.mark.parametrize("down", [False, True])
def test_blocks_of_another_shard_name_the_peer(down: bool) -> None:
    """They may lie where a rank has not packed yet: nothing but their owner may return them."""
    cluster = InprocCluster(2, shards=2, stripe_blocks=4)
    for rank in range(2):
        cluster.allreduce(rank, np.ones(8 * 60, np.float32))
        cluster.worker_drivers[rank].advance()
    link = cluster.up[1][1] if down else cluster.down[1][1]
    slot, first = (0, b"") if down else (1, Descriptor("allreduce", "", "float32", (480,)).encoded)
    nbytes = seal(link.receive_slots[slot], 0, 60, np.array([4, 5, 8]), 32, first)  # 8 is of shard 0
    link._waiting_events.clear()
    link.deliver(Received(slot, nbytes))
    cluster.settle()
    assert cluster.culprits() == {"aggregator 127.0.0.1:7401" if down else RANK_1}
    expected = "block 8, expected ascending blocks from 0 to 59 of shard 1 of 2"
    assert expected in str(cluster.worker_ends[1])


def test_blocks_that_fit_no_slot_name_the_peer() -> None:
    cluster = InprocCluster(2, shards=2, slot_bytes=4096)
    slot, extra = cluster.arenas[0][2], Descriptor("allreduce", "", "float64", (10,), block_size=2**30).encoded
    HEADER.pack_into(slot.data, 0, 0, 1, 0, 2**32 - 1, len(extra), 0, 0, 0)
    slot[HEADER_BYTES : HEADER_BYTES + len(extra)] = np.frombuffer(extra, np.uint8)
    cluster.down[0][1].deliver(Received(0, HEADER_BYTES + len(extra)))
    cluster.settle()
    assert cluster.culprits() == {RANK_1}
    assert cluster.worker_ends[0] is not None
    assert "do not fit slots of 4096" in str(cluster.worker_ends[0].cause)


def cluster_with_two_messages() -> tuple[InprocCluster, InprocLink, Received, Received]:
    """Rank 1's first two messages of collective 0 wait on its link, which the shard has not polled."""
    cluster = InprocCluster(2, slot_bytes=4096)
    for rank in range(2):
        cluster.allreduce(rank, np.ones(6000, np.float32))
        cluster.worker_drivers[rank].advance()
    link = cluster.down[0][1]
    first, second, *_ = [event for event in link._waiting_events if isinstance(event, Received)]
    return cluster, link, first, second


def test_a_message_that_changes_its_collective_names_the_peer() -> None:
    """Its first message began collective 0; the next one says that it is of collective 1, and begins nothing."""
    cluster, link, _, second = cluster_with_two_messages()
    header = read_header(link.receive_slots[second.slot], second.nbytes)
    assert (header.collective, header.extra_bytes) == (0, 0)
    HEADER.pack_into(link.receive_slots[second.slot].data, 0, 1, *header[1:])
    cluster.settle()
    assert cluster.culprits() == {RANK_1}
    assert "a message of collective 1 during 0" in str(cluster.worker_ends[0])


def test_a_message_that_goes_back_names_the_peer() -> None:
    """Its blocks are below what its sender has promised: all ranks may have their sums already."""
    cluster, link, first, second = cluster_with_two_messages()
    promised = read_header(link.receive_slots[first.slot], first.nbytes).frontier
    header = read_header(link.receive_slots[second.slot], second.nbytes)
    indices = np.arange(promised - 1, promised - 1 + header.block_count)
    nbytes = seal(link.receive_slots[second.slot], 0, header.frontier, indices, header.block_bytes)
    link._waiting_events[list(link._waiting_events).index(second)] = Received(second.slot, nbytes)
    cluster.settle()
    assert cluster.culprits() == {RANK_1}
    assert f"block {promised - 1}, expected ascending blocks from {promised} to" in str(cluster.worker_ends[0])
