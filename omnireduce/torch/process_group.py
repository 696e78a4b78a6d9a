"""A process group of torch whose collectives the aggregators serve."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from omnireduce.descriptor import Op, RowOp
from omnireduce.runtime.member.communicator import Communicator
from omnireduce.runtime.member.handle import Handle
from omnireduce.torch.completion import Completion
from omnireduce.torch.forms import allreduce_forms, broadcast_forms, coalesced_forms, made, reduce_forms
from omnireduce.torch.gloo import call_gloo, gloo_group
from omnireduce.torch.job import Job
from omnireduce.torch.rows import replace, rows_of, stream_of, width_of
from omnireduce.torch.tensors import array_of, bytes_of, gpus_of, op_of, put_back, staged
from omnireduce.torch.work import NO_LIMIT, FinishedWork, Outcome, OutcomeWork

BACKEND = "omnireduce"
COMPILER = "torch._dynamo"  # the module, once torch has loaded it


class Request(NamedTuple):
    """A collective that torch asks for: how to go through it, how to start it, and with what."""

    run: Callable[..., Any]
    begin: Callable[..., Handle[Any]]
    args: tuple[Any, ...]
    options: dict[str, Any]


class Abilities:
    """What a group can do beside collectives, as torch asks: nothing. It asks when a rank has a `device_id`."""

    supports_splitting = supports_coalescing = supports_shrinking = supports_time_estimate = False

    def name(self) -> str:
        return BACKEND

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False


class ProcessGroup(dist.ProcessGroup):
    """`rank` of `size`, who meet at `store`. A collective may take as long as `timeout`.

    Reductions, broadcasts and barriers go through omnireduce; what that does not serve goes through gloo. The methods
    have the names, parameters and results that torch asks for; where a rank fails, they or the work that they return
    raise RuntimeError.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name, self._description = rank, size, "", ""
        # torchrun keeps the store when it starts ranks anew: the addresses of those before are in it
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._gloo = gloo_group(dist.PrefixStore(f"gloo {attempt}", store), rank, size, timeout)
        self._job = Job(self._gloo, timeout)
        self._completion = Completion()
        if not dist.is_initialized():  # the first group: what is wrong with the configuration shows at once
            self._job.join()

    # what torch asks every group

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def getSize(self) -> int:  # noqa: N802
        return self._size

    def getRank(self) -> int:  # noqa: N802
        return self._rank

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def _get_backend(self, device: torch.device) -> Abilities:
        return Abilities()

    def shutdown(self) -> None:
        """Leave the job. Collectives under way fail."""
        self._job.leave()
        self._completion.close()

    def abort(self) -> None:
        self.shutdown()

    # collectives

    @allreduce_forms
    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist._Work:
        [tensor] = tensors
        op = op_of(opts.reduceOp, tensor.dtype)
        if op is not None and not tensor.is_sparse:
            return self._allreduce(tensors, op, opts)
        if (op == "sum" or op == "mean") and width_of(tensor):
            return self._allreduce_rows(tensor, op, opts)
        return call_gloo(self._gloo, "allreduce", tensors, opts)

    @coalesced_forms
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist._Work:
        op = op_of(opts.reduceOp, tensors[0].dtype) if tensors else None
        if op is None or any(tensor.is_sparse or tensor.dtype != tensors[0].dtype for tensor in tensors):
            return call_gloo(self._gloo, "allreduce_coalesced", tensors, opts)
        return self._allreduce(tensors, op, opts)

    def _allreduce(self, tensors: list[Tensor], op: Op, opts: Any) -> dist._Work:
        copies = [staged(tensor) for tensor in tensors]
        arrays = [array_of(copy) for copy in copies]
        x = arrays[0] if len(arrays) == 1 else arrays
        request = Request(Communicator.allreduce, Communicator.allreduce_async, (x,), {"op": op})
        return self._start(request, tensors, opts, lambda _: put_back(tensors, copies))

    def _allreduce_rows(self, tensor: Tensor, op: RowOp, opts: Any) -> dist._Work:
        request = Request(Communicator.allreduce_rows, Communicator.allreduce_rows_async, rows_of(tensor), {"op": op})
        stream = stream_of(tensor)
        return self._start(request, [tensor], opts, lambda rows: replace(tensor, rows, stream))

    @reduce_forms
    def reduce(self, tensors: list[Tensor], opts: Any) -> dist._Work:
        [tensor] = tensors
        op = op_of(opts.reduceOp, tensor.dtype)
        if op is None or tensor.is_sparse:
            return call_gloo(self._gloo, "reduce", tensors, opts)
        copies, root = [staged(tensor)], opts.rootRank
        request = Request(Communicator.reduce, Communicator.reduce_async, (array_of(copies[0]), root), {"op": op})
        return self._start(
            request, tensors, opts, lambda _: put_back(tensors, copies) if self._rank == root else tensors
        )

    @broadcast_forms
    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist._Work:
        copies = [staged(tensor) for tensor in tensors]
        request = Request(
            Communicator.broadcast, Communicator.broadcast_async, (bytes_of(copies[0]), opts.rootRank), {}
        )
        return self._start(request, tensors, opts, lambda _: put_back(tensors, copies))

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist._Work:
        opts = made(dist.BarrierOptions, timeout=timeout) if opts is None else opts
        return self._start(Request(Communicator.barrier, Communicator.barrier_async, (), {}), [], opts, lambda _: [])

    def _start(
        self, request: Request, tensors: Sequence[Tensor], opts: Any, finish: Callable[[Any], Sequence[Tensor]]
    ) -> dist._Work:
        """Start a collective of `tensors`; go through it at once where the caller is going to wait for it."""
        has_limit = opts.timeout > NO_LIMIT  # of this call alone
        if not opts.asyncOp and not has_limit:
            result = self._job.start(lambda c: request.run(c, *request.args, **request.options))
            return FinishedWork(result, finish)

        def begin(communicator: Communicator) -> OutcomeWork:
            handle = request.begin(communicator, *request.args, **request.options)
            limit = opts.timeout if has_limit else NO_LIMIT
            return OutcomeWork(Outcome(handle, finish), self._completion, limit, gpus_of(tensors))

        work = self._job.start(begin)  # also the completion: in the same order as they are started
        if not opts.asyncOp:
            work.wait()
        return work


def _never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, as it is also where torch.compile works. To load torch's compiler takes a second, so who does not use
    it does without."""
    uncompiled: Callable[..., Any] | None = None

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal uncompiled
        if uncompiled is None and COMPILER in sys.modules:
            uncompiled = torch.compiler.disable(function)
        return (uncompiled or function)(*args, **kwargs)

    return call


for _name in ("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier"):
    setattr(ProcessGroup, _name, _never_compiled(getattr(ProcessGroup, _name)))


def _through_gloo(name: str) -> Callable[..., Any]:
    def call(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return call_gloo(self._gloo, name, *args, **kwargs)

    call.__name__ = name
    return call


for _name in (
    "allgather", "all_gather_single", "all_gather_single_coalesced", "allgather_coalesced", "_allgather_base",
    "allgather_into_tensor_coalesced", "gather", "scatter", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall",
    "all_to_all_single", "alltoall_base", "send", "recv", "recv_anysource", "monitored_barrier",
):  # fmt: skip
    setattr(ProcessGroup, _name, _through_gloo(_name))
