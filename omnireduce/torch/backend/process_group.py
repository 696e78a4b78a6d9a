"""A process group of torch whose collectives the aggregators serve."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from omnireduce.errors import OmniReduceError, UsageError
from omnireduce.runtime.rank.calls.single import Rows
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.handles import Handle
from omnireduce.torch.backend import movements
from omnireduce.torch.backend.gloo import Movement, MovementQueue, gloo_group, gloo_message
from omnireduce.torch.backend.group_job import GroupJob
from omnireduce.torch.backend.messages import Messages
from omnireduce.torch.backend.options import (
    all_gather_forms,
    allreduce_forms,
    broadcast_forms,
    coalesced_forms,
    gather_forms,
    only_element,
    options_of,
    reduce_forms,
    reduce_scatter_forms,
    scatter_forms,
)
from omnireduce.torch.backend.reduce_ops import Reduction, reduction_of
from omnireduce.torch.backend.rendezvous import (
    address_for_gloo,
    await_all_ranks,
    host_message,
    is_made_by_torch,
    keep_store,
)
from omnireduce.torch.backend.work import NO_LIMIT, Completion, FinishedWork, Outcome, OutcomeWork, as_torch_error
from omnireduce.torch.sparse_rows import replace, rows_of, stream_of
from omnireduce.torch.tensors import array_of, bytes_of, copied, put_back, staged
from omnireduce.torch_backend import BACKEND, DEVICES

COMPILER = "torch._dynamo"  # the module, once torch has loaded it


class Request(NamedTuple):
    """A collective that torch asks for: methods that run it or begin it, with their arguments."""

    run: Callable[..., Any]
    begin: Callable[..., Handle[Any]]
    args: tuple[Any, ...]
    options: dict[str, Any]


class Abilities:
    """Abilities of a group beside collectives: none. Torch asks for them when a rank has a `device_id`."""

    supports_splitting = supports_coalescing = supports_shrinking = supports_time_estimate = False

    def name(self) -> str:
        return BACKEND

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False


class ProcessGroup(dist.ProcessGroup):
    """The process group of torch on rank `rank` of `size` ranks, which meet at `store`. `timeout`: for a collective.

    Reductions, broadcasts and barriers go through omnireduce; what that does not serve goes through gloo. The methods
    have the names, parameters and results that torch asks for; where a rank fails, they or the work that they return
    raise RuntimeError.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        for device in DEVICES[: 2 if torch.cuda.is_available() else 1]:  # whose tensors it takes: some programs ask
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, None)
        self._rank, self._size, self._name, self._description = rank, size, "", ""
        if rank == 0 and not dist.is_initialized() and is_made_by_torch(store):
            keep_store(store)
        meeting = await_all_ranks(store, rank, size, host_message(store), timeout)
        self._gloo = gloo_group(
            dist.PrefixStore(meeting.key, store), rank, size, address_for_gloo(meeting.messages), timeout
        )
        self._job = GroupJob(self._gloo, timeout)
        self._completion = Completion()
        self._movements, self._messages = MovementQueue(self._job, self._completion), Messages(self._gloo)
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
        self._movements.close()
        self._messages.close()

    def abort(self) -> None:
        self.shutdown()

    def refuse(self, error: Exception) -> None:
        """Let the other ranks know that this one refuses the next collective: see `Communicator.refuse`."""
        self._job.refuse(error)

    # collectives

    @allreduce_forms
    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist._Work:
        tensor = only_element(tensors)
        reduction = reduction_of(opts.reduceOp, tensors)
        if tensor.is_sparse:
            return self._allreduce_rows(tensor, reduction, opts)
        copies = [staged(tensor)]
        return self._combine(copies, reduction, opts, copies, tensors)

    @coalesced_forms
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist._Work:
        reduction = reduction_of(opts.reduceOp, tensors)
        if tensors[0].is_sparse:
            raise UsageError(f"{len(tensors)} sparse tensors came together; expected one at a time")
        copies = [staged(tensor) for tensor in tensors]
        return self._combine(copies, reduction, opts, copies, tensors)

    @reduce_forms
    def reduce(self, tensors: list[Tensor], opts: Any) -> dist._Work:
        tensor = only_element(tensors)
        reduction, root = reduction_of(opts.reduceOp, tensors), opts.rootRank
        if tensor.is_sparse:
            raise UsageError("a sparse tensor came; expected a dense one, or an all_reduce")
        is_root = self._rank == root
        copies = [staged(tensor) if is_root or reduction.op else copied(tensor)]
        results, targets = (copies, tensors) if is_root else ([], [])
        if reduction.op is None:
            return self._combine(copies, reduction, opts, results, targets)
        request = Request(
            Communicator.reduce, Communicator.reduce_async, (array_of(copies[0]), root), {"op": reduction.op}
        )
        finish = self._finish(reduction, results, targets)
        return self._start(request, tensors, opts, lambda done: finish(done) or tensors)

    @reduce_scatter_forms
    def reduce_scatter(self, outs: list[Tensor], parts: list[list[Tensor]], opts: Any) -> dist._Work:
        out, inputs = only_element(outs), only_element(parts)
        if len(inputs) != self._size or inputs[self._rank].shape != out.shape:
            shapes = [list(part.shape) for part in inputs]
            raise UsageError(
                f"tensors of {shapes} came for a result of {list(out.shape)}; expected one for each of the "
                f"{self._size} ranks, and that of this rank of the shape of the result"
            )
        reduction = reduction_of(opts.reduceOp, [out, *inputs])
        copies = [copied(part) for part in inputs]
        return self._combine(copies, reduction, opts, [copies[self._rank]], outs)

    @reduce_scatter_forms
    def reduce_scatter_single_coalesced(self, outs: list[Tensor], tensors: list[Tensor], opts: Any) -> dist._Work:
        for out, tensor in zip(outs, tensors, strict=True):
            if tensor.numel() != out.numel() * self._size:
                raise UsageError(
                    f"a tensor of {list(tensor.shape)} came for a result of {list(out.shape)}; expected {self._size} "
                    "times as many elements"
                )
        reduction = reduction_of(opts.reduceOp, [*outs, *tensors])
        copies = [copied(tensor) for tensor in tensors]
        results = [copy.view(self._size, *out.shape)[self._rank] for copy, out in zip(copies, outs, strict=True)]
        return self._combine(copies, reduction, opts, results, outs)

    def _combine(
        self, copies: list[Tensor], reduction: Reduction, opts: Any, results: list[Tensor], targets: list[Tensor]
    ) -> dist._Work:
        """Combine staged tensors of all ranks in place, and put `results`, which are parts of them, into `targets`."""
        if reduction.op is None:
            return self._move(movements.combine_bits(self._gloo, copies, opts, results, targets), opts)
        arrays = [array_of(copy) for copy in copies]
        x = arrays[0] if len(arrays) == 1 else arrays
        request = Request(Communicator.allreduce, Communicator.allreduce_async, (x,), {"op": reduction.op})
        return self._start(request, targets, opts, self._finish(reduction, results, targets))

    def _finish(
        self, reduction: Reduction, results: list[Tensor], targets: list[Tensor]
    ) -> Callable[[Any], Sequence[Tensor]]:
        def finish(_: Any) -> Sequence[Tensor]:
            for result in results:
                reduction.divided(array_of(result), self._size)
            return put_back(targets, results)

        return finish

    def _allreduce_rows(self, tensor: Tensor, reduction: Reduction, opts: Any) -> dist._Work:
        request = Request(
            Communicator.allreduce_rows, Communicator.allreduce_rows_async, rows_of(tensor), {"op": reduction.op}
        )
        stream = stream_of(tensor)

        def finish(rows: Rows[Any]) -> list[Tensor]:
            numbers, values = rows
            replace(tensor, (numbers, reduction.divided(values, self._size)), stream)
            return [tensor]

        return self._start(request, [tensor], opts, finish)

    @broadcast_forms
    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist._Work:
        copies = [staged(only_element(tensors))]
        request = Request(
            Communicator.broadcast, Communicator.broadcast_async, (bytes_of(copies[0]), opts.rootRank), {}
        )
        return self._start(request, tensors, opts, lambda _: put_back(tensors, copies))

    def barrier(self, *args: Any, **named: Any) -> dist._Work:
        opts = options_of(dist.BarrierOptions, ["timeout"], args, named)
        return self._start(Request(Communicator.barrier, Communicator.barrier_async, (), {}), [], opts, lambda _: [])

    @all_gather_forms
    def allgather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> dist._Work:
        return self._move(movements.all_gather(self._gloo, only_element(outs), only_element(tensors), opts), opts)

    @all_gather_forms
    def all_gather_single_coalesced(self, outs: list[Tensor], tensors: list[Tensor], opts: Any) -> dist._Work:
        return self._move(movements.all_gather_single(self._gloo, outs, tensors, opts), opts)

    @all_gather_forms
    def allgather_coalesced(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> dist._Work:
        return self._move(movements.all_gather_coalesced(self._gloo, outs, tensors, opts), opts)

    @gather_forms
    def gather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> dist._Work:
        return self._move(movements.gather(self._gloo, outs, only_element(tensors), opts), opts)

    @scatter_forms
    def scatter(self, outs: list[Tensor], parts: list[list[Tensor]], opts: Any) -> dist._Work:
        return self._move(movements.scatter(self._gloo, only_element(outs), parts, opts), opts)

    def alltoall(self, outs: list[Tensor], tensors: list[Tensor], *args: Any, **named: Any) -> dist._Work:
        opts = options_of(dist.AllToAllOptions, ["timeout"], args, named)
        return self._move(movements.all_to_all(self._gloo, outs, tensors, opts), opts)

    def all_to_all_single(
        self, out: Tensor, tensor: Tensor, out_splits: list[int], splits: list[int], *args: Any, **named: Any
    ) -> dist._Work:
        opts = options_of(dist.AllToAllOptions, ["timeout"], args, named)
        return self._move(movements.all_to_all_single(self._gloo, (out, tensor), (out_splits, splits), opts), opts)

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist._Work:
        return self._messages.send(tensors, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist._Work:
        return self._messages.receive(tensors, rank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist._Work:
        return self._messages.receive_from_any(tensors, tag)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """Raises RuntimeError on rank 0, which says who has not come, and on ranks that wait for it. Collectives that
        go through gloo do not work in this group after that."""
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        try:
            self._gloo.monitored_barrier(limit, wait_all_ranks)
        except RuntimeError as error:
            raise dist.DistBackendError(f"omnireduce: {gloo_message(error)}") from error

    def _move(self, movement: Movement, opts: Any) -> dist._Work:
        return self._movements.start(movement, opts)

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
            return OutcomeWork(Outcome(handle, finish), self._completion, limit, tensors)

        work = self._job.start(begin)  # also the completion: in the same order as they are started
        if not opts.asyncOp:
            work.wait()
        return work


def _with_torch_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method, so that it raises the errors that users of torch expect.

    torch.compile never compiles it. Loading torch's compiler takes a second, so only a program that uses it loads it.
    """
    uncompiled: Callable[..., Any] | None = None

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except OmniReduceError as error:
            raise as_torch_error(error) from error

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal uncompiled
        if uncompiled is None and COMPILER in sys.modules:
            uncompiled = torch.compiler.disable(run)
        return (uncompiled or run)(*args, **kwargs)

    return call


def _refusing(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a collective: if this rank alone refuses it, the other ranks get an error, too."""

    @wraps(method)
    def call(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except dist.DistError:  # of what all ranks know
            raise
        except Exception as error:
            (self._movements if name in _MOVEMENTS else self).refuse(error)
            raise

    return call


_MESSAGES = ("send", "recv", "recv_anysource")
_MOVEMENTS = (
    "allgather", "all_gather_single_coalesced", "allgather_coalesced", "gather", "scatter", "alltoall",
    "all_to_all_single",
)  # fmt: skip
_REDUCTIONS = ("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single_coalesced")
_OTHER_NAMES = {  # those of one tensor, and those that older versions of torch call
    "reduce_scatter_single_coalesced": (
        "reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
    ),
    "all_gather_single_coalesced": ("all_gather_single", "_allgather_base", "allgather_into_tensor_coalesced"),
    "all_to_all_single": ("alltoall_base",),
}  # fmt: skip
for _name in (*_REDUCTIONS, "broadcast", "barrier", *_MOVEMENTS):
    setattr(ProcessGroup, _name, _with_torch_errors(_refusing(getattr(ProcessGroup, _name), _name)))
for _name in _MESSAGES:
    setattr(ProcessGroup, _name, _with_torch_errors(getattr(ProcessGroup, _name)))
for _name, _others in _OTHER_NAMES.items():
    for _other in _others:
        setattr(ProcessGroup, _other, getattr(ProcessGroup, _name))
