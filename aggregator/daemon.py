"""The supervisor: binds all addresses, compiles kernels, forks one process per shard, restarts one that dies or hangs.

At SIGTERM it drains, or stops: see `drain_state`.

Shards are forked after the kernels are loaded, so a restart takes milliseconds. They are forked before any thread
exists. Metrics and health are served by one more process, the monitor.

At SIGHUP the supervisor reads the files with secrets, teams and certificates again. If they are valid, it lets its
children read them, too. So errors in the files show here first. A child that is started again begins with the rules
that were accepted last.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait

from omnireduce.aggregator.access import count_changes, make_access
from omnireduce.aggregator.advice import advice, changed_settings, refuse_itself_as_upstream
from omnireduce.aggregator.children import (
    RESTART_WINDOW_S,
    ChannelEnd,
    Child,
    Children,
    ClientOrder,
    Deaths,
    RemainingJobs,
    read_stacks,
)
from omnireduce.aggregator.drain_state import Draining
from omnireduce.aggregator.heartbeats import Heartbeat, HeartbeatWatch, check_interval_s
from omnireduce.aggregator.ignored_signals import ignore
from omnireduce.aggregator.page_access import make_pages, warning_if_open
from omnireduce.aggregator.reload_on_hangup import try_reload
from omnireduce.aggregator.shard import Listeners, open_listeners, own_codecs, run_shard
from omnireduce.aggregator.systemd import notify, watchdog_s
from omnireduce.core.admin_messages import Order
from omnireduce.errors import ConfigError
from omnireduce.kernels.warm import progress_text, take_trouble, warm_up_aggregator
from omnireduce.runtime.aggregator_client import MONITOR
from omnireduce.runtime.tracing.trace import check_trace
from omnireduce.support.addresses import parse_listen
from omnireduce.support.config import Config
from omnireduce.support.control_groups import OutOfMemory
from omnireduce.support.logs import report_left_out, tagged
from omnireduce.support.progress import Throttle
from omnireduce.transport.rdma_offer import check_rdma

log = logging.getLogger("omnireduce.aggregator")
STOP_MARGIN_S = 5.0  # a shard that has not stopped this long after finish_s is killed
STOP_ORDER = Order("drain", "a signal", stops=True)


class Daemon:
    """All shards of this host. Raises ConfigError if the secret is missing, or if a secret or codec cannot be used."""

    def __init__(self, config: Config, read_config: Callable[[], Config] | None = None) -> None:
        """`read_config` reads the configuration again, to compare it with the configuration in force."""
        self._read_config = read_config or (lambda: config)
        self._config, self._access, self._pages = config, make_access(config), make_pages(config.metrics)
        # random, so that no other process can take this name before
        self._monitor_purpose = f"{MONITOR}-{secrets.token_hex(8)}"
        self._children, self._drain, self._out_of_memory = Children(), Draining(), OutOfMemory()
        own_codecs(config)  # they are loaded before shards are forked
        self._signals, self._signals_writer = socket.socketpair()
        self._heartbeats = [Heartbeat() for _ in range(config.aggregator.shards)]
        self._systemd_s = watchdog_s()

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit status. Raises TransportError when an address is taken, and
        ConfigError when traces cannot be written."""
        self._watch_signals()
        check_trace(self._config.trace)
        check_rdma(self._config)
        bound = self._bind()
        refuse_itself_as_upstream(self._config.aggregator.upstream, [listeners.address for listeners in bound])
        self._give_advice()
        if self._config.metrics.listen:
            self._start_monitor(bound)
        try:
            _make_kernels_ready()
            if wait([self._signals], 0) and self._handle_signals():
                log.info("stopped before the start", extra=tagged("stopped"))
                return 0
            return self._serve(bound)
        finally:
            self._stop("monitor", STOP_MARGIN_S)
            self._ignore_signals()

    def _serve(self, bound: Sequence[Listeners]) -> int:
        deaths = Deaths()
        for listeners, heartbeat in zip(bound, self._heartbeats, strict=True):
            run = partial(self._run_shard, listeners, heartbeat)
            self._children.start("shard", listeners.address, run, deaths, HeartbeatWatch(heartbeat))
        addresses = [listeners.address for listeners in bound]
        print("ready", *addresses, flush=True)
        log.info("ready at %s", ", ".join(addresses), extra=tagged("ready", shards=addresses))
        notify("READY=1", f"STATUS=serving at {' '.join(addresses)}")
        is_healthy = self._supervise()
        notify("STOPPING=1", "STATUS=letting collectives finish")
        is_clean = self._stop("shard", self._config.aggregator.finish_s + STOP_MARGIN_S)
        log.info("stopped", extra=tagged("stopped"))
        return 0 if is_clean and is_healthy else 1

    def _run_shard(self, listeners: Listeners, heartbeat: Heartbeat, channel: ChannelEnd) -> None:
        run_shard(listeners, self._config, self._access, heartbeat, channel)

    def _watch_signals(self) -> None:
        self._signals_writer.setblocking(False)
        self._ends_with_terminal = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        # To warn of a full buffer, Python takes a lock in its signal handler. Many signals at once would make it hang.
        signal.set_wakeup_fd(self._signals_writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # from here on each is written there
            signal.signal(number, lambda *_: None)

    def _handle_signals(self) -> bool:
        """Handle the signals that have come; return whether one of them ends the daemon."""
        if set(self._signals.recv(64)) != {signal.SIGHUP} or (self._ends_with_terminal and not _has_terminal()):
            return True
        self._reload()
        return False

    def _reload(self) -> None:
        access_before = self._access
        if not try_reload(self._read_access):
            return
        counts = count_changes(access_before, self._access)
        self._children.send_hangup()
        text = "read files again: %d teams, %d secrets (%d new, %d gone); shards and monitor follow"
        log.info(text, *counts.values(), extra=tagged("reloaded", **counts))
        self._give_advice()
        try:
            keys = changed_settings(self._config, self._read_config())
        except ConfigError as error:
            log.warning("the next start would fail: %s", error, extra=tagged("restart_needed"))
            return
        if keys:
            log.warning(
                "changed, but takes effect only after a restart: %s", ", ".join(keys), extra=tagged("restart_needed")
            )

    def _give_advice(self) -> None:
        for event, text in advice(self._config, self._access):
            log.warning("%s", text, extra=tagged(event))

    def _read_access(self) -> None:
        access, pages = make_access(self._config), make_pages(self._config.metrics)
        self._access, self._pages = replace(access, ticket_key=self._access.ticket_key), pages

    def _ignore_signals(self) -> None:
        """Ignore signals at the end of the daemon: they must not change the exit status."""
        ignore((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
        signal.set_wakeup_fd(-1)

    def _bind(self) -> list[Listeners]:
        settings = self._config.aggregator
        host, port = parse_listen(settings.listen)
        kind, monitor = self._config.transport.kind, self._monitor_purpose if self._config.metrics.listen else ""
        return [open_listeners(host, port + i if port else 0, kind, monitor) for i in range(settings.shards)]

    def _start_monitor(self, bound: Sequence[Listeners]) -> None:
        from omnireduce.aggregator.http_monitor import open_http, run_monitor

        listener, address = open_http(self._config.metrics.listen)
        scheme = "http" if self._pages.tls is None else "https"
        log.info("metrics at %s://%s/metrics", scheme, address, extra=tagged("metrics", address=address))
        names, addresses = [listeners.name for listeners in bound], [listeners.address for listeners in bound]
        warning = warning_if_open(self._config.metrics)
        if warning:
            log.warning("%s", warning, extra=tagged("metrics_open", address=address))

        def run(channel: ChannelEnd) -> None:
            run_monitor(
                listener, self._config, self._pages,
                purpose=self._monitor_purpose, names=names, addresses=addresses, heartbeats=self._heartbeats,
                channel=channel,
            )  # fmt: skip

        self._children.start("monitor", address, run, Deaths())

    def _supervise(self) -> bool:
        """Serve until a signal ends the daemon, or until it has drained. Restart children that die or hang. Returns
        False when shards die too often."""
        while True:
            wait_s = min(check_interval_s(self._config.aggregator.watchdog_s), check_interval_s(self._systemd_s or 0))
            wait_s = min(wait_s, max(0.0, self._drain.until - time.monotonic()))
            sentinels = {child.process.sentinel: child for child in self._children.members}
            channels = {shard.channel.fileno(): shard for shard in self._shards}
            ready = wait([self._signals, *channels, *sentinels], wait_s)
            if self._signals in ready and self._handle_signals() and self._begin_or_end():
                log.info("stopping", extra=tagged("stopping"))
                return True
            for shard in [shard for descriptor, shard in channels.items() if descriptor in ready]:
                self._read_messages(shard)
            dead = [child for sentinel, child in sentinels.items() if sentinel in ready]
            if not all(self._restart(child) for child in dead):
                return False
            self._check_heartbeats()
            if self._drain.is_over(self._shards, time.monotonic()):
                jobs = self._drain.jobs()
                log.info("drained: %s", f"{jobs} jobs are left" if jobs else "no job is left", extra=tagged("drained"))
                return True
            report_left_out()

    @property
    def _shards(self) -> list[Child]:
        return [child for child in self._children.members if child.kind == "shard"]

    def _begin_or_end(self) -> bool:
        """Handle a signal to end. Return True to end now, False to drain first."""
        limit_s = self._config.aggregator.drain_s
        if self._drain.stops or not limit_s:
            return True
        # systemd waits for as long as it is told
        notify(f"EXTEND_TIMEOUT_USEC={round((limit_s + self._config.aggregator.finish_s + 2 * STOP_MARGIN_S) * 1e6)}")
        self._carry_out(STOP_ORDER, limit_s)
        return False

    def _read_messages(self, shard: Child) -> None:
        """Handle the messages of a shard."""
        for message in shard.channel.receive():
            if isinstance(message, RemainingJobs):
                self._drain.record_jobs(shard, message.jobs)
                notify(f"STATUS=draining: {self._drain.jobs()} jobs are left")
            elif isinstance(message, ClientOrder):
                self._carry_out(message.order)

    def _carry_out(self, order: Order, limit_s: float = math.inf) -> None:
        """Carry out an order on all shards. It comes from a client of a shard, or from a signal."""
        if order.action == "drain" and (self._drain.order is None or order.stops):
            limit_text = f"; they have {limit_s:g} s" if limit_s < math.inf else ""
            log.info("draining, because %s says so: no new jobs%s", order.by, limit_text, extra=tagged("draining"))
            self._drain.begin(order, limit_s)
        elif order.action == "resume" and self._drain.order is not None and not self._drain.stops:
            log.info("takes new jobs again, because %s says so", order.by, extra=tagged("resumed"))
            self._drain.resume()
            notify("STATUS=serving")
        for shard in self._shards:
            shard.channel.send(order)

    def _check_heartbeats(self) -> None:
        """Kill shards that hang; they are then replaced like dead ones. Tell systemd while all shards take turns."""
        now, limit_s = time.monotonic(), self._config.aggregator.watchdog_s
        watches = [(child, child.watch) for child in self._children.members if child.watch is not None]
        for child, watch in watches:
            watch.check(now)
            if limit_s and watch.silent_s >= limit_s and child.process.is_alive():
                stacks, seconds = read_stacks(child), round(watch.silent_s, 1)
                log_fields = tagged("shard_hangs", shard=child.address, seconds=seconds, exception=stacks or None)
                log.error("%s has taken no turn for %.1f s: it hangs; killed it", child.name, seconds, extra=log_fields)
                child.process.kill()
                watch.reset()
        if self._drain.order is not None:
            for shard in self._drain.without_report(self._shards):  # a shard that has just started, or did not read
                shard.channel.send(self._drain.order)
        if self._systemd_s and all(watch.silent_s < self._systemd_s / 2 for _, watch in watches):
            notify("WATCHDOG=1")

    def _restart(self, child: Child) -> bool:
        """Start a child that has died again, unless too many died; return whether the daemon can go on."""
        status = self._children.release(child)
        self._drain.forget(child)
        fields = {child.kind: child.address, "status": status}
        reason = self._out_of_memory.news() if status else ""
        message = f"{child.name} died with status {status}{f': {reason}' if reason else ''}"
        log.error("%s", message, extra=tagged(f"{child.kind}_died", **fields))
        if not child.deaths.count_death():
            self._children.restart(child)
            return True
        self._children.members.remove(child)
        text = f"{child.deaths.count} {child.kind}s died within {RESTART_WINDOW_S:g} s; giving up"
        log.error(text, extra=tagged("gave_up"))
        return child.kind == "monitor"  # jobs can do without metrics

    def _stop(self, kind: str, timeout_s: float) -> bool:
        """Stop the children of this kind; return whether all ended by themselves."""
        children = [child for child in self._children.members if child.kind == kind]
        for child in self._children.stop(children, timeout_s):
            fields = tagged(f"{kind}_killed", **{kind: child.address})
            log.error("%s did not stop; killed it", child.name, extra=fields)
        return all(child.process.exitcode == 0 for child in children)


def _has_terminal() -> bool:
    """Whether a terminal controls this process. If one did before, SIGHUP means that the terminal is gone."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _make_kernels_ready() -> None:
    """Load or compile the kernels. The log shows the progress when that takes long, and the time in the end."""
    started = time.monotonic()
    warm_up_aggregator(Throttle(_log_progress))
    seconds = time.monotonic() - started
    log.info("kernels ready after %.1f s", seconds, extra=tagged("kernels_ready", seconds=round(seconds, 1)))
    if trouble := take_trouble():
        log.warning("%s", trouble, extra=tagged("kernels_not_kept"))


def _log_progress(done_s: float, total_s: float) -> None:
    text = progress_text(done_s, total_s)
    log.info("%s", text, extra=tagged("compiling", done_s=round(done_s, 1), total_s=round(total_s, 1)))
