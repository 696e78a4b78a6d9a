"""The secret: its sources, the ones that are refused, and that nothing shows it."""

from __future__ import annotations

import errno
import hmac
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from local_cluster import ROOT

from omnireduce.errors import ConfigError
from omnireduce.support.config import Config, Security, dump_config, load_config, override_config
from omnireduce.support.config.schema import SECRET_VARIABLE
from omnireduce.support.secret import MAX_BYTES, MAX_LINES, MIN_BYTES, Secret, load_secret, load_secrets
from omnireduce.worker.cli import main

TEXT = "correct horse battery staple"
NONCES = bytes(32), bytes(range(32))


def write(folder: Path, content: bytes, mode: int = 0o600) -> str:
    file = folder / "secret"
    file.write_bytes(content)
    file.chmod(mode)
    return str(file)


def refusal(security: Security, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_secret(security, environ)
    return str(caught.value)


def test_there_may_be_none() -> None:
    assert load_secret(Security(), {}) is None


@pytest.mark.parametrize("content", [TEXT, f"{TEXT}\n", f"  {TEXT}\r\n"])
def test_file_and_variable_give_the_same_secret(tmp_path: Path, content: str) -> None:
    from_file = load_secret(Security(secret_file=write(tmp_path, content.encode())), {})
    from_variable = load_secret(Security(), {SECRET_VARIABLE: content})
    assert from_file is not None
    assert from_variable is not None
    assert from_file.proof("worker", *NONCES) == from_variable.proof("worker", *NONCES)


def test_a_file_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, TEXT.encode())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_secret(Security(secret_file="~/secret"), {}) is not None


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o610, 0o660, 0o601, 0o444, 0o777])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    name = write(tmp_path, TEXT.encode(), mode)
    text = refusal(Security(secret_file=name))
    assert text.startswith(f"security.secret_file: {name}: mode {mode:04o} lets others")
    assert "chmod 600" in text


STRANGER, OURS, US = 64_001, 64_002, 64_003  # ids that no account here has
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files and processes other users and groups")


def verdict(name: str, user: int, groups: Sequence[int]) -> str:
    """Read the file as a process of this user; the first of `groups` is the primary one. "accepted", or the refusal.

    The process begins as root, because the interpreter may lie where only root gets at it.
    """
    code = f"""
import os
from omnireduce.support.config import Security
from omnireduce.errors import ConfigError
from omnireduce.support.secret import load_secret
os.setgroups({list(groups[1:])}); os.setgid({groups[0]}); os.setuid({user})
try:
    load_secret(Security(secret_file={name!r}), {{}})
    print("accepted")
except ConfigError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return result.stdout.strip()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all users reach, which `tmp_path` is not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@as_root
@pytest.mark.parametrize("groups", [(OURS,), (STRANGER + 9, OURS)])
@pytest.mark.parametrize("mode", [0o440, 0o640])
def test_a_group_of_ours_may_read_it(shared: Path, mode: int, groups: Sequence[int]) -> None:
    """As Kubernetes mounts it, with fsGroup: root's, 0440, and the group is one of the process."""
    name = write(shared, TEXT.encode(), mode)
    os.chown(name, 0, OURS)
    assert verdict(name, US, groups) == "accepted"


@as_root
@pytest.mark.parametrize(
    ("mode", "owner", "group", "user", "message"),
    [
        (0o440, 0, STRANGER, 0, f"lets group {STRANGER} read it, to which this process does not belong"),
        (0o640, US, OURS, US, f"lets a group read it, but it belongs to user {US}"),  # "users", as like as not
        (0o640, STRANGER, OURS, US, f"lets a group read it, but it belongs to user {STRANGER}"),
        (0o440, STRANGER, OURS, 0, f"lets a group read it, but it belongs to user {STRANGER}"),
        (0o460, 0, OURS, US, "lets others than its owner use it"),
        (0o450, 0, OURS, US, "lets others than its owner use it"),
        (0o444, 0, OURS, US, "lets others than its owner use it"),
    ],
)
def test_what_strangers_may_read_is_refused(
    shared: Path, mode: int, owner: int, group: int, user: int, message: str
) -> None:
    name = write(shared, TEXT.encode(), mode)
    os.chown(name, owner, group)
    text = verdict(name, user, [OURS])
    assert text.startswith(f"security.secret_file: {name}: mode {mode:04o} {message}, expected 0600, or 0440 of root")
    assert "chmod 600" in text


