"""Workers and aggregators that break the rules of the protocol: all others name them, and no other job is disturbed."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from cluster_checks import assert_serves
from local_cluster import WAIT_S, Daemon, Ranks, configured, run_job, unique_job
from raw_peer import CONTROL, CREDIT, DATA, NOISE, RawPeer, framed

from omnireduce import AbortedError, Communicator, RefusedError, TransportError
from omnireduce.core.descriptor import Descriptor
from omnireduce.core.wire.blocks import seal
from omnireduce.core.wire.control import Aborted, Goodbye, Refused, Welcome
from omnireduce.runtime.aggregator_client import ask
from omnireduce.transport.framing import CONTROL_LIMIT, FRAME

GRADIENT = Descriptor("allreduce", "", "float32", (10_000,), block_size=256)  # 40 blocks
FIVE = [3, 4, 5, 6, 7]


def message(
    indices: list[int],
    *,
    frontier: int = 40,
    number: int = 0,
    block_bytes: int = 1024,
    extra: bytes = GRADIENT.encoded,
    runs: Sequence[tuple[int, int]] = (),
    steps: bytes = b"",
) -> bytes:
    memory = np.zeros(65536, np.uint8)
    listed = np.array(runs, np.int64).reshape(-1, 2)
    numbers = np.array(indices, np.int64)
    in_steps = np.frombuffer(steps, np.uint8)
    nbytes = seal(memory, number, frontier, numbers, block_bytes, extra, runs=listed, steps=in_steps)
    return memory[:nbytes].tobytes()


def header(count: int, block_bytes: int = 1024, extra: int = 0, nbytes: int = 64) -> bytes:
    return struct.pack("<QqIII", 0, 40, count, block_bytes, extra).ljust(nbytes, b"\0")


def data(*bodies: bytes, slots: tuple[int, ...] = (0, 0)) -> Callable[[RawPeer], None]:
    """Send block messages, each in its slot, at once."""
    frames = [FRAME.pack(DATA, slot, len(body)) + body for slot, body in zip(slots, bodies, strict=False)]
    return lambda peer: peer.send(b"".join(frames))


def descriptor(**fields: object) -> bytes:
    values = {name: getattr(GRADIENT, name) for name in GRADIENT.__struct_fields__} | fields
    return msgspec.msgpack.encode(list(values.values()))


MEMBERS: dict[str, Callable[[RawPeer], None]] = {
    "noise": lambda peer: peer.send(NOISE),
    "a slot that does not exist": data(message([]), slots=(4,)),
    "a slot without credit": data(message([], frontier=1), message([])),
    "a message larger than its slot": lambda peer: peer.frame(DATA, 0, (1 << 22) + 1, bytes(5000)),
    "a message shorter than a header": data(bytes(8)),
    "an empty message": data(b""),
    "a credit that it does not owe": lambda peer: peer.frame(CREDIT, 0, 0),
    "a count beyond the slot": data(header(2**32 - 1)),
    "a length that its header contradicts": data(header(1)),
    "an extra beyond its room": data(header(0, extra=2**31)),
    "blocks of no bytes": data(header(5, block_bytes=0, nbytes=104)),
    "no descriptor": data(message([], extra=b"")),
    "noise for a descriptor": data(message([], extra=NOISE[:100])),
    "an unknown dtype": data(message([], extra=descriptor(dtype="complex64"))),
    "an unknown op": data(message([], extra=descriptor(op="xor"))),
    "the mean of integers": data(message([], extra=descriptor(op="mean", dtype="int8"))),
    "a negative size": data(message([], extra=descriptor(shape=[-1]))),
    "a size beyond all": data(message([], extra=descriptor(shape=[2**62]))),
    "blocks of a negative size": data(message([], extra=descriptor(block_size=-8))),
    "blocks of another size": data(message([3], block_bytes=512)),
    "indices that do not ascend": data(message([3, 3])),
    "indices that descend": data(message([7, 3])),
    "a negative index": data(message([-1])),
    "an index beyond the tensor": data(message([40])),
    "a run of none": data(message(FIVE, runs=[(3, 5), (8, 0)])),
    "a run of less than none": data(message(FIVE, runs=[(3, 6), (9, -1)])),
    "runs of more blocks": data(message(FIVE, runs=[(3, 6)])),
    "runs of fewer blocks": data(message(FIVE, runs=[(3, 4)])),
    "runs that overlap": data(message(FIVE, runs=[(3, 3), (5, 2)])),
    "runs that descend": data(message(FIVE, runs=[(6, 3), (3, 2)])),
    "a run beyond the tensor": data(message(FIVE, runs=[(36, 5)])),
    "a run from a negative index": data(message(FIVE, runs=[(-1, 5)])),
    "runs that take more room": data(message(FIVE, runs=[(3, 1), (4, 2), (6, 2)])),
    "a step of none": data(message(FIVE, steps=bytes([3, 1, 1, 0, 1]))),
    "a step without end": data(message(FIVE, steps=bytes([3, 1, 1, 1, 129]))),
    "a step longer than any": data(message(FIVE, steps=bytes([3, 1, 1, 1, *[129] * 7, 1]))),
    "steps of more blocks": data(message(FIVE, steps=bytes([3, 1, 1, 1, 1, 1]))),
    "steps of fewer blocks": data(message(FIVE, steps=bytes([3, 1, 1, 129, 1]))),
    "steps beyond the tensor": data(message(FIVE, steps=bytes([36, 1, 1, 1, 1]))),
    "steps that take more room": data(message([3], steps=bytes([131, *[128] * 6, 0]))),
    "an index beyond its frontier": data(message([9], frontier=9)),
    "a frontier beyond the tensor": data(message([3], frontier=41)),
    "a negative frontier": data(message([], frontier=-1)),
    "a collective out of order": data(message([], frontier=9), message([], number=5, extra=b""), slots=(0, 1)),
    "a frontier that goes back": data(message([], frontier=9), message([], frontier=8, extra=b""), slots=(0, 1)),
    "a frontier that stays": data(message([], frontier=9), message([], frontier=9, extra=b""), slots=(0, 1)),
    "an index again": data(message([5], frontier=6), message([5], extra=b""), slots=(0, 1)),
    "a second descriptor": data(message([], frontier=9), message([], frontier=20), slots=(0, 1)),
    "a credit with bytes": lambda peer: peer.frame(CREDIT, 0, 8, bytes(8)),
    "a second hello": lambda peer: peer.hello("other", 0, 1),
    "a goodbye": lambda peer: peer.say(Goodbye()),
    "a control message that is no msgpack": lambda peer: peer.frame(CONTROL, 0, 100, NOISE[:100]),
    "an oversized control message": lambda peer: peer.frame(CONTROL, 0, CONTROL_LIMIT + 1, NOISE),
    "an unknown frame": lambda peer: peer.frame(77, 0, 0),
}


@pytest.mark.parametrize("what", MEMBERS)
def test_members_that_break_the_rules_are_named(daemon: Daemon, what: str) -> None:
    """Rank 1 is admitted and then does something wrong; both learn that it was rank 1, and what it was."""
    job, config = unique_job(), configured(daemon.addresses[:1])

    def honest(_: int) -> None:
        with Communicator(config, rank=0, size=2, job=job) as comm:
            comm.allreduce(np.ones(10_000, np.float32))

    with RawPeer(daemon.addresses[0]) as peer:
        ranks = Ranks(1, honest)
        peer.hello(job, 1, 2)
        while not isinstance(peer.control(), Welcome):
            pass
        MEMBERS[what](peer)
        [error] = ranks.outcomes()
        while not isinstance(answer := peer.control(), Aborted):
            pass
    assert isinstance(error, AbortedError)
    assert (answer.cause.culprit, answer.cause.reason) == (error.culprit, error.reason)
    assert error.culprit == "rank 1 (host test, pid 1)"
    assert error.reason.startswith("protocol error: "), error.reason


COUNTED = (
    "noise", "a slot without credit", "a credit that it does not owe", "a message shorter than a header",
    "a second hello", "a control message that is no msgpack", "an unknown frame",
)  # fmt: skip


def test_broken_rules_are_counted_as_that() -> None:
    """A violation counts, whether the link, the decoder or the machine finds it."""
    with Daemon(1) as daemon:
        for what in COUNTED:
            test_members_that_break_the_rules_are_named(daemon, what)
        status = ask(daemon.addresses[0], configured(daemon.addresses), WAIT_S)
        assert {kind: count for kind, count in status.aborts.items() if count} == {"violation": len(COUNTED)}
        assert daemon.log.count(" cause=violation rank=1 ") == len(COUNTED)


def test_blocks_that_fit_no_slot(daemon: Daemon) -> None:
    """A descriptor that is in order but for the size of the job's slots."""
    with RawPeer(daemon.addresses[0]) as peer:
        peer.hello(unique_job(), 0, 1)
        assert isinstance(peer.control(), Welcome)
        data(message([], extra=descriptor(block_size=2**30)))(peer)
        answer = peer.control()
    assert isinstance(answer, Aborted)
    assert answer.cause.culprit == "rank 0 (host test, pid 1)"
    assert f"blocks of {2**32} bytes do not fit slots of" in answer.cause.reason


