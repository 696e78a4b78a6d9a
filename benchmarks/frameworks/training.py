"""Training with torch from end to end: the project's examples on omnireduce and on gloo, in turns.

Each example prints how many steps it takes per second, and how good its model is then: the same on all backends. Ranks
are started by torchrun, on this host, or on two hosts with shaped links that have half of the ranks and a shard each.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, NamedTuple

import numpy as np

from benchmarks.contest.cases import MEMORY
from benchmarks.contest.contest import OURS
from benchmarks.contest.outcomes import Outcome, Row
from benchmarks.contest.shaped import INTERFACE, OPEN, PORT, SHARED_HOSTS, Setting
from benchmarks.harness.carriers import CARRIED_BY, NOTHING, wrong_carrier
from benchmarks.harness.environments import ROOT, python_of
from benchmarks.harness.group import THREADS, PeerError, daemon, end_torchrun
from benchmarks.harness.verdicts import Verdict, at_least, at_most, undecided

GLOO = "gloo"
RUN_S = 300.0  # the longest that one run of an example may take
EXIT_S, POLL_S = 5.0, 0.2
TURNS = 5
SPEED_LINE = re.compile(r" ([\d.]+) steps/s; (?:loss )?([\d.]+)")
MAX_DIFFERENCE = 0.01  # how far a loss, or an accuracy in percent, may be from gloo's, as a part of that
THIS_HOST, DENSE = "this host", " dense"
SHAPED_RANKS = 4  # with a target: two on each host


class Model(NamedTuple):
    """An example: its file, and the options of each variant."""

    script: str
    variants: dict[str, tuple[str, ...]]


MODELS = {
    "embedding": Model("torch_embedding.py", {"": ("--steps", "60"), DENSE: ("--dense", "--steps", "8")}),
    "digits": Model("torch_ddp.py", {"": ("--steps", "200")}),
    "25 M parameters": Model("torch_ddp.py", {"": ("--width", "3500", "--steps", "8")}),
}


@dataclass(frozen=True)
class Training:
    """A model that `ranks` train, on this host, or on two whose links carry `links`, as tc writes it."""

    model: str
    ranks: int
    links: str = THIS_HOST
    kind: str = "training"

    @property
    def name(self) -> str:
        return f"training, {self.model}, {self.ranks} ranks, {self.links}"

    @property
    def carrier(self) -> str:
        """The carrier of omnireduce's tensors: ranks of one host combine them in memory first."""
        return MEMORY if self.links == THIS_HOST else "tcp" if self.ranks == SHARED_HOSTS else f"{MEMORY}+tcp"

    @property
    def labels(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """The entrants: the backend of each, and the options."""
        variants = MODELS[self.model].variants
        return {
            backend + variant: (backend, options) for variant, options in variants.items() for backend in (OURS, GLOO)
        }


@dataclass
class Runs:
    """Results of the runs of one entrant: milliseconds of a step, how good the model was in the end, and what carried
    the tensors."""

    ms: list[float] = field(default_factory=list)
    quality: list[float] = field(default_factory=list)
    carriers: set[str] = field(default_factory=set)


class Placement(NamedTuple):
    """Place of the ranks: what is put before the command of each host, and what all of them have in their
    environment."""

    prefixes: Sequence[Sequence[str]]
    environ: dict[str, str]
    address: str = ""  # of the first host, where there are several


def run_trainings(cases: Sequence[Training], turns: int) -> Iterator[Outcome]:
    """Run these; yield what became of each. A run that fails is said to, and left out. Raises TestbedError where there
    can be no hosts with shaped links, PeerError where a daemon does not start, OmniReduceError where torch cannot be
    installed."""
    for case in cases:
        with _placement(case) as placement:
            runs = {label: Runs() for label in case.labels}
            for turn in range(turns):
                labels = list(runs)
                for label in labels[turn % len(labels) :] + labels[: turn % len(labels)]:
                    try:
                        step_ms, quality, carrier = _run(case, label, placement)
                    except PeerError as error:
                        sys.stderr.write(f"bench: LEFT OUT: a run of {case.name}: {error}\n")
                        continue
                    runs[label].ms.append(step_ms)
                    runs[label].quality.append(quality)
                    runs[label].carriers.add(carrier)
        yield outcome_of(case, runs)


def outcome_of(case: Training, runs_by_label: Mapping[str, Runs]) -> Outcome:
    return Outcome(case, _rows(case, runs_by_label), _verdicts(case, runs_by_label))


@contextlib.contextmanager
def _placement(case: Training) -> Iterator[Placement]:
    if case.links == THIS_HOST:
        yield Placement([()], {"GLOO_SOCKET_IFNAME": "lo"})
        return
    with contextlib.ExitStack() as stack:
        _, hosts = stack.enter_context(Setting("shared", case.ranks, case.links).testbed())
        daemons = [
            stack.enter_context(daemon(1, OPEN, listen=f"{host.address}:{PORT}", prefix=host.prefix)) for host in hosts
        ]
        environ = {
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(address for servers in daemons for address in servers.addresses),
            "OMNIREDUCE_TRANSPORT_KIND": "tcp",
        }
        yield Placement([host.prefix for host in hosts], environ, hosts[0].address)


def _run(case: Training, label: str, placement: Placement) -> tuple[float, float, str]:
    """Run an example; return the milliseconds of a step, the loss or accuracy, and what carried the tensors. Raises
    PeerError where that is not what the case says."""
    backend, options = case.labels[label]
    torchrun, hosts = python_of("gloo").parent / "torchrun", len(placement.prefixes)
    rendezvous_options = (
        ["--nnodes", str(hosts), "--master-addr", placement.address] if placement.address else ["--standalone"]
    )
    program = ["-m", "benchmarks.harness.carriers", str(ROOT / "examples" / MODELS[case.model].script)]
    program += ["--backend", backend, *options]
    commands = [
        [
            *prefix,
            str(torchrun),
            *rendezvous_options,
            "--node-rank",
            str(host),
            "--nproc-per-node",
            str(case.ranks // hosts),
            *program,
        ]
        for host, prefix in enumerate(placement.prefixes)
    ]
    text = _output(label, commands, placement.environ)
    match = SPEED_LINE.search(text)
    if match is None:
        raise PeerError(label, f"did not say how fast it was: {text[-500:]}")
    carrier = "+".join(sorted(set(CARRIED_BY.findall(text)))) or NOTHING
    if wrong := wrong_carrier(case.carrier if backend == OURS else "tcp", carrier):
        raise PeerError(label, f"failed: {wrong}")
    return 1e3 / float(match[1]), float(match[2]), carrier


def _output(label: str, commands: Sequence[Sequence[str]], environ: dict[str, str]) -> str:
    """The output of these commands together. Raises PeerError where one fails, or takes too long.

    Those that have said how fast they were need not end: gloo of torch 2.13 now and then waits for itself at the end,
    for a thread that wants the interpreter, which waits for that thread.
    """
    with tempfile.TemporaryFile() as log, contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            process = subprocess.Popen(
                command,
                env=os.environ | THREADS | {"PYTHONPATH": str(ROOT)} | environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            stack.callback(end_torchrun, process)
            processes.append(process)
        deadline = time.monotonic() + RUN_S
        while not all(process.poll() is not None for process in processes) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            if SPEED_LINE.search(_written(log)):
                deadline = min(deadline, time.monotonic() + EXIT_S)
        text = _written(log)
        if any(process.poll() for process in processes):
            raise PeerError(label, f"failed: {text[-500:]}")
        if any(process.poll() is None for process in processes):
            if not SPEED_LINE.search(text):
                raise PeerError(label, f"took longer than {RUN_S:g} s")
            sys.stderr.write(f"bench: a run of {label} said how fast it was, and did not end\n")
        return text


def _written(log: IO[bytes]) -> str:
    return os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")


def _rows(case: Training, runs_by_label: Mapping[str, Runs]) -> list[Row]:
    """One for each entrant that ran. Wrong is one whose model is not as good, or as bad, as gloo's."""
    rows = []
    for label, runs in runs_by_label.items():
        if not runs.ms:
            continue
        gloo_qualities = runs_by_label[GLOO + label.removeprefix(OURS).removeprefix(GLOO)].quality or runs.quality
        quality, gloo_quality = float(np.median(runs.quality)), float(np.median(gloo_qualities))
        rows.append(
            {
                "case": case.name,
                "entrant": label,
                "measured": time.strftime("%Y-%m-%d %H:%M:%S"),
                "kind": case.kind,
                "model": case.model,
                "ranks": case.ranks,
                "links": case.links,
                "rounds": len(runs.ms),
                "ms": float(np.median(runs.ms)),
                "ms_min": min(runs.ms),
                "ms_max": max(runs.ms),
                "steps_per_s": 1e3 / float(np.median(runs.ms)),
                "quality": quality,
                "carried_by": ", ".join(sorted(runs.carriers)),
                "wrong": int(abs(quality - gloo_quality) > MAX_DIFFERENCE * gloo_quality),
            }
        )
    return rows


def _verdicts(case: Training, runs_by_label: Mapping[str, Runs]) -> list[Verdict]:
    medians = {label: float(np.median(runs.ms)) for label, runs in runs_by_label.items() if runs.ms}
    return [_verdict(case.name + suffix, medians, ours, peer, target) for suffix, ours, peer, target in _targets(case)]


def _targets(case: Training) -> list[tuple[str, str, str, float]]:
    """The comparisons: our entrant, theirs, and how many times as fast we have to be; below 1, almost."""
    is_this_host = case.links == THIS_HOST
    if case.model != "embedding":
        if is_this_host:
            return [("", OURS, GLOO, 1 / 1.05)]
        return [("", OURS, GLOO, 1.0)] if case.ranks == SHAPED_RANKS else []
    if is_this_host:
        return [(": against dense", OURS, GLOO + DENSE, 1.2), (": both dense", OURS + DENSE, GLOO + DENSE, 1.2)]
    if case.ranks != SHAPED_RANKS:
        return []
    return [
        (": against dense", OURS, GLOO + DENSE, 2.0),
        (": both dense", OURS + DENSE, GLOO + DENSE, 2.0),
        (": both sparse", OURS, GLOO, 1.3),
    ]


def _verdict(name: str, medians: Mapping[str, float], ours: str, peer: str, target: float) -> Verdict:
    absent = [label for label in (ours, peer) if label not in medians]
    if absent:
        return undecided(name, medians.get(ours, 0.0), absent, target)
    if target < 1:
        return at_most(name, medians[ours], peer, medians[peer], 1 / target)
    return at_least(name, medians[ours], peer, medians[peer], target)
