"""Signal handlers that raise in the middle of collectives: never a wrong sum, never a wrong culprit, nobody waits."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
from pathlib import Path

import alarmed_worker
import numpy as np
import pytest
from local_cluster import Daemon, Process, Ranks, configured, eventually, unique_job
from transports import MEMORY

from omnireduce import AbortedError, ClosedError, Communicator
from omnireduce.support.config import Config

PATHS = os.pathsep.join(str(Path(__file__).parent.parent / part) for part in ("..", "."))


def the_other(config: Config, job: str) -> list[AbortedError]:
    """Rank 1: how each job has ended. It checks every sum, too."""
    ends = []
    for number in range(alarmed_worker.JOBS):
        try:
            with Communicator(config, rank=1, size=2, job=f"{job}-{number}") as comm:
                for at in itertools.count():
                    x = comm.allreduce(np.full(alarmed_worker.SIZE, at + 1, np.float32))
                    assert (x == 2 * at + 2).all()
        except AbortedError as error:
            ends.append(error)
    return ends


OTHER_WAYS = ("shm", "threads", MEMORY)


@pytest.mark.parametrize(
    ("error", "kind"),
    [*((error, "tcp") for error in alarmed_worker.ERRORS), *zip(alarmed_worker.ERRORS, OTHER_WAYS, strict=False)],
)
def test_a_handler_that_raises_ends_the_job_and_nothing_else(daemon: Daemon, kind: str, error: str) -> None:
    """All errors over TCP, whose sockets raise the like; one over each other transport."""
    config, job = (
        configured(daemon.addresses, *alarmed_worker.settings_of(kind), "cluster.timeout_s=20"),
        unique_job("alarm"),
    )
    script = str(Path(alarmed_worker.__file__))
    arguments = (",".join(daemon.addresses), job, kind, error)
    with Process(sys.executable, script, *arguments, environ={"PYTHONPATH": PATHS}) as process:
        ranks = Ranks(1, lambda _: the_other(config, job))
        reports = [json.loads(process.line()) for _ in range(alarmed_worker.JOBS)]
        [ends] = ranks.results()
        assert process.wait() == 0
    for report in reports:
        assert report["wrong"] == 0, report
        assert (report["raised"], report["reason"]) == (error, f"interrupted by {error}")
        assert report["culprit"].startswith("rank 0 (host ")
    # Closing a TCP connection with unread input resets it, and the reset may overtake the last message.
    reset = {"connection broken: Connection reset by peer"} if kind in ("tcp", "threads") else set()
    assert {end.reason for end in ends} <= {f"interrupted by {error}"} | reset
    assert len(ends) == alarmed_worker.JOBS
    assert all(end.culprit.startswith("rank 0 (host ") for end in ends)


def test_a_handler_shuts_down_while_its_thread_forms_the_job_anew(daemon: Daemon) -> None:
    """The old engine is closed by then, and the new one not there yet."""
    elastic = ("elastic.enabled=true", "elastic.last_call_s=20", "cluster.join_timeout_s=60")
    comm = Communicator(configured(daemon.addresses, *elastic), rank=0, size=1, job=unique_job())
    handled: list[bool] = []

    def handler(*_: object) -> None:
        comm.shutdown()
        handled.append(True)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        old = comm._engine
        Ranks(1, lambda _: eventually(lambda: old.is_closed) and os.kill(os.getpid(), signal.SIGALRM))
        with pytest.raises(ClosedError, match="shut down while it joined"):
            comm.reform(max_ranks=2)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert handled == [True]
    with pytest.raises(ClosedError):
        comm.allreduce(np.ones(3))
    comm.reform(min_ranks=1, max_ranks=1)  # it may still change its mind
    assert comm.allreduce(np.ones(3)).tolist() == [1.0] * 3
    comm.shutdown()


def test_another_thread_shuts_down_what_forms_the_job_anew(daemon: Daemon) -> None:
    elastic = ("elastic.enabled=true", "elastic.last_call_s=20", "cluster.join_timeout_s=60")
    comm = Communicator(configured(daemon.addresses, *elastic), rank=0, size=1, job=unique_job())
    over = threading.Event()

    def work(rank: int) -> None:
        if rank == 0:
            with pytest.raises(ClosedError, match="shut down while it joined"):
                comm.reform(max_ranks=2)
            over.set()
        while rank and not over.wait(0.05):
            comm.shutdown()

    Ranks(2, work).results()
