"""Control messages, with the checks of decoding. They are msgpack, tagged by type."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from omnireduce.core.admin_messages import AdminAnswer, AdminRequest
from omnireduce.core.names import TEAM_PATTERN
from omnireduce.core.status_messages import LISTED, MAX_TOTAL, Status, StatusRequest
from omnireduce.core.wire.safe_text import SHOWN, UNDECODABLE, shown
from omnireduce.errors import ProtocolError

PROTOCOL_VERSION = 22
TOKEN_BYTES = 16
NONCE_BYTES = PROOF_BYTES = 32  # a proof is HMAC-SHA256
MAX_LOCAL_RANKS = 256  # the most ranks of a host that share memory: each maps the memory of all
RELAY_CHARACTERS = 255  # the longest address of a relay
MAX_RELAYS = 8  # the most relays that a worker may come through: more are most likely a circle
_U16 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
_U24 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
_U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_U64 = Annotated[int, msgspec.Meta(ge=0)]
_I32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]  # numbers of a hello before they are checked
_Formation = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Total = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOTAL)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Message = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Proof = Annotated[bytes, msgspec.Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
_Ticket = Annotated[bytes, msgspec.Meta(max_length=PROOF_BYTES)]
_Team = Annotated[str, msgspec.Meta(pattern=TEAM_PATTERN)]
_Relay = Annotated[str, msgspec.Meta(max_length=RELAY_CHARACTERS)]
_RelayKey = Annotated[bytes, msgspec.Meta(max_length=TOKEN_BYTES)]
_Relays = Annotated[tuple[_Relay, ...], msgspec.Meta(max_length=MAX_RELAYS)]
_Key = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")]
_Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
TEXT_CHARACTERS, REFUSED_CHARACTERS = 4096, 600
# a text of one peer goes to all others: it must fit their messages
_Urgent = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
_State = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARACTERS)]
_Reason = Annotated[str, msgspec.Meta(max_length=REFUSED_CHARACTERS)]


class Cause(msgspec.Struct, frozen=True):
    """The reason for the end of a collective or job: who caused it, and what happened.

    `timeout` tells a time-out from a fault. `orderly`: an aggregator stopped between two collectives; a worker may
    still wait for other shards' results of the last collective. `mismatch`: ranks have begun different collectives, or
    some have refused a collective that others have begun.
    """

    culprit: _Text
    reason: _Text
    timeout: bool = False
    orderly: bool = False
    mismatch: bool = False


Mtu = Literal[256, 512, 1024, 2048, 4096]  # bytes


class Endpoint(msgspec.Struct, frozen=True):
    """One end of an RDMA connection: its GID and LID, queue pair, first sequence number, receive slots."""

    gid: Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Fa-f:.]{2,39}\Z")]
    lid: _U16
    queue: _U24
    sequence: _U24
    key: _U32
    address: _U64
    mtu: Mtu


class Greeting(msgspec.Struct, frozen=True, tag=True):
    """Worker to aggregator, the first message if there is a secret: it begins the handshake for the secret of a
    team."""

    version: int
    nonce: _Nonce
    team: _Team = ""


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """Aggregator to worker: prove the secret first, with this nonce."""

    nonce: _Nonce


class Proof(msgspec.Struct, frozen=True, tag=True):
    """Worker to aggregator, and aggregator to worker: the proof that the sender knows the secret."""

    proof: _Proof


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Worker to aggregator, first or after the proofs: the worker, the job that it wants to join, and its slots."""

    version: int
    job: str
    rank: _I32
    world_size: _I32
    shard: _I32
    shards: _I32
    slots: _I32
    slot_bytes: _I32
    host: str
    pid: _I32
    stripe_blocks: _I32  # the size of a stripe, which must be the same on all ranks
    timeout_s: float = 60.0  # the worker's limit for one collective; before that it must learn whom it waits for
    verbs: Endpoint | None = None  # this worker's endpoint for RDMA, if it wants to use it
    whole_bytes: _I32 = 0  # tensors up to this size may go to the first shard as a whole
    tcp_message_bytes: _Message = 1 << 18  # the longest message for this worker over TCP
    min_ranks: _I32 = 0  # an elastic job may start with this many workers; 0: the job is not elastic
    last_call_s: float = 0.0  # the time that an elastic job waits for more workers
    urgent_bytes: _Urgent = 0  # tensors up to this size have a separate channel, which is another job
    state_bytes: _State = 0  # bytes that block programs may keep on this shard
    launch: str = ""  # the id of the launch: ranks of different launches never meet; empty: not known
    formation: _Formation = 0  # in an elastic job, on all shards except the first: the number that the first shard gave
    survived: _Formation = 0  # the formation that this worker was in before; 0: it is new
    ticket: _Ticket = b""  # the ticket that the first shard gave to the members of formation `survived`
    team: str = ""  # ignored from a worker: the aggregator sets it to the team that was proved
    memory: _Key = ""  # the same text for workers that can share memory with each other; empty: it shares none
    relays: _Relays = ()  # the addresses of the relays that have passed this on, the last relay first
    relay: _RelayKey = b""  # the key of the last relay: it sends one sum for all ranks that come through it
    compiling: bool = False  # the worker will say this hello on another connection, once its kernels are compiled
    parent_rank: _I32 = -1  # a rank of a group: its rank in the job that the group belongs to; -1: no group
    refuses: _Reason = ""  # why this rank does not come to a group: ranks that wait for it, or come later, are refused


