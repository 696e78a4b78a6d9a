"""The container file: built where a builder runs, else its parts: what it copies is enough, what it starts starts."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from deployment import DEPLOY, HERE, OLD, SECRET, aggregator, as_here, check_rotation
from local_cluster import READY_S, ROOT, WAIT_S, Process
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from pod_here import need_pods, pod_command, pod_with

from omnireduce.support.config import load_config

FILE = DEPLOY / "container" / "Containerfile"
LOCK = DEPLOY / "container" / "requirements.lock"
BUILD = DEPLOY / "container" / "build.sh"
KEYWORDS = {
    *("ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "VOLUME", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"),
}


class Step(NamedTuple):
    stage: str
    keyword: str
    text: str


def steps() -> list[Step]:
    lines = [line for line in FILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    results, stage = [], ""
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            keyword, _, text = line.partition(" ")
            if keyword == "FROM":
                stage = text.partition(" AS ")[2] or "final"
            results.append(Step(stage, keyword, text.strip()))
    return results


def of(stage: str, keyword: str) -> list[str]:
    return [step.text for step in steps() if (step.stage, step.keyword) == (stage, keyword)]


def test_every_instruction_is_one() -> None:
    assert {step.keyword for step in steps()} <= KEYWORDS
    assert [step.text for step in steps() if step.keyword == "ARG"] == [
        "BASE",
        "BASE",
        "WARM",
    ]  # no default, no floating tag
    stages = [step.stage for step in steps() if step.keyword == "FROM"]
    assert stages == ["build", "service", "mpi", "final"]
    bases = [step.text.split()[0] for step in steps() if step.keyword == "FROM"]
    assert bases[:2] == ["${BASE}"] * 2  # a virtual environment works with the Python it was made with
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
    """A folder that holds only the files that the build stage copies."""
    folder = tmp_path_factory.mktemp("image")
    for text in of("build", "COPY"):
        *sources, target = text.split()
        for source in sources:
            if (ROOT / source).is_dir():
                skip = shutil.ignore_patterns("*.pyc")  # but the kernels that were compiled here: that takes long
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
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd="/", env={"PYTHONPATH": str(image)}, capture_output=True, text=True, timeout=READY_S, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert all(line.startswith(str(image)) for line in result.stdout.splitlines())


def locked() -> dict[str, tuple[Version, int]]:
    """Version and number of hashes of each package in the lock."""
    text = re.sub(r"\\\n", " ", LOCK.read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    results = {}
    for line in lines:
        requirement, *hashes = line.split()
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), line
        name, version = requirement.split("==")
        results[canonicalize_name(name)] = (Version(version), len(hashes))
    return results


def unmet(requirements: Iterable[str]) -> list[str]:
    """The requirements that the lock does not meet."""
    result, required = locked(), [Requirement(requirement) for requirement in requirements]
    lines = {each.name: result.get(canonicalize_name(each.name)) for each in required}
    return [str(each) for each in required if not (at := lines[each.name]) or not each.specifier.contains(at[0])]


def test_the_lock_has_all_that_the_image_installs() -> None:
    """The lock has one version of every package, with the hashes of its files; lock.sh writes it."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    required = [
        *project["dependencies"],
        *project["optional-dependencies"]["mpi"],
        *pyproject["build-system"]["requires"],
    ]
    assert unmet(required) == []
    assert unmet(["numpy>=99", "no-such-package"]) == ["numpy>=99", "no-such-package"]
    assert all(hashes for _, hashes in locked().values())
    assert "://" not in LOCK.read_text()
    installed = {
        canonicalize_name(distribution.name): distribution for distribution in importlib.metadata.distributions()
    }
    for name in locked().keys() - {"setuptools"}:  # their requirements are locked, too
        assert unmet(needs_of(installed[name])) == []


def needs_of(package: importlib.metadata.Distribution) -> list[str]:
    """Requirements of an installed package on this machine, without its extras."""
    required = [Requirement(each) for each in package.requires or []]
    return [
        f"{each.name}{each.specifier}" for each in required if not each.marker or each.marker.evaluate({"extra": ""})
    ]


