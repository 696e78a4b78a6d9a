"""A rank of three that calls Horovod's names and checks what comes. Arguments: rank, size, job, scenarios."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from itertools import chain

import horovod_gradients
import pytest
import torch
from torch import Tensor, nn

import omnireduce.torch as hvd
from omnireduce import ClosedError, UsageError
from omnireduce.data_parallel.session import queue


def tensor_of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    count = int(torch.tensor(shape).prod())
    return (torch.arange(count).reshape(shape) * (rank + 1) % 7).to(dtype)


def everyone(*shape: int) -> Tensor:
    return torch.stack([tensor_of(rank, *shape) for rank in range(hvd.size())])


def refuses(call: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        call()


def reductions() -> None:
    rank, shape = hvd.rank(), (5, 3)
    mine = tensor_of(rank, *shape)
    assert torch.equal(hvd.allreduce(mine, name="s", op=hvd.Sum), everyone(*shape).sum(0))
    assert torch.allclose(hvd.allreduce(mine), everyone(*shape).mean(0))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Max), everyone(*shape).max(0).values)
    assert torch.equal(hvd.allreduce(mine, op=hvd.Min), everyone(*shape).min(0).values)
    assert torch.equal(hvd.allreduce(mine, op=hvd.Product), everyone(*shape).prod(0))
    scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2, postscale_factor=0.5)
    assert torch.equal(scaled, everyone(*shape).sum(0))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.fp16), everyone(*shape).sum(0))
    assert torch.equal(mine, tensor_of(rank, *shape))
    turned = tensor_of(rank, 3, 5).T
    assert hvd.allreduce_(turned, op=hvd.Sum) is turned
    assert torch.equal(turned, everyone(3, 5).sum(0).T)
    handle = hvd.allreduce_async_(mine, average=False, name="async")
    assert hvd.synchronize(handle) is mine
    assert hvd.poll(handle)
    group = [tensor_of(rank, 2), tensor_of(rank, 4, dtype=torch.float64)]
    result = hvd.grouped_allreduce(group, op=hvd.Sum)
    assert torch.equal(result[0], everyone(2).sum(0))
    assert torch.equal(result[1], everyone(4).sum(0).double())
    hvd.grouped_allreduce_(group, op=hvd.Sum, name="g")
    assert torch.equal(group[0], everyone(2).sum(0))
    ints = torch.tensor([rank, -rank])
    assert hvd.allreduce(ints).tolist() == [1, -1]
    assert hvd.allreduce(torch.tensor([1j * rank]), op=hvd.Sum).tolist() == [3j]
    half = torch.full((2,), float(rank), dtype=torch.bfloat16)
    assert hvd.allreduce(half, op=hvd.Sum).tolist() == [3, 3]
    assert torch.equal(
        hvd.reducescatter(tensor_of(rank, 4, 2), op=hvd.Sum), everyone(4, 2).sum(0).tensor_split(3)[rank]
    )
    refuses(lambda: hvd.allreduce(torch.tensor([1j]), op=hvd.Product), "of complex numbers: expected Average or Sum")
    refuses(lambda: hvd.allreduce(mine, average=True, op=hvd.Sum), "average and op are both given")
    refuses(lambda: hvd.allreduce(mine, op="median"), "op 'median': expected Average, Sum")  # type: ignore[arg-type]


def moves() -> None:
    rank = hvd.rank()
    result = hvd.allgather(tensor_of(rank, 1 + rank, 2))
    assert torch.equal(result, torch.cat([tensor_of(number, 1 + number, 2) for number in range(3)]))
    assert torch.equal(hvd.broadcast(tensor_of(rank, 4), 2), tensor_of(2, 4))
    x = tensor_of(rank, 4)
    assert hvd.broadcast_(x, 1) is x
    assert torch.equal(x, tensor_of(1, 4))
    splits = torch.tensor([[1, 0, 2], [0, 3, 0], [1, 1, 1]], dtype=torch.int32)
    rows, counts = hvd.alltoall(tensor_of(rank, 3, 2), splits=splits[rank])
    assert counts.tolist() == splits[:, rank].tolist()
    sent = [tensor_of(number, 3, 2).split(splits[number].tolist())[rank] for number in range(3)]
    assert torch.equal(rows, torch.cat(sent))
    assert hvd.alltoall(torch.arange(3) + 10 * rank).tolist() == [rank, rank + 10, rank + 20]
    assert hvd.broadcast_object({"epoch": rank}, root_rank=1) == {"epoch": 1}
    assert hvd.allgather_object((rank, "x")) == [(0, "x"), (1, "x"), (2, "x")]
    assert [each.tolist() for each in hvd.grouped_allgather([torch.tensor([rank])] * 2)] == [[0, 1, 2]] * 2
    hvd.barrier()


def sets_of_ranks() -> None:
    rank = hvd.rank()
    some = hvd.add_process_set([0, 2])
    assert (some.included(), some.size(), some.process_set_id) == (rank != 1, 2, 1)
    if some.included():
        x = torch.tensor([float(rank)])
        assert hvd.allreduce(x, op=hvd.Sum, process_set=some).item() == 2
        assert hvd.broadcast(x, 2, process_set=some).item() == 2
        assert some.rank() == rank // 2
    else:
        refuses(lambda: hvd.allreduce(torch.ones(1), process_set=some), "rank 1 does not belong to")
    refuses(lambda: hvd.add_process_set([0, 2]), "there is one of these ranks")
    refuses(lambda: hvd.add_process_set([0, 7]), "expected ranks from 0 to 2")
    assert hvd.remove_process_set(some)
    assert not hvd.remove_process_set(some)
    refuses(lambda: hvd.allreduce(torch.ones(1), process_set=some), "was not added")
    assert not hvd.remove_process_set(hvd.global_process_set)


def model() -> nn.Module:
    torch.manual_seed(hvd.rank())
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    return net


def optimizers() -> None:
    """Each way to combine ends with the weights of one process that sees the data of all ranks."""
    data = torch.randn(hvd.size(), 6, 4, generator=torch.Generator().manual_seed(1))
    alone = model()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(4):
        plain.zero_grad()
        alone(data.reshape(-1, 4)).square().mean().backward()
        plain.step()
    ways: list[dict[str, object]] = [{}, {"num_groups": 2}, {"gradient_predivide_factor": 2.0}]
    ways += [{"compression": hvd.Compression.fp16}, {"backward_passes_per_step": 2}]
    for number, way in enumerate(ways):
        net = model()
        named = [(f"{number}.{name}", each) for name, each in net.named_parameters()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), named, **way)  # type: ignore[arg-type]
        for _ in range(4):
            optimizer.zero_grad()
            for part in data[hvd.rank()].chunk(int(way.get("backward_passes_per_step", 1))):  # type: ignore[call-overload]
                net(part).square().mean().backward()
            refuses(optimizer.zero_grad, "while gradients are combined")
            if "backward_passes_per_step" in way:
                optimizer.synchronize()
                for parameter in net.parameters():
                    parameter.grad /= 2
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        exact = 1e-3 if "compression" in way else 1e-6
        for one, other in zip(net.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(one, other, atol=exact), way
        digests = hvd.allgather_object([parameter.tolist() for parameter in net.parameters()])
        assert digests[0] == digests[1] == digests[2], way


def parameters_without_a_gradient() -> None:
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([one, other], lr=3.0), [("one", one), ("other", other)])
    (one if hvd.rank() else other).sum().backward()
    optimizer.step()
    assert (one.tolist(), other.tolist()) == ([-2, -2], [-1, -1])


def a_parameter_that_thaws() -> None:
    """Also where the program synchronises itself."""
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    first = net[0].weight.requires_grad_(False)
    named = [(f"thaws.{name}", each) for name, each in net.named_parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.25), named)
    for step in range(3):
        first.requires_grad_(step > 0)
        optimizer.zero_grad()
        net(torch.full((1, 1), hvd.rank() + 1.0)).sum().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    result = hvd.allgather_object([parameter.item() for parameter in net.parameters()])
    assert result[0] == result[1] == result[2]


def parameters_in_groups() -> None:
    layers = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for groups in ([layers[:2], layers[1:]], [[layers[0], layers[0]]]):
        plain = torch.optim.SGD(layers, lr=1.0)
        refuses(lambda plain=plain, groups=groups: hvd.DistributedOptimizer(plain, groups=groups), "is there twice")


def sparse_gradients_of_some_ranks() -> None:
    words = nn.Embedding(9, 2, sparse=True)
    nn.init.zeros_(words.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(words.parameters(), lr=1.0), [("some", words.weight)], op=hvd.Sum
    )
    for step in range(4):
        optimizer.zero_grad()
        if step == 0 or hvd.rank() == 1:
            words(torch.tensor([3])).sum().backward()
        optimizer.step()
    assert words.weight[:, 0].tolist() == [0, 0, 0, -6, 0, 0, 0, 0, 0]


def sparse_gradients() -> None:
    for as_dense in (False, True):
        words = nn.Embedding(9, 2, sparse=True)
        nn.init.zeros_(words.weight)
        named = [(f"{as_dense}", words.weight)]
        plain = torch.optim.SGD(words.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(plain, named, op=hvd.Sum, sparse_as_dense=as_dense)
        for _ in range(3):
            optimizer.zero_grad()
            words(torch.tensor([hvd.rank(), 5])).sum().backward()
            optimizer.step()
            assert words.weight.grad is not None
            assert words.weight.grad.is_sparse
        assert words.weight[:, 0].tolist() == [-3, -3, -3, 0, 0, -9, 0, 0, 0]


def states_of_optimizers() -> None:
    for number, (kind, key) in enumerate(((torch.optim.Adam, "exp_avg"), (torch.optim.SGD, "momentum_buffer"))):
        net = model()
        options = {"lr": 0.5 if hvd.rank() == 0 else 0.1} | ({"momentum": 0.9} if kind is torch.optim.SGD else {})
        optimizer = kind(net.parameters(), **options)
        if hvd.rank() == 0:
            net(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert optimizer.param_groups[0]["lr"] == 0.5
        kept = [each[key].tolist() for each in optimizer.state.values()]
        result = hvd.allgather_object(kept, name=f"kept {number}")
        assert result[0] == result[1] == result[2]
        assert len(result[0]) == 4


def a_sparse_gradient_of_one_rank() -> None:
    """In the first step: the others cannot know that it is sparse."""
    words = nn.Embedding(9, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(words.parameters(), lr=1.0), [("lone", words.weight)])
    if hvd.rank() == 1:
        words(torch.tensor([3])).sum().backward()
    refuses(
        optimizer.step, "'gradient.lone' differs between ranks: rank 0 has allreduce mean float32[9, 2], rank 1 has"
    )


def optimizers_one_after_another() -> None:
    """Several optimizers for one model, as in a cell of a notebook that runs again."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    for _ in range(3):
        plain = torch.optim.SGD(net.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(plain, [("again", net.weight)], op=hvd.Sum)
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.ones(1, 1)).sum().backward()
            optimizer.step()
    assert net.weight.item() == -3 * 2 * 3


