"""The parts of the configuration that say who may join, who may look, and what a team may do: docs/security.md."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from omnireduce.config.meta import LISTEN_ALLOWED, FilePath, Section, meta

Users = Literal["same", "any"]
TEAM_CHARACTERS = 64
SECRET_VARIABLE = "OMNIREDUCE_SECURITY_SECRET"
SECRET_KEY = "security.secret"  # no such key exists; who tries to set it is told so
TEAM_PATTERN = rf"^[A-Za-z0-9_-]{{0,{TEAM_CHARACTERS}}}\Z"
TEAM_ALLOWED = f'a string of up to {TEAM_CHARACTERS} characters out of A-Z a-z 0-9 _ -; "" for none'
_JobsPattern = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9._:@+*-]{1,128}\Z",
        extra={"allowed": "strings of 1 to 128 characters out of A-Z a-z 0-9 . _ : @ + -, and * for any of them"},
    ),
]


class Security(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "Who may join: docs/security.md. A secret itself is no part of the configuration."

    secret_file: Annotated[
        FilePath,
        meta(
            "file with the secret that workers and aggregators prove to each other to know; only its owner may be "
            "allowed to read it, or a group of this process. Of up to 4 lines a worker proves the first, an "
            "aggregator admits any. The variable OMNIREDUCE_SECURITY_SECRET can hold the secret instead"
        ),
    ] = ""
    team: Annotated[
        str,
        meta(
            'the team whose secret a worker has; "" is for the aggregators\' own secret',
            pattern=TEAM_PATTERN,
            allowed=TEAM_ALLOWED,
        ),
    ] = ""
    teams_folder: Annotated[
        FilePath,
        meta(
            "folder with a file for each team that an aggregator admits: NAME has its secret, and NAME.toml, if there "
            "is one, says which jobs are its own and how much they may take"
        ),
    ] = ""
    allow_no_secret: Annotated[
        bool,
        meta("let an aggregator without a secret listen beyond loopback: all who can reach its port may join"),
    ] = False
    local_users: Annotated[
        Users,
        meta('whose processes share memory with this one: "same" is this user\'s and root\'s, "any" all on this host'),
    ] = "same"
    tls_certificate: Annotated[
        FilePath,
        meta("PEM file: this end's certificate. With it an aggregator takes TCP connections by TLS only"),
    ] = ""
    tls_key: Annotated[FilePath, meta("PEM file: the certificate's key; only its owner may be allowed to read it")] = ""
    tls_ca: Annotated[
        FilePath,
        meta(
            "PEM file: who must have signed the other end's certificate. With it a worker connects by TLS, and an "
            "aggregator with TLS wants workers to have certificates, too"
        ),
    ] = ""


class Metrics(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "Metrics and health of the daemon by HTTP: /metrics for Prometheus, /healthz, /readyz. docs/operations.md"

    listen: Annotated[
        str,
        meta(
            'address to serve them at; "" serves none. Without token_file or tls_ca whoever reaches it sees the names '
            "of jobs and hosts",
            allowed=f'{LISTEN_ALLOWED}; or "" for none',
        ),
    ] = ""
    timeout_s: Annotated[
        float, meta("how long one request waits for the shards to answer", "seconds", ge=0.1, le=60)
    ] = 1.0
    token_file: Annotated[
        FilePath,
        meta(
            "file with the bearer token that /metrics wants, and /healthz and /readyz do not; only its owner may be "
            "allowed to read it. Of up to 4 lines any will do"
        ),
    ] = ""
    tls_certificate: Annotated[
        FilePath, meta("PEM file: the certificate of these pages. With it they come by HTTPS only")
    ] = ""
    tls_key: Annotated[FilePath, meta("PEM file: its key; only its owner may be allowed to read it")] = ""
    tls_ca: Annotated[
        FilePath,
        meta("PEM file: who must have signed the certificate of whoever asks for a page, health included"),
    ] = ""


class Terms(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a team may do, on each shard: its file NAME.toml in `security.teams_folder`."""

    jobs: Annotated[
        tuple[_JobsPattern, ...],
        Meta(min_length=1, max_length=64),
        meta('names of its jobs; without any NAME and "NAME.*"'),
    ] = ()
    max_jobs: Annotated[int, meta("most of its jobs at once", "jobs", ge=1, le=65536)] = 65536
    max_ranks: Annotated[int, meta("most ranks of its jobs together", "ranks", ge=1, le=2**20)] = 2**20
    max_bytes: Annotated[
        int, meta("most memory of slots and state of its jobs together", "bytes", ge=2**20, le=2**44)
    ] = 2**44
