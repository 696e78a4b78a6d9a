"""Inputs that get far: each a whole, proper conversation of a peer. They are the files in `corpus`, which keep what was
found beside them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path

import msgspec
import numpy as np
from messages import (
    AGGREGATOR_NONCE,
    CAUSE,
    ELASTIC,
    GREETING,
    HELLO,
    MESSAGES,
    REFUSES,
    SLOT_BYTES,
    TEAM_GREETING,
    TEAM_SECRET,
    WORKER_NONCE,
)
from msgspec.msgpack import Ext, encode

from omnireduce.core.admin_messages import AdminRequest
from omnireduce.core.block_program import BlockProgram, packed
from omnireduce.core.descriptor import Descriptor
from omnireduce.core.wire.blocks import seal
from omnireduce.core.wire.control import (
    PROTOCOL_VERSION,
    Aborted,
    Cause,
    Challenge,
    ControlMessage,
    Goodbye,
    Leave,
    Pending,
    Proof,
    Refused,
    Waiting,
    Welcome,
    encode_control,
)
from omnireduce.protocol.joining.authentication import Candidate
from omnireduce.runtime.rank.calls.objects import CODECS, to_bytes
from omnireduce.support.secret import Secret
from omnireduce.transport.framing import CONTROL, CREDIT, DATA, FRAME

CORPUS = Path(__file__).parent / "corpus"
SECRET = Secret(b"the secret of the fuzzer")
TENSOR = Descriptor("allreduce", "gradient", "float32", (5, 60))  # 38 blocks, the last one short
ROWS = Descriptor("allreduce_rows", "", "float32", (50, 12))
HALVES = Descriptor("reduce_scatter", "", "bfloat16", (100,), "mean")
MOVED = Descriptor("broadcast", "state", "[('step', '<i8')]", (), block_size=256, root=1, item_bytes=8)
GATHERED = Descriptor("allgather", "", "float32", (0, 3), item_bytes=4, parts=2)
ANY = Descriptor("reduce", "", "bool", (9,), "any", root=1, group="2 arrays 0123456789abcdef")
RAGGED = Descriptor("allgather_ragged", "", "int64", (0, 3), item_bytes=8, parts=2, packets=8)
OBJECT = Descriptor("broadcast_object", "", "plain data", (), root=1, item_bytes=1, parts=2, packets=8)
PARTS = Descriptor("scatter", "", "|V3", (2,), root=1, item_bytes=3, parts=2)
MIXED = BlockProgram(
    2, 2, 1,
    bytes([11, 8, 0, 0, 27, 1, 0, 0, 14, 0, 8, 1, 29, 1, 0, 0, 30, 8, 0, 0, 31, 0, 8, 1]), packed(0.5, 2.0, 1.0, 0.25),
    True, 1, False, False,
)  # fmt: skip
THROUGH = Descriptor("allreduce", "", "float32", (5, 60), "mean", 16, program=MIXED)
REFUSAL = Descriptor("refusal", "", "uint8", (0,), item_bytes=1, refused="x is a list; expected a numpy.ndarray")
CALLS = [TENSOR, ROWS, HALVES, MOVED, GATHERED, ANY, RAGGED, OBJECT, PARTS, THROUGH, REFUSAL]
END = AdminRequest(PROTOCOL_VERSION, "end", "a-job")
END_OF_TEAM = AdminRequest(PROTOCOL_VERSION, "end", "", TEAM_SECRET.team)


def control(*messages: ControlMessage) -> bytes:
    bodies = [encode_control(message) for message in messages]
    return b"".join(FRAME.pack(CONTROL, 0, len(body)) + body for body in bodies)


def block_message(
    indices: list[int],
    frontier: int,
    *,
    number: int = 0,
    block_bytes: int = 32,
    extra: bytes = b"",
    runs: Sequence[tuple[int, int]] = (),
    steps: bytes = b"",
) -> bytes:
    memory = np.zeros(SLOT_BYTES, np.uint8)
    memory[64 : 64 + len(indices) * block_bytes].view(np.float32)[:] = 1
    own, listed = np.array(indices, np.int64), np.array(runs, np.int64).reshape(-1, 2)
    in_steps = np.frombuffer(steps, np.uint8)
    nbytes = seal(memory, number, frontier, own, block_bytes, extra, runs=listed, steps=in_steps)
    return memory[:nbytes].tobytes()


def data(slot: int, message: bytes) -> bytes:
    return FRAME.pack(DATA, slot, len(message)) + message


def credit(slot: int) -> bytes:
    return FRAME.pack(CREDIT, slot, 0)


FIRST = TENSOR.encoded
WHOLE = block_message([0, 3, 37], 38, extra=FIRST)
DENSE = block_message(list(range(38)), 38, extra=FIRST, runs=[(0, 38)])
TWO_RUNS = [*range(3, 9), *range(20, 38)]
IN_TWO = [block_message([0, 3], 9, extra=FIRST), block_message([9, 37], 38)]
WHOLE_RESULT = block_message(list(range(38)), 38)
RESULTS = {
    "valid-whole": block_message([0, 3, 37], 38),
    "valid-own": block_message([0, 3 | 1 << 48, 37], 38),
    "valid-part": block_message([0], 1),
    "valid-empty": block_message([], 38),
    "valid-run": block_message(list(range(38)), 38, runs=[(0, 38)]),
    "valid-own-run": block_message(TWO_RUNS, 38, runs=[(3 | 1 << 48, 6), (20, 18)]),
    "valid-steps": block_message([0, 3, 37], 38, steps=bytes([0, 3, 34])),
    "step-of-two-bytes": block_message([0, 3, 37], 38, steps=bytes([0, 3, 0xA2, 1])),
    "run-too-long": block_message(TWO_RUNS, 38, runs=[(3, 6), (20, 19)]),
}
SMALL = block_message([1], 13, number=1, block_bytes=16, extra=HALVES.encoded)
SESSION = control(HELLO) + data(1, IN_TWO[0]) + data(0, IN_TWO[1]) + credit(1) + data(1, SMALL) + credit(1)
PROVEN = control(GREETING, Proof(SECRET.proof("worker", WORKER_NONCE, AGGREGATOR_NONCE)))
TEAM_PROVEN = control(TEAM_GREETING, Proof(TEAM_SECRET.proof("worker", WORKER_NONCE, AGGREGATOR_NONCE)))
TEAM_HELLO = msgspec.structs.replace(HELLO, job="team.job")


def proven_aggregator() -> bytes:
    candidate = Candidate(SECRET, WORKER_NONCE)
    assert candidate.answer(Challenge(AGGREGATOR_NONCE)) is not None
    return control(Challenge(AGGREGATOR_NONCE), Proof(SECRET.proof("aggregator", WORKER_NONCE, AGGREGATOR_NONCE)))


SAME_INPUTS = {
    "daemon": "stranger",
    "daemon-unix": "stranger",
    "daemon-secret": "proven",
    "worker-secret": "aggregator",
}

PLAIN = (
    None, 2**70, b"x", ["a", [1.5]], (1, (2,)), {1, 2}, {"a": {"b": 1j}}, Decimal("1.5"), date(2026, 1, 2), time(1, 2),
    datetime(2026, 1, 2), timedelta(1), np.ones((2, 1)), np.float32(1),
)  # fmt: skip
SEEDS: dict[str, dict[str, bytes]] = {
    "control": {f"valid-{name}": encode_control(message) for name, message in MESSAGES.items()}
    | {
        "deep": b"\x91" * 2000,
        "a-map-of-2-to-the-32": b"\xdf\xff\xff\xff\xff",
        "not-text": b"\x82\xa4type\xa1\xff\xa1x\0",
    },
    "descriptor": {f"valid-{number}": call.encoded for number, call in enumerate(CALLS)}
    | {
        "many-dimensions": msgspec.msgpack.encode(["allreduce", "", "int8", [1] * 64 + [2], "sum", 8, 0, 0, 1]),
        "large-dimensions": msgspec.msgpack.encode(["allreduce", "", "int8", [0, 2**63], "sum", 8, 0, 0, 1]),
    },
    "plain": {f"valid-{type(each).__name__}": to_bytes(each, trust=False) for each in PLAIN}
    | {
        "colliding": encode(
            Ext([*CODECS].index(dict), encode([each for n in range(500) for each in ((2**61 - 1) * (n % 4), n)]))
        ),
        "pickle": to_bytes(len, trust=True),
    },
    "packets": {
        "valid-small": encode([[0, 0], [8, 127]]),
        "valid-large": encode([[0, 3], *([number, 7 * 128 - 1] for number in range(8, 15))]),
        "gap": encode([[0, 0], [8, 200], [10, 200]]),
        "valid-refusal": encode([[0, 0], [8, 1 << 63 | 40]]),
        "refusal-of-no-reason": encode([[0, 0], [8, 1 << 63]]),
        "refusal-of-two-packets": encode([[0, 0], [8, 0], [9, 1 << 63 | 40]]),
        "many-items": encode([[0, 0], [8, 2**61]]),
        "as-many-as-there-can-be": encode([[0, 0], [8, 2**61 - 1]]),
    },
    "upward": {
        "valid-whole": WHOLE,
        "valid-part": IN_TWO[0],
        "valid-empty": block_message([], 38, extra=FIRST),
        "valid-refusal": block_message([], 0, block_bytes=8, extra=REFUSAL.encoded),
        "valid-run": DENSE,
        "valid-runs": block_message(TWO_RUNS, 38, extra=FIRST, runs=[(3, 6), (20, 18)]),
        "valid-steps": block_message([0, 3, 37], 38, extra=FIRST, steps=bytes([0, 3, 34])),
        "step-without-end": block_message([0, 3, 37], 38, extra=FIRST, steps=bytes([0, 3, 34 | 0x80])),
        "runs-that-overlap": block_message(TWO_RUNS, 38, extra=FIRST, runs=[(3, 6), (8, 18)]),
    },
    "downward": RESULTS,
    "stranger": {
        "valid-session": SESSION + control(Leave()),
        "valid-abort": SESSION + control(Leave(CAUSE)),
        "valid-elastic": control(ELASTIC) + SESSION[len(control(HELLO)) :] + control(Leave()),
        "valid-formation": control(msgspec.structs.replace(HELLO, shard=1, shards=2, world_size=2, formation=7)),
        "valid-waits": control(msgspec.structs.replace(HELLO, world_size=2)),
        "valid-compiles": control(msgspec.structs.replace(HELLO, world_size=2, compiling=True)),
        "valid-shard-1-of-2": control(msgspec.structs.replace(HELLO, shard=1, shards=2, stripe_blocks=4))
        + data(0, block_message([4, 13], 38, extra=FIRST)),
        "valid-runs-of-shard-1-of-2": control(msgspec.structs.replace(HELLO, shard=1, shards=2, stripe_blocks=4))
        + data(0, block_message([6, 7, 12, 13], 38, extra=FIRST, runs=[(6, 4)])),
        "refuses-a-group": control(REFUSES),
        "another-version": control(msgspec.structs.replace(HELLO, version=99)),
        "ends-a-job": control(END),  # no drain: those of whom the operator is one would obey
        "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "data-first": data(0, WHOLE),
    },
    "proven": {
        "valid-session": PROVEN + SESSION + control(Leave()),
        "valid-team": TEAM_PROVEN + control(TEAM_HELLO) + SESSION[len(control(HELLO)) :] + control(Leave()),
        "team-and-a-job-of-others": TEAM_PROVEN + SESSION,
        "team-with-the-secret-of-all": control(TEAM_GREETING) + PROVEN[len(control(GREETING)) :] + SESSION,
        "greeting": control(GREETING),
        "valid-ends-a-job": PROVEN + control(END),
        "valid-team-ends-its-jobs": TEAM_PROVEN + control(END_OF_TEAM),
        "team-ends-jobs-of-others": TEAM_PROVEN + control(msgspec.structs.replace(END_OF_TEAM, team="others")),
        "hello-first": SESSION,
        "false-proof": control(GREETING, Proof(bytes(32)), HELLO),
        "hello-before-proof": control(GREETING, HELLO),
    },
    "aggregator": {
        "valid-welcome": proven_aggregator() + control(Pending([1], 1), Welcome(1)),
        "refused": control(Refused("no")),
        "welcome-first": control(Welcome(1)),
        "refused-later": proven_aggregator() + control(Pending([1], 1), Refused("no")),
        "aborted": proven_aggregator() + control(Waiting("collective 0", "rank 1", 2.0), Aborted(CAUSE)),
    },
    "delivery": {
        "valid-whole": credit(1) + data(0, RESULTS["valid-whole"]) + control(Goodbye()),
        "valid-two": data(1, RESULTS["valid-part"]) + data(0, block_message([3, 37], 38)),
        "valid-waiting": control(Waiting("collective 0", "rank 1", 2.0)) + data(0, RESULTS["valid-own"]),
        "aborted": control(Aborted(CAUSE)),
        "orderly": control(Aborted(Cause("aggregator a:1", "shutting down", orderly=True))),
    },
    "worker": {
        "valid-whole": control(Pending([1], 1), Welcome(1)) + data(1, WHOLE_RESULT) + control(Goodbye()),
        "valid-then-noise": control(Welcome(1)) + data(0, WHOLE_RESULT) + bytes(100),
        "refused": control(Refused("no")),
        "aborted": control(Welcome(1), Aborted(CAUSE)),
    },
}


def folder(target: str) -> Path:
    """Folder of the inputs of a target; some targets share one."""
    return CORPUS / SAME_INPUTS.get(target, target)


def write() -> int:
    """Write the files anew, in place of all but those that were found; return how many there are."""
    for target, inputs in SEEDS.items():
        folder(target).mkdir(parents=True, exist_ok=True)
        for old in folder(target).glob("*.bin"):
            if not old.name.startswith("found-"):
                old.unlink()
        for name, content in inputs.items():
            (folder(target) / f"{name}.bin").write_bytes(content)
    return sum(map(len, SEEDS.values()))