def test_members_that_break_the_rules_disturb_nobody_else(busy: Daemon) -> None:
    for what in MEMBERS:
        test_members_that_break_the_rules_are_named(busy, what)
    assert_serves(busy)


FALSE_AGGREGATORS: dict[str, tuple[bytes, type[Exception], str]] = {
    "closes": (b"", TransportError, "connection closed before this worker was admitted"),
    "http": (b"HTTP/1.1 400 Bad Request\r\n\r\n", TransportError, "not a frame of this protocol: it looks like HTTP"),
    "no msgpack": (FRAME.pack(CONTROL, 0, 100) + NOISE[:100], TransportError, "malformed control message"),
    "a hello": (FRAME.pack(CONTROL, 0, 5) + b"\x81\xa4typ", TransportError, "malformed control message"),
    "a goodbye": (
        framed(Goodbye()),
        TransportError,
        "answered the hello with Goodbye",
    ),
    "noise after the welcome": (framed(Welcome(1)) + b"\xee" * 100, TransportError, "not a frame"),
}


@pytest.mark.parametrize("what", FALSE_AGGREGATORS)
def test_something_else_listens_at_the_address_of_an_aggregator(what: str) -> None:
    answer, kind, expected = FALSE_AGGREGATORS[what]
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        config = configured([address], "transport.kind=tcp", "cluster.join_timeout_s=20")
        ranks = Ranks(1, lambda rank: Communicator(config, rank=0, size=1))
        server.settimeout(WAIT_S)
        with server.accept()[0] as sock:
            sock.settimeout(WAIT_S)
            assert sock.recv(65536)
            sock.sendall(answer)
            sock.shutdown(socket.SHUT_WR)
            [error] = ranks.outcomes()
    assert type(error) is kind
    assert f"aggregator {address}" in str(error)
    assert expected in str(error)


