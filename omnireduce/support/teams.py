"""Workers that may join an aggregator: workers with its own secret, and teams with their secrets, jobs and limits.

`security.teams_folder` has a file NAME with the secret of each team. If a team's `TeamLimits` differ from the defaults,
there is also a file NAME.toml with them.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

import msgspec

from omnireduce.core.names import TEAM_ALLOWED, TEAM_CHARACTERS, TEAM_PATTERN, URGENT
from omnireduce.errors import ConfigError, UsageError
from omnireduce.support.config.schema import Security, TeamLimits
from omnireduce.support.config.validation import expected_one_of, keys_of
from omnireduce.support.files.paths import decode_text, user_path
from omnireduce.support.secret import MAX_LINES, Secret, load_secrets, read_private, read_secrets

MAX_TEAMS = 1024
TERMS_BYTES = 64 * 1024
_FOLDER = "security.teams_folder"
_SUFFIX = ".toml"
_TERMS = {key.name: key for key in keys_of("terms", TeamLimits)}
NO_LIMITS = TeamLimits()
msgspec.convert({}, TeamLimits)  # the first conversion prepares the type, and threads may not do that at the same time


@dataclass(frozen=True, slots=True)
class Team:
    """The workers that know one of `secrets`. The name "" stands for workers with the aggregator's own secret."""

    name: str
    secrets: tuple[Secret, ...] = ()
    terms: TeamLimits = NO_LIMITS

    def proved(self, proof: bytes, worker_nonce: bytes, aggregator_nonce: bytes) -> Secret | None:
        """The secret that a worker has proved; None: it knows none of them. All are tried, so that the time shows
        nothing."""
        proved = None
        for secret in self.secrets:
            if secret.proves(proof, "worker", worker_nonce, aggregator_nonce):
                proved = secret
        return proved

    @property
    def jobs(self) -> Sequence[str]:
        """Patterns of the names of the team's jobs; * stands for any characters."""
        return self.terms.jobs or ((self.name, f"{self.name}.*") if self.name else ("*",))

    def may_use(self, job: str) -> bool:
        """Whether the team's jobs, or their channels for urgent tensors, may have this name."""
        return any(fnmatchcase(job.removesuffix(URGENT), pattern) for pattern in self.jobs)


ANYBODY = Team("")  # where there is no secret


class Teams:
    """The teams of an aggregator, by name; "" has the aggregator's own secrets, if there are any.

    All teams have the same number of secrets: random ones, which nobody knows, are added to the real ones. One more
    team of this kind stands for every team that does not exist. So neither an answer nor its time tells which teams
    there are. `known`: each real secret with the name of its team.
    """

    def __init__(self, known: Mapping[str, Sequence[Secret]], terms: Mapping[str, TeamLimits] | None = None) -> None:
        self.known = frozenset((name, secret) for name, team_secrets in known.items() for secret in team_secrets)
        self._teams = {
            name: Team(name, _fill_up(team_secrets, name), (terms or {}).get(name, NO_LIMITS))
            for name, team_secrets in {"": (), **known}.items()
        }
        nobody = "?" * TEAM_CHARACTERS
        self._nobody = Team(nobody, _fill_up((), nobody))

    def __len__(self) -> int:
        """The number of teams, without the aggregator's own."""
        return len(self._teams) - 1

    def of(self, name: str) -> Team:
        """The team of this name, or a team whose secrets nobody knows."""
        return self._teams.get(name, self._nobody)


def _fill_up(real_secrets: Sequence[Secret], team: str) -> tuple[Secret, ...]:
    return (*real_secrets, *(Secret(secrets.token_bytes(32), team) for _ in range(MAX_LINES - len(real_secrets))))