ACL_OWNER, ACL_USER, ACL_ITS_GROUP, ACL_GROUP, ACL_MASK, ACL_REST = 1, 2, 4, 8, 16, 32  # acl(5), linux/posix_acl.h
NOBODY = 0xFFFFFFFF


@as_root
@pytest.mark.parametrize(
    ("listed", "its_group", "message"),
    [
        ([(ACL_USER, US)], 0, "accepted"),
        ([(ACL_USER, US), (ACL_USER, STRANGER)], 0, f"an access list that lets user {STRANGER} read it"),
        ([(ACL_USER, US), (ACL_GROUP, STRANGER)], 0, f"lets group {STRANGER} read it"),
        ([(ACL_USER, US), (ACL_GROUP, OURS)], 0, "accepted"),
        ([(ACL_USER, US)], 4, "lets group 0 read it"),
    ],
)
def test_an_access_list_is_read_as_one(
    shared: Path, listed: Sequence[tuple[int, int]], its_group: int, message: str
) -> None:
    """systemd hands on a credential of root that its list lets the service's user read: the mode then shows 0440."""
    name = write(shared, TEXT.encode(), 0o400)
    entries = [(ACL_OWNER, 4, NOBODY), (ACL_ITS_GROUP, its_group, NOBODY), (ACL_MASK, 4, NOBODY), (ACL_REST, 0, NOBODY)]
    entries += [(tag, 4, number) for tag, number in listed]
    packed = b"".join(struct.pack("<HHI", *entry) for entry in sorted(entries))
    try:
        os.setxattr(name, "system.posix_acl_access", struct.pack("<I", 2) + packed)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        pytest.skip("this file system has no access lists")
    assert Path(name).stat().st_mode & 0o777 == 0o440
    assert message in verdict(name, US, [OURS])


@pytest.mark.parametrize("content", [b"", b" \n", b"x" * (MIN_BYTES - 1), b"x" * (MAX_BYTES + 1)])
def test_a_secret_of_an_unsuitable_length_is_refused(tmp_path: Path, content: bytes) -> None:
    expected = f"got a secret of {len(content.strip())} bytes, expected {MIN_BYTES} to {MAX_BYTES}"
    name = write(tmp_path, content)
    assert refusal(Security(secret_file=name)).startswith(f"{name}: {expected}")
    assert refusal(Security(), **{SECRET_VARIABLE: content.decode()}).startswith(f"{SECRET_VARIABLE}: {expected}")


def test_of_several_lines_a_worker_proves_the_first_and_an_aggregator_admits_all(tmp_path: Path) -> None:
    lines = [f"secret number {number} of four" for number in range(MAX_LINES)]
    security = Security(secret_file=write(tmp_path, f"\n  {lines[0]}\r\n\n{lines[1]}\n{lines[2]}\n{lines[3]}".encode()))
    assert load_secret(security, {}) == Secret(lines[0].encode())
    assert load_secrets(security, {}) == [Secret(line.encode()) for line in lines]
    assert load_secrets(Security(), {SECRET_VARIABLE: "\n".join(lines)}) == load_secrets(security, {})


def test_lines_that_are_too_many_or_too_short_are_refused(tmp_path: Path) -> None:
    name = write(tmp_path, f"{TEXT}\n".encode() * (MAX_LINES + 1))
    assert refusal(Security(secret_file=name)) == f"{name}: got 5 lines or more, expected 1 to 4, each a secret"
    name = write(tmp_path, f"{TEXT}\nshort\n".encode())
    expected = f"{name}: got a secret of 5 bytes on one of its lines, expected 16 to 4096, made for example by"
    assert refusal(Security(secret_file=name)).startswith(expected)
    for size in (MAX_BYTES + 1, 100 * MAX_BYTES):  # all is read that four may take, and not more
        name = write(tmp_path, b"x" * size)
        assert f"expected {MIN_BYTES} to {MAX_BYTES}" in refusal(Security(secret_file=name))


