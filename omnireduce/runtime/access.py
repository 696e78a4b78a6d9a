"""Whom an aggregator shard talks to."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from omnireduce.protocol.handshake import Gate
from omnireduce.secret import NONCE_BYTES, Secret
from omnireduce.transport.base import Link


@dataclass(frozen=True, slots=True)
class Access:
    """`secret`: what workers must prove to know."""

    secret: Secret | None = None

    def gate(self, link: Link) -> Gate:
        """What stands between a new connection and its Hello."""
        return Gate(self.secret, secrets.token_bytes(NONCE_BYTES))


ANYBODY = Access()
