"""Messages between rank 0 and the aggregator that it starts for its job, and from rank 0 to the other ranks.

A pair of connected Unix sockets joins the two processes. The rank sends an `Order`, together with a descriptor of its
own process if the system has pidfd_open(2). The aggregator sends `Compiling` now and then, and in the end `Ready` or
`EmbeddingFailed`. When the connection or the rank's process ends, the aggregator stops with the job. The rank passes
all these messages on to the other ranks unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct, msgpack

from omnireduce.support.config import Config

SECRET_BYTES = 32
MAX_MESSAGE_BYTES = 1 << 16  # the longest message
MAX_REASON_CHARACTERS = 4096  # the most characters of a reason
_Seconds = Annotated[float, Meta(ge=0, le=1e6)]
_Address = Annotated[str, Meta(pattern=r"^(127\.0\.0\.1|\[::1\]):[1-9][0-9]{0,4}\Z")]
_Secret = Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]


class Order(Struct, frozen=True):
    """The configuration of the aggregator. `sums`: it will have to sum. Otherwise all ranks exchange tensors in memory,
    and it needs no kernels."""

    config: Config
    sums: bool


class Compiling(Struct, frozen=True, tag="compiling"):
    """Progress of compiling the aggregator's kernels, in seconds that a processor takes."""

    done_s: _Seconds
    total_s: _Seconds


class Ready(Struct, frozen=True, tag="ready"):
    """The aggregator waits for the ranks at `address`. It admits workers that know `secret`, a random one."""

    address: _Address
    secret: _Secret


class EmbeddingFailed(Struct, frozen=True, tag="failed"):
    """There is no aggregator, and there will be none."""

    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARACTERS)]


News = Compiling | Ready | EmbeddingFailed
encode = msgpack.Encoder().encode
# Both raise msgspec.DecodeError, a ValueError, for anything else.
decode_news: Callable[[bytes], News] = msgpack.Decoder(News).decode
decode_order = msgpack.Decoder(Order).decode
