"""Access to the pages of metrics: reads the tokens and certificates that the configuration names."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import ssl
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from omnireduce.aggregator.access import text_of_reach
from omnireduce.errors import ConfigError
from omnireduce.support.addresses import is_loopback, parse_listen
from omnireduce.support.config.schema import Metrics
from omnireduce.support.secret import read_lines
from omnireduce.transport.tls import aggregator_context

CHALLENGES = 'Bearer realm="omnireduce metrics"', 'Basic realm="omnireduce metrics"'  # browsers know the second
_TOKEN = re.compile(rb"[A-Za-z0-9._~+/-]+=*\Z")  # RFC 6750
_BEARER = re.compile(r"bearer +(\S+) *\Z", re.IGNORECASE)
_BASIC = re.compile(r"basic +(\S+) *\Z", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PageAccess:
    """Rules of access to the pages. `tokens`: SHA-256 digests of the tokens; a request for metrics must have one of
    them; empty: no token is needed. `tls`: the TLS context of the pages; None: plain HTTP. `names`: the names of this
    host, beside those of loopback, under which pages are served; None: any name."""

    tokens: tuple[bytes, ...] = ()
    tls: ssl.SSLContext | None = None
    names: frozenset[str] | None = None

    def answers_for(self, host: str) -> bool:
        """Whether to answer a request with this Host header; empty: it had none, so it is not from a browser."""
        if self.names is None or not host:
            return True
        with suppress(ValueError):  # no name and no address
            parts = urlsplit(f"//{host}")
            name = (parts.hostname or "").rstrip(".")
            return parts.netloc == host and "@" not in host and (is_loopback(name) or name in self.names)
        return False

    def admits(self, authorization: str) -> bool:
        """Whether a request with this header may see the metrics: with a token, or any name and a token as the
        password. The time tells nothing about the tokens."""
        digest = _digest(_token_of_header(authorization))
        matches = [hmac.compare_digest(digest, token) for token in self.tokens]  # all, so that the time tells nothing
        return not self.tokens or any(matches)


OPEN_PAGES = PageAccess()


def make_pages(metrics: Metrics) -> PageAccess:
    """Read the access rules of the pages. Raises ConfigError."""
    tokens = read_lines(metrics.token_file, "metrics.token_file", "token") if metrics.token_file else []
    for token in tokens:
        if not _TOKEN.match(token):
            expected = "letters, digits and . _ ~ + / - alone, as from: (umask 077; openssl rand -hex 32 > FILE)"
            raise ConfigError(f"{metrics.token_file}: got a token with other characters, expected {expected}")
    tls = aggregator_context(metrics, "metrics")
    return PageAccess(tuple(map(_digest, tokens)), tls, None if tokens or tls else _own_names(metrics.listen))


def _own_names(listen: str) -> frozenset[str] | None:
    """The names under which pages on loopback are served. None: any name, because other hosts can reach them.

    A web site can give its name the address of loopback (DNS rebinding). Then a browser on this host takes these pages
    for pages of the site, and hands them to its scripts.
    """
    if not listen or text_of_reach(listen):
        return None
    return frozenset({parse_listen(listen).host.lower()})


def warning_if_open(metrics: Metrics) -> str:
    """A warning if hosts beyond this one can read the metrics; empty if they cannot."""
    reach = "" if not metrics.listen or metrics.token_file or metrics.tls_ca else text_of_reach(metrics.listen)
    return reach and (
        f"metrics.listen: {metrics.listen} {reach}, and all of them may read the metrics, with the names of jobs and "
        "teams: give metrics.token_file, or metrics.tls_ca"
    )


def _token_of_header(authorization: str) -> bytes:
    """The token in a header; nothing if there is none."""
    if match := _BEARER.match(authorization):
        return match[1].encode(errors="replace")
    if match := _BASIC.match(authorization):
        with suppress(ValueError):  # no base64
            return base64.b64decode(match[1].encode("ascii"), validate=True).partition(b":")[2]
    return b""


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
