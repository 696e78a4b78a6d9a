"""The section of the configuration about blocks and messages."""

from __future__ import annotations

from typing import Annotated

from omnireduce.config.meta import Section
from omnireduce.config.meta import meta as _meta

_OWN = r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*"
CODEC_PATTERN = rf"^(none|bf16|fp16|int8|natural|onebit|qsgd|scaled_sign|sign|ternary|(?=.{{3,50}}\Z){_OWN})\Z"
CODEC_ALLOWED = (
    "none, bf16, fp16, int8, natural, onebit, qsgd, scaled_sign, sign, ternary, or module:Class of up to 50 characters"
)
OwnCodec = Annotated[
    str, _meta("", pattern=rf"^(?=.{{3,50}}\Z){_OWN}\Z", allowed="module:Class of up to 50 characters")
]


class Protocol(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "Blocks, slots and stripes; the same on every worker of a job."

    block_size: Annotated[
        int, _meta("size of a block, the unit of sparsity", "elements", ge=8, le=65536, multiple_of=8)
    ] = 256
    slot_bytes: Annotated[
        int,
        _meta(
            "size of a slot, the buffer of one message; a block of 8-byte elements and its framing must fit",
            "bytes",
            ge=65536,
            le=67108864,
            multiple_of=4096,
        ),
    ] = 3 << 19
    slots: Annotated[int, _meta("slots, and so credits, of one link in one direction", "slots", ge=2, le=64)] = 3
    tcp_message_bytes: Annotated[
        int,
        _meta(
            "the longest message over tcp; a message has a 64th of what goes to its shard, but no less than a quarter "
            "of this; elsewhere a message may fill its slot",
            "bytes",
            ge=4096,
            le=67108864,
        ),
    ] = 1 << 20
    scan_span: Annotated[
        int,
        _meta("blocks scanned before a slot is sent that is not full yet", "blocks", ge=1, le=2**31),
    ] = 16_384
    stripe_blocks: Annotated[
        int,
        _meta(
            "consecutive blocks that go to the same shard; of tensors that several hosts sum, a chunk instead",
            "blocks",
            ge=1,
            le=2**20,
        ),
    ] = 64
    whole_bytes: Annotated[
        int,
        _meta(
            "tensors of up to so many bytes go to the first shard as a whole, where all aggregators are reached by "
            "loopback",
            "bytes",
            ge=0,
            le=2**30,
        ),
    ] = 1 << 20
    urgent_bytes: Annotated[
        int,
        _meta(
            "arrays of up to so many bytes that allreduce sums have a channel of their own, and do not wait behind "
            "larger ones; to aggregators and teams it is a second job, JOB+urgent; the same on every worker. 0: none",
            "bytes",
            ge=0,
            le=2**20,
        ),
    ] = 0
    codec: Annotated[
        str,
        _meta(
            "how sums and means of float32 travel, unless a call says otherwise: none, bf16, fp16, int8, natural, "
            "onebit, qsgd, scaled_sign, sign, ternary, or module:Class, a codec of your own, which aggregators name, "
            "too (aggregator.codecs); the same on every worker. Ranks of one host exchange exactly, whatever this says",
            pattern=CODEC_PATTERN,
            allowed=CODEC_ALLOWED,
        ),
    ] = "none"
    codec_seed: Annotated[int, _meta("of what codecs draw at random; the same on every worker", ge=0, le=2**63 - 1)] = 0
    max_part_bytes: Annotated[
        int,
        _meta(
            "the most that one rank may send as an object or as its part of allgather_ragged; the others set so much "
            "memory aside only when it comes",
            "bytes",
            ge=1024,
            le=2**34,
        ),
    ] = 1 << 30

    state_bytes: Annotated[
        int,
        _meta(
            "what block programs may keep on each shard; with more than 0 all collectives go through the aggregators, "
            "also between ranks of one host; the same on every worker",
            "bytes",
            ge=0,
            le=2**40,
        ),
    ] = 0

    @property
    def has_own(self) -> bool:
        """The codec is a class of the user's own."""
        return ":" in self.codec
