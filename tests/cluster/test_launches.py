"""Two launches of one name at once: each sums its own tensors only."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys

import numpy as np
import pytest
from local_cluster import Daemon, Process, Ranks, configured, eventually, unique_job

from omnireduce import Communicator, ConfigError, OmniReduceError, RefusedError
from omnireduce.runtime.aggregator_client import ask

PROGRAM = """
import os, sys
import numpy as np
import omnireduce as omni
launch = int(os.environ["LAUNCH"])
with omni.connect() as comm:
    sys.stdout.write(f"{launch} {comm.allreduce(np.full(1, 10.0**launch))[0]:g}\\n")
"""
ORDERS = [order for order in itertools.permutations("aabb") if order[0] == "a"]


@pytest.mark.parametrize("order", sorted(set(ORDERS)), ids="".join)
def test_ranks_of_two_launches_in_every_order(daemon: Daemon, order: tuple[str, ...]) -> None:
    """Their job has the same name. The second of each launch completes it, whoever came in between."""
    job, config = unique_job(), {each: configured(daemon.addresses, f"cluster.launch={each}") for each in "ab"}
    address = daemon.addresses[0]
    ranks = []

    def run(launch: str, rank: int) -> float:
        with Communicator(config[launch], rank=rank, size=2, job=job) as comm:
            return float(comm.allreduce(np.full(1, 1.0 if launch == "a" else 10.0))[0])

    for position, launch in enumerate(order):
        rank = order[:position].count(launch)
        ranks.append(Ranks(1, lambda _, launch=launch, rank=rank: run(launch, rank)))
        waiting = sum(order[: position + 1].count(each) == 1 for each in "ab")
        assert eventually(
            lambda waiting=waiting: (
                sum(
                    each.joined
                    for each in ask(address, config["a"], 5.0).jobs
                    if each.name == job and not each.generation
                )
                == waiting
            )
        )
    assert [each.results()[0] for each in ranks] == [2.0 if launch == "a" else 20.0 for launch in order]


@pytest.mark.slow
def test_torchrun_without_an_id(daemon: Daemon) -> None:
    """Launches differ in the address at which PyTorch's ranks meet."""
    with contextlib.ExitStack() as stack:
        started = []
        for rank, launch in itertools.product(range(2), range(2)):
            environ = {
                "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "none",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + launch), "LAUNCH": str(launch),
                "OMNIREDUCE_CLUSTER_AGGREGATORS": json.dumps(daemon.addresses),
            }  # fmt: skip
            started.append(stack.enter_context(Process(sys.executable, "-c", PROGRAM, environ=environ)))
        assert sorted(each.line().strip() for each in started) == ["0 2", "0 2", "1 20", "1 20"]
        assert [each.wait() for each in started] == [0] * 4


@pytest.mark.parametrize(
    ("overrides", "job", "error"),
    [
        ((), None, ConfigError),
        ((), "named", RefusedError),  # the id of a rank that does not come
        (("cluster.job=named",), None, RefusedError),
        (("cluster.launch=x",), None, RefusedError),
        (("cluster.launch=",), None, RefusedError),  # no other launch can be there
        (("elastic.enabled=true", "elastic.last_call_s=0.1"), None, ConfigError),
    ],
)
def test_workers_that_nothing_tells_from_those_of_another_launch_are_refused(
    daemon: Daemon, overrides: tuple[str, ...], job: str | None, error: type[OmniReduceError]
) -> None:
    config = configured(daemon.addresses, "cluster.join_timeout_s=0.5", *overrides)
    with pytest.raises(error):
        Communicator(config, rank=0, size=2, job=job)
