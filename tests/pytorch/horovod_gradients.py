"""Scenarios of horovod_worker.py: gradients, rounding and forms of calls as Horovod 0.28.1 has them, on three ranks."""

from __future__ import annotations

import json
import re
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import omnireduce.torch as hvd
from omnireduce import UsageError

RANKS = 3


def gradient_of(call: Callable[[Tensor], Any], length: int = 2) -> list[float]:
    """That of the sum of the first result, multiplied by the rank + 1, for a tensor of ones."""
    x = torch.ones(length, requires_grad=True)
    result = call(x)
    y = result[0] if isinstance(result, tuple | list) else result
    (y * (hvd.rank() + 1)).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()  # type: ignore[no-any-return]


def gradients_of_collectives() -> None:
    """Ranks have the gradients 1, 2 and 3 of their results. Those of what is gathered or broadcast are means."""
    rank = hvd.rank()
    x = torch.tensor([float(rank), 2.0], requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum).pow(2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3 * 2 * 3, 3 * 2 * 6]
    y = torch.ones(rank + 1, requires_grad=True)
    (hvd.allgather(y) * torch.arange(6)).sum().backward()
    assert y.grad is not None
    assert y.grad.tolist() == [[0], [1, 2], [3, 4, 5]][rank]
    assert gradient_of(lambda x: hvd.allgather(x)) == [2, 2]
    assert gradient_of(lambda x: hvd.broadcast(x, 1)) == ([2, 2] if rank == 1 else [0, 0])
    assert gradient_of(hvd.alltoall, 3) == [1, 2, 3]
    rows = [1, 1, 2, 2, 3][:5]
    for op, times in ((hvd.Average, 1), (hvd.Sum, RANKS)):
        scaled = lambda x, op=op: hvd.reducescatter(x, op=op, prescale_factor=0.5, postscale_factor=4.0)  # noqa: E731
        assert gradient_of(lambda x, op=op: hvd.reducescatter(x, op=op), 5) == [times * row for row in rows]
        assert gradient_of(scaled, 5) == [2 * times * row for row in rows]
    with pytest.raises(UsageError, match="no gradients go through reducescatter of op 'max'"):
        gradient_of(lambda x: hvd.reducescatter(x, op=hvd.Max), 3)


def gradients_of_groups() -> None:
    """As those of single tensors. One that is not used has a gradient of zeros."""
    assert gradient_of(lambda x: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum, postscale_factor=0.5)) == [3, 3]
    assert gradient_of(lambda x: hvd.grouped_allreduce([x], compression=hvd.Compression.fp16)) == [2, 2]
    assert gradient_of(lambda x: hvd.grouped_allgather([x, x[:1]])) == [2, 2]
    assert gradient_of(lambda x: hvd.grouped_reducescatter([x, x], op=hvd.Sum), 3) == [3, 6, 9]
    x, y = torch.ones(2, requires_grad=True), torch.full((hvd.rank() + 1,), 2.0, requires_grad=True)
    both = hvd.grouped_allgather([x, y])
    (both[0].sum() + both[1].pow(2).sum()).backward()
    assert (x.grad.tolist(), y.grad.tolist()) == ([1, 1], [4.0] * (hvd.rank() + 1))  # type: ignore[union-attr]
    some = hvd.add_process_set([0, 2])
    if some.included():
        assert gradient_of(lambda x: hvd.grouped_allgather([x], process_set=some)) == [2, 2]
        assert gradient_of(lambda x: hvd.reducescatter(x, op=hvd.Sum, process_set=some)) == [2, 6]
        assert gradient_of(lambda x: hvd.broadcast(x, 2, process_set=some)) == [2.0 * (hvd.rank() == 2)] * 2
    hvd.remove_process_set(some)


def gradients_of_gradients() -> None:
    """Second derivatives of the cube of a sum, which is 6 on each of three ranks."""
    x = torch.full((2,), 2.0, requires_grad=True)
    [result] = torch.autograd.grad(hvd.allreduce(x, op=hvd.Sum).pow(3).sum(), x, create_graph=True)
    assert result.tolist() == [3 * 6**2 * RANKS] * 2
    result.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3 * 2 * 6 * RANKS**2] * 2


def forms_of_groups() -> None:
    """Grouped calls with names, scales and handles."""
    rank = hvd.rank()
    mine = [torch.full((4,), rank + 1.0), torch.full((2, 2), 10.0 * rank)]
    gathered = hvd.grouped_allgather_async([each[:1] for each in mine], name="g")
    scattered = hvd.grouped_reducescatter_async(mine, "s", hvd.Sum, hvd.global_process_set, 2.0, 0.5)
    assert [each.tolist() for each in hvd.synchronize(gathered)] == [[1, 2, 3], [[0, 0], [10, 10], [20, 20]]]
    assert hvd.poll(gathered)
    assert [each.tolist() for each in hvd.synchronize(scattered)] == [
        [6.0] * (2 if rank == 0 else 1), [[30.0, 30.0]] * (rank < 2)
    ]  # fmt: skip
    small = hvd.grouped_reducescatter(mine, compression=hvd.Compression.fp16)
    assert [each.dtype for each in small] == [torch.float32] * 2
    assert small[0].tolist() == [2.0] * (2 if rank == 0 else 1)
    rows, counts = hvd.synchronize(hvd.alltoall_async(torch.arange(3), name="a"))
    assert (rows.tolist(), counts.tolist()) == ([rank] * 3, [1] * 3)
    assert hvd.alltoall(torch.arange(3), [0, 3, 0])[1].tolist() == ([3] * 3 if rank == 1 else [0] * 3)


