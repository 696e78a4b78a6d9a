"""`omnireduce.ray.run` on a real Ray cluster of two nodes, both on this host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from omnireduce import RankFailedError, TransportError, UsageError

ray = pytest.importorskip("ray", reason="no Ray here; `make ray` installs it")
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings are Ray's


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two nodes with room for two ranks each."""
    from ray.cluster_utils import Cluster

    result = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        result.add_node(num_cpus=2)
        ray.init(address=result.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        result.shutdown()


def run(func: Any, *args: Any, **options: Any) -> list[Any]:
    import omnireduce.ray

    return omnireduce.ray.run(func, args, **options)


def test_ranks_of_one_node_sum(cluster: None) -> None:
    def work(size: int) -> tuple[int, float, str]:
        import omnireduce as omni

        with omni.init() as comm:
            return comm.rank, float(omni.allreduce(np.full(size, comm.rank + 1.0))[0]), os.environ["HOROVOD_SIZE"]

    assert run(work, 100, num_workers=2) == [(rank, 3.0, "2") for rank in range(2)]


def test_ranks_of_two_nodes_sum(cluster: None) -> None:
    """The job has an aggregator of its own, at an address of the first node."""

    def work() -> tuple[int, float, list[str], str]:
        import omnireduce as omni

        with omni.init() as comm:
            total = float(omni.allreduce(np.full(50, comm.rank + 1.0))[0])
            numbers = [os.environ[f"OMNIRUN_{name}"] for name in ("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")]
            return comm.rank, total, numbers, ",".join(comm.config.cluster.aggregators)

    results = run(work, num_workers=4)
    assert [result[:3] for result in results] == [(rank, 10.0, ["2", str(rank // 2), "2"]) for rank in range(4)]
    [address] = {result[3] for result in results}
    assert address.rpartition(":")[0] == ray.util.get_node_ip_address()


def test_a_rank_that_raises(cluster: None) -> None:
    def fail() -> None:
        import omnireduce as omni

        omni.init()
        if omni.rank() == 1:
            raise LookupError("no such word")
        omni.allreduce(np.ones(3))

    with pytest.raises(RankFailedError, match="rank 1 raised an exception") as caught:
        run(fail, num_workers=2, aggregators=1)
    assert "LookupError: no such word" in caught.value.text
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_rank_that_dies(cluster: None) -> None:
    def die() -> None:
        if os.environ["RANK"] == "0":
            os._exit(3)

    with pytest.raises(RankFailedError, match="rank 0 died"):
        run(die, num_workers=2)


def test_a_cluster_that_is_too_small(cluster: None) -> None:
    with pytest.raises(TransportError, match="Ray has no room for 9 ranks"):
        run(lambda: None, num_workers=9, placement_timeout_s=0.5)
    with pytest.raises(UsageError, match="num_workers 0"):
        run(lambda: None, num_workers=0)
