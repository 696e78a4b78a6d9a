"""Supervisors that break off, hang or say nonsense: what they say is checked, and no wait is without a limit."""

from __future__ import annotations

import os
import signal
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launches import run
from local_cluster import READY_S
from test_supervisors import fake_ssh

from omnireduce import TransportError
from omnireduce.launch import launched_job
from omnireduce.launch.connection import (
    AGGREGATOR,
    CHUNK,
    MAGIC,
    MAX_REASON_CHARACTERS,
    RESULT,
    STDOUT,
    Connection,
    Ended,
    Greeting,
    News,
    Output,
    RankFailed,
    Start,
    Started,
    frame,
)
from omnireduce.launch.launched_job import InterruptedLaunchError, LaunchedJob
from omnireduce.launch.output import DescriptorSink, PrefixedOutput, TextSink

GREETING = Greeting(1, 40000)
START = Start(0, [b"true"], {}, b"/")


def says(*news: News | bytes, then: str = "while sys.stdin.buffer.read(1): pass") -> list[str]:
    """A supervisor that greets, says this when its first order comes, and does `then`."""
    texts = [each if isinstance(each, bytes) else frame(each) for each in news]
    code = f"""
import sys, time, zlib
say = lambda data: (sys.stdout.buffer.write(data), sys.stdout.flush())
say({MAGIC + frame(GREETING)!r})
sys.stdin.buffer.read(1)
say(zlib.decompress({zlib.compress(b"".join(texts))!r}))
{then}
"""
    return [sys.executable, "-c", code]


@contextmanager
def job_on(*supervisors: list[str], grace_s: float = 0.0) -> Iterator[LaunchedJob]:
    """A job on hosts a, b, ... with these supervisors."""
    hosts = [Connection(name, words, is_remote=True) for name, words in zip("abc", supervisors, strict=False)]
    with LaunchedJob(hosts, PrefixedOutput({STDOUT: TextSink(str)}), grace_s=grace_s) as job:
        job.greet(READY_S)
        yield job


@pytest.mark.parametrize(
    "news",
    [
        Ended(7, 0),  # nobody has started it
        Output(7, STDOUT, b"x"),
        Output(0, 4, b"x"),
        Output(0, STDOUT, bytes(CHUNK + 1)),
        Ended(0, 1 << 40),
        Started(0, -1),
        Started(-(1 << 40), 1),
        RankFailed(0, "x" * (MAX_REASON_CHARACTERS + 1)),
        Greeting(1, 1 << 20),
        (1 << 31).to_bytes(4, "big"),
        b"\0\0\0\1\xc1",
    ],
    ids=lambda news: repr(news)[:60],
)
def test_what_makes_no_sense_loses_the_host(news: News | bytes) -> None:
    with job_on(says(Started(0, 5), news)) as job:
        [host] = job.connections
        job.start(0, host, START)
        assert job.run() == 1
        assert host.is_lost
        assert host.popen.poll() is not None


def test_a_result_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched_job, "MOST_RESULT_BYTES", CHUNK)
    with job_on(says(*[Output(0, RESULT, bytes(CHUNK))] * 2)) as job:
        job.start(0, job.connections[0], START)
        assert job.run() == 1


@pytest.mark.parametrize("words", ["", "here", "1.1.1.1:0", "1.1.1.1:1 1.1.1.1:2", "1.1.1.1:" + "9" * 5000])
def test_the_address_of_an_aggregator_is_checked(words: str) -> None:
    lines = f"ready {words}\n{'' if words else 'ready here'}\n".encode()
    with job_on(says(Output(AGGREGATOR, STDOUT, lines))) as job:
        job.start(AGGREGATOR, job.connections[0], START)
        with pytest.raises(TransportError, match="the aggregator of this job on a does not give valid addresses"):
            job.await_aggregator(1)


def test_a_host_that_is_lost_while_the_aggregator_starts_ends_the_wait() -> None:
    with job_on(says(), says()) as job:
        job.start(AGGREGATOR, job.connections[0], START)
        job.connections[1].close()
        with pytest.raises(TransportError, match="lost host b before its ranks were started"):
            job.await_aggregator(1)


def test_a_host_that_is_lost_before_its_ranks_start_ends_the_launch(tmp_path: Path) -> None:
    (tmp_path / "greets").write_text(f"import sys; sys.stdout.buffer.write({MAGIC + frame(GREETING)!r})")
    ssh = fake_ssh(tmp_path, f"exec {sys.executable} {tmp_path}/greets")
    result = run("-np", "2", "-H", "localhost:1,127.0.0.2:1", "--aggregators", "1", "--grace-period", "0", *ssh, "true")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "Error: lost host 127.0.0.2 before its ranks were started"


@pytest.mark.parametrize("signals", [1, 3])
def test_ranks_that_do_not_end_are_given_up(signals: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that hangs: nothing that it should do is done."""
    monkeypatch.setattr(launched_job, "SLOWNESS_S", 0.2)
    with job_on(says(Started(0, 5), then="time.sleep(1000)")) as job:
        job.start(0, job.connections[0], START)
        job.wait_for(lambda: job.ranks[0].pid > 0, READY_S)
        for _ in range(signals):
            job.take_signal(signal.SIGINT)
        assert job.run() == 128 + signal.SIGINT


def test_orders_that_have_not_gone_are_withdrawn() -> None:
    """Few of a hundred ranks have been started when the signal comes."""
    with job_on(says(then="time.sleep(1000)")) as job:
        host = job.connections[0]
        for number in range(100):
            job.start(number, host, Start(number, [b"x" * CHUNK], {}, b"/"))
        job.take_signal(signal.SIGTERM)
        with pytest.raises(InterruptedLaunchError):
            job.check()
        left = [rank.number for rank in job.ranks.values() if rank.status is None]
        assert len(left) < 50
        assert left == list(range(len(left)))
        job.give_up(host)


def test_a_reader_that_takes_nothing_holds_up_no_interrupted_launch() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.write(writer, bytes(1 << 20))
    sink = DescriptorSink(writer)
    with LaunchedJob([], PrefixedOutput({STDOUT: sink}), grace_s=0, descriptors=[sink]) as job:
        sink.add(b"the last line\n")
        os.write(job._wake_writer.fileno(), bytes([signal.SIGINT] * 2))
    assert sink.waits
    for each in (reader, writer):
        os.close(each)
