"""Warnings about settings that are allowed but most likely not meant, at the start and after SIGHUP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec

from omnireduce.errors import ConfigError, show
from omnireduce.runtime.shard.access import Access
from omnireduce.support.addresses import (
    Target,
    is_loopback,
    is_numeric,
    is_own_target,
    is_wildcard,
    listening_target,
    look_up,
    own_addresses,
    parse_address,
    parse_listen,
)
from omnireduce.support.config import Config

# Sections that a daemon reads:
_SECTIONS_READ = ("transport", "verbs", "aggregator", "security", "metrics", "trace", "log")

_PAGE_KEYS = ("token_file", "tls_certificate", "tls_key", "tls_ca")


def advice(config: Config, access: Access) -> Iterator[tuple[str, str]]:
    """Yield each warning: its event and its text."""
    if access.teams is not None and not access.teams.known:
        folder = config.security.teams_folder
        yield (
            "nobody_may_join",
            f"security.teams_folder: {folder} has no team, and there is no other secret: nobody can join",
        )
    if not config.metrics.listen:
        for name in _PAGE_KEYS:
            if getattr(config.metrics, name):
                yield "no_effect", f"metrics.{name} has no effect: metrics.listen is not set, so there are no pages"
    if config.security.team:
        team = config.security.team
        yield "no_effect", f"security.team has no effect on an aggregator, which admits more than team {team}"
    yield from _loopback_warnings(config.aggregator.listen)


def _loopback_warnings(listen: str) -> Iterator[tuple[str, str]]:
    """Yield a warning if the host name to listen at resolves to loopback on this host."""
    host, port = parse_listen(listen)
    with suppress(OSError):  # it cannot be looked up just now
        address = listening_target(host).host
        if not is_numeric(host) and not is_loopback(host) and is_loopback(address):
            own_address = " or ".join(own_addresses()) or "an address"
            advice_text = f"listen at :{port}, or at {own_address} with this port"
            text = f"aggregator.listen: {host} is {address} on this host, which no other host reaches: {advice_text}"
            yield "listen_loopback", text


def changed_settings(running: Config, new_config: Config) -> list[str]:
    """The settings of a daemon that differ, each with its old and its new value."""
    return [
        f"{section}.{name} ({show(msgspec.to_builtins(old))}, now {show(msgspec.to_builtins(new))})"
        for section in _SECTIONS_READ
        for name in getattr(running, section).__struct_fields__
        if (old := getattr(getattr(running, section), name)) != (new := getattr(getattr(new_config, section), name))
    ]


def refuse_itself_as_upstream(upstream: Sequence[str], own_addresses: Sequence[str]) -> None:
    """Raise ConfigError if an `upstream` address is one of the daemon's `own_addresses`."""
    for address in upstream:
        if any(_is_the_same(address, own_address) for own_address in own_addresses):
            raise ConfigError(f"aggregator.upstream: {address} is this aggregator itself, expected the one above it")


def _is_the_same(address: str, own_address: str) -> bool:
    (host, port), (own_host, own_port) = parse_address(address), parse_address(own_address)
    targets: list[Target] = []
    with suppress(OSError):  # it may become known later
        targets = look_up(host) if port == own_port else []
    if is_wildcard(own_host):
        return any(map(is_own_target, targets))
    return bool(targets) and listening_target(own_host).host in {target.host for target in targets}
