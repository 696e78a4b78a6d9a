"""The supervisor: binds all addresses, compiles kernels, forks one process per shard, restarts a shard that dies.

Shards are forked after the kernels are loaded, so a restart takes milliseconds, and before any thread exists.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess

from aggregator.access import make_access
from aggregator.shard import Listeners, open_listeners, run_shard
from omnireduce.config import Config, parse_address
from omnireduce.kernels.warm import warm_up_aggregator
from omnireduce.logs import tagged

log = logging.getLogger("omnireduce.aggregator")
RESTART_WINDOW_S = 60.0
RESTARTS_PER_WINDOW = 5
MOMENT_S = 1.0  # longer than it takes to load compiled kernels
STOP_MARGIN_S = 5.0  # beyond drain_s, before a shard that does not stop is killed


@dataclass
class _Shard:
    listeners: Listeners
    process: ForkProcess
    stop: int  # closing this descriptor asks the shard to stop


class Daemon:
    """All shards of this host. Raises ConfigError when the secret is missing or cannot be used."""

    def __init__(self, config: Config) -> None:
        self._config, self._access = config, make_access(config)
        self._fork = multiprocessing.get_context("fork")
        self._shards: list[_Shard] = []
        self._deaths: list[float] = []
        self._signals, self._signals_in = socket.socketpair()

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit status. Raises TransportError when an address is taken."""
        self._watch_signals()
        if self._config.transport.kind == "verbs":
            _check_rdma(self._config)
        bound = self._bind()
        _make_kernels_ready()
        if wait([self._signals], 0):
            log.info("stopped before the start", extra=tagged("stopped"))
            return 0
        for listeners in bound:
            self._shards.append(self._start(listeners))
        addresses = [each.address for each in bound]
        print("ready", *addresses, flush=True)
        log.info("ready at %s", ", ".join(addresses), extra=tagged("ready", shards=addresses))
        healthy = self._supervise()
        clean = self._stop()
        log.info("stopped", extra=tagged("stopped"))
        return 0 if clean and healthy else 1

    def _watch_signals(self) -> None:
        self._signals_in.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._signals_in.fileno())

    def _bind(self) -> list[Listeners]:
        settings = self._config.aggregator
        host, port = parse_address(settings.listen)
        kind = self._config.transport.kind
        return [open_listeners(host, port + i if port else 0, kind) for i in range(settings.shards)]

    def _start(self, listeners: Listeners) -> _Shard:
        theirs, ours = os.pipe()
        name = f"shard {listeners.address}"
        process = self._fork.Process(target=self._run_child, args=(listeners, theirs, ours), name=name)
        process.start()
        os.close(theirs)
        return _Shard(listeners, process, ours)

    def _run_child(self, listeners: Listeners, stop_pipe: int, stop: int) -> None:
        signal.set_wakeup_fd(-1)
        for descriptor in (stop, *(shard.stop for shard in self._shards)):
            os.close(descriptor)  # the supervisor's ends: a copy here would keep the pipes open
        run_shard(listeners, self._config, self._access, stop_pipe)

    def _supervise(self) -> bool:
        """Wait for a signal, restarting shards that die; return False when they die too often."""
        while True:
            ready = wait([self._signals, *(shard.process.sentinel for shard in self._shards)])
            if self._signals in ready:
                self._signals.recv(64)
                log.info("stopping", extra=tagged("stopping"))
                return True
            for i, shard in enumerate(self._shards):
                if shard.process.sentinel in ready and not self._restart(i, shard):
                    return False

    def _restart(self, index: int, shard: _Shard) -> bool:
        shard.process.join()
        name, status = shard.listeners.address, shard.process.exitcode
        log.error("shard %s died with status %s", name, status, extra=tagged("shard_died", shard=name, status=status))
        os.close(shard.stop)
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < RESTART_WINDOW_S] + [now]
        del self._shards[index]
        if len(self._deaths) > RESTARTS_PER_WINDOW:
            deaths = len(self._deaths)
            log.error("%d shards died within %g s; giving up", deaths, RESTART_WINDOW_S, extra=tagged("gave_up"))
            return False
        self._shards.insert(index, self._start(shard.listeners))
        return True

    def _stop(self) -> bool:
        """Let every shard drain; return whether all ended by themselves."""
        for shard in self._shards:
            os.close(shard.stop)
        deadline = time.monotonic() + self._config.aggregator.drain_s + STOP_MARGIN_S
        clean = True
        for shard in self._shards:
            shard.process.join(max(0.0, deadline - time.monotonic()))
            if shard.process.is_alive():
                name = shard.listeners.address
                log.error("shard %s did not stop; killing it", name, extra=tagged("shard_killed", shard=name))
                shard.process.kill()
                shard.process.join()
            clean &= shard.process.exitcode == 0
        return clean


def _make_kernels_ready() -> None:
    """Load or compile the kernels, and say so when that takes long. No thread is left at the end: shards are forked."""
    started = time.monotonic()
    text = "compiling kernels (at the first start only)"
    slow = threading.Timer(MOMENT_S, log.info, [text], {"extra": tagged("compiling")})
    slow.start()
    try:
        warm_up_aggregator()
    finally:
        slow.cancel()
        slow.join()
    seconds = time.monotonic() - started
    log.info("kernels ready after %.1f s", seconds, extra=tagged("kernels_ready", seconds=round(seconds, 1)))


def _check_rdma(config: Config) -> None:
    """Raise TransportError, which says what there is, unless some RDMA port can be used."""
    from omnireduce.transport.verbs.devices import choose

    choose(config.verbs, near="")
