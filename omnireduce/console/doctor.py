"""`omnireduce doctor`: looks at this host and its aggregators, and says what to do about what it finds wrong."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from rich.console import Console
from rich.text import Text

from omnireduce.core.wire.safe_text import shown
from omnireduce.errors import ConfigError, OmniReduceError, TransportError, UsageError
from omnireduce.kernels.compiling.jit import has_compiler, kernel_files
from omnireduce.kernels.warm import progress_text, take_trouble, warm_up_all
from omnireduce.protocol.joining.authentication import WANTS_PROOF
from omnireduce.runtime.aggregator_client import AT_ONCE, reach, read_status
from omnireduce.runtime.rank.embedded_aggregator import identify
from omnireduce.runtime.rank.launcher_detection import detect_launch, find_launcher_sign, job_name
from omnireduce.support import processors
from omnireduce.support.config import Config
from omnireduce.support.config.schema import SECRET_VARIABLE
from omnireduce.support.printing import make_console
from omnireduce.support.progress import PlainProgress
from omnireduce.support.secret import load_secret
from omnireduce.support.version import __version__
from omnireduce.transport.kinds import TABLE, Transport, UnavailableError, is_required
from omnireduce.transport.rdma_offer import RDMA, rdma_is_required

if TYPE_CHECKING:
    from omnireduce.transport.verbs.devices import Port


State = Literal["ok", "info", "warn", "fail"]
_STYLES: dict[State, str] = {"ok": "green", "info": "", "warn": "yellow", "fail": "bold red"}


class Finding(NamedTuple):
    """`fail`: what the configuration asks for cannot work. `warn`: it works, but not as well as it could."""

    state: State
    subject: str
    text: str
    advice: str = ""


def show(console: Console, findings: Sequence[Finding]) -> None:
    """Print one line for each finding. A long line is not cut."""
    for state, subject, text, advice in findings:
        line = Text.assemble((f"{state:<5}", _STYLES[state]), (f"{subject}: ", "bold"), text)
        console.print(line + Text(f"; {advice}" if advice else ""), soft_wrap=True)


PACKAGES = ("omnireduce", "numpy", "numba", "llvmlite", "msgspec", "ml_dtypes", "prometheus-client")
OPTIONAL = {"mpi4py": "omnireduce bench --against mpi", "pyverbs": "RDMA"}
FEATURES = ("sse4_2", "avx", "avx2", "avx512f", "asimd", "sve")  # as /proc/cpuinfo calls them
LOCK_CAPABILITY = 1 << 14  # CAP_IPC_LOCK: capabilities(7)
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
    launcher = "no launcher" if launch.launcher == "none" else f"by {launch.launcher}"
    yield Finding(
        "ok", "launch", f"{launcher}; rank {launch.rank} of {launch.size}, job {job_name(config, launch.job)!r}"
    )
    alone = find_launcher_sign(environ) if launch.launcher == "none" else None
    if alone is not None:
        yield Finding("fail" if alone.is_certain else "warn", "launch", alone.text, alone.instead)


def check_processor(cpuinfo: str | None = None) -> Iterator[Finding]:
    """Cores and vector instructions, as /proc/cpuinfo says."""
    lines = (Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo).splitlines()
    fields = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    words = set((fields.get("flags") or fields.get("Features") or "").split())
    features = [name for name in FEATURES if name in words]
    quota = processors.quota()
    quota_text = f", a quota of {quota:g}" if quota is not None else ""
    cores = f"{processors.usable()} of {os.cpu_count()} cores{quota_text}"
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
    text = f"{_limit_text(soft)} open files, {_limit_text(hard)} at most"
    needed_by_worker = SPARE_DESCRIPTORS + 4 * max(1, len(config.cluster.aggregators))
    if _is_below(soft, needed_by_worker):
        yield Finding(
            "fail", "descriptors", f"{text}; a worker needs {needed_by_worker}", f"ulimit -n {needed_by_worker}"
        )
    elif _is_below(ranks, config.aggregator.max_world_size):
        needed_descriptors = config.aggregator.max_world_size * 4 // 3 + 1
        limits = f"ulimit -Hn {needed_descriptors}, or LimitNOFILE={needed_descriptors} of a systemd unit"
        advice = f"{limits}; or lower aggregator.max_world_size"
        yield Finding("warn", "descriptors", f"{text}, which is enough for {ranks} ranks on an aggregator here", advice)
    else:
        yield Finding("ok", "descriptors", text)


def check_locked_memory(config: Config, limit: int, *, exempt: bool, has_devices: bool) -> Iterator[Finding]:
    """The limit of locked memory. It counts only with RDMA, where slots are registered with the device."""
    protocol = config.protocol
    needed_bytes = 2 * protocol.slots * protocol.slot_bytes * max(1, len(config.cluster.aggregators))
    text = f"{_limit_text(limit)} bytes" + (", not applied to this user" if exempt else "")
    if not exempt and _is_below(limit, needed_bytes):
        advice = (
            "ulimit -l unlimited, LimitMEMLOCK=infinity of a systemd unit, or --ulimit memlock=-1 of a container; or "
            "lower protocol.slots or protocol.slot_bytes"
        )
        if rdma_is_required(config) or has_devices:
            state: State = "fail" if rdma_is_required(config) else "warn"
            yield Finding(state, "locked memory", f"{text}; a worker registers {needed_bytes} for RDMA", advice)
            return
        text += f"; RDMA would need {needed_bytes}, other transports none"
    yield Finding("ok", "locked memory", text)


def may_lock_any_memory(status: str | None = None) -> bool:
    """Whether the limit of locked memory does not apply to this process, by its capabilities."""
    text = Path("/proc/self/status").read_text() if status is None else status
    return bool(int(text.split("CapEff:")[1].split()[0], 16) & LOCK_CAPABILITY)


def check_limits(config: Config, *, has_devices: bool) -> Iterator[Finding]:
    """The limits of this process."""
    yield from check_descriptors(config, *resource.getrlimit(resource.RLIMIT_NOFILE))
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield from check_locked_memory(config, memlock, exempt=may_lock_any_memory(), has_devices=has_devices)


def _is_below(limit: int, needed: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < needed


def _limit_text(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


ANSWER_S = 2.0  # how long an aggregator may take to answer


def check_transports(config: Config) -> Iterator[Finding]:
    """Try shared memory and TCP, over loopback. RDMA is looked at by `check_rdma`."""
    for transport in TABLE:
        yield _try_transport(transport, config)


def _try_transport(transport: Transport, config: Config) -> Finding:
    try:
        return Finding("ok", transport.name, transport.probe())
    except (OSError, UnavailableError) as error:
        state: State = "fail" if is_required(transport, config.transport.kind) else "warn"
        reason = getattr(error, "strerror", None) or error
        return Finding(state, transport.name, f"not available: {reason}", transport.advice)


def find_ports() -> tuple[list[Port], str]:
    """The ports of all RDMA devices here, or why there are none."""
    try:
        from omnireduce.transport.verbs.devices import list_ports

        ports = list_ports()
    except TransportError as error:
        return [], str(error)
    return ports, "" if ports else "this host has no RDMA device"


def check_rdma(config: Config, ports: list[Port], reason: str) -> Iterator[Finding]:
    """Ports with their state and GIDs, and which one is taken."""
    required: State = "fail" if rdma_is_required(config) else "info"
    if not ports:
        advice = "or choose another transport.kind; docs/rdma.md" if required == "fail" else ""
        yield Finding(required, RDMA, f"not available: {reason}", advice)
        return
    for port in ports:
        yield _check_port(port)
    from omnireduce.transport.verbs.devices import choose

    try:
        choice = choose(config.verbs, local_address="")
    except TransportError as error:
        advice = "give the port's interface an IPv4 address and a link, or set verbs.device, port and gid_index"
        yield Finding(required if required == "fail" else "warn", RDMA, f"not available: {error}", advice)
        return
    gid = f"GID {choice.gid.index}, {choice.gid.ipv4 or choice.gid.text}"
    yield Finding("ok", RDMA, f"available, by default {choice.port.device} port {choice.port.number}, {gid}")


def _check_port(port: Port) -> Finding:
    subject = f"RDMA port {port.device}/{port.number}"
    gids = ", ".join(f"{gid.index}: {gid.kind} {gid.ipv4 or gid.text}" for gid in port.gids)
    text = f"{port.state}, MTU {port.mtu}, GIDs {gids or 'none'}"
    if not port.active:
        return Finding(
            "warn", subject, text, "is its cable in, its interface up (ip link set IFACE up), or a subnet manager?"
        )
    if not any(gid.kind == "IB" or (gid.kind == "RoCE v2" and gid.ipv4) for gid in port.gids):
        return Finding("warn", subject, text, "give its interface an IPv4 address, for RoCE v2")
    return Finding("ok", subject, text)


def check_secret(config: Config) -> Iterator[Finding]:
    """Say where the secret comes from. Whether it is that of the aggregators, `check_aggregators` finds out."""
    try:
        secret = load_secret(config.security)
    except ConfigError as error:
        yield Finding("fail", "secret", str(error))
        return
    if secret is None:
        yield Finding("info", "secret", "none: whoever can reach an aggregator without one may join; docs/security.md")
    else:
        team = f", of team {secret.team}" if secret.team else ""
        yield Finding("ok", "secret", f"from {config.security.secret_file or SECRET_VARIABLE}{team}")


def check_aggregators(config: Config) -> Iterator[Finding]:
    """Ask each configured aggregator, by the transport and with the proof that a worker would use."""
    addresses = config.cluster.aggregators
    if not addresses:
        yield _check_embedded(config)
        return
    with ThreadPoolExecutor(min(len(addresses), AT_ONCE)) as pool:
        yield from pool.map(lambda address: _check_aggregator(address, config), addresses)


def _check_embedded(config: Config) -> Finding:
    try:
        launch = detect_launch()
        identify(config, launch, is_named=launch.job is not None or config.cluster.job != "auto")
    except OmniReduceError as error:
        return Finding("fail", "aggregator", str(error))
    text = "none configured: rank 0 of a job whose ranks are all on this host starts one for it"
    return Finding("info", "aggregator", text, "for several hosts start some, and set cluster.aggregators")


def _check_aggregator(address: str, config: Config) -> Finding:
    subject, started = f"aggregator {address}", time.monotonic()
    try:
        secret = load_secret(config.security)
        with contextlib.closing(reach(address, config, secret, started + ANSWER_S)) as link:
            status = read_status(link, started + ANSWER_S)
            transport = str(link)
    except OmniReduceError as error:
        return Finding("fail", subject, shown(str(error)))
    if secret is None and status.wants_secret:  # this user may ask without it, and no worker may
        return Finding("fail", subject, WANTS_PROOF)
    took_ms = (time.monotonic() - started) * 1000
    proved = "" if secret is None else ", both proved the secret"
    text = (
        f"answers by {transport} after {took_ms:.1f} ms{proved}; version {shown(status.version)}, {status.running} jobs"
    )
    if status.version != __version__:
        return Finding("warn", subject, text, f"here is {__version__}: install the same omnireduce everywhere")
    return Finding("ok", subject, text)


NO_COMPILER = "unset NUMBA_DISABLE_JIT"


def warm() -> None:
    """Compile all kernels that the first folder for them does not have, and print where they are kept. Raises
    UsageError where they are not."""
    if not has_compiler():
        raise UsageError(f"kernels run as plain Python, and there is nothing to compile: {NO_COMPILER}")
    console = make_console()
    kernel_files().use_first_only()  # an image is for other users, who do not have this user's own folder
    took_s = _warm_up_kernels(console)
    if trouble := take_trouble():
        raise UsageError(trouble)
    console.print(f"kernels ready after {took_s:.1f} s, kept in {kernel_files().kept_in}")


def check_kernels(console: Console) -> Finding:
    """Compile all kernels, or load them, and say how that went."""
    text = f"ready after {_warm_up_kernels(console):.1f} s"
    if not has_compiler():
        return Finding("warn", "kernels", f"{text}, as plain Python, which is very slow", NO_COMPILER)
    if trouble := take_trouble():
        return Finding("warn", "kernels", f"{text}; {trouble}")
    return Finding("ok", "kernels", f"{text}, kept in {kernel_files().kept_in}")


def _warm_up_kernels(console: Console) -> float:
    """Show how far that is; return how many seconds it took."""
    started = time.monotonic()
    plain = PlainProgress(started)
    with console.status("loading kernels") as status:

        def report(done_s: float, total_s: float) -> None:
            if console.is_terminal:
                status.update(progress_text(done_s, total_s))
            else:
                plain.write_if_due(progress_text(done_s, total_s), time.monotonic())

        warm_up_all(report)
    return time.monotonic() - started


def examine(config: Config) -> bool:
    """Print what is found; return whether everything that `config` asks for can work."""
    console, counts = make_console(), Counter[str]()

    def report(*findings: Finding) -> None:
        counts.update(finding.state for finding in findings)
        show(console, findings)

    report(*check_versions(), *check_processor())
    report(check_kernels(console))
    ports, no_rdma_reason = find_ports()
    report(*check_limits(config, has_devices=bool(ports)))
    report(*check_transports(config), *check_rdma(config, ports, no_rdma_reason))
    report(*check_launch(config))
    report(*check_secret(config), *check_aggregators(config))
    _print_summary(console, counts)
    return not counts["fail"]


def _print_summary(console: Console, counts: Counter[str]) -> None:
    if counts["fail"]:
        console.print(f"{counts['fail']} of these cannot work as configured", style="bold red")
    elif counts["warn"]:
        console.print(f"all can work, {counts['warn']} not as well as it could", style="yellow")
    else:
        console.print("all is well", style="green")
