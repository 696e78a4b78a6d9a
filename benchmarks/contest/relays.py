"""Relays against shards alone, where two racks of two hosts share one slow link each to the aggregator.

    flat     every rank sends its blocks to the aggregator, and gets the union: a rack's link carries two of each
    relays   in each rack a relay sends the union of its two ranks once, and gets the union of all once

A rack's link carries at least `max(up, down) / B` seconds: of both bounds the one of relays is about half.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from benchmarks.contest.cases import Case
from benchmarks.contest.contest import Contest, Entrant, Measured, Method
from benchmarks.contest.outcomes import Outcome, rows_of
from benchmarks.contest.shaped import OPEN, PORT
from benchmarks.harness.group import Servers, daemon, service_group
from benchmarks.harness.testbed import BURST_BYTES, Racks, goodput, racked_testbed
from benchmarks.harness.verdicts import Verdict, at_least

RACKS, IN_A_RACK = 2, 2
ENTRANTS = FLAT, RELAYS = "flat", "relays"
TARGET = 1.8  # times as fast as flat, of a dense tensor: of sparse ones results for ranks leave out what these have
ROUNDS = {1.0: 5, 0.1: 7}  # by density
SIZE = "16 MiB"
RATE, HOST_RATE = "250mbit", "4gbit"  # what the hosts of a rack share; what each has to the others of its rack
HOST_BYTES_PER_S = 4e9 / 8


def cases(rate: str, rounds: int | None = None) -> list[Case]:
    """The cases where a rack's link has this rate."""
    case = Case("tcp", RACKS * IN_A_RACK, SIZE, 1.0, links=f"racks {rate}")
    return [replace(case, density=density, rounds=rounds or own) for density, own in ROUNDS.items()]


def run_relays(rate: str, chosen: list[Case]) -> Iterator[Outcome]:
    """Measure these cases. Raises TestbedError where there can be no such hosts, PeerError when something fails."""
    with _racks(rate) as (contest, bytes_per_s):
        for case in chosen:
            measured = contest.run(case)
            bounds = bounds_ms(measured, bytes_per_s)
            more = {"layout": "racks", "rate": rate, "link_bytes_per_s": bytes_per_s}
            rows = [
                row | more | {"bound_ms": bounds[row["entrant"]], "share": bounds[row["entrant"]] / row["ms"]}
                for row in rows_of(measured)
            ]
            yield Outcome(case, rows, [verdict_of(measured)] if case.density == 1 else [])


def bounds_ms(measured: Measured, bytes_per_s: float) -> dict[str, float]:
    """The least time that a rack's link allows after a pause, in which its shapers have saved up a burst."""
    of_rack = 1 - (1 - measured.density) ** IN_A_RACK
    down = measured.union_density
    loads = {FLAT: IN_A_RACK * max(measured.density, down), RELAYS: max(of_rack, down)}
    nbytes = measured.case.elements * 4
    return {name: 1e3 * max(0.0, load * nbytes - BURST_BYTES) / bytes_per_s for name, load in loads.items()}


def verdict_of(measured: Measured) -> Verdict:
    """Whether relays are as much faster as they should be."""
    flat, relays = measured.results[FLAT].median, measured.results[RELAYS].median
    return at_least(measured.case.name, relays, FLAT, flat, TARGET)


def _seconds(servers: Sequence[Servers]) -> float:
    """Processor time of all of them so far."""
    return sum(server.cpu_seconds() for server in servers)


@contextlib.contextmanager
def _racks(rate: str) -> Iterator[tuple[Contest, float]]:
    """Two racks with a relay each, and the aggregator outside; and the goodput of a rack's link in bytes per second."""
    size = IN_A_RACK + 1
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="omnireduce-bench-")) for _ in range(2)]
        hosts = stack.enter_context(racked_testbed(RACKS * size + 1, HOST_RATE, Racks((size,) * RACKS, rate)))
        *in_racks, outside = hosts
        bytes_per_s = max(goodput(in_racks[0], outside, 0.5) for _ in range(3))

        def start(host: int, port: int, *sets: str) -> Servers:
            at = hosts[host]
            return stack.enter_context(daemon(1, OPEN, *sets, listen=f"{at.address}:{port}", prefix=at.prefix))

        flat, top = start(-1, PORT), start(-1, PORT + 1)
        above = f"aggregator.upstream={json.dumps(top.addresses)}"
        relays = [start(rack * size + IN_A_RACK, PORT, above) for rack in range(RACKS)]
        of_ranks = [in_racks[rack * size + place] for rack in range(RACKS) for place in range(IN_A_RACK)]
        prefixes = [host.prefix for host in of_ranks]
        ways = {
            FLAT: [flat.addresses] * len(of_ranks),
            RELAYS: [relays[r // IN_A_RACK].addresses for r in range(len(of_ranks))],
        }
        servers = {FLAT: [flat], RELAYS: [top, *relays]}
        entrants = []
        for (name, addresses), folder in zip(ways.items(), folders, strict=True):
            group = service_group(
                len(of_ranks), folder, [], "transport.kind=tcp", prefixes=prefixes, carrier="tcp",
                per_rank=[(f"cluster.aggregators={json.dumps(of_rank)}",) for of_rank in addresses],
            )  # fmt: skip
            method = Method(name, "allreduce", "dense", own=True)
            entrants.append(Entrant(method, stack.enter_context(group), partial(_seconds, servers[name])))
        yield Contest(entrants), bytes_per_s
