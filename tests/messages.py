"""A control message of every kind, and the header of a message of blocks, as bytes."""

from __future__ import annotations

import struct

import msgspec

from omnireduce.core.admin_messages import AdminAnswer, AdminRequest
from omnireduce.core.status_messages import JobStatus, Status, StatusRequest, Traffic
from omnireduce.core.wire.control import (
    PROTOCOL_VERSION,
    Aborted,
    Cause,
    Challenge,
    ControlMessage,
    Endpoint,
    Goodbye,
    Greeting,
    Hello,
    Leave,
    Newcomers,
    Pending,
    Proof,
    RankAssignment,
    Refused,
    Report,
    Waiting,
    Welcome,
)
from omnireduce.support.secret import Secret

HEADER = struct.Struct("<QqIIIIII")  # the rest, up to HEADER_BYTES, is 0
SLOTS, SLOT_BYTES = 2, 65536
TEAM_TEXT = b"the secret of its team"
TEAM_SECRET = Secret(TEAM_TEXT, "team")
WORKER_NONCE, AGGREGATOR_NONCE = b"w" * 32, b"a" * 32
ENDPOINT = Endpoint("fe80:0000:0000:0000:0000:0000:0000:0001", 0, 17, 99, 7, 2**40, 4096)
HELLO = Hello(PROTOCOL_VERSION, "job", 0, 1, 0, 1, SLOTS, SLOT_BYTES, "host", 7, 64)
REFUSES = msgspec.structs.replace(HELLO, job="job+group.1", parent_rank=0, refuses="because")
ELASTIC = msgspec.structs.replace(HELLO, rank=5, world_size=3, min_ranks=1, survived=3, ticket=bytes(32))
GREETING = Greeting(PROTOCOL_VERSION, WORKER_NONCE)
TEAM_GREETING = Greeting(PROTOCOL_VERSION, WORKER_NONCE, TEAM_SECRET.team)
CAUSE = Cause("rank 1 (host h, pid 7)", "died", timeout=True)

MESSAGES: dict[str, ControlMessage] = {
    "greeting": GREETING,
    "greeting-team": TEAM_GREETING,
    "challenge": Challenge(AGGREGATOR_NONCE),
    "proof": Proof(bytes(32)),
    "hello": HELLO,
    "hello-memory": msgspec.structs.replace(HELLO, memory="0123456789abcdef" * 2),
    "hello-verbs": msgspec.structs.replace(HELLO, verbs=ENDPOINT),
    "hello-elastic": ELASTIC,
    "hello-refuses": REFUSES,
    "pending": Pending([1, 2], 2, "rank 1 was refused"),
    "welcome": Welcome(3, ENDPOINT, "note"),
    "welcome-assignment": Welcome(3, assignment=RankAssignment(1, 2, 9, bytes(32))),
    "welcome-host-token": Welcome(3, host_token=bytes(range(16))),
    "welcome-late": Welcome(2**40),
    "newcomers": Newcomers(2),
    "refused": Refused("because"),
    "waiting": Waiting("collective 3", "rank 1", 2.5),
    "report": Report(
        collectives=3, blocks=40, own_blocks=9, union_blocks=12, sent_bytes=9216, received_bytes=4096, late=[1],
        late_s=[0.5], what="collective 3", behind=[1], total=1, waited_s=1.5,
    ),
    "aborted": Aborted(CAUSE),
    "aborted-in-time": Aborted(Cause("rank 1", "died")),
    "leave": Leave(CAUSE),
    "leave-orderly": Leave(),
    "goodbye": Goodbye(),
    "admin-drain": AdminRequest(PROTOCOL_VERSION, "drain"),
    "admin-end": AdminRequest(PROTOCOL_VERSION, "end", "job", "team", "because"),
    "admin-answer": AdminAnswer(2),
    "status-request": StatusRequest(PROTOCOL_VERSION, ("job", 3, "")),
    "status": Status(
        shard="a:1", pid=7, version="0", uptime_s=1.5, connections=2, running=1, gathering=0, traffic=Traffic(),
        jobs_started=1, jobs_ended=0, aborts={"died": 1}, refused=0, more=True,
        jobs=[JobStatus(name="job", generation=3, world_size=2, joined=2, age_s=1.0, carried={"shm": 8})],
    ),
}  # fmt: skip
