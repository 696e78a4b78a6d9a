"""GRACE's helper: every name, and what it says of those that do not exist or do not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job

import omnireduce as omni
from omnireduce import Communicator, UsageError
from omnireduce.compression import grace, grace_from_params
from omnireduce.compression.grace.params import COMMUNICATORS, COMPRESSORS, GPU_NAMES, MEMORIES
from omnireduce.runtime.rank import global_communicator

GRACE_HAS = [
    *("none", "adaq", "dgc", "efsignsgd", "fp16", "inceptionn", "natural", "onebit", "powersgd", "qsgd", "randomk"),
    *("signsgd", "signum", "sketch", "terngrad", "threshold", "topk", "u8bit"),
]


def test_all_names(daemon: Daemon) -> None:
    """18 of GRACE, and two of ours; each with each memory, and the communicators that it goes with."""
    assert sorted([*GRACE_HAS, "adaptive", "guarded_threshold"]) == sorted(COMPRESSORS)

    def run(comm: Communicator) -> None:
        for name, kind in {**COMPRESSORS, **{each: COMPRESSORS[same] for each, same in GPU_NAMES.items()}}.items():
            for memory in MEMORIES:
                for communicator in COMMUNICATORS:
                    params = {"compressor": name, "memory": memory, "communicator": communicator, "world_size": 1}
                    if communicator in kind.communicators:
                        made = grace_from_params(params, comm=comm)
                        assert type(made.compressor) is kind or communicator == "alltoall"
                        assert (type(made.memory), type(made)) == (MEMORIES[memory], COMMUNICATORS[communicator])
                        assert (made.world_size, made.state) == (1, made)
                    else:
                        message = rf"with communicator '{communicator}': it goes with {', '.join(kind.communicators)}$"
                        with pytest.raises(UsageError, match=message):
                            grace_from_params(params, comm=comm)

    run_job(configured(daemon.addresses), 1, run)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"compressor": "topk", "communicator": "allreduce"}, "it goes with allgather, broadcast, aggregator"),
        ({"compressor": "topq"}, "compressor 'topq': expected none, adaptive, adaq, dgc, efsignsgd, fp16"),
        ({"compressor": None}, "compressor None: expected none, adaptive"),
        ({"memory": "some"}, "memory 'some': expected none, dgc, efsignsgd, powersgd, residual"),
        ({"communicator": ["a"]}, r"communicator \['a'\]: expected aggregator, allgather, allreduce, alltoall, broad"),
        ({"compressor": "topk", "ratio": 1}, "parameter 'ratio': compressor 'topk' with memory 'none' takes compress_"),
        ({"compress_rate": 0.1}, "parameter 'compress_rate': compressor 'none' with memory 'none' takes nothing"),
        ({"compressor": "topk", "compress_ratio": 2}, "ratio 2: expected more than 0 and at most 1"),
        ({"compressor": "natural", "seed": "a"}, "seed is 'a', a str; expected an int"),
        ({"compressor": "qsgd", "seed": None}, "seed is None, a NoneType; expected an int"),
        ({"compressor": "terngrad", "seed": 1.5}, "seed is 1.5, a float; expected an int"),
        ({"compressor": "powersgd", "seed": -1}, "seed -1: expected a whole number from 0 on"),
        ({"compressor": "randomk", "seed": "a"}, "seed is 'a'"),
        ({"compressor": "dgc", "seed": -1}, "seed -1: expected a whole number from 0 on"),
        ({"compressor": "omnireduce.compression.grace:Compressor"}, "Compressor is abstract; .* has compress, decom"),
        ({"memory": "omnireduce.compression.grace:Memory"}, "Memory is abstract; expected a class that has compensate"),
        (
            {"communicator": "omnireduce.compression.grace:Communicator"},
            "Communicator does not exchange: .* send_receive, or",
        ),
        ({"world_size": 7}, "world_size 7: the communicator has 1 ranks"),
        ({"world_size": "1"}, "world_size is '1'"),
        ("topk", "params is a str; expected a dict such as"),
    ],
)
def test_what_cannot_be(daemon: Daemon, params: Any, message: str) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=message):
            grace_from_params(params, comm=comm)

    run_job(configured(daemon.addresses), 1, run)


def test_parameters_go_to_those_that_have_them(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        params = {"compressor": "efsignsgd", "memory": "efsignsgd", "lr": 0.5}
        made: Any = grace_from_params(params, comm=comm)
        assert (made.compressor.learning_rate, made.memory.wrapped.gamma) == (0.5, 0.5)
        params = {"compressor": "dgc", "memory": "dgc", "momentum": 0.5, "gradient_clipping": 2.0}
        made = grace_from_params(params, comm=comm)
        assert (made.memory.wrapped.momentum, made.memory.wrapped.clip) == (0.5, 2.0)
        made = grace_from_params({"compressor": "signum", "memory": "dgc", "momentum": 0.25}, comm=comm)
        assert (made.memory.wrapped.momentum, made.compressor.momentum) == (0.25, 0.25)

    run_job(configured(daemon.addresses), 1, run)


def test_classes_of_the_users_own_by_name(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
from omnireduce.compression.grace import Allgather, ResidualMemory, TopKCompressor
class Mine(TopKCompressor): ...
class Kept(ResidualMemory): ...
class MyCommunicator(Allgather): ...
"""
    (tmp_path / "grace_of_mine.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    def run(comm: Communicator) -> list[str]:
        names = {"compressor": "Mine", "memory": "Kept", "communicator": "MyCommunicator"}
        params = {key: f"grace_of_mine:{name}" for key, name in names.items()}
        made: Any = grace_from_params({**params, "compress_ratio": 0.5, "beta": 0.5}, comm=comm)
        assert (made.compressor.compress_ratio, made.memory.wrapped.beta) == (0.5, 0.5)
        with pytest.raises(UsageError, match=r"expected a class that derives from omnireduce.*\.Memory"):
            grace_from_params({"memory": "grace_of_mine:Mine"}, comm=comm)
        with pytest.raises(UsageError, match="nowhere:X cannot be loaded: ModuleNotFoundError"):
            grace_from_params({"compressor": "nowhere:X"}, comm=comm)
        return [type(each).__name__ for each in (made.compressor, made.memory, made)]

    assert run_job(configured(daemon.addresses), 1, run) == [["Mine", "Kept", "MyCommunicator"]]


def test_it_takes_the_communicator_of_the_program(daemon: Daemon) -> None:
    with pytest.raises(UsageError, match=r"call omnireduce.init\(\) first"):
        grace_from_params({})
    with omni.init(configured(daemon.addresses), job="grace-params", rank=0, size=1) as comm:
        made = grace_from_params({"compressor": "topk"})
        assert made.comm is comm
        again = grace.Allgather(grace.TopKCompressor(0.3), grace.ResidualMemory(), omni.size())
        assert again.comm is comm
        for pair, message in (
            (
                (grace.ResidualMemory(), grace.TopKCompressor()),
                "compressor is a ResidualMemory; expected an object whose",
            ),
            (
                (grace.TopKCompressor(), grace.ResidualMemory),
                r"memory is ResidualMemory; .* omnireduce\.compression\.grace\.Mem",
            ),
        ):
            with pytest.raises(UsageError, match=message):
                grace.Allgather(*pair)  # type: ignore[arg-type]


def ignored(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "grace_ignored"]


def test_what_only_others_take_is_ignored_with_one_warning(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    """A script that names another compressor leaves all its parameters where they are."""
    of_all = {
        "compress_ratio": 0.1,
        "threshold": 0.1,
        "quantum_num": 7,
        "compress_rank": 2,
        "lr": 0.5,
        "kernel": "torch",
    }
    of_all |= {"momentum": 0.5, "gradient_clipping": False, "bucket_size": 8, "quantiles": 4, "error_bound": 0.1}

    def run(comm: Communicator) -> Any:
        made: Any = grace_from_params({"compressor": "signum", **of_all}, comm=comm)
        grace_from_params({"compressor": "signum", "momentum": 0.5}, comm=comm)
        return made.compressor.momentum

    assert run_job(configured(daemon.addresses), 2, run) == [0.5, 0.5]
    others = ", ".join(key for key in of_all if key != "momentum")
    assert ignored(caplog) == [f"ignored: {others}. compressor 'signum' with memory 'none' takes momentum"]


class Own(grace.Communicator):
    """As GRACE's users write one for Horovod: two halves, and a constructor that sets `world_size`."""

    def __init__(self, compressor: grace.Compressor, memory: grace.Memory, world_size: int) -> None:
        super().__init__(compressor, memory)
        self.world_size = world_size

    def async_send(self, tensors: Any, name: str) -> Any:
        return [self.comm.allgather_async(tensor, name=f"{name} {i}") for i, tensor in enumerate(tensors)]

    def wait_receive(self, handles: Any, ctx: Any) -> Any:
        everyone = zip(*(handle.wait() for handle in handles), strict=True)
        return self.combined([self.compressor.decompress(each, ctx) for each in everyone])


class Whole(grace.Communicator):
    """As for torch.distributed: in one piece."""

    def __init__(self, compressor: grace.Compressor, memory: grace.Memory) -> None:
        super().__init__(compressor, memory)

    def send_receive(self, tensors: Any, name: str, ctx: Any) -> Any:
        return Own.wait_receive(self, Own.async_send(self, tensors, name), ctx)  # type: ignore[arg-type]


class Half(grace.Communicator):
    def async_send(self, tensors: Any, name: str) -> Any: ...


def test_communicators_of_the_users_own(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Derived as GRACE has them for Horovod, and for torch.distributed; made by name, on the global communicator."""

    def run(comm: Communicator) -> list[list[float]]:
        monkeypatch.setattr(global_communicator, "_global", comm)
        results = []
        for kind in (Own, Whole):
            made = grace_from_params({"compressor": "fp16", "communicator": f"{__name__}:{kind.__name__}"})
            gradient = np.array([-1, 2], np.float32)
            results.append(made.step(gradient, "w").tolist())
            assert made.world_size == 1
            with pytest.raises(UsageError, match="world_size 3: the communicator has 1 ranks"):
                made.world_size = 3
        with pytest.raises(UsageError, match=r"Half does not exchange: .* it has no wait_receive"):
            Half(grace.NoneCompressor(), grace.NoneMemory())
        return results

    assert run_job(configured(daemon.addresses), 1, run) == [[[-1, 2], [-1, 2]]]
