"""Paths and text files of users mean the same, whoever reads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_cluster import WAIT_S

from omnireduce import ConfigError, OmniReduceError, UsageError
from omnireduce.console.bench.recorded_tensors import find_arrays
from omnireduce.console.tune.report import open_log
from omnireduce.launch.command import parse_command_line
from omnireduce.launch.connection import STDOUT
from omnireduce.launch.flags import read_yaml
from omnireduce.launch.hosts import Host, read_hostfile
from omnireduce.launch.output import PrefixedOutput, TextSink
from omnireduce.optimizers.saved_state import Save, SavedParts, publish_part, write_part
from omnireduce.programs.library.schedules import schedules
from omnireduce.support.config import Security, Trace, check_config, load_config
from omnireduce.support.config.schema import Config
from omnireduce.support.files import paths
from omnireduce.support.files.output import check_writable, make_folder, write_file
from omnireduce.support.files.paths import MOST_BYTES, current_folder, decode_text, read_text, user_path, whole_path
from omnireduce.support.files.tensors import read_tensors
from omnireduce.support.load_by_name import search_path
from omnireduce.support.secret import Secret, load_secrets
from omnireduce.support.teams import load_teams
from omnireduce.switchml.settings import load_settings
from omnireduce.transport.tls import worker_context
from omnireduce.worker.switchml.recording import read_layers

WORD = "a-secret-of-16-bytes"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder. The current folder is another one, and is empty."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    return home


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The current folder is gone."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    yield
    os.chdir(tmp_path)


def test_a_path_of_a_user(home: Path) -> None:
    file = home / "a.toml"
    file.touch()
    assert user_path("~/x") == user_path(Path("~/x")) == user_path(" ~/x\r\n") == whole_path("~/x", file) == home / "x"
    assert user_path("~root") == Path("~root").expanduser()
    assert user_path("/a b/c") == whole_path("/a b/c", file) == Path("/a b/c")
    assert user_path("x y") == Path("x y")
    assert whole_path("../y") == Path.cwd() / "../y"  # as it is: a folder may be a link
    assert user_path("x", file) == whole_path("x", file) == home / "x"
    assert user_path("x", "/dev/null") == Path("x")  # it names a path, but is in no folder that anybody means
    with pytest.raises(UsageError, match=r"^~nobody-of-this-name/x: no home folder ~nobody-of-this-name is known$"):
        user_path("~nobody-of-this-name/x")


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"))))
def test_lines_of_other_systems_are_the_same_text(lines: list[str]) -> None:
    text = "\n".join(lines)
    for end in ("\n", "\r\n", "\r"):
        for encoding in ("utf-8", "utf-8-sig"):
            data = end.join(lines).encode(encoding)
            assert decode_text(data, "") == text.removeprefix("\ufeff" if encoding == "utf-8" else "")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "no such file, expected a list of words"),
        (b"\xff", "not UTF-8 (at byte 0), expected a list of words"),
        ("words".encode("utf-16"), "is UTF-16, expected a list of words in UTF-8"),
        (b"x" * (MOST_BYTES + 1), f"got more than {MOST_BYTES} bytes, expected a list of words"),
    ],
)
@pytest.mark.parametrize("error", [ConfigError, UsageError])
def test_a_file_that_is_no_text(home: Path, data: bytes | None, message: str, error: type[OmniReduceError]) -> None:
    if data is not None:
        (home / "f").write_bytes(data)
    with pytest.raises(error) as caught:
        read_text("~/f", "--words ~/f", expected="a list of words", error=error)
    assert str(caught.value) == f"--words ~/f: {message}"


def test_a_pipe_is_read_and_one_that_nobody_writes_to_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(home / "f.npy")
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(read_text, "~/f.npy")
        (home / "f.npy").write_bytes(b"a\r\nb")
        assert text.result(WAIT_S) == "a\nb"
    monkeypatch.setattr(paths, "PIPE_S", 0.01)
    with pytest.raises(ConfigError, match=r"^'f': is a pipe to which nobody has written for 0.01 s, expected words$"):
        read_text("~/f.npy", "'f'", expected="words")
    with pytest.raises(OmniReduceError, match=r"is not an .npy file, whatever its name says"):
        list(read_tensors("~/f.npy"))
    with pytest.raises(ConfigError, match=r"^security.tls_ca: .*/f.npy is a pipe, expected a file$"):
        worker_context(Security(tls_ca=str(home / "f.npy")))


def _secret(path: str) -> object:
    os.chmod(os.path.expanduser(path), 0o600)
    return load_secrets(check_config(Config(security=Security(secret_file=path))).security, {})


TEXTS: dict[str, tuple[str, Callable[[str], object], object]] = {
    "--config": ("[protocol]\nslots = 8\n", lambda path: load_config(path, environ={}).protocol.slots, 8),
    "OMNIREDUCE_CONFIG": (
        "[protocol]\nslots = 8\n",
        lambda path: load_config(environ={"OMNIREDUCE_CONFIG": path}).protocol.slots,
        8,
    ),
    "secret_file": (f"{WORD}\n", _secret, [Secret(WORD.encode())]),
    "--hostfile": ("node1 slots=2\n\n", read_hostfile, [Host("node1", 2)]),
    "--config-file": ("verbose: true\n", lambda path: read_yaml(path, ("verbose",)), {"verbose": True}),
    "switchml.cfg": (
        "[general]\npacket_numel = 64\n",
        lambda path: load_settings(f"{path}.cfg", environ={}).config.protocol.block_size,
        64,
    ),
    "layers": ("0, 5, 6, 7\n", lambda path: tuple(read_layers(path)[0]), (0, 5, 6, 7)),
}


@pytest.mark.parametrize("what", TEXTS)
def test_text_files_of_users_are_read_in_one_way(home: Path, what: str) -> None:
    """In the home folder, and as an editor of another system writes them."""
    text, read, expected = TEXTS[what]
    for name in ("f", "f.cfg"):
        (home / name).write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    assert read("~/f") == expected


def test_teams_and_their_terms(home: Path) -> None:
    (home / "teams").mkdir(0o700)
    for name, text in (("vision", f"{WORD}\n"), ("vision.toml", 'jobs = ["v.*"]\n')):
        (home / "teams" / name).write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
        (home / "teams" / name).chmod(0o600)
    security = load_config(overrides=["security.teams_folder=~/teams"], environ={}).security
    teams = load_teams(security, {})
    assert teams is not None
    assert ("vision", Secret(WORD.encode())) in teams.known
    assert teams.of("vision").may_use("v.1")


def _saved(path: str) -> None:
    save = Save(1, 2, 0, 1)
    write_part(path, save, {})
    publish_part(path, save)
    assert SavedParts(path, {}).steps == 2


def _logged(path: str) -> None:
    with open_log(path):
        pass


WRITERS: dict[str, Callable[[str], object]] = {
    "a file": lambda path: write_file(b"", path),
    "a folder": make_folder,
    "--output-filename": lambda path: PrefixedOutput({STDOUT: TextSink(str)}, folder=path, ranks=1).close(),
    "the state of an optimizer": _saved,
    "--log": _logged,
    "a program as a file": lambda path: schedules("adam")["rs-c-ag"].codegen(path, target="mpi4py", schedule="rs-c-ag"),
}


@pytest.mark.parametrize("what", WRITERS)
def test_what_is_written_is_in_the_home_folder(home: Path, what: str) -> None:
    WRITERS[what]("~/out")
    assert (home / "out").exists()
    assert not os.listdir()


def test_arrays_are_found_in_the_home_folder(home: Path) -> None:
    for rank in range(2):
        np.save(home / f"g-{rank}.npy", np.zeros(3))
    assert [each.shape for each in read_tensors("~/g-0.npy")] == [(3,)]
    assert [each.shape for each in find_arrays("~/g-{rank}.npy", 2)] == [(3,)]


def test_paths_in_a_configuration_are_those_of_its_file(home: Path) -> None:
    """Paths of variables and overrides are of the current folder. All become absolute: that folder may change."""
    (home / "c.toml").write_text(
        '[trace]\nfolder = "t"\nprofile = "1"\n[security]\nsecret_file = " ~/s "\ntls_ca = ""\n'
    )
    config = load_config("~/c.toml", overrides=["security.tls_key=k"], environ={"HOROVOD_TIMELINE": "DYNAMIC"})
    assert (config.trace.folder, config.security.secret_file) == (str(home / "t"), str(home / "s"))
    assert (config.security.tls_key, config.security.tls_ca) == (str(Path.cwd() / "k"), "")
    assert (config.trace.profile, config.trace.timeline) == ("1", "DYNAMIC")
    assert check_config(Config(trace=Trace(folder="t"))).trace.folder == str(Path.cwd() / "t")
    assert load_config(environ={"HOROVOD_TIMELINE": "~/t.json"}).trace.timeline == str(home / "t.json")


def test_paths_of_a_launch(home: Path) -> None:
    for name, text in (("hosts", "node1 slots=2\r\n"), ("key", ""), ("find.sh", ""), ("c.toml", "")):
        (home / name).write_text(text)
    (home / "launch.yaml").write_text("hostfile: hosts\noutput-filename: out\nssh-identity-file: key\n")
    request = parse_command_line(
        ["--config-file", "~/launch.yaml", "--config", "~/c.toml", "--timeline", "~/t", "true"]
    )
    assert request.hosts == [Host("node1", 2)]
    assert (request.output_folder, request.ssh) == (str(home / "out"), f"ssh -i {home / 'key'}")
    assert request.environ["OMNIREDUCE_CONFIG"] == str(home / "c.toml")
    assert request.environ["HOROVOD_TIMELINE"] == str(home / "t")
    for name, script in (
        ("~/find.sh", home / "find.sh"),
        ("./find.sh", Path.cwd() / "find.sh"),
        ("find.sh", "find.sh"),
    ):
        words = ["--min-np", "1", "--host-discovery-script", name, "true"]
        assert parse_command_line(words).discovery_script == str(script)


@pytest.mark.usefixtures("nowhere")
def test_a_current_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    """Calls that need the current folder say that it is gone; other calls work."""
    gone = "the current folder is gone: change to another folder, or give absolute paths"
    calls: list[Callable[[], object]] = [
        current_folder,
        lambda: whole_path("x"),
        lambda: check_writable("x"),
        lambda: read_text("x"),
        lambda: load_config(overrides=["trace.folder=x"], environ={}),
        lambda: list(read_tensors("x.npy")),
    ]
    for call in calls:
        with pytest.raises(OmniReduceError, match=gone):
            call()
    (tmp_path / "c.toml").write_text('[trace]\nfolder = "t"\n')
    assert load_config(tmp_path / "c.toml", environ={}).trace.folder == str(tmp_path / "t")
    assert all(map(os.path.isabs, search_path()))
