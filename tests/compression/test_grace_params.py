"""GRACE's helper: every name, and what it says of those that do not exist or do not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from local_cluster import Daemon, configured, run_job

import omnireduce as omni
from omnireduce import Communicator, UsageError
from omnireduce.compression import grace, grace_from_params
from omnireduce.compression.grace.params import COMMUNICATORS, COMPRESSORS, MEMORIES, ON_A_GPU

GRACE_HAS = [
    *("none", "adaq", "dgc", "efsignsgd", "fp16", "inceptionn", "natural", "onebit", "powersgd", "qsgd", "randomk"),
    *("signsgd", "signum", "sketch", "terngrad", "threshold", "topk", "u8bit"),
]


def test_all_names(daemon: Daemon) -> None:
    """18 of GRACE, and two of ours; each with each memory, and the communicators that it goes with."""
    assert sorted([*GRACE_HAS, "adaptive", "guarded_threshold"]) == sorted(COMPRESSORS)

    def run(comm: Communicator) -> None:
        for name, kind in {**COMPRESSORS, **{each: COMPRESSORS[same] for each, same in ON_A_GPU.items()}}.items():
            for memory in MEMORIES:
                for communicator in COMMUNICATORS:
                    params = {"compressor": name, "memory": memory, "communicator": communicator, "world_size": 1}
                    if communicator in kind.communicators:
                        made = grace_from_params(params, comm=comm)
                        assert type(made.compressor) is kind or communicator == "alltoall"
                        assert (type(made.memory), type(made)) == (MEMORIES[memory], COMMUNICATORS[communicator])
                        assert (made.world_size, made.state) == (1, made)
                    else:
                        said = rf"with communicator '{communicator}': it goes with {', '.join(kind.communicators)}$"
                        with pytest.raises(UsageError, match=said):
                            grace_from_params(params, comm=comm)

    run_job(configured(daemon.addresses), 1, run)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"compressor": "topk", "communicator": "allreduce"}, "it goes with allgather, broadcast, aggregator"),
        ({"compressor": "topq"}, "compressor 'topq': expected none, adaptive, adaq, dgc, efsignsgd, fp16"),
        ({"compressor": None}, "compressor None: expected none, adaptive"),
        ({"memory": "some"}, "memory 'some': expected none, dgc, efsignsgd, powersgd, residual"),
        ({"communicator": ["a"]}, r"communicator \['a'\]: expected aggregator, allgather, allreduce, alltoall, broad"),
        ({"compressor": "topk", "ratio": 1}, "parameter 'ratio': compressor 'topk' with memory 'none' takes compress_"),
        ({"compress_ratio": 0.1}, "parameter 'compress_ratio': compressor 'none' with memory 'none' takes nothing"),
        ({"compressor": "topk", "compress_ratio": 2}, "ratio 2: expected more than 0 and at most 1"),
        ({"compressor": "natural", "seed": "a"}, "seed is 'a', a str; expected an int"),
        ({"compressor": "qsgd", "seed": None}, "seed is None, a NoneType; expected an int"),
        ({"compressor": "terngrad", "seed": 1.5}, "seed is 1.5, a float; expected an int"),
        ({"compressor": "powersgd", "seed": -1}, "seed -1: expected a whole number from 0 on"),
        ({"compressor": "randomk", "seed": "a"}, "seed is 'a'"),
        ({"compressor": "dgc", "seed": -1}, "seed -1: expected a whole number from 0 on"),
        ({"compressor": "omnireduce.compression.grace:Compressor"}, "Compressor is abstract; .* has compress, decom"),
        ({"memory": "omnireduce.compression.grace:Memory"}, "Memory is abstract; expected a class that has compensate"),
        ({"communicator": "omnireduce.compression.grace:Communicator"}, "Communicator is abstract; .* send_receive"),
        ({"world_size": 7}, "world_size 7: the communicator has 1 ranks"),
        ({"world_size": "1"}, "world_size is '1'"),
        ("topk", "params is a str; expected a dict such as"),
    ],
)
def test_what_cannot_be(daemon: Daemon, params: Any, said: str) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=said):
            grace_from_params(params, comm=comm)

    run_job(configured(daemon.addresses), 1, run)


def test_parameters_go_to_those_that_have_them(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        params = {"compressor": "efsignsgd", "memory": "efsignsgd", "lr": 0.5}
        made: Any = grace_from_params(params, comm=comm)
        assert (made.compressor.learning_rate, made.memory.kept.gamma) == (0.5, 0.5)
        params = {"compressor": "dgc", "memory": "dgc", "momentum": 0.5, "gradient_clipping": 2.0}
        made = grace_from_params(params, comm=comm)
        assert (made.memory.kept.momentum, made.memory.kept.clip) == (0.5, 2.0)
        made = grace_from_params({"compressor": "signum", "memory": "dgc", "momentum": 0.25}, comm=comm)
        assert (made.memory.kept.momentum, made.compressor.momentum) == (0.25, 0.25)

    run_job(configured(daemon.addresses), 1, run)


def test_classes_of_the_users_own_by_name(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = """
from omnireduce.compression.grace import Allgather, ResidualMemory, TopKCompressor
class Mine(TopKCompressor): ...
class Kept(ResidualMemory): ...
class Way(Allgather): ...
"""
    (tmp_path / "grace_of_mine.py").write_text(own)
    monkeypatch.syspath_prepend(tmp_path)

    def run(comm: Communicator) -> list[str]:
        names = {"compressor": "Mine", "memory": "Kept", "communicator": "Way"}
        params = {key: f"grace_of_mine:{name}" for key, name in names.items()}
        made: Any = grace_from_params({**params, "compress_ratio": 0.5, "beta": 0.5}, comm=comm)
        assert (made.compressor.compress_ratio, made.memory.kept.beta) == (0.5, 0.5)
        with pytest.raises(UsageError, match=r"expected a class that derives from omnireduce.*\.Memory"):
            grace_from_params({"memory": "grace_of_mine:Mine"}, comm=comm)
        with pytest.raises(UsageError, match="nowhere:X cannot be loaded: ModuleNotFoundError"):
            grace_from_params({"compressor": "nowhere:X"}, comm=comm)
        return [type(each).__name__ for each in (made.compressor, made.memory, made)]

    assert run_job(configured(daemon.addresses), 1, run) == [["Mine", "Kept", "Way"]]


def test_it_takes_the_communicator_of_the_program(daemon: Daemon) -> None:
    with pytest.raises(UsageError, match=r"call omnireduce.init\(\) first"):
        grace_from_params({})
    with omni.init(configured(daemon.addresses), job="grace-params", rank=0, size=1) as comm:
        made = grace_from_params({"compressor": "topk"})
        assert made.comm is comm
        again = grace.Allgather(grace.TopKCompressor(0.3), grace.ResidualMemory(), omni.size())
        assert again.comm is comm
        with pytest.raises(UsageError, match="expected a Compressor and a Memory"):
            grace.Allgather(grace.ResidualMemory(), grace.TopKCompressor())  # type: ignore[arg-type]
