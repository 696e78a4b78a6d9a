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

RACKS, RANKS_PER_RACK = 2, 2
ENTRANTS = FLAT, RELAYS = "flat", "relays"
MIN_SPEEDUP = 1.8  # over flat, of a dense tensor: of sparse ones results for ranks leave out what these have
ROUNDS = {1.0: 5, 0.1: 7}  # by density
SIZE = "16 MiB"
RATE, HOST_RATE = "250mbit", "4gbit"  # what the hosts of a rack share; what each has to the others of its rack
HOST_BYTES_PER_S = 4e9 / 8


def cases(rate: str, rounds: int | None = None) -> list[Case]:
    """The cases where a rack's link has this rate."""
    case = Case("tcp", RACKS * RANKS_PER_RACK, SIZE, 1.0, links=f"racks {rate}")
    return [
        replace(case, density=density, rounds=rounds or default_rounds) for density, default_rounds in ROUNDS.items()
    ]


def run_relays(rate: str, chosen: list[Case]) -> Iterator[Outcome]:
    """Measure these cases. Raises TestbedError where there can be no such hosts, PeerError when something fails."""
    with _racks(rate) as (contest, bytes_per_s):
        for case in chosen:
            measured = contest.run(case)
            bounds = bounds_ms(measured, bytes_per_s)
            extra = {"layout": "racks", "rate": rate, "link_bytes_per_s": bytes_per_s}
            rows = [
                row | extra | {"bound_ms": bounds[row["entrant"]], "share": bounds[row["entrant"]] / row["ms"]}
                for row in rows_of(measured)
            ]
            yield Outcome(case, rows, [verdict_of(measured)] if case.density == 1 else [])


def bounds_ms(measured: Measured, bytes_per_s: float) -> dict[str, float]:
    """The least time that a rack's link allows after a pause, in which its shapers have saved up a burst."""
    rack_density = 1 - (1 - measured.density) ** RANKS_PER_RACK
    down = measured.union_density
    loads = {FLAT: RANKS_PER_RACK * max(measured.density, down), RELAYS: max(rack_density, down)}
    nbytes = measured.case.elements * 4
    return {name: 1e3 * max(0.0, load * nbytes - BURST_BYTES) / bytes_per_s for name, load in loads.items()}


def verdict_of(measured: Measured) -> Verdict:
    """Whether relays are as much faster as they should be."""
    flat, relays = measured.results[FLAT].median, measured.results[RELAYS].median
    return at_least(measured.case.name, relays, FLAT, flat, MIN_SPEEDUP)


def _seconds(servers: Sequence[Servers]) -> float:
    """Processor time of all of them so far."""
    return sum(server.cpu_seconds() for server in servers)


@contextlib.contextmanager
def _racks(rate: str) -> Iterator[tuple[Contest, float]]:
    """Two racks with a relay each, and the aggregator outside; and the goodput of a rack's link in bytes per second."""
    size = RANKS_PER_RACK + 1
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="omnireduce-bench-")) for _ in range(2)]
        hosts = stack.enter_context(racked_testbed(RACKS * size + 1, HOST_RATE, Racks((size,) * RACKS, rate)))
        *in_racks, outside = hosts
        bytes_per_s = max(goodput(in_racks[0], outside, 0.5) for _ in range(3))

        def start(host: int, port: int, *sets: str) -> Servers:
            _, address, prefix = hosts[host]
            return stack.enter_context(daemon(1, OPEN, *sets, listen=f"{address}:{port}", prefix=prefix))

        flat, upper = start(-1, PORT), start(-1, PORT + 1)
        upstream_setting = f"aggregator.upstream={json.dumps(upper.addresses)}"
        relays = [start(rack * size + RANKS_PER_RACK, PORT, upstream_setting) for rack in range(RACKS)]
        rank_hosts = [in_racks[rack * size + index] for rack in range(RACKS) for index in range(RANKS_PER_RACK)]
        prefixes = [host.prefix for host in rank_hosts]
        addresses_of_entrants = {
            FLAT: [flat.addresses] * len(rank_hosts),
            RELAYS: [relays[r // RANKS_PER_RACK].addresses for r in range(len(rank_hosts))],
        }
        servers = {FLAT: [flat], RELAYS: [upper, *relays]}
        entrants = []
        for (name, addresses), folder in zip(addresses_of_entrants.items(), folders, strict=True):
            group = service_group(
                len(rank_hosts), folder, [], "transport.kind=tcp", prefixes=prefixes, carrier="tcp",
                per_rank=[(f"cluster.aggregators={json.dumps(rank_addresses)}",) for rank_addresses in addresses],
            )  # fmt: skip
            method = Method(name, "allreduce", "dense", is_own=True)
            entrants.append(Entrant(method, stack.enter_context(group), partial(_seconds, servers[name])))
        yield Contest(entrants), bytes_per_s
