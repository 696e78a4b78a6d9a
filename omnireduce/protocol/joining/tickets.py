"""Tickets of the members of a formation of an elastic job: they prove later that a worker was in it.

A ticket is made with a key that never leaves the daemon. So a shard need not remember which workers got one.
"""

from __future__ import annotations

from hashlib import blake2b
from hmac import compare_digest

from omnireduce.core.wire.control import Hello

_PURPOSE = b"omni ticket 1"


def ticket(key: bytes, hello: Hello, formation: int) -> bytes:
    """The ticket of the members of `formation` of the job that `hello` names: keyed BLAKE2b (RFC 7693), 32 bytes.

    HMAC-SHA256 would do as well, but in each shard it touches 1.1 MiB of OpenSSL.
    """
    text = "\0".join((hello.team, hello.job, hello.launch, str(formation)))
    return blake2b(text.encode(), digest_size=32, key=key, person=_PURPOSE).digest()


def is_valid(key: bytes, hello: Hello) -> bool:
    """Whether the worker of this hello was in the formation that it names. The check of a wrong ticket takes as long
    as the check of a right ticket."""
    return hello.survived > 0 and compare_digest(hello.ticket, ticket(key, hello, hello.survived))
