"""A daemon, the honest job on it, a job that gathers its ranks, and the attacker."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Self

from certificates import LARGE_KEY, SMALL_KEY, certificates
from faults.crew import WorkerProcess
from faults.site import held
from faults.worker import FINISH
from local_cluster import WAIT_S, Daemon, configured, eventually
from transports import over

from omnireduce.runtime.aggregator_client import ask
from omnireduce.support.secret import load_secret

from . import attacker, honest
from .attacker import GO, HALT, NICEST, Tally
from .honest import SAMPLES
from .kinds import Kind
from .target import SMALL, Peer, Target

ADDRESS_SPACE = 4 << 30  # bytes of the daemon at most, whatever an attacker makes it allocate
TRANSPORTS = ("shm", "tcp")  # one for each honest rank
SETTLE_S = 0.3  # the daemon finishes with what the attacker left, before the honest job is alone again
HONEST = ("protocol.slot_bytes=262144", "protocol.slots=2", "transport.spin_us=0")


class JobError(Exception):
    """The honest job has ended, or a sum of it was wrong."""


@dataclass(frozen=True)
class Options:
    """Settings of an attack: whether the daemon has a secret and a certificate; the number of pairs of phases."""

    secret: bool = False
    tls: bool = False
    seed: int = 0
    pairs: int = 1
    prefix: tuple[str, ...] = ()  # in front of the daemon's command
    nice: int = NICEST  # priority of the attacker


class Attacker(WorkerProcess):
    """The process that attacks a target."""

    def __init__(self, kind: str, target: Target, options: Options) -> None:
        super().__init__(kind, target, options.seed, options.nice, target=attacker.serve)

    @contextlib.contextmanager
    def attacking(self, tally: Tally) -> Iterator[None]:
        """Attack within the block, and add what was done to `tally`."""
        self.tell(GO)
        try:
            yield
        finally:
            self.tell(HALT)
            heard: object = self.hear("tally", within_s=2 * WAIT_S)
            assert isinstance(heard, Tally)
            tally.add(heard)


def _bounded() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))


class Testbed:
    """A daemon, its honest job, and an attacker of one kind: `who` is a stranger or a member."""

    def __init__(self, kind: Kind, who: str, options: Options) -> None:
        self._kind = kind
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omnireduce-attacks-")))
            shared = self._secret(folder) if options.secret else ()
            self._certificates = certificates(LARGE_KEY if kind.large_key else SMALL_KEY) if options.tls else None
            theirs = self._certificates.holder("aggregator") if self._certificates else ()
            ours = (self._certificates.trust(),) if self._certificates else ()
            settings = ("metrics.listen=127.0.0.1:0", *shared, *theirs, *kind.settings)
            self._open = partial(Daemon, 1, *settings, prefix=options.prefix, preexec_fn=_bounded)
            self.daemon = stack.enter_context(self._open())
            self._config = configured(self.daemon.addresses, *shared, *ours)
            self._secret_of_all = load_secret(self._config.security, environ={})
            self._secret_known = (folder / "secret").read_bytes() if options.secret else None
            self._insider = self._target(self.daemon)
            self.target = replace(self._insider, secret=self._insider.secret if who == "member" else None)
            self._honest = self._join((*HONEST, *shared, *ours), stack)
            self._options = options
            self.attacker = stack.enter_context(Attacker(kind.name, self.target, options))
            self.shard = self._ask_pid()
            self._stack = stack.pop_all()

    def _secret(self, folder: Path) -> tuple[str, ...]:
        file = folder / "secret"
        with open(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as opened:
            opened.write(secrets.token_hex(32))
        return (f"security.secret_file={file}",)

    def _target(self, daemon: Daemon) -> Target:
        assert eventually(lambda: "http://" in daemon.log), daemon.log
        page = daemon.log.partition("http://")[2].split("/")[0].split()[0].strip('"')
        ca = str(self._certificates.folder / "ca.pem") if self._certificates else None
        return Target(daemon.addresses[0], page, self._secret_known, ca)

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[Attacker]:
        """The same attacker against another daemon of this machine."""
        with self._open() as daemon:
            target = replace(self._target(daemon), secret=self.target.secret)
            with Attacker(self._kind.name, target, self._options) as decoy:
                yield decoy

    def _join(self, overrides: tuple[str, ...], stack: contextlib.ExitStack) -> list[WorkerProcess]:
        elastic = ("elastic.enabled=true", "elastic.last_call_s=1") if self._kind.elastic else ()
        members = []
        for rank, transport in enumerate(TRANSPORTS):
            settings = (*over(transport), *overrides, *elastic)
            arguments = (self.daemon.addresses[0], self._insider.job, rank, len(TRANSPORTS), settings)
            members.append(stack.enter_context(WorkerProcess(*arguments, target=honest.serve)))
        for member in members:
            joined = member.hear("joined", "error")
            assert joined.event == "joined", joined
        return members

    def _ask_pid(self) -> int:
        return ask(self.daemon.addresses[0], self._config, WAIT_S, secret=self._secret_of_all).pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            self.daemon.expected_status = None if kind else 0
            if kind is None:
                self.attacker.close()
                for member in self._honest:
                    member.tell(FINISH)
                for member in self._honest:
                    self._heard(member, "left")

    @property
    def memory(self) -> int:
        """Memory of the shard, in bytes."""
        return held(self.shard).memory

    @property
    def shard_cpu_s(self) -> float:
        """Time that the shard has had on a core."""
        try:
            fields = Path(f"/proc/{self.shard}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _heard(self, member: WorkerProcess, expected: str) -> honest.Samples:
        report = member.hear(expected, "error", "wrong", "left", within_s=2 * WAIT_S)
        if report.event != expected:
            raise JobError(f"the honest job: {report.event}: {report.text}")
        return report  # type: ignore[return-value]

    def samples(self) -> list[float]:
        """Seconds of each collective of the honest ranks since the last call. Raises JobError."""
        for member in self._honest:
            with contextlib.suppress(ConnectionError):  # its last report can still be read
                member.tell(SAMPLES)
        return [seconds for member in self._honest for seconds in self._heard(member, SAMPLES).seconds]

    def measure(self, seconds: float) -> list[float]:
        """Seconds of each collective of the honest ranks during `seconds`, or until the job ends. Raises JobError."""
        self.samples()
        connection.wait([member.pipe for member in self._honest], seconds)
        return self.samples()

    def settle(self) -> None:
        connection.wait([member.pipe for member in self._honest], SETTLE_S)

    def gather(self) -> Peer:
        """The connection of an honest rank that waits for the last rank of its job."""
        peer = Peer(self._insider)
        peer.sock.settimeout(WAIT_S)
        peer.hello(self._insider.gathering, 0, 2, **SMALL)
        answer = peer.answer()
        assert answer == "Pending", f"the first of the gathering job hears {answer}"
        return peer

    def complete(self, first: Peer) -> str:
        """Let the last rank come; return what went wrong, "" if nothing did."""
        with Peer(self._insider) as last:
            last.sock.settimeout(WAIT_S)
            last.hello(self._insider.gathering, 1, 2, **SMALL)
            try:
                return "" if first.admitted() and last.admitted() else "those who gathered were refused"
            except OSError as error:
                return f"those who gathered: {error!r}"

    def same_shard(self) -> bool:
        """Whether the shard is still the same process."""
        return self._ask_pid() == self.shard
