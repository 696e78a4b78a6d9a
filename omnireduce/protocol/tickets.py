"""What the members of a formation of an elastic job are given, and nobody else: it proves later that they were in it.

A ticket is made of a key that never leaves the daemon, so a shard need not remember whom it gave one.
"""

from __future__ import annotations

from hashlib import blake2b
from hmac import compare_digest

from omnireduce.wire.control import Hello

_PURPOSE = b"omni ticket 1"


def ticket(key: bytes, hello: Hello, formation: int) -> bytes:
    """That of the members of `formation` of the job that `hello` names: keyed BLAKE2b (RFC 7693), 32 bytes.

    HMAC-SHA256 would do as well, but in each shard it touches 1.1 MiB of OpenSSL.
    """
    said = "\0".join((hello.team, hello.job, hello.launch, str(formation)))
    return blake2b(said.encode(), digest_size=32, key=key, person=_PURPOSE).digest()


def is_valid(key: bytes, hello: Hello) -> bool:
    """Whether the worker that says this was in the formation that it names. Takes as long for a wrong ticket."""
    return hello.survived > 0 and compare_digest(hello.ticket, ticket(key, hello, hello.survived))
