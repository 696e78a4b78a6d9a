"""The collectives of torch that move tensors from rank to rank, as gloo does them: with bytes.

Each function takes the arguments that torch hands to the method of a group, and the group of gloo. It raises UsageError
for wrong arguments.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from omnireduce.errors import UsageError
from omnireduce.torch.backend.gloo import Movement, Sizes
from omnireduce.torch.backend.reduce_ops import op_name
from omnireduce.torch.tensors import described, flat_bytes, gpus_of, put_back, result_buffer, staged, type_name

Tensors = Sequence[Tensor]
MAX_LISTED = 3  # tensors that words name one by one


def all_gather(gloo: dist.ProcessGroup, outs: Tensors, tensor: Tensor, opts: Any) -> Movement:
    """The tensors of all ranks."""
    _check_results(outs, tensor, gloo.size())
    buffers, sent = _result_buffers(outs), flat_bytes(staged(tensor))
    return Movement(
        f"all_gather of {described(tensor)}",
        lambda: gloo.allgather([_all_bytes(buffers)], [sent], opts),
        lambda: put_back(outs, buffers),
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
    buffers, sent = _result_buffers(outs), _all_bytes([staged(tensor) for tensor in tensors])
    rank_parts = [
        list(parts) for parts in zip(*(buffer.tensor_split(gloo.size()) for buffer in _all_bytes(buffers)), strict=True)
    ]
    return Movement(
        f"all_gather into one tensor of {_describe_all(tensors)}",
        lambda: gloo.allgather_coalesced(rank_parts, sent, opts),
        lambda: put_back(outs, buffers),
        gpus_of(outs),
    )


def all_gather_coalesced(gloo: dist.ProcessGroup, outs: Sequence[Tensors], tensors: Tensors, opts: Any) -> Movement:
    """Several tensors of each rank: `outs[rank]` are those of one."""
    if len(outs) != gloo.size():
        raise UsageError(f"{len(outs)} lists of results came; expected one for each of the {gloo.size()} ranks")
    for results in zip(*outs, tensors, strict=True):
        _check_results(results[:-1], results[-1], gloo.size())
    flat = [out for rank_outs in outs for out in rank_outs]
    buffers, sent = _result_buffers(flat), _all_bytes([staged(tensor) for tensor in tensors])
    starts = range(0, len(flat), len(tensors))
    return Movement(
        f"all_gather of {_describe_all(tensors)}",
        lambda: gloo.allgather_coalesced(
            [_all_bytes(buffers[start : start + len(tensors)]) for start in starts], sent, opts
        ),
        lambda: put_back(flat, buffers),
        gpus_of(flat),
    )


def gather(gloo: dist.ProcessGroup, outs: Sequence[Tensors], tensor: Tensor, opts: Any) -> Movement:
    """The tensors of all ranks, on the root alone."""
    results = outs[0] if outs else []
    if gloo.rank() == opts.rootRank:
        _check_results(results, tensor, gloo.size())
    elif results:
        raise UsageError(f"{len(results)} results came; expected none, for the root is rank {opts.rootRank}")
    buffers, sent = _result_buffers(results), flat_bytes(staged(tensor))
    return Movement(
        f"gather of {described(tensor)} to rank {opts.rootRank}",
        lambda: gloo.gather([_all_bytes(buffers)] if buffers else [], [sent], opts),
        lambda: put_back(results, buffers),
        gpus_of(results),
    )


def scatter(gloo: dist.ProcessGroup, out: Tensor, parts: Sequence[Tensors], opts: Any) -> Movement:
    """This rank's part of the root's."""
    root_parts = parts[0] if parts else []
    if gloo.rank() == opts.rootRank:
        _check_results(root_parts, out, gloo.size())
    elif root_parts:
        raise UsageError(f"{len(root_parts)} parts came; expected none, for the root is rank {opts.rootRank}")
    buffers, sent = _result_buffers([out]), _all_bytes([staged(part) for part in root_parts])
    return Movement(
        f"scatter of {described(out)} from rank {opts.rootRank}",
        lambda: gloo.scatter(_all_bytes(buffers), [sent] if sent else [], opts),
        lambda: put_back([out], buffers),
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
    sent, buffer = torch.cat(parts), torch.empty(sum(sizes.expected), dtype=torch.uint8)

    def finish() -> list[Tensor]:
        pairs = zip(buffer.split(list(sizes.expected)), outs, strict=True)
        return put_back(outs, [part.view(out.dtype).view(out.shape) for part, out in pairs])

    return Movement(
        f"all_to_all of {kinds[0]}",
        lambda: gloo.alltoall_base(buffer, sent, list(sizes.expected), list(sizes.sent), opts),
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
    buffers, sent = _result_buffers([out]), flat_bytes(staged(tensor))
    return Movement(
        f"all_to_all_single of {type_name(tensor)}",
        lambda: gloo.alltoall_base(flat_bytes(buffers[0]), sent, list(sizes.expected), list(sizes.sent), opts),
        lambda: put_back([out], buffers),
        gpus_of([out]),
        sizes,
    )


def combine_bits(gloo: dist.ProcessGroup, copies: Tensors, opts: Any, results: Tensors, targets: Tensors) -> Movement:
    """Staged tensors of all ranks are combined in place, bit by bit. `results`, which are parts of them, go into
    `targets`."""
    plain = dist.AllreduceCoalescedOptions()
    plain.reduceOp, plain.timeout = opts.reduceOp, opts.timeout
    sent = _all_bytes(copies)
    return Movement(
        f"ReduceOp.{op_name(opts.reduceOp)} of {_describe_all(copies)}",
        lambda: gloo.allreduce_coalesced(sent, plain),
        lambda: put_back(targets, results),
        gpus_of(targets),
    )


def _result_buffers(outs: Tensors) -> list[Tensor]:
    return [result_buffer(out) for out in outs]


def _all_bytes(tensors: Tensors) -> list[Tensor]:
    return [flat_bytes(tensor) for tensor in tensors]


def _describe_all(tensors: Tensors) -> str:
    """Tensors in words; a long list shows how many there are, and what tells it from others."""
    texts = [described(tensor) for tensor in tensors]
    if len(texts) <= MAX_LISTED:
        return " and ".join(texts)
    return f"{len(texts)} tensors, checksum {zlib.crc32(' and '.join(texts).encode()):08x}"


def _check_results(outs: Tensors, tensor: Tensor, size: int) -> None:
    """Whether there is a tensor like this one for each rank."""
    if len(outs) == size and all(out.dtype == tensor.dtype and out.shape == tensor.shape for out in outs):
        return
    kinds = sorted({described(out) for out in outs})
    received = f"{len(outs)} tensors of {' and '.join(kinds[:MAX_LISTED])}" if outs else "no tensors"
    raise UsageError(
        f"{received} came beside one of {described(tensor)}; expected such a one for each of the {size} ranks"
    )


def _sizes(tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Bytes of a tensor for each of `splits`, which count rows; for no splits, the same number each."""
    rows = len(tensor) if tensor.dim() else 0
    lengths = list(splits) or [rows // size] * size
    if not tensor.dim() or len(lengths) != size or min(lengths) < 0 or sum(lengths) != rows:
        raise UsageError(
            f"a tensor of {described(tensor)} came with splits {list(splits)}; expected a number of rows for each of "
            f"the {size} ranks, {rows} in all, or no splits and as many rows for each"
        )
    row_bytes = tensor.nbytes // rows if rows else 0
    return [row_bytes * length for length in lengths]