def roundings() -> None:
    """Means of integers are rounded towards zero, also where a rank has joined; of halves the product is rounded."""
    half = torch.tensor([118.5], dtype=torch.float16)
    total = hvd.allreduce(half, op=hvd.Sum, prescale_factor=0.19151945, postscale_factor=2.0)
    assert total.item() == 6 * (half.float() * 0.19151945).half().item()
    x = torch.tensor([-7, 7, -3], dtype=torch.int32)
    assert hvd.allreduce(x * (hvd.rank() == 0)).tolist() == [-2, 2, -1]
    assert hvd.reducescatter(x * (hvd.rank() == 0)).tolist() == [[-2], [2], [-1]][hvd.rank()]
    if hvd.rank() < 2:
        assert hvd.allreduce(x, name="joined").tolist() == [-4, 4, -2]
    hvd.join()


def callable_sparse_handles() -> None:
    x = torch.sparse_coo_tensor([[hvd.rank(), 3]], torch.ones(2), (4,), check_invariants=True)
    handle = hvd.sparse_allreduce_async(x, name="s", op=hvd.Sum)
    assert handle().to_dense().tolist() == [1, 1, 1, 3]


def ranks_outside_of_a_set() -> None:
    """They step by themselves, in groups and with a clip between, too."""
    some = hvd.add_process_set([0, 1])
    ways: list[dict[str, Any]] = [{}, {"num_groups": 1}, {"gradient_predivide_factor": 2.0}]
    for number, way in enumerate(ways):
        w = torch.zeros(2, requires_grad=True)
        plain = torch.optim.SGD([w], lr=1.0)
        optimizer = hvd.DistributedOptimizer(plain, [(f"outside.{number}", w)], process_set=some, **way)
        (w * (hvd.rank() + 1)).sum().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        (w * 0).sum().backward()
        optimizer.step()
        assert w.tolist() == ([-3, -3] if hvd.rank() == 2 else [-1.5, -1.5])
    hvd.remove_process_set(some)


def a_gradient_that_is_changed_while_it_is_combined() -> None:
    """By a clip without `synchronize` before it. All ranks hear of it, and the next step is sound."""
    ways: list[dict[str, Any]] = [{}, {"compression": hvd.Compression.fp16}, {"num_groups": 1}]
    for number, way in enumerate(ways):
        w = torch.zeros(4, requires_grad=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), [(f"changed.{number}", w)], **way)
        w.sum().backward()
        torch.nn.utils.clip_grad_norm_([w], 1.0)
        with pytest.raises(UsageError, match=rf"'changed\.{number}' was changed while it was combined: expected sync"):
            optimizer.step()
        optimizer.zero_grad()
        (w * (hvd.rank() + 3)).sum().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_([w], 2.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        torch.testing.assert_close(w.detach(), torch.full((4,), -1.0))


def tensors_in_objects() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    nn.init.constant_(net[0].weight, hvd.rank())
    result = hvd.broadcast_object(net.state_dict(), root_rank=1)
    assert type(result) is OrderedDict
    net.load_state_dict(result)
    assert net[0].weight.tolist() == [[1, 1], [1, 1]]
    everyones = hvd.allgather_object({"loss": torch.tensor(float(hvd.rank())), "step": 3})
    assert [each["loss"].item() for each in everyones] == [0, 1, 2]


def what_is_no_tensor() -> None:
    """Each call says so: the gradient of a parameter that has none, for instance."""
    nothing: Any = None
    for call in (hvd.allreduce, hvd.allreduce_async_, hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with pytest.raises(UsageError, match="a NoneType came; expected"):
            call(nothing)
    with pytest.raises(UsageError, match="a NoneType came; expected"):
        hvd.broadcast(nothing, 0)


def process_sets_at_the_start() -> None:
    """Words for them that say: none yet."""
    for given in (None, "dynamic", []):
        hvd.init(process_sets=given)
    with pytest.raises(UsageError, match="process_sets is 'static'; expected sets of ranks"):
        hvd.init(process_sets="static")


def parameters_without_names() -> None:
    tensors = [torch.full((2,), float(hvd.rank())), torch.full((3,), 10.0 * hvd.rank())]
    hvd.broadcast_parameters(tensors, root_rank=2)
    assert [tensor.tolist() for tensor in tensors] == [[2, 2], [20, 20, 20]]


def timelines_one_after_another() -> None:
    """The second one ends the first."""
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
    for name in ("first", "second", "second"):
        hvd.start_timeline(str(folder / name))
        hvd.allreduce(torch.ones(2), name=name)
    hvd.stop_timeline()
    hvd.barrier()
    for name in ("first", "second"):
        text = (folder / name).read_text()
        assert re.search(f"allreduce.{name}", text)
        json.loads(text)
