"""A daemon, beside each of its shards a job that nothing may disturb, and what the daemon holds when it is at rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from local_cluster import Daemon, eventually, open_files
from transports import over

from .crew import WorkerProcess, complete
from .plan import SHARDS
from .worker import Order

GROWTH_BYTES = 16 << 20  # growth of a shard that its allocator may cause
REST_S = 10.0  # a connection that is over may linger for a second
INHERITED = 2 * SHARDS  # descriptors of a shard that is forked again: the supervisor's of those that it had
NEIGHBOURS = ("shm", "tcp")  # the ranks of a job beside
SMALL_SLOTS = ("protocol.slot_bytes=65536", "protocol.slots=2")


@dataclass(frozen=True)
class Held:
    """Descriptors, and bytes of memory: anonymous and shared, without what is mapped from files."""

    files: int
    memory: int

    def __str__(self) -> str:
        return f"{self.memory / 2**20:.1f} MiB and {self.files} descriptors"

    def within(self, base: Held) -> bool:
        """Whether this is no more than `base`, but for what an allocator keeps."""
        return self.files <= base.files and self.memory <= base.memory + GROWTH_BYTES


def held(pid: int) -> Held:
    """Open files and memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return Held(len(open_files(pid)), sum(kilobytes) * 1024)


class Site:
    """A daemon of `SHARDS` shards. Each serves a small job whose two ranks are processes, one by shm and one by tcp.

    `pids` are the shards' processes, `base` is what each holds at rest; `deaths` counts shards that were killed.
    """

    def __init__(self) -> None:
        self.deaths = 0
        with contextlib.ExitStack() as stack:
            self.daemon = stack.enter_context(Daemon(SHARDS))
            self.pids = self.daemon.shard_pids
            self._neighbours = [[stack.enter_context(WorkerProcess()) for _ in NEIGHBOURS] for _ in range(SHARDS)]
            for shard in range(SHARDS):
                self._employ(shard)
            self._files = [held(pid).files for pid in self.pids]
            self._warm_up()
            for pid, count in zip(self.pids, self._files, strict=True):
                assert eventually(lambda pid=pid, count=count: held(pid).files <= count, REST_S)
            self.base = [held(pid) for pid in self.pids]
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if kind is None:
                self._dismiss()
            else:
                self.daemon.expected_status = None

    def address(self, shard: int) -> str:
        return self.daemon.addresses[shard]

    def expect_neighbours(self, shards: Iterable[int] = range(SHARDS)) -> None:
        """The small jobs of these shards go on, and their sums are right."""
        for shard in shards:
            for member in self._neighbours[shard]:
                member.expect_progress()

    def neighbours(self, shard: int) -> list[WorkerProcess]:
        return self._neighbours[shard]

    def shard_restarted(self, shard: int) -> None:
        """The shard was killed: wait for the next one, and begin its small job anew."""
        self.deaths += 1
        gone, others = self.pids[shard], {pid for pid in self.pids if pid != self.pids[shard]}

        def successors() -> set[int]:
            return {*self.daemon.shard_pids} - others - {gone}

        assert eventually(lambda: bool(successors())), f"shard {shard} is not restarted: {self.daemon.log}"
        [self.pids[shard]] = successors()
        self._employ(shard)
        files, before = held(self.pids[shard]).files, self.base[shard]
        assert files <= self._files[shard] + INHERITED, (
            f"shard {shard} was restarted with {open_files(self.pids[shard])}"
        )
        self.base[shard] = Held(files, before.memory)

    def expect_rest(self) -> list[Held]:
        """Every shard comes back to what it held at rest; return that."""
        assert {*self.daemon.shard_pids} == {*self.pids}, f"a shard has died: {self.daemon.log}"
        for shard, (pid, base) in enumerate(zip(self.pids, self.base, strict=True)):
            back = eventually(lambda pid=pid, base=base: held(pid).within(base), REST_S)
            assert back, f"shard {shard} holds {held(pid)}; at rest it held {base}: {open_files(pid)}"
        assert "internal error" not in self.daemon.log, self.daemon.log
        return [held(pid) for pid in self.pids]

    def _employ(self, shard: int) -> None:
        for rank, (member, transport) in enumerate(zip(self._neighbours[shard], NEIGHBOURS, strict=True)):
            overrides = (*over(transport), *SMALL_SLOTS)
            where = (self.address(shard),)
            member.tell(Order("neighbour", rank, len(NEIGHBOURS), where, overrides, elements=10_000, idle_s=0.01))
        for member in self._neighbours[shard]:
            member.hear("joined")

    def _dismiss(self) -> None:
        everybody = [member for pair in self._neighbours for member in pair]
        for member in everybody:
            member.finish()
        for member in everybody:
            member.expect_left()

    def _warm_up(self) -> None:
        """Each shard serves a large job, so that its allocator has what it will keep."""
        with contextlib.ExitStack() as stack:
            members = [stack.enter_context(WorkerProcess()) for _ in range(4)]
            for transport in ("shm", "tcp"):
                overrides, where = over(transport), tuple(self.daemon.addresses)
                complete(
                    members,
                    [Order("large", rank, 4, where, overrides, elements=2_000_000, rounds=3) for rank in range(4)],
                )
