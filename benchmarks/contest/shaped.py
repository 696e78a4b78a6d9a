"""The service on hosts with shaped links, as a share of the bound that the links set.

Dedicated: as many aggregator hosts as ranks, one shard each. A rank's link carries its own blocks up and the union
down, so an exchange of S bytes takes at least max(D, Du) S / B. Colocated: a rank and a shard on every host. A link
carries, each way, the blocks for the other shards and the results of its own one for the other ranks: at least
(N-1)/N (D + Du) S / B, which for dense tensors is the bound of a ring. Shared: two hosts, each with half of the ranks
and one shard; the same bound, where N is the number of hosts and D the density of what the ranks of a host have
together. B is the goodput measured in the same run.

These are the bounds of a service that sends the union to every rank (`bound_ms`, `share`). A rank, or a host of
several, needs only what others contributed: with that density in the place of Du there is a lower one (`least_ms`,
`share_of_least`), which the service can only come near where what it leaves out is an eighth of a message or more.

Colocated ranks are compared with gloo, those of shared hosts with Open MPI, too.

The first bytes of a round pass unshaped, as many as a shaper's burst has: the links were idle since the last one. Both
bounds are less by that, since the link that carries most has it once: `(bytes of that link - burst) / B`. Shapers that
a byte passes one after the other have their bursts at the same time, so that one of them counts.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.contest.cases import Case
from benchmarks.contest.contest import METHODS, OURS, Contest, Entrant, Measured, Method, labels
from benchmarks.contest.outcomes import Outcome, rows_of
from benchmarks.harness.group import Group, PeerError, Servers, daemon, gloo_group, openmpi_between, service_group
from benchmarks.harness.testbed import BURST_BYTES, Host, goodput, testbed
from benchmarks.harness.verdicts import Verdict, at_least, undecided

INTERFACE = "eth0"
PORT = 7400
RATE = "1gbit"  # of a link, where nothing else is asked for
OPEN = "security.allow_no_secret=true"  # the hosts are namespaces of our own
LAYOUTS = ("dedicated", "colocated", "shared")
SHARED_HOSTS = 2
SHARE_TARGET = 0.92
DENSE_TARGETS = {"colocated": 1.0, "shared": 1.4}  # how many times as fast as gloo
BEST_TARGET = 1.0  # how many times as fast as the best of gloo and Open MPI, on shared hosts
DENSE = Method(OURS, "allreduce", "dense", is_own=True)
PEERS = {"dedicated": (), "colocated": ("gloo",), "shared": ("gloo", "openmpi")}
ROUNDS = {1.0: 5, 0.1: 7, 0.01: 9}  # by density


@dataclass(frozen=True)
class Setting:
    """The layout of shards, the number of ranks, and the rate of each link, as tc writes it."""

    layout: str
    ranks: int
    rate: str

    @classmethod
    def of(cls, layout: str, ranks: int, rate: str) -> Setting:
        """With so many ranks; of a shared layout, so many on each host."""
        return cls(layout, ranks * (SHARED_HOSTS if layout == "shared" else 1), rate)

    @property
    def hosts(self) -> int:
        """The number of hosts with ranks, which is that of hosts with shards."""
        return SHARED_HOSTS if self.layout == "shared" else self.ranks

    @contextlib.contextmanager
    def testbed(self) -> Iterator[tuple[list[Host], list[Host]]]:
        """The host of each rank, neighbours on one, and that of each shard. Raises TestbedError."""
        with testbed(2 * self.hosts if self.layout == "dedicated" else self.hosts, self.rate) as hosts:
            yield [hosts[rank * self.hosts // self.ranks] for rank in range(self.ranks)], hosts[-self.hosts :]

    @property
    def carrier(self) -> str:
        """The carrier of the tensors: ranks of one host combine them in memory before."""
        return "tcp" if self.ranks == self.hosts else "memory+tcp"

    def cases(self, rounds: int | None = None) -> list[Case]:
        """The cases, of `rounds` timed rounds each instead of their own."""
        case = Case("tcp", self.ranks, "100 MiB", 1.0, links=f"{self.layout} {self.rate}")
        return [
            replace(case, density=density, rounds=rounds or default_rounds)
            for density, default_rounds in ROUNDS.items()
        ]

    @property
    def peers(self) -> tuple[str, ...]:
        """The competitors."""
        return PEERS[self.layout]

    def others_density(self, measured: Measured) -> float:
        """The density of what the ranks of other hosts have together."""
        if self.ranks == self.hosts:
            return measured.others_density
        return 1 - (1 - measured.density) ** (self.ranks - self.ranks // self.hosts)

    def bound_ms(self, measured: Measured, bytes_per_s: float, down: float) -> float:
        """The least time that the links allow after a pause, in which their shapers have saved up a burst, when blocks
        of density `down` are sent to every rank."""
        # the ranks of a host draw their blocks independently
        host_density = 1 - (1 - measured.density) ** (self.ranks // self.hosts)
        if self.layout == "dedicated":
            load = max(host_density, down)
        else:
            load = (self.hosts - 1) / self.hosts * (host_density + down)
        shaped = max(0.0, load * measured.case.elements * 4 - BURST_BYTES)
        return 1e3 * shaped / bytes_per_s


@contextlib.contextmanager
def _shaped(setting: Setting, sets: Sequence[str]) -> Iterator[tuple[Contest, float]]:
    """The hosts with everything running on them, and the goodput of a link in bytes per second.

    `sets` are `section.key=value` for the ranks.

    Raises TestbedError where there can be no such hosts, PeerError when something does not start.
    """
    ranks = setting.ranks
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="omnireduce-bench-"))
        rank_hosts, shard_hosts = stack.enter_context(setting.testbed())
        speeds = [goodput(shard_hosts[0], shard_hosts[1], 0.5) for _ in range(3)]
        bytes_per_s = max(speeds)  # less only where something disturbs it
        daemons = _daemons(stack, shard_hosts)
        addresses = [address for servers in daemons for address in servers.addresses]
        prefixes = [host.prefix for host in rank_hosts]
        service = service_group(
            ranks, folder, addresses, "transport.kind=tcp", *sets, prefixes=prefixes, carrier=setting.carrier
        )

        def shards_s() -> float:
            return sum(servers.cpu_seconds() for servers in daemons)

        entrants = [Entrant(DENSE, stack.enter_context(service), shards_s)]
        for name in setting.peers:
            try:
                group = stack.enter_context(_peer_group(name, rank_hosts, folder))
            except (PeerError, RuntimeError, OSError) as error:
                sys.stderr.write(f"bench: left out: {error}\n")
            else:
                entrants += [Entrant(method, group) for method in METHODS[name] if method.is_rival]
        yield Contest(entrants), bytes_per_s


@contextlib.contextmanager
def group_between(
    rate: str, ranks: int, *sets: str, program: Sequence[str], shards: int | None = None
) -> Iterator[Group]:
    """Ranks of the service and `shards`, by default as many, on hosts of their own with links of this rate. `sets` and
    `program` are those of `service_group`. Raises TestbedError where there can be no such hosts."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="omnireduce-bench-"))
        rank_hosts, shard_hosts = stack.enter_context(Setting.of("dedicated", ranks, rate).testbed())
        addresses = [address for servers in _daemons(stack, shard_hosts[:shards]) for address in servers.addresses]
        prefixes = [host.prefix for host in rank_hosts]
        yield stack.enter_context(
            service_group(
                ranks, folder, addresses, "transport.kind=tcp", *sets, prefixes=prefixes, program=program, carrier="tcp"
            )
        )


