"""Access to this daemon: reads the secrets, teams and certificates that the configuration names."""

from __future__ import annotations

from omnireduce.errors import ConfigError
from omnireduce.protocol.joining.authentication import GIVE_SECRET
from omnireduce.runtime.shard.access import Access
from omnireduce.support.addresses import is_loopback, listening_target, parse_listen
from omnireduce.support.config import Config
from omnireduce.support.teams import load_teams
from omnireduce.transport.tls import aggregator_context


def make_access(config: Config) -> Access:
    """Read the access rules of the shards: teams and secrets, local users, TLS.

    Raises ConfigError if a file is wrong. Raises it, too, if there is no secret and other hosts can reach the daemon,
    unless `security.allow_no_secret` allows that.
    """
    teams, listen = load_teams(config.security), config.aggregator.listen
    reach = "" if teams is not None or config.security.allow_no_secret else text_of_reach(listen)
    if reach:
        raise ConfigError(
            f"aggregator.listen: {listen} {reach}, and without a secret all of them may join: "
            f"give {GIVE_SECRET}, here and to the workers, or say security.allow_no_secret = true"
        )
    return Access(teams, config.security.local_users == "any", aggregator_context(config.security))


def count_changes(before: Access, after: Access) -> dict[str, int]:
    """Count the teams, the secrets, the new secrets, and the secrets that are gone."""
    secrets_before, secrets_after = (
        set() if access.teams is None else access.teams.known for access in (before, after)
    )
    teams = 0 if after.teams is None else len(after.teams)
    return {
        "teams": teams,
        "secrets": len(secrets_after),
        "new": len(secrets_after - secrets_before),
        "gone": len(secrets_before - secrets_after),
    }


def text_of_reach(listen: str) -> str:
    """The text that says why other hosts can, or could, reach the address `listen`; empty for a loopback address."""
    try:
        host = listening_target(parse_listen(listen).host).host
    except OSError as error:
        return f"cannot be looked up now ({error.strerror or error}) and may stand for an address of other hosts"
    return "" if is_loopback(host) else "can be reached from other hosts"