FALSE_RESULTS: dict[str, tuple[bytes, str]] = {
    "noise": (b"\xee" * 100, "not a frame of this protocol"),
    "too long": (FRAME.pack(DATA, 0, 2**31), "message of 2147483648 bytes"),
    "an empty message": (FRAME.pack(DATA, 0, 0), "a block message of 0 bytes"),
    "an index beyond the tensor": (
        b"",
        "a result with block 40, expected ascending blocks from 0 to 39 of shard 0 of 1",
    ),
    "a credit for nothing": (FRAME.pack(CREDIT, 0, 0), "credit for slot 0, which is not under way"),
    "a refusal": (
        framed(Refused("x")),
        "unexpected Refused",
    ),
}


@pytest.mark.parametrize("what", FALSE_RESULTS)
def test_an_aggregator_that_breaks_the_rules_is_named(what: str) -> None:
    answer, expected = FALSE_RESULTS[what]
    body = message([40], extra=b"")
    answer = answer or FRAME.pack(DATA, 0, len(body)) + body
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        config = configured([address], "transport.kind=tcp")

        def run(_: int) -> None:
            with Communicator(config, rank=0, size=1) as comm:
                comm.allreduce(np.ones(10_000, np.float32))

        ranks = Ranks(1, run)
        server.settimeout(WAIT_S)
        with server.accept()[0] as sock:
            sock.settimeout(WAIT_S)
            assert sock.recv(65536)
            sock.sendall(framed(Welcome(1)))
            assert sock.recv(64, socket.MSG_WAITALL)
            sock.sendall(answer)
            [error] = ranks.outcomes()
    assert isinstance(error, AbortedError)
    assert error.culprit == f"aggregator {address}"
    assert error.reason.startswith("protocol error: ")
    assert expected in error.reason


def test_a_worker_of_an_aggregator_that_never_answers(daemon: Daemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        config = configured([address], "cluster.join_timeout_s=0.3")
        with pytest.raises(
            RefusedError,
            match=rf"an answer of aggregator {address} after cluster.join_timeout_s = 0.3; is it stopped or overloaded",
        ):
            Communicator(config, rank=0, size=1)
    assert run_job(configured(daemon.addresses), 1, lambda comm: comm.size) == [1]
