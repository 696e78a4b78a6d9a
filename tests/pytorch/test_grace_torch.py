"""GRACE in training scripts: an optimizer in Horovod's words, and a hook of DDP; two processes learn the same."""

from __future__ import annotations

import gc
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_cluster import ROOT, WAIT_S, Daemon, Process, configured, run_job, unique_job
from nursery import TORCH
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import omnireduce as omni
import omnireduce.torch as hvd
from omnireduce import Communicator, UsageError
from omnireduce.compression import grace_from_params
from omnireduce.compression.grace import Communicator as Grace
from omnireduce.torch.grace import Buckets

SCRIPT = str(ROOT / "tests" / "pytorch" / "grace_worker.py")
SIZE = 2


def test_ranks_learn_and_stay_the_same(daemon: Daemon, tmp_path: Path) -> None:
    """Without GRACE, and with five communicators, by optimizer and by hook."""
    environ = {"OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(daemon.addresses), "OMNIREDUCE_LOG_LEVEL": "debug"}
    meet, job = f"file://{tmp_path}/meet", unique_job("grace")
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Process(sys.executable, SCRIPT, str(rank), str(SIZE), meet, job, environ=environ, preloaded=TORCH)
            )
            for rank in range(SIZE)
        ]
        for _ in range(11):
            reports = [json.loads(rank.line(2 * WAIT_S)) for rank in ranks]
            before, after = reports[0]["losses"]
            assert after < 0.5 * before, reports
            assert reports[0]["digest"] == reports[1]["digest"], reports
        for each in ranks:
            assert json.loads(each.line()) == {"way": "mean", "losses": [0.5] * 3, "digest": "tensor([2, 2])"}
            assert each.wait() == 0, each.log
            lines = [line for line in each.log.splitlines() if "==Debug== grace is called" in line]
            assert len(lines) == 10, each.log
            assert all("event=grace" in line for line in lines)


@pytest.fixture
def alone(daemon: Daemon) -> Any:
    with omni.init(configured(daemon.addresses), job=unique_job("alone"), rank=0, size=1) as comm:
        yield comm


def step_of(net: nn.Module, **named: Any) -> None:
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), **named)
    optimizer.step()


@pytest.mark.usefixtures("alone")
def test_gradients_are_combined_by_name() -> None:
    """The largest element of weights and of bias is sent; a parameter without a gradient counts as zeros."""
    net = nn.Linear(2, 1)
    torch.nn.init.zeros_(net.weight)
    torch.nn.init.zeros_(net.bias)
    net.weight.grad = torch.tensor([[3.0, -4.0]])
    grc: Any = grace_from_params({"compressor": "topk", "compress_ratio": 0.5, "memory": "residual"})
    step_of(net, named_parameters=net.named_parameters(), grace=grc)
    assert (net.weight.tolist(), net.bias.tolist()) == ([[0, 4]], [0])
    assert {name: residual.tolist() for name, residual in grc.memory.state_dict()["residuals"].items()} == {
        "weight": [3, 0],
        "bias": [0],
    }
    net.weight.grad = torch.tensor([[1.0, 2.0]])
    step_of(net)  # numbered, without GRACE
    assert net.weight.tolist() == [[-1, 2]]