def test_pip_takes_only_what_is_locked() -> None:
    install, own = [text for text in of("build", "RUN") if "pip install" in text]
    assert {"--require-hashes", "--only-binary", "-r", "requirements.lock"} <= set(install.split())
    assert {"--no-index", "--no-deps", "--no-build-isolation"} <= set(own.split())
    [version] = re.findall(r"autogenerated by pip-compile with Python (\S+)", LOCK.read_text())
    assert f"python:{version}-slim" in BUILD.read_text()


DIGEST = f"sha256:{'0123456789abcdef' * 4}"


def build(
    folder: Path, *arguments: str, digest: str = "", base: str = "", push: str = ""
) -> tuple[int, str, list[list[str]]]:
    """Run build.sh on a copy of its folder, with a program that notes what docker would be told: the status, what it
    says, and each call. `digest` is what docker would say that the base has; `push`: what the program does beside."""
    shutil.copytree(BUILD.parent, folder / "deploy" / "container", dirs_exist_ok=True)
    tool = folder / "docker"
    tool.write_text(f'#!/bin/sh\nprintf "%s\\t" "$@" >> {folder}/calls\necho >> {folder}/calls\n'
                    f'[ "$1 $2" != "image inspect" ] || echo "{digest}"\n{push}\n')  # fmt: skip
    tool.chmod(0o755)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}"} | ({"BASE": base} if base else {})
    (folder / "calls").write_text("")
    command = [folder / "deploy" / "container" / "build.sh", *arguments]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=WAIT_S, check=False)
    calls = [line.split("\t")[:-1] for line in (folder / "calls").read_text().splitlines()]
    return result.returncode, result.stdout + result.stderr, calls


def test_the_base_is_resolved_once_and_recorded(tmp_path: Path) -> None:
    status, output, calls = build(tmp_path, "mine:1", digest=f"python@{DIGEST}")
    assert status == 0, output
    assert [call[0] for call in calls] == ["pull", "image", "build", "build"]
    lock = tmp_path / "deploy" / "container" / "base.lock"
    assert lock.read_text().splitlines()[1:] == [f"python@{DIGEST}"]
    for call, target, name in zip(calls[2:], ("service", "mpi"), ("mine:1", "mine-mpi:1"), strict=True):
        assert call[call.index("--build-arg") + 1] == f"BASE=python@{DIGEST}"
        assert (call[call.index("--target") + 1], call[call.index("-t") + 1]) == (target, name)

    status, output, calls = build(tmp_path, "mine:2", digest="never asked")  # from the record
    assert (status, [call[0] for call in calls]) == (0, ["build", "build"])
    other = DIGEST.replace("0", "f")
    status, output, calls = build(tmp_path, "--update", "mine:3", digest=f"python@{other}", base="python:3.11-slim")
    assert (status, calls[0], calls[2][4]) == (0, ["pull", "python:3.11-slim"], f"BASE=python@{other}")
    assert build(tmp_path, "mine:4", base="python:3.11-slim")[0] == 2  # another base than the record's


PUSH = {  # output of a push: docker writes the digest in its last line, podman in a file
    "docker": '[ "$1" != push ] || [ "$2" = --help ] || printf "layer: Pushed\\n1: digest: %s size: 528\\n" DIGEST',
    "podman": '[ "$1" != push ] || { echo "  --digestfile string"; [ "$2" != --digestfile ] || echo DIGEST > "$3"; }',
}


@pytest.mark.parametrize("tool", [*PUSH, "other"])
def test_what_is_pushed_is_told_by_digest(tmp_path: Path, tool: str) -> None:
    """That of the registry: the files of kubernetes/ name images so."""
    step = PUSH.get(tool, "").replace("DIGEST", DIGEST)
    status, output, calls = build(tmp_path, "--push", "here.example/mine:1", digest=f"python@{DIGEST}", push=step)
    pushed = [call[-1] for call in calls if call[0] == "push" and call[1:] != ["--help"]]
    if tool == "other":
        assert status == 2
        assert "here.example/mine:1 is pushed, but " in output
        return
    assert status == 0, output
    assert pushed == ["here.example/mine:1", "here.example/mine-mpi:1"]
    names = ["here.example/mine", "here.example/mine-mpi"]
    assert [line for line in output.splitlines() if "@" in line] == [f"{name}@{DIGEST}" for name in names]


