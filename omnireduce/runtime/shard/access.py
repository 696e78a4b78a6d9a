"""Whom an aggregator shard talks to."""

from __future__ import annotations

import os
import secrets
import ssl
from dataclasses import dataclass, field

from omnireduce.protocol.handshake import Gate
from omnireduce.secret import NONCE_BYTES, Secret
from omnireduce.teams import Teams
from omnireduce.transport.base import Link
from omnireduce.transport.shm import ShmLink


@dataclass(frozen=True, slots=True)
class Access:
    """`teams`: which secrets workers must prove to know; None: none. `any_local_user`: any user of this host may share
    memory with the shard. `tls`: TCP connections must use TLS with this; None: TCP goes without TLS. `ticket_key`: by
    this key a shard knows the survivors of elastic jobs; a shard that takes the place of another has the same key."""

    teams: Teams | None = None
    any_local_user: bool = False
    tls: ssl.SSLContext | None = None
    ticket_key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def secret_of(self, team: str) -> Secret | None:
        """What this shard proves to its upstream for a worker of `team`; None where no secret is wanted."""
        return None if self.teams is None else self.teams.of(team).secrets[0]

    def gate(self, link: Link) -> Gate:
        """The gate that a new connection must pass before it may say Hello."""
        return Gate(self.teams, secrets.token_bytes(NONCE_BYTES), self._objection(link))

    def _objection(self, link: Link) -> str:
        user = None if self.any_local_user or not isinstance(link, ShmLink) else link.foreign_user
        if user is None:
            return ""
        return (
            f"user {user} may not share memory with an aggregator of user {os.geteuid()}: "
            "set security.local_users = 'any' on both, or transport.kind = 'tcp' on the worker"
        )


ANYBODY = Access()
