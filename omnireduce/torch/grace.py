"""GRACE under DistributedDataParallel: `model.register_comm_hook(grc.state, grc.hook)`, one exchange a bucket."""
# Annotations are not postponed here: torch compares those of a hook with its own classes.

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from omnireduce.compression.grace import Communicator, PowerSGDCompressor
from omnireduce.errors import UsageError


def grace_hook(state: Communicator, bucket: dist.GradBucket) -> Future[Tensor]:
    """Combine a bucket as `state`, what `grace_from_params` returns, says. With PowerSGD its gradients go one by one:
    they are the matrices.

    What a memory keeps is known by the number and size of the bucket. DistributedDataParallel makes its buckets anew
    after the first step: where their sizes change, what was kept of that step is lost. Raises UsageError for a sparse
    gradient.
    """
    buffer = bucket.buffer()
    if buffer.is_sparse:
        raise UsageError("a sparse gradient cannot be compressed: expected nn.Embedding(sparse=False)")
    name = f"bucket {bucket.index()} of {buffer.numel()}"
    if isinstance(state.compressor, PowerSGDCompressor):
        for i, gradient in enumerate(bucket.gradients()):
            gradient.copy_(state.step(gradient, f"{name}, {i} of {tuple(gradient.shape)}"))
    else:
        buffer.copy_(state.step(buffer, name))
    done: Future[Tensor] = Future()
    done.set_result(buffer)
    return done


Communicator.hook_of_torch = staticmethod(grace_hook)  # the library does not know torch
