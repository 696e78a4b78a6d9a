"""Helpers that the tests of `deploy/` share."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from local_cluster import READY_S, ROOT, WAIT_S, Process, configured, eventually, run_job

from omnireduce import RefusedError
from omnireduce.runtime.shard.pending_connections import MAX_UNIDENTIFIED
from omnireduce.support.config import Aggregator
from omnireduce.transport.framing import CONTROL_LIMIT, READ_BYTES, SMALL_LIMIT

DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
SECRET = {"OMNIREDUCE_SECURITY_SECRET": "whatever the operator has chosen"}


def as_here(words: Sequence[str]) -> list[str]:
    """A command of an installed program, or of `python`, as one that runs in this checkout."""
    program = Path(words[0]).name
    assert program in ("python", "omnireduce")
    return [sys.executable, *([] if program == "python" else ["-m", program]), *words[1:]]


KIB, MIB = 1 << 10, 1 << 20
PROGRAM_BYTES = 256 * MIB  # memory of supervisor, monitor and shards before the first job; they share most of it
JOB_BYTES, RANK_BYTES, TLS_BYTES = MIB, 64 * KIB, 320 * KIB  # work space of a job and of each rank; TLS of a connection


def memory_bytes(allowed: Aggregator) -> int:
    """Bytes that an aggregator of this configuration may need for jobs and strangers, as docs/security.md counts them.

    TLS is included: one line of the configuration turns it on, and then nobody thinks of memory.
    """
    jobs = 2 * allowed.max_bytes + allowed.max_jobs * JOB_BYTES
    ranks = allowed.max_ranks * (RANK_BYTES + READ_BYTES + TLS_BYTES + SMALL_LIMIT)
    strangers = MAX_UNIDENTIFIED * (READ_BYTES + TLS_BYTES + CONTROL_LIMIT)  # each with an answer that it does not read
    return allowed.shards * (jobs + ranks + strangers) + PROGRAM_BYTES


@contextlib.contextmanager
def aggregator(
    command: Sequence[str], environ: dict[str, str], secret: dict[str, str] = SECRET
) -> Iterator[tuple[Process, list[str]]]:
    """Run an aggregator's command until it is ready; afterwards it must stop cleanly on SIGTERM.

    Yields the process and its shards' addresses.
    """
    with Process(*command, environ=environ | secret) as process:
        word, *addresses = process.line(READY_S).split()
        assert word == "ready"
        yield process, addresses
        process.popen.terminate()
        assert process.wait() == 0, process.log


def page(process: Process, path: str) -> str:
    """A page of the aggregator's metrics and health."""
    assert eventually(lambda: "http://" in process.log)
    port = re.findall(r"http://[^/]*:(\d+)", process.log)[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S) as answer:
        result: bytes = answer.read()
    return result.decode()


HERE = {"OMNIREDUCE_AGGREGATOR_LISTEN": "127.0.0.1:0", "OMNIREDUCE_METRICS_LISTEN": "127.0.0.1:0"}
OLD, NEW = "what is known until now", "what will be known instead"


def replace(file: Path, *secrets: str) -> None:
    """Rename a file with these secrets over another one, with the same owner, group and mode."""
    new, was = file.with_name("new"), file.stat()
    new.touch(0o600)
    new.write_text("".join(f"{secret}\n" for secret in secrets))
    os.chown(new, was.st_uid, was.st_gid)
    new.chmod(was.st_mode & 0o777)
    new.rename(file)


def admitted(addresses: Sequence[str], own: Path) -> set[str]:
    """The secrets, of two, with which workers are let in; `own` is a file for the secret of the workers."""
    results = set()
    for secret in (OLD, NEW):
        own.touch(0o600)
        own.write_text(secret)
        try:
            sums = run_job(
                configured(addresses, f"security.secret_file={own}"), 2, lambda c: c.allreduce(np.ones(9))[0]
            )
        except RefusedError as error:
            if "another secret than the aggregator" not in str(error):
                raise
        else:
            assert sums == [2.0, 2.0]
            results.add(secret)
    return results


def check_rotation(
    process: Process, addresses: Sequence[str], file: Path, own: Path, hang_up: Callable[[], object]
) -> None:
    """A secret changes while the aggregator runs, as docs/security.md says. `file`: the aggregator's, which has OLD."""

    def reload(*secrets: str) -> str:
        logged = process.log.count('"event": "reloaded"')
        replace(file, *secrets)
        hang_up()
        everybody = logged + 2 + len(addresses)  # the supervisor, the monitor and the shards
        assert eventually(lambda: process.log.count('"event": "reloaded"') >= everybody), process.log
        return [line for line in process.log.splitlines() if '"event": "reloaded"' in line and '"teams": 0' in line][-1]

    assert admitted(addresses, own) == {OLD}
    assert '"secrets": 2, "new": 1, "gone": 0' in reload(NEW, OLD)
    assert admitted(addresses, own) == {OLD, NEW}
    assert '"secrets": 1, "new": 0, "gone": 1' in reload(NEW)
    assert admitted(addresses, own) == {NEW}
    assert page(process, "/readyz") == "ready\n"


@contextlib.contextmanager
def systemd_socket() -> Iterator[tuple[str, socket.socket]]:
    """Address and socket to which a service sends notifications for systemd."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        path = os.path.join(folder, "notify")
        sock.bind(path)
        sock.settimeout(READY_S)
        yield path, sock
