"""A rank of a launch that joins and leaves one job after another, each with collectives of random types and sizes.

In every fifth job the last rank fails. For each job it writes one line of JSON on standard output: `job` and `outcome`,
"done" or the exception's type. A wrong sum ends it with an AssertionError.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import omnireduce as omni
from omnireduce.core.dtypes import ELEMENT_TYPES

sys.path.append(str(Path(__file__).parent.parent))
from transports import MEMORY, check_carried, over

WAYS = over("shm"), over("tcp"), over(MEMORY)


def collectives(comm: omni.Communicator, same: random.Random) -> None:
    """Some collectives, checked; `same` draws the same numbers on all ranks."""
    for _ in range(same.randint(1, 4)):
        dtype = same.choice(list(ELEMENT_TYPES))
        elements = same.choice([0, 1, 17, 300, 5000, 200_003])
        x = np.zeros(elements, ELEMENT_TYPES[dtype].dtype)
        x[:: same.choice([1, 7, 1000])] = 1
        expected = (x.astype(np.int64) * comm.size).tolist()
        assert comm.allreduce(x).astype(np.int64).tolist() == expected
    assert comm.allgather(np.array(comm.rank)).tolist() == list(range(comm.size))


def outcome(overrides: Sequence[str], number: int) -> str:
    config = omni.load_config(overrides=overrides)
    try:
        with omni.connect(config, job="one-name-for-all") as comm:
            if number % 5 == 0 and comm.rank == comm.size - 1:
                raise ZeroDivisionError
            collectives(comm, random.Random(number))
            check_carried(comm, overrides)
    except (omni.AbortedError, ZeroDivisionError) as error:
        return type(error).__name__
    return "done"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--aggregators", required=True)
    parser.add_argument("--jobs", nargs=2, type=int, required=True, metavar=("FIRST", "STOP"))
    options = parser.parse_args()
    addresses = f"cluster.aggregators={json.dumps(options.aggregators.split(','))}"
    for number in range(*options.jobs):
        result = outcome([addresses, *WAYS[number // 5 % len(WAYS)]], number)
        sys.stdout.write(json.dumps({"job": number, "outcome": result}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
