"""Who may join this daemon, as its configuration says."""

from __future__ import annotations

import ipaddress
import socket

from omnireduce.config import Config, parse_address
from omnireduce.errors import ConfigError
from omnireduce.protocol.handshake import GIVE
from omnireduce.runtime.access import Access
from omnireduce.secret import load_secret
from omnireduce.transport.tls import aggregator_context


def make_access(config: Config) -> Access:
    """Whom the shards talk to. Raises ConfigError, also when all the network could join without a word having been
    said about that."""
    secret = load_secret(config.security)
    listen = config.aggregator.listen
    if secret is None and not config.security.allow_no_secret and not _is_loopback(parse_address(listen)[0]):
        raise ConfigError(
            f"aggregator.listen: {listen} can be reached from other hosts, and without a secret all of them may join: "
            f"give {GIVE}, here and to the workers, or say security.allow_no_secret = true"
        )
    return Access(secret, config.security.local_users == "any", aggregator_context(config.security))


def _is_loopback(host: str) -> bool:
    """Whether `host` can be reached from this host alone. One that has no address is for the bind to complain about."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