@pytest.mark.parametrize("digest", ["", "python:3.11-slim", "python@sha256:0123", f"python@{DIGEST}0", f"@{DIGEST}"])
def test_a_base_without_a_digest_is_refused(tmp_path: Path, digest: str) -> None:
    status, output, calls = build(tmp_path, "mine:1", digest=digest)
    assert (status, [call[0] for call in calls]) == (2, ["pull", "image"])
    assert f"the base is '{digest}', expected one line NAME@sha256:DIGEST" in output
    assert not (tmp_path / "deploy" / "container" / "base.lock").exists()
    (tmp_path / "deploy" / "container" / "base.lock").write_text(f"{digest}\n")
    status, output, calls = build(tmp_path, "mine:1")
    assert (status, calls) == (2, [])


def test_the_container_file_refuses_a_base_without_a_digest() -> None:
    [check] = [text for text in of("build", "RUN") if text.startswith("case")]
    for base, status in ((f"python@{DIGEST}", 0), ("python:3.11-slim-bookworm", 1), ("", 1)):
        result = subprocess.run(["sh", "-c", check], env={"BASE": base}, capture_output=True, check=False)
        assert result.returncode == status


def test_the_image_runs_as_no_root_and_brings_no_keys() -> None:
    for stage in ("service", "mpi"):
        assert of(stage, "USER")[-1] == "10001:10001"
    [packages] = [text for text in of("mpi", "RUN") if "openssh-server" in text]
    assert packages.endswith("/etc/ssh/ssh_host_*")
    assert packages.split("&&")[-1].split()[:2] == ["rm", "-rf"]


def test_shell_steps_are_shell() -> None:
    for step in steps():
        if step.keyword == "RUN":
            subprocess.run(["sh", "-n", "-c", step.text], check=True, timeout=WAIT_S)


def test_the_variables_are_known_to_the_programs() -> None:
    [text] = of("service", "ENV")
    variables = dict(pair.split("=", 1) for pair in text.split())
    load_config(environ={name: value for name, value in variables.items() if name.startswith("OMNIREDUCE_")})
    assert variables["PATH"].startswith("/opt/omnireduce/bin:")
    assert of("service", "VOLUME") == [variables["XDG_CACHE_HOME"] + "/omnireduce"]


def test_the_image_starts_an_aggregator_that_its_health_check_finds(image: Path) -> None:
    """Run as the image would, from what was copied, but for the address."""
    entrypoint = json.loads(of("service", "ENTRYPOINT")[0])
    arguments = json.loads(of("service", "CMD")[0])
    assert arguments == ["--listen", ":7400"]
    check = json.loads(re.sub(r".* CMD ", "", of("service", "HEALTHCHECK")[0]))
    assert check[-1] == "localhost:7400"
    environ = {"PYTHONPATH": str(image), "PYTHONSAFEPATH": "1", **SECRET}
    start = as_here([*entrypoint, "--listen", "127.0.0.1:0"])
    with Process(*start, environ=environ) as process:
        address = process.line(READY_S).split()[1]
        probe = as_here(check[:-1])
        with Process(*probe, address, environ=environ) as answer:
            assert answer.wait() == 0
        process.popen.terminate()
        assert process.wait() == 0
        with Process(*probe, address, environ=environ) as answer:
            assert answer.wait() == 1