@pytest.mark.usefixtures("alone")
def test_what_cannot_be() -> None:
    net = nn.Linear(2, 2)
    for named, message in (
        ({"named_parameters": [("weight", net.weight)]}, "1 parameters of the optimizer have none"),
        ({"named_parameters": [("w", net.weight), ("w", net.bias)]}, "some are there twice"),
        ({"named_parameters": net.parameters()}, "named_parameters has a Parameter; expected a name and a parameter"),
        ({"named_parameters": enumerate(net.parameters())}, "named_parameters has a tuple; expected a name and a para"),
        (
            {"grace": {"compressor": "topk"}},
            "grace is a dict; expected what grace_from_params returns, or an object",
        ),
        ({"grace": grace_from_params({}), "op": hvd.Sum}, "op beside grace, which combines gradients in its own way"),
        ({"grace": grace_from_params({}), "compression": hvd.Compression.fp16}, "compression beside grace"),
        ({"grace": grace_from_params({}), "process_set": hvd.ProcessSet([0])}, "process_set beside grace"),
    ):
        with pytest.raises(UsageError, match=message):
            step_of(net, **named)
    with pytest.raises(UsageError, match=r"optimizer is a NoneType; expected one of torch\.optim"):
        hvd.DistributedOptimizer(None)  # type: ignore[arg-type]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))
    with pytest.raises(UsageError, match="step with a closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(UsageError, match="step with a closure"):
        optimizer.step(closure=lambda: 0.0)
    with pytest.raises(UsageError, match="combines gradients already; expected one that was not given here before"):
        hvd.DistributedOptimizer(optimizer)
    words = nn.Embedding(4, 2, sparse=True)
    words(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=r"'parameter 0' has a sparse gradient: expected nn.Embedding\(sparse=False\)"):
        step_of(words, grace=grace_from_params({}))


class OfAnotherPackage:
    """As an object of GRACE's own package."""

    compressor = memory = None


@pytest.mark.usefixtures("alone")
def test_graces_own_order() -> None:
    """Its object second; what was combined is changed before the step."""
    net = nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    grc = grace_from_params({"compressor": "topk", "compress_ratio": 0.5})
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=1.0), grc, named_parameters=net.named_parameters()
    )
    net(torch.tensor([[3.0, 4.0]])).sum().backward()
    optimizer.synchronize()
    assert net.weight.grad.tolist() == [[0, 4]]
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert torch.allclose(net.weight, torch.tensor([[0, -1.0]]))
    with pytest.raises(UsageError, match="combines gradients already"):
        hvd.DistributedOptimizer(optimizer, grc)
    message = r"grace is an OfAnotherPackage; .* derives from omnireduce\.compression\.grace\.Communicator"
    with pytest.raises(UsageError, match=message):
        hvd.DistributedOptimizer(torch.optim.SGD(net.parameters()), OfAnotherPackage(), net.named_parameters())


class UserCommunicator(Grace):
    """A communicator of a user, in two halves, with functions for tensors."""

    def async_send(self, tensors: Any, name: str) -> Any:
        return [hvd.allgather_async(tensor.reshape(1, -1), name=f"{name} {i}") for i, tensor in enumerate(tensors)]

    def wait_receive(self, handles: Any, ctx: Any) -> Any:
        everyone = zip(*(hvd.synchronize(handle) for handle in handles), strict=True)
        return self.combined([self.compressor.decompress(each, ctx) for each in everyone])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("compressor", ["none", "fp16", "qsgd", "natural", "onebit", "terngrad", "topk", "u8bit"])
def test_a_communicator_of_the_users_own_gets_tensors_of_tensors(compressor: str) -> None:
    gradient = torch.tensor([[1.0, 0], [0, -1]])
    params = {"compressor": compressor, "compress_ratio": 0.5}
    theirs, ours = (
        grace_from_params({**params, "communicator": each}).step(gradient, "w")
        for each in (f"{__name__}:UserCommunicator", "allgather")
    )
    assert torch.equal(theirs, ours)


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_tensors_that_have_no_numbers_or_not_all() -> None:
    grc = grace_from_params({"compressor": "topk"})
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        with pytest.raises(UsageError, match="a gradient is sparse; expected a dense gradient"):
            grc.step(torch.eye(3).to_sparse(layout=layout), "w")
    with pytest.raises(UsageError, match="a gradient is on the device meta, which has no numbers"):
        grc.step(torch.ones(2, device="meta"), "w")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_named", [True, False])
def test_optimizers_that_share_a_memory_have_nothing_of_each_other(is_named: bool) -> None:
    """An element of the first optimizer stays in memory. The first gets it with its next step, the second never."""
    grc = grace_from_params({"compressor": "topk", "compress_ratio": 0.5, "memory": "residual"})
    nets = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    optimizers = []
    for net in nets:
        names = net.named_parameters() if is_named else None
        optimizers.append(hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), names, grace=grc))
    results = []
    for number, gradient in ((0, [[3.0, -4.0]]), (1, [[0.0, 0.0]]), (0, [[0.0, 0.0]])):
        nets[number].weight.grad = torch.tensor(gradient)
        optimizers[number].step()
        results.append(nets[number].weight.grad.tolist())
    assert results == [[[0, -4]], [[0, 0]], [[3, 0]]]


@pytest.mark.usefixtures("alone")
def test_a_closure_that_is_none_is_no_closure() -> None:
    net = nn.Linear(1, 1, bias=False)
    net.weight.grad = net.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))
    optimizer.step(None)
    assert net.weight.tolist() == [[0]]


