"""What the members of a formation of an elastic job are given, and nobody else: it proves later that they were in it.

A ticket is made of a key that never leaves the daemon, so a shard need not remember whom it gave one.
"""

from __future__ import annotations

import hmac

from omnireduce.wire import Hello

_PURPOSE = b"omnireduce ticket 1"


def ticket(key: bytes, hello: Hello, formation: int) -> bytes:
    """That of the members of `formation` of the job that `hello` names, HMAC-SHA256."""
    said = "\0".join((hello.team, hello.job, hello.launch, str(formation)))
    return hmac.digest(key, _PURPOSE + b"\0" + said.encode(), "sha256")


def is_valid(key: bytes, hello: Hello) -> bool:
    """Whether the worker that says this was in the formation that it names. Takes as long for a wrong ticket."""
    return hello.survived > 0 and hmac.compare_digest(hello.ticket, ticket(key, hello, hello.survived))
