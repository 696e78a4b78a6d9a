"""A pod on this host: a command runs with the rights and the mounts of the container in a file of Kubernetes.

It has the pod's user and groups, no capability, no new privileges, and a file system that it cannot write to but where
a volume is mounted. Configuration and secrets lie there with the modes and groups that Kubernetes gives them. Not here:
the image (this host's files stand under it), the network of a cluster, and the container runtime's profile of seccomp.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from local_cluster import ROOT

from omnireduce.kernels.compiling.jit import kernel_files

Object = dict[str, Any]
TOOLS = ("unshare", "nsenter", "mount", "setpriv", "chroot", "ip")
HOME = "/run/omnireduce/home"
KERNELS = "/var/cache/omnireduce"


def need_pods() -> None:
    """Skip the test where no pod can be made."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a pod")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"no {missing[0]} here")
    if subprocess.run(["unshare", "--mount", "--net", "--uts", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces here")


def _volume(mount: Object, kind: Object, group: int, files: Mapping[str, str]) -> list[str]:
    """Steps that mount a volume as Kubernetes does for a pod with this fsGroup."""
    target = shlex.quote(f"root{mount['mountPath']}")
    if "hostPath" in kind:
        return [
            f"mkdir -p {target}",
            f"mount --bind {shlex.quote(kind['hostPath']['path'])} {target}",
            *([f"mount -o remount,ro,bind {target}"] if mount.get("readOnly") else []),
        ]
    steps = [f"mkdir -p {target}", f"mount -t tmpfs -o mode=3777,gid={group} none {target}"]
    if "emptyDir" in kind:
        return steps
    mode = kind.get("secret", {}).get("defaultMode", 0o644) | 0o440  # as fsGroup has it
    state = f"{target}/..2026_03_02"  # a new one is made when they change, and `..data` then leads to it
    steps += [f"mkdir -m 2755 {state}", f"chgrp {group} {state}", f"ln -s ..2026_03_02 {target}/..data"]
    for name, text in files.items():
        file = f"{state}/{shlex.quote(name)}"
        steps += [f"printf %s {shlex.quote(text)} > {file}", f"chgrp {group} {file}", f"chmod {mode:o} {file}"]
        steps.append(f"ln -s ..data/{shlex.quote(name)} {target}/{shlex.quote(name)}")
    return [*steps, f"mount -o remount,ro {target}"]


def _compiled(user: int) -> list[str]:
    """Steps that put the kernels that this user has compiled where the pod looks for its own. To compile them takes
    longer than most tests. test_systemd.py has a daemon compile its own."""
    folder = kernel_files().folder
    if folder is None:
        return []
    target = f"root{KERNELS}/kernels"
    return [f"mkdir -p {target}", f"cp -r {folder} {target}", f"chown -R {user} {target}"]


def pod_with(folder: Path, at: str, user: int, group: int, environ: Mapping[str, str]) -> Object:
    """A pod that reads a folder of this host and has a place for kernels, for what else confines a daemon so."""
    mounts = [{"name": "folder", "mountPath": at, "readOnly": True}]
    return {
        "securityContext": {"runAsUser": user, "runAsGroup": user, "fsGroup": group},
        "containers": [
            {
                "securityContext": {"readOnlyRootFilesystem": True},
                "volumeMounts": [*mounts, {"name": "kernels", "mountPath": KERNELS}],
                "env": [{"name": name, "value": value} for name, value in environ.items()],
            }
        ],
        "volumes": [{"name": "folder", "hostPath": {"path": str(folder)}}, {"name": "kernels", "emptyDir": {}}],
    }


def pod_command(
    folder: Path,
    pod: Object,
    files: Mapping[str, Mapping[str, str]],
    command: Sequence[str],
    image: Mapping[str, Path] = {},
    hosts: str = "",
) -> list[str]:
    """The command that runs `command` in the pod.

    `folder`: an empty one, which the pod alone sees filled. `files`: by volume, the text of each file. `image`: what
    the image has where, beside what this host has. `hosts`: lines for /etc/hosts.
    """
    rights, [container] = pod["securityContext"], pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    user, group, shared = rights["runAsUser"], rights["runAsGroup"], rights["fsGroup"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    steps = [
        *("set -eu", "umask 022", "mount --make-rprivate /", f"cd {folder}", "mount -t tmpfs none .", f"cd {folder}"),
        *("mkdir upper work root", "mount -t overlay -o lowerdir=/,upperdir=upper,workdir=work overlay root"),
        *("mount --rbind /proc root/proc", "mount --rbind /dev root/dev"),
        f"printf %s {shlex.quote(hosts)} >> root/etc/hosts",
        f"echo omnireduce:x:{user}:{group}::{HOME}:/bin/sh >> root/etc/passwd",
        f"mkdir -p root/opt && ln -s {sys.prefix} root/opt/omnireduce",
    ]
    folders = (Path(sys.base_prefix), *Path(sys.base_prefix).parents)  # they may let only root in
    steps += [f"chmod a+rx root{each}" for each in folders]
    steps += [f"install -D -m {file.stat().st_mode & 0o755:o} {file} root{target}" for target, file in image.items()]
    for mount in container["volumeMounts"]:
        steps += _volume(mount, volumes[mount["name"]], shared, files.get(mount["name"], {}))
    steps.append(f"mkdir -p root{ROOT} && mount --bind {ROOT} root{ROOT}")  # it may lie below a volume, such as /tmp
    if any(mount["mountPath"] == KERNELS for mount in container["volumeMounts"]):
        steps += _compiled(user)
    steps += [f"mount -o remount,ro,bind root{ROOT}", "mount -o remount,ro root"]
    variables = {"HOME": HOME, "XDG_CACHE_HOME": str(Path(KERNELS).parent), "PYTHONPATH": str(ROOT)}
    variables |= {each["name"]: each["value"] for each in container.get("env", [])}
    drop = (
        f"setpriv --reuid {user} --regid {group} --groups {shared} --bounding-set=-all --inh-caps=-all --no-new-privs"
    )
    clean = shlex.join(["env", *(f"{name}={value}" for name, value in variables.items())])
    steps.append(f"exec chroot root {drop} {clean} {shlex.join(command)}")
    return ["unshare", "--mount", "sh", "-c", "\n".join(steps)]