def test_a_team_needs_a_secret_and_has_its_name_in_its_proofs(tmp_path: Path) -> None:
    assert refusal(Security(team="vision")).startswith("security.team: got vision and no secret: give security.")
    security = Security(team="vision", secret_file=write(tmp_path, TEXT.encode()))
    result = load_secret(security, {})
    assert result is not None
    assert result.team == "vision"
    assert result == Secret(TEXT.encode())
    assert result.proof("worker", *NONCES) != Secret(TEXT.encode()).proof("worker", *NONCES)


@pytest.mark.parametrize("team", ["a.b", "x" * 65, "é", "a b", "../a", "a\n"])
def test_a_name_that_no_team_can_have(team: str) -> None:
    with pytest.raises(ConfigError, match=r"security\.team: got .*, expected a string of up to 64 characters"):
        override_config(Config(), {"security.team": team}, source="argument")


def test_a_long_secret_is_what_hmac_makes_of_it() -> None:
    """Hashed once, not for every proof: the time of a proof tells nothing of the secret's length."""
    for size in (16, 63, 64, 65, 4096):
        key = os.urandom(size)
        signed = b"omnireduce handshake 2\0worker\0" + NONCES[0] + NONCES[1]
        assert Secret(key).proof("worker", *NONCES) == hmac.digest(key, signed, "sha256")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert "none cannot be read: No such file" in refusal(Security(secret_file=str(tmp_path / "none")))
    assert "cannot be read: Is a directory" in refusal(Security(secret_file=str(tmp_path)))
    assert "cannot be read: " in refusal(Security(secret_file="~nobody-of-this-name/secret"))
    assert "/dev/null is no regular file" in refusal(Security(secret_file="/dev/null"))
    os.mkfifo(tmp_path / "pipe", 0o600)  # nobody writes to it
    assert "pipe is no regular file" in refusal(Security(secret_file=str(tmp_path / "pipe")))


def test_two_secrets_are_refused(tmp_path: Path) -> None:
    text = refusal(Security(secret_file=write(tmp_path, TEXT.encode())), **{SECRET_VARIABLE: TEXT})
    assert text == f"{SECRET_VARIABLE}: got a secret from it and one from security.secret_file, expected one"


def test_nothing_shows_it(tmp_path: Path) -> None:
    file = write(tmp_path, TEXT.encode())
    secret = load_secret(Security(secret_file=file), {})
    assert TEXT not in f"{secret!r} {secret}"
    config = load_config(overrides=[f"security.secret_file={file}"], environ={SECRET_VARIABLE: TEXT})
    assert config.security.secret_file == file
    assert TEXT not in f"{config!r}{dump_config(config)}"
    environ = {**os.environ, SECRET_VARIABLE: TEXT}
    for arguments in (["config"], ["config", "--reference"]):
        result = CliRunner().invoke(main, arguments, env=environ)
        assert result.exit_code == 0
        assert TEXT not in result.output


def test_a_command_line_or_a_configuration_is_no_place_for_it(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text(f'[security]\nsecret = "{TEXT}"\n')
    for source, load in {
        "--set": lambda: load_config(overrides=[f"security.secret={TEXT}"], environ={}),
        str(file): lambda: load_config(file, environ={}),
        "argument": lambda: override_config(Config(), {"security.secret": TEXT}, source="argument"),
    }.items():
        with pytest.raises(ConfigError) as caught:
            load()
        assert str(caught.value).startswith(f"{source}: security.secret: a command line or a configuration is no place")
        assert f"security.secret_file or the variable {SECRET_VARIABLE}" in str(caught.value)
        assert TEXT not in str(caught.value)