def load_teams(security: Security, environ: Mapping[str, str] = os.environ) -> Teams | None:
    """Read the teams that the configuration and its files admit; None if no secret is wanted.

    Raises ConfigError for any error in the files.
    """
    general = load_secrets(security, environ)
    if not general and not security.teams_folder:
        return None
    known: dict[str, Sequence[Secret]] = {"": general}
    terms: dict[str, TeamLimits] = {}
    if security.teams_folder:
        folder = _folder_of(security)
        for name in _names_in(folder):
            if name.endswith(_SUFFIX):
                terms[name.removesuffix(_SUFFIX)] = _read_terms(folder / name)
            else:
                known[name] = read_secrets(folder / name, _FOLDER, name)
    _check_files(known, terms, security.teams_folder)
    return Teams(known, terms)


def _folder_of(security: Security) -> Path:
    try:
        return user_path(security.teams_folder)
    except UsageError as error:
        raise ConfigError(f"{_FOLDER}: {security.teams_folder} cannot be read: {error}") from None


def _names_in(folder: Path) -> list[str]:
    """The names of the files in a folder of teams, without those that begin with a dot.

    Such a file comes from an editor or from a mount. An example is `..data` of Kubernetes: the other names are links to
    files in it.
    """
    try:
        folder_stat = folder.stat()
        read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
        with os.scandir(folder) as entries:
            names = list(islice((entry.name for entry in entries if not entry.name.startswith(".")), 2 * MAX_TEAMS + 1))
    except OSError as error:
        raise ConfigError(f"{_FOLDER}: {folder} cannot be read: {error.strerror}") from None
    # Kubernetes mounts Secrets read-only, though the mode of the folder lets all write to it.
    if folder_stat.st_mode & 0o022 and not (read_only and folder_stat.st_uid == 0):
        allowed = f"mode {stat.S_IMODE(folder_stat.st_mode):04o} lets others than its owner add teams"
        expected = "expected 0700, or a folder of root that is mounted read-only; run chmod 700"
        raise ConfigError(f"{_FOLDER}: {folder}: {allowed}, {expected}")
    for name in names:
        if not re.match(TEAM_PATTERN, name.removesuffix(_SUFFIX)):
            expected = f"files named like teams ({TEAM_ALLOWED.partition(';')[0]}), each with or without {_SUFFIX}"
            raise ConfigError(f"{_FOLDER}: {folder}: got a file {name!r}, expected {expected}")
    teams = sum(not name.endswith(_SUFFIX) for name in names)
    if teams > MAX_TEAMS or len(names) > 2 * MAX_TEAMS:
        raise ConfigError(f"{_FOLDER}: {folder}: got {len(names)} files or more, expected at most {MAX_TEAMS} teams")
    return names


def _read_terms(file: Path) -> TeamLimits:
    data = read_private(file, _FOLDER, most_bytes=TERMS_BYTES, is_secret=False)
    if len(data) > TERMS_BYTES:
        raise ConfigError(f"{file}: got more than {TERMS_BYTES} bytes")
    text = decode_text(data, str(file), expected="a TOML file")
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None
    values: dict[str, object] = {}
    for name, value in table.items():
        if name not in _TERMS:
            raise ConfigError(f"{file}: {name!r}: unknown key, {expected_one_of(name, _TERMS)}")
        try:
            values[name] = _TERMS[name].read(value)
        except ConfigError as error:
            raise ConfigError(f"{file}: {name}: {error}") from None
    return msgspec.convert(values, TeamLimits)


def _check_files(known: Mapping[str, Sequence[Secret]], terms: Mapping[str, TeamLimits], folder: str) -> None:
    """Raise ConfigError if the files do not fit together."""
    for name in terms.keys() - known.keys():
        raise ConfigError(f"{_FOLDER}: {folder}: got {name}{_SUFFIX} and no secret for this team in a file {name}")
    owners: dict[Secret, str] = {}
    for name, team_secrets in known.items():
        for secret in team_secrets:
            owner = owners.setdefault(secret, name)
            if owner != name:
                owners_text = " and ".join(f"team {team}" if team else "the aggregator's own" for team in (owner, name))
                raise ConfigError(f"{_FOLDER}: {folder}: {owners_text} have a secret in common, expected none")
