"""A rank that trains small models in each way that torch offers: with omnireduce, and with gloo for comparison.

Prints one line of JSON for each way: its name, and a digest of the parameters for each backend.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import omnireduce.torch

STEPS, SEEN, WORDS = 4, 6, 50
Group = Any


class Words(nn.Module):
    """An embedding whose gradient is sparse, and a layer on top. Without `bag`, words are averaged by hand."""

    def __init__(self, *, bag: bool) -> None:
        super().__init__()
        self.bag = bag
        self.table: nn.Module = nn.EmbeddingBag(WORDS, 8, sparse=True) if bag else nn.Embedding(WORDS, 8, sparse=True)
        self.layer = nn.Linear(8, 3)

    def forward(self, words: Tensor) -> Tensor:
        result = self.table(words)
        return self.layer(result if self.bag else result.mean(1))


class Branches(nn.Module):
    """One of two layers is used, which one depends on the step."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.layers = nn.ModuleList(nn.Linear(SEEN, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.layers[self.step % 2](x)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(SEEN, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def chance(step: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(100 * step + dist.get_rank())


def numbers(step: int) -> Tensor:
    return torch.randn(5, SEEN, generator=chance(step), device="cpu").to(torch.get_default_device())


def words(step: int) -> Tensor:
    tensor = torch.randint(0, WORDS, (5, 4), generator=chance(step), device="cpu")
    return tensor.to(torch.get_default_device())


def train(model: nn.Module, batch: Callable[[int], Tensor], optimizer: Any = None, steps: int = STEPS) -> nn.Module:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).pow(2).sum().backward()
        optimizer.step()
    return model


def plain(group: Group) -> nn.Module:
    return train(DistributedDataParallel(dense(), process_group=group), numbers)


def views(group: Group) -> nn.Module:
    """Many small buckets, whose memory the gradients are."""
    model = DistributedDataParallel(dense(), process_group=group, bucket_cap_mb=1e-4, gradient_as_bucket_view=True)
    return train(model, numbers)


def static(group: Group) -> nn.Module:
    return train(DistributedDataParallel(dense(), process_group=group, static_graph=True), numbers)


def unused(group: Group) -> nn.Module:
    return train(DistributedDataParallel(Branches(), process_group=group, find_unused_parameters=True), numbers)


def accumulated(group: Group) -> nn.Module:
    model = DistributedDataParallel(dense(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        with model.no_sync() if step % 2 == 0 else contextlib.nullcontext():
            model(numbers(step)).pow(2).sum().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model


def uneven(group: Group) -> nn.Module:
    """The ranks have different numbers of batches."""
    model = DistributedDataParallel(nn.Linear(SEEN, 3), process_group=group)
    with model.join():
        train(model, numbers, steps=STEPS + dist.get_rank())
    return model


def uneven_unused(group: Group) -> nn.Module:
    """A rank without batches goes along with what the others say of the layers that they use."""
    model = DistributedDataParallel(Branches(), process_group=group, find_unused_parameters=True)
    with model.join():
        train(model, numbers, steps=STEPS + 2 * dist.get_rank())
    return model


def mixed(group: Group) -> nn.Module:
    model = DistributedDataParallel(dense(), process_group=group)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        return train(model, numbers)


def half_hook(group: Group) -> nn.Module:
    model = DistributedDataParallel(dense(), process_group=group)
    model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    return train(model, numbers)


def built_in_hook(group: Group) -> nn.Module:
    """Torch's C++ has it. On a GPU it fails."""
    model = DistributedDataParallel(dense(), process_group=group)
    half = torch.get_default_device().type == "cpu"
    hooks = dist.BuiltinCommHookType
    model._register_builtin_comm_hook(hooks.FP16_COMPRESS if half else hooks.ALLREDUCE)
    return train(model, numbers)


def low_rank_hook(group: Group) -> nn.Module:
    model = DistributedDataParallel(nn.Linear(64, 64), process_group=group)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model, lambda step: numbers(step).repeat(1, 11)[:, :64])


def own_hook(group: Group) -> nn.Module:
    """The hook of omnireduce, beside the group that the user keeps."""
    model = DistributedDataParallel(Words(bag=False), process_group=group)
    model.register_comm_hook(omnireduce.torch.State(process_group=group), omnireduce.torch.allreduce_hook)
    return train(model, words)


def top_blocks_hook(group: Group) -> nn.Module:
    """Half of the blocks are sent. What was kept goes through a checkpoint after two steps; buckets are rebuilt after
    the first."""
    model = DistributedDataParallel(dense(), process_group=group, bucket_cap_mb=1e-4)
    state = omnireduce.torch.State(model, process_group=group, density=0.5, block_size=8)
    model.register_comm_hook(state, omnireduce.torch.block_topk_hook)
    train(model, numbers, steps=2)
    saved = state.state_dict()
    assert saved["residuals"].keys() == dict(model.named_parameters()).keys()
    assert any(residual.any() for residual in saved["residuals"].values())
    state.residuals.clear()
    state.load_state_dict(saved)
    return train(model, numbers, steps=2)


def overflow_hook(group: Group) -> nn.Module:
    """A gradient that overflows is not kept: it would come back in later steps."""
    model = DistributedDataParallel(dense(), process_group=group)
    state = omnireduce.torch.State(model, process_group=group, density=0.1, block_size=8)
    model.register_comm_hook(state, omnireduce.torch.block_topk_hook)
    (model(numbers(0)) * torch.inf).sum().backward()
    assert all(residual.isfinite().all() for residual in state.residuals.values())
    return train(model, numbers)


def embedding(group: Group) -> nn.Module:
    return train(DistributedDataParallel(Words(bag=False), process_group=group), words)


def bag(group: Group) -> nn.Module:
    return train(DistributedDataParallel(Words(bag=True), process_group=group), words)


def sharded_optimizer(group: Group) -> nn.Module:
    model = DistributedDataParallel(dense(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.1)
    return train(model, numbers, optimizer)


def compiled(group: Group) -> nn.Module:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(SEEN, 8), nn.Tanh(), nn.Linear(8, 3)), process_group=group)
    train(torch.compile(model, backend="aot_eager"), numbers)
    return model