def test_a_container_sees_a_new_secret(tmp_path: Path) -> None:
    """With the mount of the line that starts one: a folder, for a mounted file would stay the old one."""
    need_pods()
    [(source, target)] = re.findall(r'-v "\$PWD/(\S+):(/\S+):ro"', FILE.read_text())
    [(name, file)] = re.findall(r"-e (OMNIREDUCE_SECURITY_SECRET_FILE)=(\S+)", FILE.read_text())
    made = tmp_path / source / Path(file).relative_to(target)
    assert f"> {source}/{made.name}) && chown 10001 {source}/{made.name} " in FILE.read_text()
    scratch = tmp_path / "pod"
    for folder in (made.parent, scratch):
        folder.mkdir()
    made.touch(0o600)
    made.write_text(OLD)
    os.chown(made, 10001, 0)
    environ = {
        name: file,
        "OMNIREDUCE_LOG_FORMAT": "json",
        "OMNIREDUCE_METRICS_LISTEN": HERE["OMNIREDUCE_METRICS_LISTEN"],
    }
    pod = pod_with(tmp_path / source, target, 10001, 10001, environ)
    command = as_here([*json.loads(of("service", "ENTRYPOINT")[0]), "--listen", "127.0.0.1:0"])
    with aggregator(pod_command(scratch, pod, {}, command), {}, {}) as (process, addresses):
        hang_up = partial(os.kill, process.pid, signal.SIGHUP)
        check_rotation(process, addresses, made, tmp_path / "own", hang_up)


def test_the_sshd_of_a_pod_lets_in_only_its_job() -> None:
    """The real sshd reads the file and reports its settings; test_kubernetes.py runs it in a pod."""
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin")
    if sshd is None:
        pytest.skip("no sshd here")
    assert json.loads(of("mpi", "CMD")[0]) == ["start-sshd"]
    file = DEPLOY / "container" / "sshd_config"
    targets = {text.split()[1] for text in of("mpi", "COPY")}
    assert targets == {"/etc/ssh/sshd_omnireduce", "/etc/ssh/ssh_config.d/omnireduce.conf", "/usr/local/bin/start-sshd"}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", f"{folder}/host_key"], check=True, timeout=WAIT_S)
        text = re.sub(r"(?m)^HostKey .*$", f"HostKey {folder}/host_key", file.read_text())
        Path(folder, "sshd_config").write_text(re.sub(r"(?m)^HostCertificate .*\n", "", text))
        nobody: list[str] = []
        if os.getuid() == 0:
            nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--bounding-set", "-all"]
            for path in (folder, *Path(folder).iterdir()):
                os.chown(path, 65534, 65534)
        show = [*nobody, sshd, "-T", "-f", f"{folder}/sshd_config"]
        result = subprocess.run(show, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert result.returncode == 0, result.stderr
    assert {
        *("port 2222", "strictmodes yes", "permitrootlogin no", "allowusers omnireduce", "disableforwarding yes"),
        *("authenticationmethods publickey", "passwordauthentication no", "kbdinteractiveauthentication no"),
        *("permituserenvironment no", "permittunnel no", "usepam no"),
    } <= set(result.stdout.splitlines())


BUILDERS = {"docker": ["docker", "info"], "podman": ["podman", "info"], "buildah": ["buildah", "info"]}


def test_a_real_build(tmp_path: Path) -> None:
    """Runs only if a builder and its registry can be reached, as in a pipeline that publishes images."""
    for name, probe in BUILDERS.items():
        if (
            shutil.which(name)
            and subprocess.run(probe, capture_output=True, timeout=WAIT_S, check=False).returncode == 0
        ):
            break
    else:
        pytest.skip("no docker, podman or buildah that works here")
    [base] = re.findall(r"BASE:-([^}]+)", BUILD.read_text())[:1]
    if subprocess.run([name, "pull", base], capture_output=True, timeout=600, check=False).returncode:
        pytest.skip(f"{base} cannot be pulled here")
    shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(".*", "__pycache__", "build"))
    shutil.copy(ROOT / ".dockerignore", tmp_path / "copy")
    command = [tmp_path / "copy" / "deploy" / "container" / "build.sh", "omnireduce:test"]
    subprocess.run(command, env=os.environ | {"BUILDER": name}, check=True, timeout=3600)
