"""The collectives of torch that move tensors from rank to rank, as gloo does them: with bytes.

Each function takes what torch hands to the method of a group, and the group of gloo. It raises UsageError where that
cannot be.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from omnireduce.core.descriptor import Op
from omnireduce.core.dtypes import Array
from omnireduce.data_parallel.dispatcher import Task
from omnireduce.data_parallel.scaling import Average, Scaling, root_of
from omnireduce.data_parallel.session import (
    ProcessSet,
    begun_by_name,
    global_process_set,
    name_of,
    names_of,
    queue,
    told_by_name,
)
from omnireduce.errors import UsageError
from omnireduce.support.rounding import integer_mean
from omnireduce.torch.gloo import Movement, Sizes
from omnireduce.torch.reductions import differentiable, reduced
from omnireduce.torch.tensors import (
    Handle,
    array_of,
    described,
    detached,
    first,
    flat_bytes,
    gpus_of,
    handle_of,
    joined,
    on_device_of,
    put_back,
    room_of,
    staged,
    synchronize,
    type_name,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
_NAMES = tuple(ReduceOp.RedOpType.__members__.items())
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)


class Reduction(NamedTuple):
    """What becomes of the elements of all ranks. `op`: as the service does it; None: bit by bit, which gloo does.
    `is_divided`: that is a sum, and is divided by the number of ranks after it, towards zero."""

    op: Op | None
    is_divided: bool = False

    def divided(self, combined: Array, size: int) -> Array:
        """What the service has combined of `size` ranks, divided in place where that is still to be done."""
        return integer_mean(combined, size, combined) if self.is_divided else combined


_NUMBERS: dict[str, Reduction] = {
    "SUM": Reduction("sum"),
    "PRODUCT": Reduction("prod"),
    "MIN": Reduction("min"),
    "MAX": Reduction("max"),
}
_FLOATS = _NUMBERS | {"AVG": Reduction("mean")}
_INTEGERS = _NUMBERS | {
    "AVG": Reduction("sum", is_divided=True),
    **{name: Reduction(None) for name in ("BAND", "BOR", "BXOR")},
}
_COMPLEX = {"SUM": Reduction("sum"), "AVG": Reduction("mean")}  # of both parts
_BOOL = {
    **{name: Reduction("any") for name in ("SUM", "MAX", "BOR")},
    **{name: Reduction("all") for name in ("PRODUCT", "MIN", "BAND")},
    "BXOR": Reduction(None),
}
_OF_TYPE: dict[torch.dtype, dict[str, Reduction]] = {
    **dict.fromkeys(FLOATS, _FLOATS),
    **dict.fromkeys(INTEGERS, _INTEGERS),
    **dict.fromkeys(COMPLEX, _COMPLEX),
    torch.bool: _BOOL,
}


def op_name(op: object) -> str:
    """What torch calls an operation."""
    return next((name for name, operation in _NAMES if op == operation), str(op))


def reduction_of(op: object, tensors: Sequence[Tensor]) -> Reduction:
    """How `op` of torch is done with tensors of one element type, all dense or all sparse. Raises UsageError where that
    cannot be."""
    name = op_name(op)
    kinds = {type_name(tensor) for tensor in tensors}
    if len(kinds) != 1:
        raise UsageError(f"tensors of {' and '.join(sorted(kinds)) or 'no type'} came; expected one element type")
    dtype, [kind] = tensors[0].dtype, kinds
    known = _OF_TYPE.get(dtype, {})
    if tensors[0].is_sparse:  # a tensor that lacks a row has zeros there: other operations would have to read them
        known = {allowed: known[allowed] for allowed in ("SUM", "AVG") if allowed in known and dtype is not torch.bool}
    elif tensors[0].layout != torch.strided:
        known = {}
    if not known:
        raise UsageError(f"tensors of {kind} cannot be combined; cast them to another type")
    if name not in known:
        raise UsageError(f"ReduceOp.{name} does not work on tensors of {kind}; expected {' or '.join(known)}")
    return known[name]


MEAN = Scaling(Average)


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Start an `allgather`."""
    return first(_start_gathering([tensor], [name_of("allgather", name, process_set)], process_set))


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The tensors of all ranks, one behind the other. The first dimension may differ. Gradients go through it."""
    return first(gathered([tensor], [name_of("allgather", name, process_set)], process_set))


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a `grouped_allgather`."""
    return joined(_start_gathering(tensors, names_of("grouped_allgather", name, tensors, process_set), process_set))


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of several tensors: a list. Gradients go through it."""
    return gathered(tensors, names_of("grouped_allgather", name, tensors, process_set), process_set)


def _start_gathering(tensors: Sequence[Tensor], names: Sequence[str], process_set: ProcessSet) -> list[Handle]:
    def begin(at: int) -> Task:
        return queue(process_set).allgather_async(array_of(staged(tensors[at])), name=names[at])

    tasks = begun_by_name(names, process_set, begin)
    return [handle_of(task, partial(on_device_of, tensor)) for task, tensor in zip(tasks, tensors, strict=True)]


def gathered(tensors: Sequence[Tensor], names: Sequence[str], process_set: ProcessSet) -> list[Tensor]:
    """Those of all ranks, one behind the other. Gradients go through it."""

    lengths: list[int] = []

    def run(own: list[Tensor]) -> list[Tensor]:
        handles = _start_gathering(own, names, process_set)
        lengths[:] = map(len, own)
        return [synchronize(handle) for handle in handles]

    def back(grads: list[Tensor]) -> list[Tensor]:
        everyones, of_lengths = reduced(grads, MEAN, f"gradient of {names[0]}", process_set), f"lengths of {names[0]}"
        before = synchronize(first(_start_gathering([torch.tensor([lengths])], [of_lengths], process_set)))
        starts = before[: queue(process_set).rank].sum(0).tolist()
        return [grad[at : at + length] for grad, at, length in zip(everyones, starts, lengths, strict=True)]

    return differentiable(run, back, tensors)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a `broadcast_`. `root_rank`: a number of the job, also in a smaller set."""
    return _start_broadcast(tensor, root_rank, name_of("broadcast", name, process_set), process_set)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a `broadcast`."""
    name = name_of("broadcast", name, process_set)
    copy = told_by_name([name], process_set, lambda: detached(tensor).clone())
    return _start_broadcast(copy, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Replace a tensor by that of the root."""
    return cast(Tensor, synchronize(broadcast_async_(tensor, root_rank, name, process_set)))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The tensor of the root. Gradients go through it."""
    name = name_of("broadcast", name, process_set)
    root = told_by_name([name], process_set, lambda: root_of(root_rank, process_set))
    is_root = root == queue(process_set).rank

    def run(own: list[Tensor]) -> list[Tensor]:
        copy = told_by_name([name], process_set, lambda: detached(own[0]).clone())
        return [synchronize(_start_broadcast(copy, root_rank, name, process_set))]

    def back(grads: list[Tensor]) -> list[Tensor]:
        means = reduced(grads, MEAN, f"gradient of {name}", process_set)
        return means if is_root else [torch.zeros_like(means[0])]

    return first(differentiable(run, back, [tensor]))


def _start_broadcast(tensor: Tensor, root_rank: int, name: str, process_set: ProcessSet) -> Handle:
    def begin() -> Handle:
        plain = detached(tensor)
        copy = staged(plain)
        task = queue(process_set).broadcast_async(array_of(copy), root_of(root_rank, process_set), name=name)
        return handle_of(task, lambda _: put_back([plain], [copy])).then(lambda _: tensor)

    return told_by_name([name], process_set, begin)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an `alltoall`. The result also has, without `splits`, how much has come from each."""
    return _start_exchange(tensor, splits, name_of("alltoall", name, process_set), process_set)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send the first `splits[0]` rows to rank 0, and so on (None: as many to each); return what has come, and where
    `splits` are given also how much from each. Gradients go through it."""
    rows, counts = _exchanged(tensor, splits, name_of("alltoall", name, process_set), process_set)
    return rows if splits is None else (rows, counts)


def _exchanged(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str, process_set: ProcessSet
) -> tuple[Tensor, Tensor]:
    counts: list[Tensor] = []

    def run(own: list[Tensor]) -> list[Tensor]:
        rows, received = synchronize(_start_exchange(own[0], splits, name, process_set))
        counts.append(received)
        return [rows]

    def back(grads: list[Tensor]) -> list[Tensor]:
        return [_exchanged(grads[0], counts[0], f"gradient of {name}", process_set)[0]]

    return first(differentiable(run, back, [tensor])), counts[0]


def _start_exchange(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str, process_set: ProcessSet
) -> Handle:
    def begin() -> Handle:
        lengths: Array | None = None
        kind = splits.dtype if isinstance(splits, Tensor) else torch.int32
        if splits is not None:
            lengths = staged(splits if isinstance(splits, Tensor) else torch.tensor(splits)).numpy()
        task = queue(process_set).alltoall_async(array_of(staged(tensor)), lengths, name=name)
        return handle_of(task, lambda pair: (on_device_of(tensor, pair[0]), torch.from_numpy(pair[1]).to(kind)))

    return told_by_name([name], process_set, begin)


Tensors = Sequence[Tensor]
MOST_LISTED = 3  # tensors that words name one by one


def all_gather(gloo: dist.ProcessGroup, outs: Tensors, tensor: Tensor, opts: Any) -> Movement:
    """The tensors of all ranks."""
    _check_alike(outs, tensor, gloo.size())
    rooms, own = _rooms(outs), flat_bytes(staged(tensor))
    return Movement(
        f"all_gather of {described(tensor)}",
        lambda: gloo.allgather([_all_bytes(rooms)], [own], opts),
        lambda: put_back(outs, rooms),
        gpus_of(outs),
    )


def all_gather_single(gloo: dist.ProcessGroup, outs: Tensors, tensors: Tensors, opts: Any) -> Movement:
    """The tensors of all ranks, one behind the other in one result: for each of `tensors`."""
    for out, tensor in zip(outs, tensors, strict=True):
        if out.dtype != tensor.dtype or out.numel() != tensor.numel() * gloo.size():
            raise UsageError(
                f"a result of {described(out)} came for a tensor of {described(tensor)}; expected {gloo.size()} times "
                f"as many elements of {type_name(tensor)}"
            )
    rooms, own = _rooms(outs), _all_bytes([staged(tensor) for tensor in tensors])
    of_ranks = [
        list(parts) for parts in zip(*(room.tensor_split(gloo.size()) for room in _all_bytes(rooms)), strict=True)
    ]
    return Movement(
        f"all_gather into one tensor of {_listed(tensors)}",
        lambda: gloo.allgather_coalesced(of_ranks, own, opts),
        lambda: put_back(outs, rooms),
        gpus_of(outs),
    )


def all_gather_coalesced(gloo: dist.ProcessGroup, outs: Sequence[Tensors], tensors: Tensors, opts: Any) -> Movement:
    """Several tensors of each rank: `outs[rank]` are those of one."""
    if len(outs) != gloo.size():
        raise UsageError(f"{len(outs)} lists of results came; expected one for each of the {gloo.size()} ranks")
    for results in zip(*outs, tensors, strict=True):
        _check_alike(results[:-1], results[-1], gloo.size())
    flat = [out for of_rank in outs for out in of_rank]
    rooms, own = _rooms(flat), _all_bytes([staged(tensor) for tensor in tensors])
    starts = range(0, len(flat), len(tensors))
    return Movement(
        f"all_gather of {_listed(tensors)}",
        lambda: gloo.allgather_coalesced(
            [_all_bytes(rooms[start : start + len(tensors)]) for start in starts], own, opts
        ),
        lambda: put_back(flat, rooms),
        gpus_of(flat),
    )


def gather(gloo: dist.ProcessGroup, outs: Sequence[Tensors], tensor: Tensor, opts: Any) -> Movement:
    """The tensors of all ranks, on the root alone."""
    results = outs[0] if outs else []
    if gloo.rank() == opts.rootRank:
        _check_alike(results, tensor, gloo.size())
    elif results:
        raise UsageError(f"{len(results)} results came; expected none, for the root is rank {opts.rootRank}")
    rooms, own = _rooms(results), flat_bytes(staged(tensor))
    return Movement(
        f"gather of {described(tensor)} to rank {opts.rootRank}",
        lambda: gloo.gather([_all_bytes(rooms)] if rooms else [], [own], opts),
        lambda: put_back(results, rooms),
        gpus_of(results),
    )


def scatter(gloo: dist.ProcessGroup, out: Tensor, parts: Sequence[Tensors], opts: Any) -> Movement:
    """This rank's part of the root's."""
    own = parts[0] if parts else []
    if gloo.rank() == opts.rootRank:
        _check_alike(own, out, gloo.size())
    elif own:
        raise UsageError(f"{len(own)} parts came; expected none, for the root is rank {opts.rootRank}")
    rooms, sent = _rooms([out]), _all_bytes([staged(part) for part in own])
    return Movement(
        f"scatter of {described(out)} from rank {opts.rootRank}",
        lambda: gloo.scatter(_all_bytes(rooms), [sent] if sent else [], opts),
        lambda: put_back([out], rooms),
        gpus_of([out]),
    )


def all_to_all(gloo: dist.ProcessGroup, outs: Tensors, tensors: Tensors, opts: Any) -> Movement:
    """One tensor from each rank, and one to each. They may be of different sizes."""
    kinds = sorted({type_name(tensor) for tensor in (*outs, *tensors)})
    if not len(outs) == len(tensors) == gloo.size() or len(kinds) != 1:
        raise UsageError(
            f"{len(tensors)} tensors and {len(outs)} results of {' and '.join(kinds)} came; expected one of each for "
            f"each of the {gloo.size()} ranks, of one element type"
        )
    parts = _all_bytes([staged(tensor) for tensor in tensors])
    sizes = Sizes([len(part) for part in parts], [out.nbytes for out in outs])
    sent, room = torch.cat(parts), torch.empty(sum(sizes.expected), dtype=torch.uint8)

    def finish() -> list[Tensor]:
        came = zip(room.split(list(sizes.expected)), outs, strict=True)
        return put_back(outs, [part.view(out.dtype).view(out.shape) for part, out in came])

    return Movement(
        f"all_to_all of {kinds[0]}",
        lambda: gloo.alltoall_base(room, sent, list(sizes.expected), list(sizes.sent), opts),
        finish,
        gpus_of(outs),
        sizes,
    )


def all_to_all_single(
    gloo: dist.ProcessGroup, tensors: tuple[Tensor, Tensor], splits: tuple[Sequence[int], Sequence[int]], opts: Any
) -> Movement:
    """Rows from each rank, and rows to each. `tensors`: the result and the tensor; `splits`: how many rows of each, the
    same number where nothing is said."""
    (out, tensor), (from_ranks, to_ranks) = tensors, splits
    if out.dtype != tensor.dtype:
        raise UsageError(f"a result of {type_name(out)} came for a tensor of {type_name(tensor)}; expected the same")
    sizes = Sizes(_sizes(tensor, to_ranks, gloo.size()), _sizes(out, from_ranks, gloo.size()))
    rooms, own = _rooms([out]), flat_bytes(staged(tensor))
    return Movement(
        f"all_to_all_single of {type_name(tensor)}",
        lambda: gloo.alltoall_base(flat_bytes(rooms[0]), own, list(sizes.expected), list(sizes.sent), opts),
        lambda: put_back([out], rooms),
        gpus_of([out]),
        sizes,
    )


def combine_bits(gloo: dist.ProcessGroup, copies: Tensors, opts: Any, results: Tensors, targets: Tensors) -> Movement:
    """Staged tensors of all ranks are combined in place, bit by bit. `results`, which are parts of them, go into
    `targets`."""
    plain = dist.AllreduceCoalescedOptions()
    plain.reduceOp, plain.timeout = opts.reduceOp, opts.timeout
    own = _all_bytes(copies)
    return Movement(
        f"ReduceOp.{op_name(opts.reduceOp)} of {_listed(copies)}",
        lambda: gloo.allreduce_coalesced(own, plain),
        lambda: put_back(targets, results),
        gpus_of(targets),
    )


def _rooms(outs: Tensors) -> list[Tensor]:
    return [room_of(out) for out in outs]


def _all_bytes(tensors: Tensors) -> list[Tensor]:
    return [flat_bytes(tensor) for tensor in tensors]


def _listed(tensors: Tensors) -> str:
    """Tensors in words; a long list shows how many there are, and what tells it from others."""
    texts = [described(tensor) for tensor in tensors]
    if len(texts) <= MOST_LISTED:
        return " and ".join(texts)
    return f"{len(texts)} tensors, checksum {zlib.crc32(' and '.join(texts).encode()):08x}"


def _check_alike(outs: Tensors, tensor: Tensor, size: int) -> None:
    """Whether there is a tensor like this one for each rank."""
    if len(outs) == size and all(out.dtype == tensor.dtype and out.shape == tensor.shape for out in outs):
        return
    kinds = sorted({described(out) for out in outs})
    came = f"{len(outs)} tensors of {' and '.join(kinds[:MOST_LISTED])}" if outs else "no tensors"
    raise UsageError(f"{came} came beside one of {described(tensor)}; expected such a one for each of the {size} ranks")


def _sizes(tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """How many bytes of a tensor each of `splits` has, which count rows; empty: the same number each."""
    rows = len(tensor) if tensor.dim() else 0
    lengths = list(splits) or [rows // size] * size
    if not tensor.dim() or len(lengths) != size or min(lengths) < 0 or sum(lengths) != rows:
        raise UsageError(
            f"a tensor of {described(tensor)} came with splits {list(splits)}; expected a number of rows for each of "
            f"the {size} ranks, {rows} in all, or no splits and as many rows for each"
        )
    row_bytes = tensor.nbytes // rows if rows else 0
    return [row_bytes * length for length in lengths]
