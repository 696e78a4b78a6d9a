"""GRACE under DistributedDataParallel: `model.register_comm_hook(grc.state, grc.hook)`, one exchange a bucket."""
# Annotations are not postponed here: torch compares those of a hook with its own classes.

from itertools import count
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from omnireduce.compression.grace import Communicator, PowerSGDCompressor
from omnireduce.errors import UsageError
from omnireduce.torch.tensors import gpus_of


class Buckets:
    """The buckets that a communicator has seen. Their names are the same on all ranks, whose buckets come in one
    order."""

    def __init__(self) -> None:
        self._numbers = count()
        self._parameters: dict[str, list[ref[Tensor]]] = {}

    def name_of(self, parameters: list[Tensor], state: Communicator) -> str:
        """The name of the bucket of these parameters, in this order.

        A new one takes the place of all that had some of them, and of those whose parameters are no more. What `state`
        keeps of these is given up.
        """
        own = [id(each) for each in parameters]
        for name, known in self._parameters.items():
            if [id(each()) for each in known] == own:
                return name
        for name, known in list(self._parameters.items()):
            if any(each() is None or id(each()) in own for each in known):
                del self._parameters[name]
                state.forget([name, *(_of_gradient(name, i) for i in range(len(known)))])
        name = f"bucket {next(self._numbers)}"
        self._parameters[name] = [ref(each) for each in parameters]
        return name


def _of_gradient(bucket: str, number: int) -> str:
    return f"{bucket}, gradient {number}"


_buckets: WeakKeyDictionary[Communicator, Buckets] = WeakKeyDictionary()


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
    name = _buckets.setdefault(state, Buckets()).name_of(bucket.parameters(), state)
    if isinstance(state.compressor, PowerSGDCompressor):
        for i, gradient in enumerate(bucket.gradients()):
            gradient.copy_(state.step(gradient, _of_gradient(name, i)))
    else:
        buffer.copy_(state.step(buffer, name))
    done: Future[Tensor] = Future(devices=gpus_of([buffer]))
    done.set_result(buffer)
    return done


Communicator.hook_of_torch = staticmethod(grace_hook)  # the library does not know torch