def _daemons(stack: contextlib.ExitStack, hosts: Sequence[Host]) -> list[Servers]:
    """A shard on each host."""
    return [stack.enter_context(daemon(1, OPEN, listen=f"{host.address}:{PORT}", prefix=host.prefix)) for host in hosts]


def _peer_group(name: str, rank_hosts: Sequence[Host], folder: str) -> Group:
    if name == "gloo":
        return gloo_group(len(rank_hosts), folder, [host.prefix for host in rank_hosts], INTERFACE)
    return openmpi_between(rank_hosts, folder, INTERFACE)


def run_settings(cases: Mapping[Setting, Sequence[Case]], sets: Sequence[str] = ()) -> Iterator[Outcome]:
    """Measure these cases of each setting; yield what became of each. Where something fails, the rest of its setting is
    left out, and said to be. Raises TestbedError where there can be no such hosts."""
    for setting, chosen in cases.items():
        try:
            if chosen:
                yield from _run_setting(setting, chosen, sets)
        except (PeerError, RuntimeError) as error:
            sys.stderr.write(f"bench: LEFT OUT: {setting.layout}, {setting.ranks} ranks, from here on: {error}\n")


def _run_setting(setting: Setting, cases: Sequence[Case], sets: Sequence[str]) -> Iterator[Outcome]:
    with _shaped(setting, sets) as (contest, bytes_per_s):
        for case in cases:
            measured = contest.run(case)
            bound = setting.bound_ms(measured, bytes_per_s, measured.union_density)
            lower_bound = setting.bound_ms(measured, bytes_per_s, setting.others_density(measured))
            extra = {"layout": setting.layout, "rate": setting.rate, "link_bytes_per_s": bytes_per_s}
            extra |= {"bound_ms": bound, "least_ms": lower_bound}
            rows = [
                row | extra | {"share": bound / row["ms"], "share_of_least": lower_bound / row["ms"]}
                for row in rows_of(measured)
            ]
            yield Outcome(case, rows, verdicts_of(setting, measured, bound))


def verdicts_of(setting: Setting, measured: Measured, bound_ms: float) -> list[Verdict]:
    """The verdicts on the targets of a case. `bound_ms`: the least time of a service that sends the union."""
    ours, name = measured.results[OURS].median, measured.case.name
    if setting.layout == "dedicated":
        return [at_least(name, ours, "union bound", bound_ms, SHARE_TARGET)]
    if measured.case.density < 1:
        return [_against_best(name, setting.peers, measured, 0.9 / measured.union_density)]
    verdicts = [_against_best(name, ("gloo",), measured, DENSE_TARGETS[setting.layout])]
    if setting.layout == "shared":
        verdicts.append(_against_best(f"{name}: best", setting.peers, measured, BEST_TARGET))
        verdicts.append(at_least(f"{name}: bound", ours, "union bound", bound_ms, SHARE_TARGET))
    return verdicts


def _against_best(name: str, peers: Sequence[str], measured: Measured, target: float) -> Verdict:
    """The fastest of `peers`."""
    ours, results = measured.results[OURS].median, measured.results
    if absent := measured.absent(*peers):
        return undecided(name, ours, absent, target)
    rivals = [results[label] for label in labels(measured.case, peers) - {OURS}]
    best = min(rivals, key=lambda result: result.median)
    return at_least(name, ours, best.label, best.median, target)
