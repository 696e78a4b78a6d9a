"""The shared secret of a cluster: where it comes from, and the proofs that it makes.

It is no part of the configuration, so that nothing that shows a configuration can show it.
"""

from __future__ import annotations

import hmac
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from omnireduce.config_schema import Security
from omnireduce.errors import ConfigError

SECRET_VARIABLE = "OMNIREDUCE_SECURITY_SECRET"
SECRET_KEY = "security.secret"  # that it has no such key is said to those who try
MIN_BYTES, MAX_BYTES = 16, 4096
NONCE_BYTES = PROOF_BYTES = 32
_PURPOSE = b"omnireduce handshake 2"
_EXPECTED = (
    "expected 0600, or 0440 of root and of a group that this process is in; run chmod 600, and make a new one if "
    "somebody may have read it"
)
_USER, _ITS_GROUP, _GROUP = 2, 4, 8  # of the tags in an access list
_HOW = "for example by: (umask 077; openssl rand -hex 32 > FILE)"

Role = Literal["worker", "aggregator"]


class Secret:
    """Bytes that only members know. It makes and checks proofs, and shows itself to nobody."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def __repr__(self) -> str:
        return "Secret(...)"

    def proof(self, role: Role, worker_nonce: bytes, aggregator_nonce: bytes) -> bytes:
        """What only a `role` that knows the secret can say after these nonces, HMAC-SHA256."""
        said = b"\0".join((_PURPOSE, role.encode(), worker_nonce + aggregator_nonce))
        return hmac.digest(self._key, said, "sha256")

    def proves(self, proof: bytes, role: Role, worker_nonce: bytes, aggregator_nonce: bytes) -> bool:
        """Whether `proof` is that of the `role`; takes as long for a wrong one as for the right one."""
        return hmac.compare_digest(proof, self.proof(role, worker_nonce, aggregator_nonce))


def load_secret(security: Security, environ: Mapping[str, str] = os.environ) -> Secret | None:
    """The secret in `security.secret_file` or in the environment; None when there is neither.

    White space around it does not count. Raises ConfigError for a file that cannot be read, that others may read
    (see `read_private`), for a secret that is too short, and when it comes from both places.
    """
    text = environ.get(SECRET_VARIABLE)
    if text is not None and security.secret_file:
        raise ConfigError(f"{SECRET_VARIABLE}: got a secret from it and one from security.secret_file, expected one")
    if text is not None:
        return _checked(os.fsencode(text), SECRET_VARIABLE)
    if security.secret_file:
        return _checked(read_private(security.secret_file, "security.secret_file"), security.secret_file)
    return None


def read_private(name: str, key: str) -> bytes:
    """The start of a file that only its owner may read, or that root or we let a group of ours read.

    Raises ConfigError, which names `key`.
    """
    try:
        with open(Path(name).expanduser(), "rb", opener=_without_waiting) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{key}: {name} is no regular file")
            if found.st_mode & 0o077:
                _check_readers(file.fileno(), found, f"{key}: {name}: mode {stat.S_IMODE(found.st_mode):04o}")
            return file.read(MAX_BYTES + 1)
    except (OSError, RuntimeError) as error:  # RuntimeError: the home directory of nobody
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{key}: {name} cannot be read: {reason}") from None


def _check_readers(file: int, found: os.stat_result, what: str) -> None:
    """Accept a file that a group of ours may read, as Kubernetes mounts a secret, or that an access list lets us alone
    read, as systemd hands one on. Raises ConfigError."""
    if found.st_mode & 0o037:
        raise ConfigError(f"{what} lets others than its owner at it, {_EXPECTED}")
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{what} lets a group read it, but it belongs to user {found.st_uid}, {_EXPECTED}")
    users, groups = _listed_readers(file, found.st_gid)
    if strangers := groups - {os.getegid(), *os.getgroups()}:
        raise ConfigError(
            f"{what} lets group {min(strangers)} read it, to which this process does not belong, {_EXPECTED}"
        )
    if strangers := users - {0, os.geteuid()}:
        raise ConfigError(f"{what} has an access list that lets user {min(strangers)} read it, {_EXPECTED}")


def _listed_readers(file: int, group: int) -> tuple[set[int], set[int]]:
    """Users and groups beside the owner that may read a file whose mode has the bit of the group, see acl(5): where
    there is an access list, this bit is only what the list may allow at most."""
    try:
        entries = struct.iter_unpack("<HHI", os.getxattr(file, "system.posix_acl_access")[4:])  # after its version
    except OSError:
        return set(), {group}
    readers = [(tag, group if tag == _ITS_GROUP else number) for tag, allowed, number in entries if allowed]
    users = {number for tag, number in readers if tag == _USER}
    return users, {number for tag, number in readers if tag in (_ITS_GROUP, _GROUP)}


def _without_waiting(name: str, flags: int) -> int:
    """As `open` does it, but a FIFO is not waited for."""
    return os.open(name, flags | os.O_NONBLOCK)


def _checked(data: bytes, source: str) -> Secret:
    key = data.strip()
    if not MIN_BYTES <= len(key) <= MAX_BYTES:
        raise ConfigError(
            f"{source}: got a secret of {len(key)} bytes, expected {MIN_BYTES} to {MAX_BYTES}, made {_HOW}"
        )
    return Secret(key)