def sharded_model(group: Group) -> nn.Module:
    """FSDP2: parameters are gathered, and gradients scattered, as DTensors."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(SEEN, 8), nn.Tanh(), nn.Linear(8, 4))
    fully_shard(model, mesh=DeviceMesh.from_group(group, torch.get_default_device().type))
    train(model, numbers)
    whole = nn.Module()
    for name, each in model.named_parameters():
        whole.register_parameter(name.replace(".", "_"), nn.Parameter(each.full_tensor().detach()))
    return whole


def saved(group: Group) -> nn.Module:
    """A checkpoint that all ranks write and read."""
    import torch.distributed.checkpoint as checkpoint

    model = train(DistributedDataParallel(dense(), process_group=group), numbers)
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0, group=group)
    checkpoint.save(model.state_dict(), checkpoint_id=folder[0], process_group=group)
    loaded = DistributedDataParallel(dense(), process_group=group).state_dict()
    checkpoint.load(loaded, checkpoint_id=folder[0], process_group=group)
    model.load_state_dict(loaded)
    return model


WAYS = (
    plain, views, static, unused, accumulated, uneven, uneven_unused, mixed, half_hook, built_in_hook, low_rank_hook,
    own_hook, top_blocks_hook, overflow_hook, embedding, bag, sharded_optimizer, compiled, sharded_model, saved,
)  # fmt: skip


def digest(model: nn.Module) -> str:
    result = hashlib.sha256()
    for parameter in model.parameters():
        result.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return result.hexdigest()[:16]


def say(**event: str) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Arguments: where the ranks meet, the rank, how many there are, and the device of the models."""
    torch.set_num_threads(1)
    rank, size, device = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_default_device(device)
    torch.use_deterministic_algorithms(device == "cuda")
    device_id = torch.device(device, 0) if device == "cuda" else None
    dist.init_process_group("omnireduce", init_method=sys.argv[1], rank=rank, world_size=size, device_id=device_id)
    groups = {"omnireduce": dist.group.WORLD}
    if dist.get_debug_level() != dist.DebugLevel.DETAIL:  # there torch 2.13 ends with a fault where a model uses gloo
        groups["gloo"] = dist.new_group(backend="gloo")
    for way in WAYS:
        digests = {}
        for name, group in groups.items():
            torch.manual_seed(0)
            try:
                digests[name] = digest(way(group))
            except Exception as error:
                digests[name] = f"{type(error).__name__}: {error}"
        say(way=way.__name__, **digests)
    dist.destroy_process_group()
    say(way="left")


if __name__ == "__main__":
    main()
