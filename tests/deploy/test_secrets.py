"""No command line has a secret, in no file to deploy with and in no document: `ps` shows command lines to everybody."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from local_cluster import ROOT

FOLDERS = ("deploy", "docs", "configs", "vagrant", "examples", "tools")
SUFFIXES = {".md", ".toml", ".yaml", ".sh", ".service", ".sbatch", ".py", ""}
SHOWN = re.compile(
    r"""--from-literal            # kubectl
    | --export=(?!ALL(\s|$))        # srun, sbatch
    | (?<!\w)(-x|-e|--env|--setenv|--build-arg)[\s=]\S*SECRET(?!_FILE)\w*=
    | (?<!\w)-g?env\s+\S*SECRET(?!_FILE)\w*\s+\S  # MPICH has the value as a word of its own
    | (?<!\w)env\s+\S*SECRET(?!_FILE)\w*=
    | (?<!echo\s")(--set[\s=]security\.secret=)(?!…)
    | echo\s.*\$\(openssl         # a builtin in most shells, a program in some
    """,
    re.VERBOSE,
)
EXPLAINED = re.compile(r"\b(never|do not|refused)\b")  # a line that says what not to do


def shown(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if SHOWN.search(line) and not EXPLAINED.search(line)]


def files() -> list[Path]:
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "deploy").rglob("*file")]
    paths += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return [path for path in paths if path.is_file()]


def test_no_line_shows_a_secret() -> None:
    assert {"train.sbatch", "security.md", "Containerfile", "start-sshd"} <= {path.name for path in files()}
    results = [f"{path.relative_to(ROOT)}: {line}" for path in files() for line in shown(path.read_text("utf-8"))]
    assert not results, "\n".join(results)


@pytest.mark.parametrize(
    "line",
    [
        "kubectl create secret generic omnireduce --from-literal=secret=$(openssl rand -hex 32)",
        "srun --export=OMNIREDUCE_SECURITY_SECRET=abc python x.py",
        "srun --export=ALL,OMNIREDUCE_SECURITY_SECRET=abc python x.py",
        "mpirun -x OMNIREDUCE_SECURITY_SECRET=abc python x.py",
        "mpirun -genv OMNIREDUCE_SECURITY_SECRET abc python x.py",
        "docker run -e OMNIREDUCE_SECURITY_SECRET=abc omnireduce",
        "docker build --build-arg OMNIREDUCE_SECURITY_SECRET=abc .",
        "env OMNIREDUCE_SECURITY_SECRET=abc python x.py",
        "omnireduce aggregator --set security.secret=abc",
        'echo "OMNIREDUCE_SECURITY_SECRET=$(openssl rand -hex 32)" > secret.env',
    ],
)
def test_a_secret_in_a_command_line_is_seen(line: str) -> None:
    assert shown(line) == [line]


@pytest.mark.parametrize(
    "line",
    [
        "docker run -e OMNIREDUCE_SECURITY_SECRET_FILE=/run/secrets/omnireduce omnireduce",
        "srun --overlap --export=ALL python x.py",
        "openssl rand -hex 32 | kubectl create secret generic omnireduce --from-file=secret=/dev/stdin",
        "omnireduce aggregator --set security.secret_file=~/.omnireduce-secret",
        "mpirun -x OMNIREDUCE_SECURITY_SECRET python x.py",
    ],
)
def test_what_shows_no_secret_passes(line: str) -> None:
    assert shown(line) == []
