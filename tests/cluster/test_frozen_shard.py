"""An aggregator shard that is stopped: to the system it is alive, and its connections stay open."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster_checks import FAILURE_S, assert_aborted, assert_serves, expect_round
from local_cluster import Daemon, workers
from transports import KINDS


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("transport", KINDS)
def test_a_stopped_shard_is_named_and_serves_again_when_it_goes_on(transport: str) -> None:
    limits = ["cluster.timeout_s=0.5", f"transport.kind={transport}"]
    with Daemon(2) as daemon:
        with workers(daemon, 3, per_rank=[("--hold", "0", "1"), (), ()], overrides=limits) as ranks:
            expect_round(ranks[1], "started", 1)
            ranks[0].expect("held")
            with stopped(daemon.shard_pids[1]):
                since = time.monotonic()
                ranks[0].go_on()
                culprit = f"aggregator {daemon.addresses[1]}"
                errors = assert_aborted(ranks, since, 0.5 + FAILURE_S, culprit, kind="CollectiveTimeoutError")
        assert all("not complete after 0.5 s; nothing came from there for" in error["text"] for error in errors)
        assert_serves(daemon, f"transport.kind={transport}")
