"""The folder of teams: what an aggregator reads there, what it refuses, and how much."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnireduce.errors import ConfigError
from omnireduce.support.config import Security
from omnireduce.support.config.schema import SECRET_VARIABLE, TeamLimits
from omnireduce.support.secret import MAX_LINES, Secret
from omnireduce.support.teams import MAX_TEAMS, TERMS_BYTES, Teams, load_teams

TEXT = "correct horse battery staple"
NONCES = bytes(32), bytes(range(32))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    result = tmp_path / "teams"
    result.mkdir(0o700)
    return result


def write(folder: Path, name: str, content: str, mode: int = 0o600) -> None:
    (folder / name).write_text(content)
    (folder / name).chmod(mode)


def load(folder: Path, **environ: str) -> Teams:
    result = load_teams(Security(teams_folder=str(folder)), environ)
    assert result is not None
    return result


def refused(folder: Path, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, **environ)
    assert TEXT not in str(caught.value)
    return str(caught.value)


def knows(teams: Teams, team: str, text: str) -> bool:
    """Whether who knows this secret may say that he is of this team."""
    proof = Secret(text.encode(), team).proof("worker", *NONCES)
    return teams.of(team).proved(proof, *NONCES) is not None


def test_without_a_secret_and_a_folder_there_are_no_teams() -> None:
    assert load_teams(Security(), {}) is None


def test_each_file_is_a_team(folder: Path) -> None:
    write(folder, "vision", TEXT)
    write(folder, "text_2", "the new secret of text\nthe old secret of text\n")
    write(folder, "text_2.toml", 'jobs = ["text", "nlp-*"]\nmax_ranks = 16\n')
    write(folder, ".vision.swp", "an editor's")
    teams = load(folder)
    assert len(teams) == 2
    assert knows(teams, "vision", TEXT)
    assert knows(teams, "text_2", "the new secret of text")
    assert knows(teams, "text_2", "the old secret of text")
    assert not knows(teams, "text_2", TEXT)
    assert not knows(teams, "", TEXT)
    assert not knows(teams, "none", TEXT)
    assert teams.of("vision").terms == TeamLimits()
    assert teams.of("text_2").terms == TeamLimits(jobs=("text", "nlp-*"), max_ranks=16)
    assert [teams.of("text_2").may_use(job) for job in ("text", "nlp-1", "text.1", "text_2")] == [1, 1, 0, 0]
    assert [teams.of("text_2").may_use(job) for job in ("text+urgent", "text.1+urgent")] == [1, 0]


def test_the_aggregators_own_secret_is_beside_them(folder: Path) -> None:
    write(folder, "vision", "the secret of vision")
    teams = load(folder, **{SECRET_VARIABLE: TEXT})
    assert knows(teams, "", TEXT)
    assert len(load(folder)) == 1  # without it, teams alone may join
    assert not knows(load(folder), "", TEXT)
    alone = load_teams(Security(), {SECRET_VARIABLE: TEXT})
    assert alone is not None
    assert (len(alone), knows(alone, "", TEXT)) == (0, True)


def test_every_team_has_as_many_secrets_whether_there_is_one_or_not(folder: Path) -> None:
    for lines in range(1, MAX_LINES + 1):
        write(folder, f"team{lines}", "".join(f"secret {number} of team {lines}\n" for number in range(lines)))
    teams = load(folder)
    names = ["", "none", *(f"team{lines}" for lines in range(1, MAX_LINES + 1))]
    assert {len(teams.of(name).secrets) for name in names} == {MAX_LINES}


@pytest.mark.parametrize("index", [0, MAX_LINES - 1, None])
def test_all_secrets_are_tried_whichever_it_is(monkeypatch: pytest.MonkeyPatch, index: int | None) -> None:
    """The time tells nothing about it."""
    known = [Secret(f"secret number {number}".encode(), "x") for number in range(MAX_LINES)]
    proof = bytes(32) if index is None else known[index].proof("worker", *NONCES)
    tried, proves = [], Secret.proves
    monkeypatch.setattr(Secret, "proves", lambda *given: tried.append(given[0]) or proves(*given))
    result = Teams({"x": known}).of("x").proved(proof, *NONCES)
    assert (result, len(tried)) == (None if index is None else known[index], MAX_LINES)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("vision", "short", "got a secret of 5 bytes, expected 16 to 4096"),
        ("vision", f"{TEXT}\n" * 5, "got 5 lines or more, expected 1 to 4, each a secret"),
        ("vision~", TEXT, "got a file 'vision~', expected files named like teams (a string of up to 64 characters"),
        ("a.b.toml", "", "got a file 'a.b.toml', expected files named like teams"),
        ("vision.toml", "", "got vision.toml and no secret for this team in a file vision"),
        ("text.toml", "max_ranks = 0", "text.toml: max_ranks: got 0, expected an int between 1 and 1048576"),
        ("text.toml", "max_rank = 1", "text.toml: 'max_rank': unknown key, expected one of jobs, max_jobs, max_ranks"),
        ("text.toml", 'jobs = ["a b"]', 'text.toml: jobs: got "a b", expected a non-empty list of strings of 1 to 128'),
        ("text.toml", "jobs = []", "text.toml: jobs: got [], expected a non-empty list of strings of 1 to 128"),
        ("text.toml", 'jobs = "text"', 'text.toml: jobs: got "text", expected a non-empty list'),
        ("text.toml", "jobs", "text.toml: not valid TOML: "),
        ("text.toml", f"#{' ' * TERMS_BYTES}", f"text.toml: got more than {TERMS_BYTES} bytes"),
        ("copy", "the secret of text", "team copy and team text have a secret in common, expected none"),
    ],
)
def test_what_cannot_be_used_is_refused(folder: Path, name: str, content: str, expected: str) -> None:
    """As a whole: nobody gets in by a folder that was read in part."""
    write(folder, "text", "the secret of text")
    write(folder, name, content)
    message = refused(folder)
    assert expected.replace("copy and team text", "") in message.replace("copy and team text", "").replace(
        "text and team copy", ""
    )


def test_the_secret_of_all_in_the_file_of_a_team_is_refused(folder: Path) -> None:
    """That team would be everybody."""
    write(folder, "vision", TEXT)
    assert "the aggregator's own and team vision have a secret in common" in refused(folder, **{SECRET_VARIABLE: TEXT})


def test_who_else_may_touch_the_files_is_bounded(folder: Path) -> None:
    write(folder, "vision", TEXT, 0o640)
    write(folder, "vision", TEXT, 0o660)
    assert refused(folder).startswith(f"security.teams_folder: {folder}/vision: mode 0660 lets others than its owner")
    write(folder, "vision", TEXT)
    write(folder, "vision.toml", "max_jobs = 3", 0o644)  # limits are no secret
    assert load(folder).of("vision").terms.max_jobs == 3
    for mode in (0o664, 0o646):
        write(folder, "vision.toml", "", mode)
        assert refused(folder) == (
            f"security.teams_folder: {folder}/vision.toml: mode {mode:04o} lets others than its owner change it, "
            "expected 0644 or less; run chmod 644"
        )
    (folder / "vision.toml").unlink()
    for mode in ("0770", "3777"):
        folder.chmod(int(mode, 8))
        assert refused(folder) == (
            f"security.teams_folder: {folder}: mode {mode} lets others than its owner add teams, "
            "expected 0700, or a folder of root that is mounted read-only; run chmod 700"
        )


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    assert "none cannot be read: No such file" in refused(tmp_path / "none")
    write(tmp_path, "file", TEXT)
    assert "file cannot be read: Not a directory" in refused(tmp_path / "file")
    assert "cannot be read: " in refused(Path("~nobody-of-this-name/teams"))
    (tmp_path / "folder").mkdir()
    assert "folder cannot be read: Is a directory" in refused(tmp_path)


def test_there_are_no_more_than_so_many(folder: Path) -> None:
    for number in range(MAX_TEAMS):
        write(folder, f"team{number}", f"the secret of team {number}")
    assert len(load(folder)) == MAX_TEAMS
    write(folder, "more", "the secret of one more team")
    assert f"files or more, expected at most {MAX_TEAMS} teams" in refused(folder)
