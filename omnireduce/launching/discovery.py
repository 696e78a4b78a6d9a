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
from omnireduce.launching.hosts import Host, discovered
from omnireduce.launching.messages import CHUNK
from omnireduce.logs import tagged

LOOK_S = 5.0  # between two runs of the script
SCRIPT_S = 60.0  # that it may take
_MOST_LISTED = 1 << 20  # bytes that it prints
log = logging.getLogger("omnireduce")


class Taker(Protocol):
    """A job that takes hosts, and waits for descriptors."""

    def watch(self, descriptor: int, act: Callable[[], None]) -> None:
        """Call `act` when the descriptor is readable."""

    def forget(self, descriptor: int) -> None:
        """Watch this descriptor no more."""

    def take_hosts(self, hosts: Sequence[Host]) -> None:
        """These are the hosts that there are now."""


class Discovery:
    """Runs the script, without waiting for it. `slots`: of hosts for which it prints no number."""

    def __init__(self, script: str, slots: int) -> None:
        self._script, self._slots = script, slots
        self._process: subprocess.Popen[bytes] | None = None
        self._begun: float | None = None  # when it was started last
        self._text = bytearray()

    def look(self, job: Taker) -> None:
        """Start the script, if it has not run for a while; `job.take_hosts` gets what it prints. Raises ConfigError
        when it can never have been executed."""
        now = time.monotonic()
        since_s = LOOK_S if self._begun is None else now - self._begun
        if self._process is not None:
            if since_s > SCRIPT_S:
                self._end(job, f"it took more than {SCRIPT_S:g} s")
        elif since_s >= LOOK_S:
            self._start(job)
            self._begun = now

    def _start(self, job: Taker) -> None:
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
        self._process, self._text = process, bytearray()
        descriptor = process.stdout.fileno()

        def read() -> None:
            data = os.read(descriptor, CHUNK)
            self._text += data[: _MOST_LISTED - len(self._text)]
            if not data:
                self._finish(job, process)

        job.watch(descriptor, read)

    def _finish(self, job: Taker, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        self._end(job, f"it ended with status {status}" if status else "")
        if not status:
            try:
                found = discovered(self._text.decode(errors="replace"), "it printed a wrong line", self._slots)
            except ConfigError as error:
                self._complain(str(error))
            else:
                job.take_hosts(found)

    def _end(self, job: Taker, why: str) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        job.forget(self._process.stdout.fileno())
        self.close()
        if why:
            self._complain(why)

    def _complain(self, why: str) -> None:
        log.warning("host discovery: %s: %s", self._script, why, extra=tagged("discovery_failed"))

    def close(self) -> None:
        """End the script, and what it has started."""
        if self._process is not None:
            if self._process.returncode is None:  # else its number may be another's
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None
