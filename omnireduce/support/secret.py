"""Shared secrets of a cluster: their files, and proofs of knowing them.

They are not part of the configuration, so a program that shows its configuration cannot show them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from omnireduce.core.names import TEAM_CHARACTERS
from omnireduce.errors import ConfigError, UsageError
from omnireduce.support.config.schema import SECRET_VARIABLE, Security
from omnireduce.support.files.paths import BYTE_ORDER_MARK, user_path, without_waiting

MIN_BYTES, MAX_BYTES = 16, 4096
MAX_LINES = 4  # the most lines of a file; each line is a secret
_BLOCK_BYTES = 64  # block size of SHA-256: HMAC hashes a longer key
_PURPOSE = b"omnireduce handshake 2"
_EXPECTED = (
    "expected 0600, or 0440 of root and of a group that this process is in; run chmod 600, and make a new secret if "
    "somebody may have read it"
)
_USER, _ITS_GROUP, _GROUP = 2, 4, 8  # tags of entries in an access list
_HOW_TO_MAKE = "for example by: (umask 077; openssl rand -hex 32 > FILE)"

Role = Literal["worker", "aggregator"]


class Secret:
    """Bytes that only members of `team` know. It makes and checks proofs. No text of it shows the bytes.

    Two secrets with the same bytes are equal, even if their teams differ.
    """

    __slots__ = ("_key", "team")

    def __init__(self, key: bytes, team: str = "") -> None:
        # HMAC would hash a long key each time. It is hashed here, once, so that every proof takes the same time.
        self._key = key if len(key) <= _BLOCK_BYTES else hashlib.sha256(key).digest()
        self.team = team

    def __repr__(self) -> str:
        return "Secret(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._key, other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def proof(self, role: Role, worker_nonce: bytes, aggregator_nonce: bytes) -> bytes:
        """The proof of a `role` that knows the secret, for these two nonces: HMAC-SHA256."""
        team = self.team.encode().ljust(TEAM_CHARACTERS, b"\0") if self.team else b""
        message = b"\0".join((_PURPOSE, role.encode(), worker_nonce + aggregator_nonce + team))
        return hmac.digest(self._key, message, "sha256")

    def proves(self, proof: bytes, role: Role, worker_nonce: bytes, aggregator_nonce: bytes) -> bool:
        """Whether `proof` is right for `role`. The check of a wrong proof takes as long as that of the right proof."""
        return hmac.compare_digest(proof, self.proof(role, worker_nonce, aggregator_nonce))


def load_secret(security: Security, environ: Mapping[str, str] = os.environ) -> Secret | None:
    """The secret that a worker proves: the first line of `security.secret_file` or of the environment's variable; None
    without both.

    Raises ConfigError for a file that cannot be read or that others may read (see `read_private`), for a line that is
    too short or too long to be a secret, for too many lines, if both places give a secret, and if a team has none.
    """
    secrets = load_secrets(security, environ, security.team)
    if security.team and not secrets:
        raise ConfigError(
            f"security.team: got {security.team} and no secret: give security.secret_file or the variable "
            f"{SECRET_VARIABLE}, with the secret of this team"
        )
    return secrets[0] if secrets else None


def load_secrets(security: Security, environ: Mapping[str, str] = os.environ, team: str = "") -> list[Secret]:
    """All lines of `security.secret_file` or of the variable, the newest secret first. Raises ConfigError."""
    text = environ.get(SECRET_VARIABLE)
    if text is not None and security.secret_file:
        raise ConfigError(f"{SECRET_VARIABLE}: got a secret from it and one from security.secret_file, expected one")
    if text is not None:
        return [Secret(line, team) for line in _lines(os.fsencode(text), SECRET_VARIABLE, "secret")]
    return read_secrets(security.secret_file, "security.secret_file", team) if security.secret_file else []


def read_secrets(name: str | Path, key: str, team: str = "") -> list[Secret]:
    """The secrets of a team in a file, one on each line. Raises ConfigError, which names `key` or the file."""
    return [Secret(line, team) for line in read_lines(name, key, "secret")]


def read_lines(name: str | Path, key: str, noun: str) -> list[bytes]:
    """The lines of a private file, 1 to MAX_LINES, without the white space around them. Errors call such a line
    `noun`. Raises ConfigError, which names `key` or the file."""
    return _lines(read_private(name, key, most_bytes=MAX_LINES * (MAX_BYTES + 2)), str(name), noun)


def read_private(name: str | Path, key: str, *, most_bytes: int = MAX_BYTES, is_secret: bool = True) -> bytes:
    """The first `most_bytes` bytes of a private file, and one more byte if the file is longer.

    A file is private if only its owner may read it, or if root lets a group of this process read it. All may read a
    file without a secret (`is_secret`), but only its owner may write to it. Raises ConfigError, which names `key`.
    """
    try:
        with open(user_path(name), "rb", opener=without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{key}: {name} is no regular file")
            mode = f"{key}: {name}: mode {stat.S_IMODE(status.st_mode):04o}"
            if not is_secret and status.st_mode & 0o022:
                raise ConfigError(f"{mode} lets others than its owner change it, expected 0644 or less; run chmod 644")
            if is_secret and status.st_mode & 0o077:
                _check_readers(file.fileno(), status, mode)
            return file.read(most_bytes + 1)
    except (OSError, UsageError) as error:
        raise ConfigError(f"{key}: {name} cannot be read: {getattr(error, 'strerror', error)}") from None


def _check_readers(file: int, status: os.stat_result, mode_text: str) -> None:
    """Accept a file of root that a group of this process may read: Kubernetes mounts secrets in this way. Accept a file
    whose access list lets only this process's user read it: systemd passes credentials in this way. Raises ConfigError
    for all other files."""
    if status.st_mode & 0o037:
        raise ConfigError(f"{mode_text} lets others than its owner use it, {_EXPECTED}")
    if status.st_uid != 0:  # all users may be in the group of a user's file
        raise ConfigError(f"{mode_text} lets a group read it, but it belongs to user {status.st_uid}, {_EXPECTED}")
    users, groups = _readers_of_access_list(file, status.st_gid)
    if strangers := groups - {os.getegid(), *os.getgroups()}:
        raise ConfigError(
            f"{mode_text} lets group {min(strangers)} read it, to which this process does not belong, {_EXPECTED}"
        )
    if strangers := users - {0, os.geteuid()}:
        raise ConfigError(f"{mode_text} has an access list that lets user {min(strangers)} read it, {_EXPECTED}")


def _readers_of_access_list(file: int, group: int) -> tuple[set[int], set[int]]:
    """The users and groups, beside the owner, that may read a file whose mode has the read bit of the group.

    With an access list, this bit is only the most that the list may allow: see acl(5).
    """
    try:
        entries = struct.iter_unpack("<HHI", os.getxattr(file, "system.posix_acl_access")[4:])  # after its version
    except OSError:
        return set(), {group}
    readers = [(tag, group if tag == _ITS_GROUP else number) for tag, allowed, number in entries if allowed]
    users = {number for tag, number in readers if tag == _USER}
    return users, {number for tag, number in readers if tag in (_ITS_GROUP, _GROUP)}


def _lines(data: bytes, source: str, noun: str) -> list[bytes]:
    lines = [line.strip() for line in data.removeprefix(BYTE_ORDER_MARK).splitlines() if line.strip()] or [b""]
    if len(lines) > MAX_LINES:
        raise ConfigError(f"{source}: got {len(lines)} lines or more, expected 1 to {MAX_LINES}, each a {noun}")
    for line in lines:
        if not MIN_BYTES <= len(line) <= MAX_BYTES:
            got = f"a {noun} of {len(line)} bytes" + (" on one of its lines" if len(lines) > 1 else "")
            raise ConfigError(f"{source}: got {got}, expected {MIN_BYTES} to {MAX_BYTES}, made {_HOW_TO_MAKE}")
    return lines
