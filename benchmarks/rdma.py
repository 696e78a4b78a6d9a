"""RDMA's speed on one host, as a share of what `ib_write_bw` reaches in the same run.

    python -m benchmarks.rdma [--device rxe0] [--json FILE]        needs the extra `mpi`, pyverbs and perftest

Made for a guest with Soft-RoCE:

    python tools/guests.py run -- .venv/bin/python -m benchmarks.rdma

Two workers and one aggregator shard on one device. The rate is all bytes that the device carried, up and down, of both
workers, over the median time of an all-reduce. That of `ib_write_bw -b` is the sum of both directions, too: two
processes on that device write to each other at the same time. The exit status is 1 when an element was wrong; a missed
target is reported and does not change it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.carriers import wrong_carrier
from benchmarks.harness.environments import ROOT
from benchmarks.harness.group import daemon
from omnireduce.support.cli import reporting_errors
from omnireduce.support.config import Verbs
from omnireduce.transport.slot_memory import private_slots
from omnireduce.transport.verbs.devices import choose
from omnireduce.transport.verbs.queue_pair import VerbsQueuePair

CARRIER = "verbs"
SETTINGS = f"transport.kind={CARRIER}", "transport.host_exchange=off"
SHARE_TARGET = 0.85
SPARSE_TARGET = 20.0
MESSAGES = 2000
LIMIT_S = 300


def write_bandwidth(device: str, gid_index: int) -> float:
    """The rate that ib_write_bw reports for messages of 64 KiB, both directions at once and summed, bytes per second.

    Ends the program when it fails, or takes longer than LIMIT_S.
    """
    command = ["ib_write_bw", "-b", "-d", device, "-x", str(gid_index), "-F", "-s", "65536", "-n", "500"]
    command.append("--report_gbits")
    deadline, output = time.monotonic() + LIMIT_S, "it said nothing"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while server.poll() is None and (left := deadline - time.monotonic()) > 0:
                client = subprocess.run(
                    [*command, "127.0.0.1"], capture_output=True, text=True, check=False, timeout=left
                )
                if client.returncode == 0:
                    (line,) = (row.split() for row in client.stdout.splitlines() if row.split()[:1] == ["65536"])
                    return float(line[3]) * 1e9 / 8
                output = client.stderr or client.stdout
                time.sleep(0.2)  # the server does not say when it listens
        except subprocess.TimeoutExpired:
            output = f"no answer within {LIMIT_S} s"
        finally:
            server.kill()
    raise SystemExit(f"ib_write_bw failed: {output}")


def message_cost(device: str) -> tuple[float, float]:
    """Microseconds of Python and verbs for sending one message, and for taking one; no bytes, one process."""
    settings, slots = Verbs(device=device), 64
    queues = [
        VerbsQueuePair(choose(settings, ""), settings, private_slots(slots, 4096), private_slots(slots, 4096))
        for _ in "ab"
    ]
    sender, receiver = queues
    sender.connect(receiver.endpoint)
    receiver.connect(sender.endpoint)
    sending = receiving = 0.0
    for _ in range(MESSAGES // slots):
        start = time.perf_counter()
        for _ in range(slots):
            sender.announce(0)
        sending += time.perf_counter() - start
        arrived = 0
        while arrived < slots:
            start = time.perf_counter()
            count = len(list(receiver.poll()))
            if count:
                receiving += time.perf_counter() - start
                arrived += count
        while sender.unacknowledged:
            list(sender.poll())
    for queue in queues:
        queue.close()
    total = MESSAGES // slots * slots
    return sending / total * 1e6, receiving / total * 1e6


def bench(addresses: list[str], folder: Path, *sets: str) -> list[dict[str, Any]]:
    """The rows of `omnireduce bench` over verbs. Both workers are on this host, and must not exchange in memory. Ends
    the program where something else than RDMA carried a tensor."""
    rows = folder / "rows.json"
    settings = [f"cluster.aggregators={json.dumps(addresses)}", *SETTINGS, "cluster.timeout_s=300", *sets]
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "-n", "2"]
    command = [*mpirun, sys.executable, "-m", "omnireduce", "bench", "--json", str(rows)]
    command += [word for setting in settings for word in ("--set", setting)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=LIMIT_S)
    parsed_rows: list[dict[str, Any]] = json.loads(rows.read_text())
    check_carrier(parsed_rows)
    return parsed_rows


def check_carrier(rows: list[dict[str, Any]]) -> None:
    """End the program where one of the rows was not carried by RDMA."""
    for row in rows:
        if wrong := wrong_carrier(CARRIER, row["transport"]):
            raise SystemExit(f"{row['elements']} elements, density {row['density']:g}: {wrong}")


def rate(row: dict[str, Any]) -> float:
    """Bytes per second of all workers, both ways: what one device carries for them."""
    return float(2 * (row["wire_up_bytes"] + row["wire_down_bytes"]) / (row["time_ms"] / 1e3))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure all-reduces over RDMA, against perftest's ib_write_bw.")
    parser.add_argument("--device", default="rxe0")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    gid_index = choose(Verbs(device=options.device), "").gid.index
    device = (f"verbs.device={options.device}",)
    limits = [write_bandwidth(options.device, gid_index)]
    verbs = daemon(1, SETTINGS[0], *device, start_s=LIMIT_S)
    with verbs as running, tempfile.TemporaryDirectory() as folder:
        addresses = running.addresses
        rounds = (f"bench.rounds={options.rounds}", "bench.warmup=1")
        (dense,) = bench(addresses, Path(folder), *device, *rounds, "bench.elements=2097152", "bench.density=1.0")
        limits.append(write_bandwidth(options.device, gid_index))
        large_settings = ("bench.rounds=3", "bench.warmup=1", "bench.elements=16777216", "bench.density=[1.0,0.01]")
        large, sparse = bench(addresses, Path(folder), *device, *large_settings)
    sending_us, receiving_us = message_cost(options.device)
    limit = max(limits)
    figures = {
        "carried_by": CARRIER,
        "ib_write_bw_mb_s": limit / 1e6,
        "dense_mb_s": rate(dense) / 1e6,
        "dense_share": rate(dense) / limit,
        "sparse_speedup": large["time_ms"] / sparse["time_ms"],
        "send_us": sending_us,
        "take_us": receiving_us,
    }
    verdict = {True: "met", False: "MISSED"}
    share, speedup = figures["dense_share"], figures["sparse_speedup"]
    print(f"ib_write_bw -b, 64 KiB: {figures['ib_write_bw_mb_s']:.0f} MB/s (the better of two runs)")
    print(f"all of the following was carried by {CARRIER}")
    print(f"dense all-reduce of 8 MiB: {figures['dense_mb_s']:.0f} MB/s, {share:.0%} of it", end=" ")
    print(f"(target at least {SHARE_TARGET:.0%}: {verdict[share >= SHARE_TARGET]})")
    print(f"64 MiB at density 0.01: {speedup:.1f} times faster than dense", end=" ")
    print(f"(target at least {SPARSE_TARGET:g}: {verdict[speedup >= SPARSE_TARGET]})")
    print(f"Python and verbs for a message: {sending_us:.1f} us to send it, {receiving_us:.1f} us to take it")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    sys.exit(1 if any(row["wrong"] for row in (dense, large, sparse)) else 0)


if __name__ == "__main__":
    with reporting_errors():
        main()
