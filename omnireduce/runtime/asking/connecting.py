"""Connection of a worker or a status client to an aggregator: one attempt, by the wanted transport."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable

from omnireduce.addresses import parse_address
from omnireduce.config import Config
from omnireduce.errors import TransportError
from omnireduce.transport.shm import connect_shm
from omnireduce.transport.stream import StreamLink
from omnireduce.transport.tcp import TcpLink, connect_tcp
from omnireduce.transport.tls import connect_tls


def connect_once(
    address: str,
    config: Config,
    make_tls: Callable[[], ssl.SSLContext | None],
    deadline: float,
    say: Callable[[str], None],
) -> StreamLink:
    """Connect to an aggregator; only control messages can flow yet. Calls `make_tls` before it connects by TCP. Calls
    `say`, with the reason, when shared memory is there but belongs to another user.

    Raises OSError when the aggregator cannot be reached; TransportError when only shared memory may be used and it
    belongs to another user, or when TLS fails; and what `make_tls` raises.
    """
    host, port = parse_address(address)
    wanted = config.transport
    timeout_s = max(0.1, deadline - time.monotonic())
    if wanted.kind in ("auto", "shm"):
        any_user = config.security.local_users == "any"
        try:
            link = connect_shm(host, port, timeout_s, any_user=any_user)
        except (OSError, TransportError) as error:
            if wanted.kind == "shm":
                raise
            if isinstance(error, TransportError):
                say(str(error))
        else:
            owner = link.process.user
            if wanted.kind == "shm" or any_user or owner == os.geteuid():
                return link
            # Root's memory could be shared, but an aggregator of root shares none with other users.
            link.close()
            say(
                f"the aggregator {address} is of user {owner}, this worker of user {os.geteuid()}: for shared memory "
                "set security.local_users = 'any' on both"
            )
    tls = make_tls()
    if tls is not None:
        return connect_tls(host, port, timeout_s, wanted.dead_peer_s, tls)
    return connect_tcp(host, port, timeout_s, wanted.dead_peer_s)


def why_lost(link: StreamLink) -> str:
    """What may be wrong when an aggregator hangs up before it has admitted this worker."""
    tls = ", and does it want TLS (security.tls_ca here)" if type(link) is TcpLink else ""
    return f"; does its transport.kind allow {link.kind}{tls}?"
