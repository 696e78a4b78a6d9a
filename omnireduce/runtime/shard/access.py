"""Access control of an aggregator shard: secrets, users, TLS and operators."""

from __future__ import annotations

import os
import secrets
import ssl
from dataclasses import dataclass, field

from omnireduce.core.admin_messages import AdminRequest, Order
from omnireduce.core.wire.control import NONCE_BYTES, other_version
from omnireduce.errors import ProtocolError
from omnireduce.protocol.joining.authentication import Gate
from omnireduce.support.secret import Secret
from omnireduce.support.teams import Teams
from omnireduce.transport.base import Link


@dataclass(frozen=True, slots=True)
class Access:
    """Rules of access to a shard. `teams`: the teams whose secrets workers may prove; None: no secret is wanted.
    `any_local_user`: any user of this host may share memory with the shard. `tls`: the TLS context that TCP connections
    must use; None: TCP without TLS. `ticket_key`: proves the survivors of elastic jobs; a shard that takes the place of
    another shard has the same key."""

    teams: Teams | None = None
    any_local_user: bool = False
    tls: ssl.SSLContext | None = None
    ticket_key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def secret_of(self, team: str) -> Secret | None:
        """The secret that this shard proves to its upstream for a worker of `team`; None if no secret is wanted."""
        return None if self.teams is None else self.teams.of(team).secrets[0]

    def gate(self, link: Link) -> Gate:
        """The gate that a new connection must pass before it may say Hello."""
        return Gate(self.teams, secrets.token_bytes(NONCE_BYTES), self._objection(link))

    def order(self, request: AdminRequest, link: Link, gate: Gate) -> Order:
        """The order that the peer's request gives to the daemon. Raises ProtocolError if the peer may not give it.

        A peer that may read the daemon's memory, or knows its own secret, is the operator. A team may end its own jobs.
        """
        if wrong := other_version(request.version):
            raise ProtocolError(wrong)
        if request.action == "end" and not request.job and not request.team:
            raise ProtocolError("a request to end jobs without a name; expected the name of a job or of a team")
        if is_operator(link) or (gate.proved and not gate.team.name):
            by, team = "the operator", request.team or None
        elif gate.proved and request.action == "end" and request.team in ("", gate.team.name):
            by, team = f"team '{gate.team.name}'", gate.team.name
        else:
            raise ProtocolError(_NOT_YOURS.format(action=request.text, user=os.geteuid()))
        return Order(request.action, f"{by} ({link.peer})", request.job, team, request.why)

    def _objection(self, link: Link) -> str:
        if self.any_local_user or not link.shares_memory or is_operator(link):
            return ""
        return (
            f"user {link.user} may not share memory with an aggregator of user {os.geteuid()}: "
            "set security.local_users = 'any' on both, or transport.kind = 'tcp' on the client"
        )


def is_operator(link: Link) -> bool:
    """Whether the kernel says that the peer is of root or of this process's user, on this host."""
    return link.process is not None and link.process.is_trusted


ANYBODY = Access()
_NOT_YOURS = (
    "only the operator may {action}: root or user {user} on the aggregator's host, if transport.kind allows shm, or a "
    "client that proves the aggregator's own secret (security.secret_file, without security.team); a team may end its "
    "own jobs"
)
