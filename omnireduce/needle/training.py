"""Functions for training with Needle, and its distributed optimizer."""

from __future__ import annotations

from typing import Any

from omnireduce import data_parallel
from omnireduce.data_parallel.dataset_loader import Loader
from omnireduce.data_parallel.default_communicator import communicator
from omnireduce.needle.adapter import NeedleAdapter, library


def init(config: Any = None, *, device: Any = None, **named: Any) -> tuple[int, Any]:
    """Join the job: return the rank of this process, and the device that it computes on.

    `device`: by default the GPU that has the number of this rank on its host, where Needle was built with CUDA, and
    otherwise the processor. The rest is as in `omnireduce.data_parallel.init`, also what is raised.
    """
    needle = library()
    rank, _ = data_parallel.init(config, **named)
    return rank, _device_of(needle, communicator().local_rank or 0) if device is None else device


def _device_of(needle: Any, local_rank: int) -> Any:
    """The GPU, or the processor without CUDA. Needle's `cuda` takes the number of a GPU if it knows several."""
    cuda = getattr(needle, "cuda", None)
    if cuda is not None:
        try:
            device = cuda(local_rank)
        except TypeError:
            device = cuda()
        if device.enabled():
            return device
    return needle.cpu()


def partition_dataset(
    dataset: Any,
    batch_size: int,
    device: Any = None,
    dtype: str = "float32",
    *,
    seed: int = 0,
    shuffle: bool = True,
) -> tuple[Loader, int]:
    """Deal out a dataset to the ranks, in batches of tensors of this dtype on this device: see
    `omnireduce.data_parallel.partition_dataset`, which `dataset` and the rest are for."""
    needle = library()
    return data_parallel.partition_dataset(
        dataset,
        batch_size,
        seed=seed,
        shuffle=shuffle,
        to_tensor=lambda values: needle.Tensor(
            values.astype(dtype, copy=False), device=device, dtype=dtype, requires_grad=False
        ),
    )


def broadcast_parameters(model: Any, root_rank: int = 0, *, optimizer: Any = None) -> None:
    """Give all ranks the parameters of rank `root_rank`, all other tensors of its modules, such as running means, and
    the state of the `optimizer`, if one is given: see `omnireduce.data_parallel.broadcast_parameters`."""
    data_parallel.broadcast_parameters(model, root_rank, optimizer=optimizer, adapter=NeedleAdapter())


class DistributedOptimizer(data_parallel.DistributedOptimizer):
    """An optimizer of Needle whose `step` first averages the gradients of all ranks: see
    `omnireduce.data_parallel.DistributedOptimizer`."""

    def __init__(self, opt: Any, parameters: Any = None, *, loader: Loader | None = None) -> None:
        super().__init__(opt, parameters, loader=loader, adapter=NeedleAdapter())
