"""A worker for tests: joins a job, sums the same tensor again and again, and reports what happens.

Each event is one line of JSON on standard output with the time `at` (monotonic, the same clock in every process):
`joined`, `started` (round n is under way), `held` (waits for a line on standard input before round n), `round` (n is
complete), `error`, `left`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from users import set_user

import omnireduce as omni

sys.path.append(str(Path(__file__).parent.parent))
from transports import check_carried


def report(event: str, **details: object) -> None:
    sys.stdout.write(json.dumps({"event": event, "at": time.monotonic(), **details}) + "\n")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default=None)
    parser.add_argument("--aggregators", default=None)
    parser.add_argument("--rank", type=int, default=None)
    parser.add_argument("--size", type=int, default=None)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--elements", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=1_000_000)
    parser.add_argument("--name", default="gradient")
    parser.add_argument("--hold", nargs=2, type=int, default=(-1, -1), metavar=("RANK", "ROUND"))
    parser.add_argument("--as-user", type=int, default=None, metavar="ID")
    return parser.parse_args()


def loop(comm: omni.Communicator, options: argparse.Namespace) -> None:
    tensor = np.arange(options.elements, dtype=np.float32) % 1024
    total = np.empty_like(tensor)
    expected = tensor * comm.size
    for number in range(options.rounds):
        if tuple(options.hold) == (comm.rank, number):
            report("held", round=number)
            sys.stdin.readline()
        handle = comm.allreduce_async(tensor, out=total, name=options.name)
        report("started", round=number)
        handle.wait()
        if not np.array_equal(total, expected):
            report("error", type="WrongSum", text="wrong sum", culprit="")
            sys.exit(3)
        report("round", round=number)
        if number == 0:
            check_carried(comm, options.overrides)


def main() -> int:
    options = arguments()
    if options.as_user is not None and not set_user(options.as_user):
        sys.exit("this process cannot be another user")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    given = [] if options.aggregators is None else options.aggregators.split(",")
    overrides = [f"cluster.aggregators={json.dumps(given)}", *options.overrides]
    try:
        config = omni.load_config(overrides=overrides)
        with omni.connect(config, job=options.job, rank=options.rank, size=options.size) as comm:
            report("joined", rank=comm.rank, size=comm.size, transport=comm.transport, pid=os.getpid())
            loop(comm, options)
    except KeyboardInterrupt:
        report("error", type="KeyboardInterrupt", text="", culprit="")
        return 130
    except omni.OmniReduceError as error:
        report("error", type=type(error).__name__, text=str(error), culprit=getattr(error, "culprit", ""))
        return 1
    report("left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