def samples_between_commits() -> None:
    """Samples since the last commit are not dealt out again when ranks come, if no rank was lost."""
    sampler = hvd.elastic.ElasticSampler(range(12), shuffle=False, pad=False)
    state = hvd.elastic.TorchState(sampler=sampler)
    sampler.record_batch(0, 1)
    done = chain(*hvd.allgather_object(sampler.indices[:1]))
    state.on_reset()
    state.sync()
    left = chain(*hvd.allgather_object(sampler.indices))
    assert sorted([*done, *left]) == list(range(12))


def uneven_batches() -> None:
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters(), op=hvd.Sum)
    for _ in range(2 + hvd.rank()):
        optimizer.zero_grad()
        net(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        hvd.allreduce(torch.ones(1))  # without a name
    assert hvd.join() == 2
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3
    hvd.broadcast_parameters(net.state_dict(), root_rank=2)
    assert net.weight.item() == -(3 + 3 + 2 + 1)


def batch_norm() -> None:
    data = torch.randn(3, 4, 2, 5, generator=torch.Generator().manual_seed(1))
    whole, split = nn.BatchNorm1d(2), hvd.SyncBatchNorm(2)
    x, own_x = data.reshape(12, 2, 5).requires_grad_(), data[hvd.rank()].clone().requires_grad_()
    expected, result = whole(x), split(own_x)
    found_of_whole = result.detach()
    assert torch.allclose(expected.view(3, 4, 2, 5)[hvd.rank()], result, atol=1e-5)
    (expected * x.detach().square()).sum().backward()
    (result * own_x.detach().square()).sum().backward()
    assert x.grad is not None
    assert own_x.grad is not None
    assert torch.allclose(x.grad.view(3, 4, 2, 5)[hvd.rank()], own_x.grad, atol=1e-4)
    assert split.running_mean is not None
    assert whole.running_mean is not None
    assert torch.allclose(split.running_mean, whole.running_mean, atol=1e-5)
    assert torch.allclose(split.running_var, whole.running_var, atol=1e-4)  # type: ignore[arg-type]
    split.eval()
    split(own_x)
    half = hvd.SyncBatchNorm(2).half()
    result = half(torch.full((400, 2, 200), float(hvd.rank()), dtype=torch.float16))
    assert result.dtype == torch.float16
    assert torch.allclose(result, torch.full_like(result, (hvd.rank() - 1) * 1.5**0.5), atol=1e-2)
    assert torch.allclose(hvd.SyncBatchNorm(2, bias=False)(own_x), found_of_whole, atol=1e-5)
    lone = hvd.SyncBatchNorm(2)
    assert lone(torch.full((1, 2), float(hvd.rank()))).isfinite().all()


def any_order() -> None:
    """Forty steps, of which most are alike; ranks submit in other orders. Then steps need no rounds."""
    rng, rounds = random.Random(hvd.rank()), []
    for step in range(40):
        names = rng.sample(range(8), 8) if step % 20 == 10 else list(range(8))
        handles = {i: hvd.allreduce_async(tensor_of(hvd.rank(), 3 + i), name=str(i), op=hvd.Sum) for i in names}
        for i, handle in handles.items():
            assert torch.equal(hvd.synchronize(handle), everyone(3 + i).sum(0))
        rounds.append(queue().statistics().rounds)
    assert rounds[-1] == rounds[-2]


def one_that_differs() -> None:
    refuses(
        lambda: hvd.allreduce(torch.ones(3 if hvd.rank() else 4), name="w", op=hvd.Sum),
        "'allreduce.w' differs between ranks: rank 0 has allreduce sum float32[4], rank 1 has allreduce sum float32[3]",
    )
    if hvd.rank() == 1:
        handle = hvd.allreduce_async(torch.ones(3), name="twice")
        refuses(lambda: hvd.allreduce_async(torch.ones(3), name="twice"), "'allreduce.twice' is under way already")
        hvd.synchronize(handle)
    else:
        hvd.allreduce(torch.ones(3), name="twice")


def one_that_ends() -> None:
    if hvd.rank() == 1:
        return
    with pytest.raises(ClosedError, match="closed its queue"):
        hvd.allreduce(torch.ones(3), name="w")


def main() -> None:
    torch.set_num_threads(1)
    hvd.init(rank=int(sys.argv[1]), size=int(sys.argv[2]), job=sys.argv[3])
    hvd.init()
    assert (hvd.local_size(), hvd.cross_size(), hvd.is_homogeneous()) == (hvd.size(), 1, True)
    assert hvd.local_rank() == hvd.rank()
    for scenario in sys.argv[4:]:
        sys.stderr.write(f"{scenario}\n")
        (globals().get(scenario) or getattr(horovod_gradients, scenario))()
    hvd.shutdown()
    assert not hvd.is_initialized()


if __name__ == "__main__":
    main()