@pytest.mark.parametrize("is_named", [False, True])
def test_parameters_that_come_later_are_combined(daemon: Daemon, is_named: bool) -> None:
    """Parameters of a group that was added to the finished optimizer. The mean of all gradients is 0.5."""

    def run(comm: Communicator) -> list[float]:
        first, later = (nn.Parameter(torch.zeros(1)) for _ in range(2))
        names = {"first": first, "later": later} if is_named else None
        plain = torch.optim.SGD([first], lr=1.0)
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=names, grace=grace_from_params({}, comm=comm))
        optimizer.add_param_group({"params": [later]})
        first.grad, later.grad = (torch.full((1,), float(comm.rank)) for _ in range(2))
        optimizer.step()
        return [first.item(), later.item()]

    assert run_job(configured(daemon.addresses), SIZE, run) == [[-0.5, -0.5]] * SIZE


@pytest.mark.usefixtures("alone")
def test_a_parameter_that_comes_later_has_a_name() -> None:
    net = nn.Linear(2, 2)
    plain = torch.optim.SGD(net.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=net.named_parameters())
    with pytest.raises(UsageError, match="expected a name for each parameter; 1 parameters of the optimizer have none"):
        optimizer.add_param_group({"params": nn.Linear(1, 1, bias=False).parameters()})


@pytest.mark.usefixtures("alone")
def test_parameters_of_all_types_are_broadcast() -> None:
    params = {"half": torch.ones(3, dtype=torch.bfloat16), "steps": torch.tensor(3), "name": "no tensor"}
    params["turned"] = torch.arange(6.0).view(2, 3).T
    hvd.broadcast_parameters(params)
    assert params["half"].tolist() == [1, 1, 1]
    assert params["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]


class Turned(nn.Module):
    """Two layers of one shape whose gradients come in another order than DDP expects."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x))


@pytest.mark.usefixtures("alone")
def test_buckets_that_are_made_anew_do_not_mix_up_what_was_kept() -> None:
    """The same gradient in each step, of whole numbers. From the second step on nothing is lost."""
    net, steps = Turned(), 4
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            parameter.copy_(torch.arange(16.0).view(4, 4) + i)
    x = torch.tensor([[1.0, 2, -3, 4]])
    net(x).sum().backward()
    gradients = [parameter.grad.flatten().clone() for parameter in net.parameters()]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(net)
        grc: Any = grace_from_params({"compressor": "topk", "compress_ratio": 0.2, "memory": "residual"})
        model.register_comm_hook(grc.state, grc.hook)
        received = [torch.zeros(16) for _ in gradients]
        for step in range(steps):
            model.zero_grad()
            model(x).sum().backward()
            for total, parameter in zip(received, net.parameters(), strict=True):
                total += parameter.grad.flatten() * (step > 0)
    finally:
        dist.destroy_process_group()
    kept = grc.memory.state_dict()["residuals"]
    assert list(kept) == ["bucket 1"]  # else this test would test nothing
    left = torch.from_numpy(kept["bucket 1"]).view(2, 16).flip(0).flatten()  # in the order of their gradients
    everything = torch.cat(gradients) * (steps - 1)
    assert torch.equal(torch.cat(received) + left, everything)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("compressor", ["topk", "signum", "powersgd"])
def test_models_one_after_another_have_nothing_of_each_other(compressor: str) -> None:
    """Models of one shape share a communicator: memory of freed models is used again for the next ones."""
    x, results = torch.tensor([[1.0, 2, -3, 4]]), []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    grc: Any = grace_from_params({"compressor": compressor, "memory": "residual"})
    try:
        for sign in (1, -1, 1, -1, 1):
            net = nn.Linear(4, 4, bias=False)
            model = DistributedDataParallel(net)
            model.register_comm_hook(grc.state, grc.hook)
            (sign * model(x)).sum().backward()
            results.append((sign * net.weight.grad).tolist())
            del net, model
            gc.collect()
    finally:
        dist.destroy_process_group()
    assert results == results[:1] * 5
    kept = grc.memory.state_dict()["residuals"]
    assert [each.partition(",")[0] for each in kept] in ([], ["bucket 4"])


@pytest.mark.usefixtures("alone")
def test_a_bucket_is_known_while_its_parameters_are_there() -> None:
    grc, buckets = grace_from_params({}), Buckets()
    one, other = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    assert [buckets.name_of(each, grc) for each in ([one, other], [one, other])] == ["bucket 0"] * 2
    assert [buckets.name_of(each, grc) for each in ([other, one], [one, other])] == ["bucket 1", "bucket 2"]
    names = {buckets.name_of([nn.Parameter(torch.zeros(1))], grc) for _ in range(20)}
    assert len(names) == 20
    assert buckets.name_of([one, other], grc) == "bucket 2"


def test_the_optimizer_asks_for_a_communicator() -> None:
    with pytest.raises(UsageError, match=r"call omnireduce.init\(\) first"):
        step_of(nn.Linear(1, 1))
