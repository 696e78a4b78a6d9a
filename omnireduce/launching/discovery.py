"""The script of the user that says which hosts an elastic job has."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from omnireduce.errors import ConfigError
from omnireduce.files.paths import decode_text
from omnireduce.launching.host_lists import Host, parse_lines
from omnireduce.launching.messages import CHUNK
from omnireduce.logs import tagged

LOOK_S = 5.0  # between two runs of the script
SCRIPT_S = 60.0  # that it may take
KILLED_S = 5.0  # for a script to end that was killed: it may hang in the system
_MOST_LISTED = 1 << 20  # bytes that it prints
log = logging.getLogger("omnireduce")


class HostReceiver(Protocol):
    """A job that takes hosts, and waits for descriptors."""

    def watch(self, descriptor: int, act: Callable[[], None]) -> None:
        """Call `act` when the descriptor is readable."""

    def forget(self, descriptor: int) -> None:
        """Watch this descriptor no more."""

    def take_hosts(self, hosts: Sequence[Host]) -> None:
        """These are the hosts that there are now."""


class Discovery:
    """Runs the script, without waiting for it. `slots`: of hosts for which it prints no number.

    The script is over when its process is, whatever it has done with its output before, and whoever else has that. What
    it has started in its process group ends with it.
    """

    def __init__(self, script: str, slots: int) -> None:
        self._script, self._slots = script, slots
        self._process: subprocess.Popen[bytes] | None = None
        self._output = self._end = -1  # descriptors: what it prints, and one that is readable when it is over
        self._unwatch: Callable[[int], None] = lambda _: None
        self._begun: float | None = None  # when it was started last
        self._text = bytearray()

    def look(self, job: HostReceiver) -> None:
        """Start the script, if it has not run for a while; `job.take_hosts` gets what it prints. Raises ConfigError
        when it can never have been executed."""
        now = time.monotonic()
        since_s = LOOK_S if self._begun is None else now - self._begun
        if self._process is not None:
            if since_s > SCRIPT_S:
                self.close()
                self._complain(f"it took more than {SCRIPT_S:g} s")
        elif since_s >= LOOK_S:
            self._start(job)
            self._begun = now

    def _start(self, job: HostReceiver) -> None:
        try:
            process = subprocess.Popen(
                [self._script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            if self._begun is None:
                raise ConfigError(f"--host-discovery-script {self._script}: {error.strerror}") from None
            self._complain(str(error.strerror))  # as when its file is just being replaced
            return
        assert process.stdout is not None
        self._process, self._text, self._unwatch = process, bytearray(), job.forget
        self._output, self._end = process.stdout.fileno(), os.pidfd_open(process.pid)
        os.set_blocking(self._output, False)

        def read() -> None:
            if not self._read():
                job.forget(self._output)  # it has closed that, but may go on

        job.watch(self._output, read)
        job.watch(self._end, lambda: self._finish(job, process.pid))

    def _read(self) -> int:
        """Take a piece of what the script has printed: so many bytes."""
        try:
            data = os.read(self._output, CHUNK)
        except BlockingIOError:
            return 0
        self._text += data[: _MOST_LISTED + 1 - len(self._text)]
        return len(data)

    def _finish(self, job: HostReceiver, pid: int) -> None:
        ended, left = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT), _MOST_LISTED
        assert ended is not None
        while left > 0 and (many := self._read()):  # what it has started may print on
            left -= many
        self.close()
        if ended.si_status:
            how = "with status" if ended.si_code == os.CLD_EXITED else "by signal"
            self._complain(f"it ended {how} {ended.si_status}")
            return
        if len(self._text) > _MOST_LISTED:  # a list that is cut off would leave hosts out
            self._complain(f"it printed more than {_MOST_LISTED} bytes")
            return
        try:
            text = decode_text(bytes(self._text), "what it printed", expected="a list of hosts")
            hosts = parse_lines(text, "what it printed", self._slots)
        except ConfigError as error:
            self._complain(str(error))
        else:
            job.take_hosts(hosts)

    def _complain(self, why: str) -> None:
        log.warning("host discovery: %s: %s", self._script, why, extra=tagged("discovery_failed"))

    def close(self) -> None:
        """End the script, if it still runs, and what it has started. Until then nobody else can have its number."""
        process, self._process = self._process, None
        if process is None:
            return
        for descriptor in (self._output, self._end):
            self._unwatch(descriptor)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
        assert process.stdout is not None
        process.stdout.close()
        os.close(self._end)
