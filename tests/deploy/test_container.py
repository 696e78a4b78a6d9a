"""The container file: built where a builder runs, else its parts: what it copies is enough, what it starts starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from deployment import DEPLOY, PROGRAMS, SECRET
from local_cluster import READY_S, ROOT, WAIT_S, Process

from omnireduce.config import load_config

FILE = DEPLOY / "container" / "Containerfile"
KEYWORDS = {
    *("FROM", "WORKDIR", "COPY", "RUN", "ENV", "VOLUME", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"),
}


class Step(NamedTuple):
    stage: str
    keyword: str
    text: str


def steps() -> list[Step]:
    lines = [line for line in FILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    found, stage = [], ""
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            keyword, _, text = line.partition(" ")
            if keyword == "FROM":
                stage = text.partition(" AS ")[2] or "final"
            found.append(Step(stage, keyword, text.strip()))
    return found


def of(stage: str, keyword: str) -> list[str]:
    return [step.text for step in steps() if (step.stage, step.keyword) == (stage, keyword)]


def test_every_instruction_is_one() -> None:
    assert {step.keyword for step in steps()} <= KEYWORDS
    stages = [step.stage for step in steps() if step.keyword == "FROM"]
    assert stages == ["build", "service", "mpi", "final"]
    bases = [step.text.split()[0] for step in steps() if step.keyword == "FROM"]
    assert bases[0] == bases[1]  # a virtual environment works with the Python it was made with
    assert bases[2:] == ["service", "service"]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    kept = [line[1:] for line in ignored if line.startswith("!")]
    for step in steps():
        if step.keyword == "COPY" and not step.text.startswith("--from="):
            for source in step.text.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert any(source == each or source.startswith(f"{each}/") for each in kept), f"{source} is ignored"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the build stage copies, alone in a folder."""
    folder = tmp_path_factory.mktemp("image")
    for text in of("build", "COPY"):
        *sources, target = text.split()
        for source in sources:
            if (ROOT / source).is_dir():
                skip = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / source, folder / target, ignore=skip, dirs_exist_ok=True)
            else:
                shutil.copy(ROOT / source, folder / target)
    return folder


def test_what_is_copied_is_all_that_the_package_needs(image: Path) -> None:
    project = tomllib.loads((image / "pyproject.toml").read_text())
    assert (image / project["project"]["readme"]).exists()
    assert all((image / each).exists() for each in project["project"]["license-files"])
    modules = sorted({target.partition(":")[0] for target in project["project"]["scripts"].values()})
    code = f"import importlib, sys\nfor name in {modules}: print(importlib.import_module(name).__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd="/", env={"PYTHONPATH": str(image)}, capture_output=True, text=True, timeout=READY_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(str(image)) for line in done.stdout.splitlines())
    extras = re.findall(r"\.\[(\w+)\]", of("build", "RUN")[0])
    assert set(extras) <= set(project["project"]["optional-dependencies"])


def test_shell_steps_are_shell() -> None:
    for step in steps():
        if step.keyword == "RUN":
            subprocess.run(["sh", "-n", "-c", step.text], check=True, timeout=WAIT_S)


def test_the_variables_are_known_to_the_programs() -> None:
    [text] = of("service", "ENV")
    variables = dict(pair.split("=", 1) for pair in text.split())
    load_config(environ={name: value for name, value in variables.items() if name.startswith("OMNIREDUCE_")})
    assert variables["PATH"].startswith("/opt/omnireduce/bin:")
    assert of("service", "VOLUME") == [variables["NUMBA_CACHE_DIR"]]


def test_the_image_starts_an_aggregator_that_its_health_check_finds(image: Path) -> None:
    """Run as the image would, from what was copied, but for the address."""
    [entrypoint] = json.loads(of("service", "ENTRYPOINT")[0])
    arguments = json.loads(of("service", "CMD")[0])
    assert arguments == ["--listen", "0.0.0.0:7400"]
    check = json.loads(re.sub(r".* CMD ", "", of("service", "HEALTHCHECK")[0]))
    assert check[-1] == "127.0.0.1:7400"
    environ = {"PYTHONPATH": str(image), "PYTHONSAFEPATH": "1", **SECRET}
    start = [sys.executable, "-m", PROGRAMS[entrypoint], "--listen", "127.0.0.1:0"]
    with Process(*start, environ=environ) as process:
        address = process.line(READY_S).split()[1]
        probe = [sys.executable, "-m", PROGRAMS[check[0]], *check[1:-1]]
        with Process(*probe, address, environ=environ) as answer:
            assert answer.wait() == 0
        process.popen.terminate()
        assert process.wait() == 0
        with Process(*probe, address, environ=environ) as answer:
            assert answer.wait() == 1


def test_the_pod_of_the_operator_runs_an_sshd_that_needs_no_root() -> None:
    """The real sshd reads its configuration, but for the paths, as a user who may do nothing."""
    sshd, keygen = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin"), shutil.which("ssh-keygen")
    if sshd is None or keygen is None:
        pytest.skip("no sshd here")
    command = json.loads(of("mpi", "CMD")[0])
    targets = {text.split()[1] for text in of("mpi", "COPY")}
    assert targets == {command[-1], "/etc/ssh/ssh_config.d/omnireduce.conf"}
    text = (DEPLOY / "container" / "sshd_config").read_text()
    assert text.count("/var/lib/omnireduce/.ssh/") == 2
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([keygen, "-q", "-N", "", "-f", f"{folder}/id_rsa"], check=True, timeout=WAIT_S)
        Path(folder, "sshd_config").write_text(text.replace("/var/lib/omnireduce/.ssh", folder))
        nobody: list[str] = []
        if os.getuid() == 0:
            nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--bounding-set", "-all"]
            for path in (folder, *Path(folder).iterdir()):
                os.chown(path, 65534, 65534)
        show = [*nobody, sshd, "-T", "-f", f"{folder}/sshd_config"]
        done = subprocess.run(show, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert {"port 2222", "strictmodes no", "passwordauthentication no"} <= set(done.stdout.splitlines())
    variables = [line.removeprefix("setenv ") for line in done.stdout.splitlines() if line.startswith("setenv ")]
    assert any(each.startswith("PATH=/opt/omnireduce/bin:") for each in variables)


BUILDERS = {"docker": ["docker", "info"], "podman": ["podman", "info"], "buildah": ["buildah", "info"]}


def test_a_real_build() -> None:
    """Where a builder and its registry can be reached, as in a pipeline that publishes images."""
    for name, probe in BUILDERS.items():
        if (
            shutil.which(name)
            and subprocess.run(probe, capture_output=True, timeout=WAIT_S, check=False).returncode == 0
        ):
            break
    else:
        pytest.skip("no docker, podman or buildah that works here")
    base = next(step.text.split()[0] for step in steps() if step.keyword == "FROM")
    if subprocess.run([name, "pull", base], capture_output=True, timeout=600, check=False).returncode:
        pytest.skip(f"{base} cannot be pulled here")
    for target in ("service", "mpi"):
        subprocess.run([name, "build", "-q", "-f", FILE, "--target", target, ROOT], check=True, timeout=1800)