class Pending(msgspec.Struct, frozen=True, tag=True):
    """Aggregator to waiting workers: these ranks are still missing. `note`: the rank that was refused last, and the
    reason. `compiling`: missing ranks whose kernels are known to compile. While there are some, this is sent once a
    second, and the time to join stands still."""

    missing: Annotated[list[int], msgspec.Meta(max_length=LISTED)]
    total_missing: int
    note: _Text = ""
    compiling: Annotated[list[_U32], msgspec.Meta(max_length=LISTED)] = []


class RankAssignment(msgspec.Struct, frozen=True):
    """Rank `rank` of `world_size`. The worker tells `formation` to the other shards; `ticket` proves later that it was
    in this formation."""

    rank: _U32
    world_size: _U32
    formation: _Positive
    ticket: _Ticket


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Aggregator to worker: all ranks are here; collectives may start.

    `verbs` answers the `verbs` of the Hello. Without it blocks go over this connection, and `note` says why.
    `assignment` is the worker's rank in an elastic job. `whole_bytes`: the smallest that a rank sent. `host_token`
    names the place where the ranks of this worker's host meet. These ranks are `local_ranks`, ascending, on host number
    `host` of `hosts`. Without them each rank of the job sends its own blocks. `place`: in memory that local ranks share
    with an aggregator, this worker's slots begin at slot `place` × slots. `relayed`: the number of ranks of this
    generation that have come through the same relay; 0 without a relay. `shards`: the number of shards of the
    aggregator; 0 if it is not known.
    """

    generation: _Positive
    verbs: Endpoint | None = None
    note: _Text = ""
    assignment: RankAssignment | None = None
    host_token: _Token | None = None
    local_ranks: Annotated[tuple[_U32, ...], msgspec.Meta(max_length=MAX_LOCAL_RANKS)] = ()
    host: _U32 = 0
    hosts: _U32 = 1
    whole_bytes: _I32 = 0
    place: _U32 = 0
    relayed: _U32 = 0
    shards: _U32 = 0


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Aggregator to worker: you cannot join, because of `reason`; `temporary`: perhaps you can later."""

    reason: _Text
    temporary: bool = False


ITSELF = "the aggregator"  # an aggregator's name for itself: it does not know the address that a worker uses for it


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """Aggregator to workers: no result of a collective, which `what` describes, has left for `seconds`, because of
    `who`."""

    what: _Text
    who: _Text
    seconds: _Seconds

    def with_sender(self, address: str) -> Waiting:
        """The same message with the `address` of the aggregator, if it names itself."""
        if not self.who.startswith(ITSELF):
            return self
        who = self.who.replace(ITSELF, f"aggregator {address}", 1)
        return msgspec.structs.replace(self, who=who[:TEXT_CHARACTERS])  # the text may go into a Leave


class Report(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Worker to the first aggregator, in a job whose ranks exchange tensors in memory: their statistics so far.

    The numbers have the meaning of `Traffic`, for the collectives of the job. But `own_blocks` and the bytes count for
    this rank only, and `union_blocks` for its part. `late_s`: the total time that the others waited for each rank in
    `late`. The collective under way, which `what` describes, has waited `waited_s` for `total` ranks; `behind` lists
    some.
    """

    collectives: _Total = 0
    blocks: _Total = 0
    own_blocks: _Total = 0
    union_blocks: _Total = 0
    sent_bytes: _Total = 0
    received_bytes: _Total = 0
    late: Annotated[list[_U32], msgspec.Meta(max_length=LISTED)] = []
    late_s: Annotated[list[_Seconds], msgspec.Meta(max_length=LISTED)] = []
    what: _Text = ""
    behind: Annotated[list[_U32], msgspec.Meta(max_length=LISTED)] = []
    total: _U32 = 0
    waited_s: _Seconds = 0.0

    @property
    def for_other_shards(self) -> Report:
        """The report for the shards after the first shard: they must not count the bytes again."""
        return msgspec.structs.replace(self, sent_bytes=0, received_bytes=0)


class Newcomers(msgspec.Struct, frozen=True, tag=True):
    """Aggregator to workers: `count` other workers wait to join this job when it is formed anew."""

    count: _U32


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """Aggregator to workers: the job is over."""

    cause: Cause


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Worker to aggregator: the worker leaves, cleanly or (with a cause) because something failed."""

    cause: Cause | None = None


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """Aggregator to worker: your Leave was handled."""


class _Opening(msgspec.Struct):
    """The fields of a connection's first message that every version of the protocol has."""

    type: str
    version: int


ControlMessage = (
    Greeting
    | Challenge
    | Proof
    | Hello
    | Pending
    | Welcome
    | Refused
    | Waiting
    | Report
    | Newcomers
    | Aborted
    | Leave
    | Goodbye
    | StatusRequest
    | Status
    | AdminRequest
    | AdminAnswer
)
_control_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ControlMessage)
_opening_decoder = msgspec.msgpack.Decoder(_Opening)


def encode_control(message: ControlMessage) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_control(body: bytes) -> ControlMessage:
    """Decode and validate a control message. Raises ProtocolError."""
    try:
        message: ControlMessage = _control_decoder.decode(body)
        return message
    except UNDECODABLE as error:
        raise ProtocolError(_decode_error_text(body, error)) from None


def other_version(version: int) -> str:
    """The text for a peer with another version of the protocol; empty if the version is the same."""
    if version == PROTOCOL_VERSION:
        return ""
    return f"protocol version {version}, expected {PROTOCOL_VERSION}: install the same omnireduce everywhere"


def _decode_error_text(body: bytes, error: Exception) -> str:
    """The reason why a control message does not decode. The first message of another version may look different."""
    try:
        version_error = other_version(_opening_decoder.decode(body).version)
    except UNDECODABLE:
        version_error = ""
    return version_error or f"malformed control message: {shown(str(error)[:SHOWN])}"
