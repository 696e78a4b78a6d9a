"""GRACE under DistributedDataParallel: `model.register_comm_hook(grc.state, grc.hook)`, one exchange a bucket."""
# Annotations are not postponed here: torch compares those of a hook with its own classes.

from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from omnireduce.compression.grace import Communicator, PowerSGDCompressor
from omnireduce.errors import UsageError
from omnireduce.torch.tensors import gpus_of

# The number of each bucket that was seen, by its parameters: the same on all ranks, whose buckets come in one order
_buckets: WeakKeyDictionary[Communicator, dict[tuple[int, ...], int]] = WeakKeyDictionary()


def grace_hook(state: Communicator, bucket: dist.GradBucket) -> Future[Tensor]:
    """Combine a bucket as `state`, what `grace_from_params` returns, says. With PowerSGD its gradients go one by one:
    they are the matrices.

    What a memory keeps is known by the parameters of the bucket and their order. DistributedDataParallel makes its
    buckets anew after the first step: where they change, what was kept of that step is lost. Raises UsageError for a
    sparse gradient.
    """
    buffer = bucket.buffer()
    if buffer.is_sparse:
        raise UsageError("a sparse gradient cannot be compressed: expected nn.Embedding(sparse=False)")
    known = _buckets.setdefault(state, {})
    name = f"bucket {known.setdefault(tuple(map(id, bucket.parameters())), len(known))}"
    if isinstance(state.compressor, PowerSGDCompressor):
        for i, gradient in enumerate(bucket.gradients()):
            gradient.copy_(state.step(gradient, f"{name}, gradient {i}"))
    else:
        buffer.copy_(state.step(buffer, name))
    done: Future[Tensor] = Future(devices=gpus_of([buffer]))
    done.set_result(buffer)
    return done


Communicator.hook_of_torch = staticmethod(grace_hook)  # the library does not know torch
