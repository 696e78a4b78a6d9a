"""Checks of this host: versions, launcher, processor, limits."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from omnireduce import processors
from omnireduce.config import Config
from omnireduce.console.finding import Finding, State
from omnireduce.errors import UsageError
from omnireduce.runtime.rank.environment import alone_though, detect_launch, job_name

PACKAGES = ("omnireduce", "numpy", "numba", "llvmlite", "msgspec", "ml_dtypes", "prometheus-client")
OPTIONAL = {"mpi4py": "omnireduce bench --against mpi", "pyverbs": "RDMA"}
FEATURES = ("sse4_2", "avx", "avx2", "avx512f", "asimd", "sve")  # as /proc/cpuinfo calls them
LOCKING_IS_FREE = 1 << 14  # CAP_IPC_LOCK: capabilities(7)
SPARE_DESCRIPTORS = 64  # what a process needs beside its links


def check_versions() -> Iterator[Finding]:
    """Versions of what is installed."""
    installed, missing = [f"Python {platform.python_version()}"], []
    for name in PACKAGES:
        try:
            installed.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    yield Finding("ok", "versions", ", ".join(installed))
    if missing:
        yield Finding("warn", "versions", f"no version of {', '.join(missing)}", "pip install -e . in the checkout")
    for name, purpose in OPTIONAL.items():
        try:
            yield Finding("ok", name, version(name))
        except PackageNotFoundError:
            if _is_importable(name):  # a link to the distribution's package has no version
                yield Finding("ok", name, "the distribution's")
            else:
                yield Finding("info", name, f"not installed; it is for {purpose} only")


def _is_importable(name: str) -> bool:
    return any((Path(folder) / name / "__init__.py").exists() for folder in sys.path)


def check_launch(config: Config, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """The launcher, the rank and the job that a worker would find here."""
    try:
        launch = detect_launch(environ)
    except UsageError as error:
        yield Finding("fail", "launch", str(error))
        return
    by = "no launcher" if launch.launcher == "none" else f"by {launch.launcher}"
    yield Finding("ok", "launch", f"{by}; rank {launch.rank} of {launch.size}, job {job_name(config, launch.job)!r}")
    alone = alone_though(environ) if launch.launcher == "none" else None
    if alone is not None:
        yield Finding("fail" if alone.is_certain else "warn", "launch", alone.said, alone.instead)


def check_processor(cpuinfo: str | None = None) -> Iterator[Finding]:
    """Cores and vector instructions, as /proc/cpuinfo says."""
    lines = (Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo).splitlines()
    fields = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    words = set((fields.get("flags") or fields.get("Features") or "").split())
    features = [name for name in FEATURES if name in words]
    quota = processors.quota()
    more = f", a quota of {quota:g}" if quota is not None else ""
    cores = f"{processors.usable()} of {os.cpu_count()} cores{more}"
    text = (
        f"{fields.get('model name') or platform.machine()}, {cores}; {' '.join(features) or 'no vector instructions'}"
    )
    if "flags" in fields and "avx2" not in words:
        advice = "kernels must do with narrow vectors; give a virtual machine the host's processor (-cpu host)"
        yield Finding("warn", "processor", text, advice)
    else:
        yield Finding("ok", "processor", text)


def check_descriptors(config: Config, soft: int, hard: int) -> Iterator[Finding]:
    """The limits of open files. An aggregator raises its own to the hard limit, and gives 3/4 of that to ranks."""
    ranks = hard * 3 // 4
    text = f"{_shown(soft)} open files, {_shown(hard)} at most"
    need = SPARE_DESCRIPTORS + 4 * max(1, len(config.cluster.aggregators))
    if _below(soft, need):
        yield Finding("fail", "descriptors", f"{text}; a worker needs {need}", f"ulimit -n {need}")
    elif _below(ranks, config.aggregator.max_world_size):
        wanted = config.aggregator.max_world_size * 4 // 3 + 1
        advice = f"ulimit -Hn {wanted}, or LimitNOFILE={wanted} of a systemd unit; or lower aggregator.max_world_size"
        yield Finding("warn", "descriptors", f"{text}, which is enough for {ranks} ranks on an aggregator here", advice)
    else:
        yield Finding("ok", "descriptors", text)


def check_locked_memory(config: Config, limit: int, *, exempt: bool, has_devices: bool) -> Iterator[Finding]:
    """The limit of locked memory. It counts only with RDMA, where slots are registered with the device."""
    protocol = config.protocol
    need = 2 * protocol.slots * protocol.slot_bytes * max(1, len(config.cluster.aggregators))
    text = f"{_shown(limit)} bytes" + (", not applied to this user" if exempt else "")
    if not exempt and _below(limit, need):
        advice = (
            "ulimit -l unlimited, LimitMEMLOCK=infinity of a systemd unit, or --ulimit memlock=-1 of a container; or "
            "lower protocol.slots or protocol.slot_bytes"
        )
        if config.transport.kind == "verbs" or has_devices:
            state: State = "fail" if config.transport.kind == "verbs" else "warn"
            yield Finding(state, "locked memory", f"{text}; a worker registers {need} for RDMA", advice)
            return
        text += f"; RDMA would need {need}, other transports none"
    yield Finding("ok", "locked memory", text)


def locking_is_free(status: str | None = None) -> bool:
    """Whether the limit of locked memory does not apply to this process, by its capabilities."""
    text = Path("/proc/self/status").read_text() if status is None else status
    return bool(int(text.split("CapEff:")[1].split()[0], 16) & LOCKING_IS_FREE)


def check_limits(config: Config, *, has_devices: bool) -> Iterator[Finding]:
    """The limits of this process."""
    yield from check_descriptors(config, *resource.getrlimit(resource.RLIMIT_NOFILE))
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield from check_locked_memory(config, memlock, exempt=locking_is_free(), has_devices=has_devices)


def _below(limit: int, need: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < need


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
