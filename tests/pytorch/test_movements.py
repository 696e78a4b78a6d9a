"""Movements of gloo for a group: each element type and layout, from each rank to the right one. No GPU is
needed: any tensor that is not contiguous is staged, too."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import method, options, run_group
from local_cluster import WAIT_S
from torch import Tensor

from omnireduce.protocol import wait_notices
from omnireduce.torch.backend import messages
from omnireduce.torch.backend.messages import Messages
from omnireduce.torch.backend.process_group import ProcessGroup
from omnireduce.torch.backend.reduce_ops import COMPLEX
from omnireduce.torch.tensors import TORCH_TYPES

pytestmark = [
    pytest.mark.usefixtures("aggregators"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),  # for complex32
]

SIZE = 3
TYPES = (*TORCH_TYPES, *COMPLEX, torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.clone().t().contiguous().t(),
    "strided": lambda x: torch.stack([x, x], dim=-1)[..., 0],
}
Move = Callable[[ProcessGroup, Tensor, Callable[[Tensor], Tensor]], tuple[list[Tensor], list[Tensor]]]


def values(rank: int, dtype: torch.dtype, rows: int = SIZE) -> Tensor:
    return (torch.arange(2 * rows).reshape(rows, 2) % 5 + 7 * rank).to(dtype)


def blank(like: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return change(torch.ones_like(like))


def all_gather(group: ProcessGroup, x: Tensor, change: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    outs = [blank(x, change) for _ in range(SIZE)]
    group.allgather([outs], [x]).wait()
    return outs, [values(rank, x.dtype) for rank in range(SIZE)]


def into_one(group: ProcessGroup, x: Tensor, change: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    out = blank(x.repeat(SIZE, 1), change)
    method(group, "all_gather_single", "_allgather_base")(out, x).wait()
    return [out], [torch.cat([values(rank, x.dtype) for rank in range(SIZE)])]


def several(group: ProcessGroup, x: Tensor, change: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Gather tensors of different element types and sizes."""
    flags = torch.ones(group.getRank() * 0 + 5, dtype=torch.int64) * group.getRank()
    outs = [[blank(x, change), torch.ones_like(flags)] for _ in range(SIZE)]
    group.allgather_coalesced(outs, [x, flags]).wait()
    expected = [[values(rank, x.dtype), torch.ones_like(flags) * rank] for rank in range(SIZE)]
    return [each for pair in outs for each in pair], [each for pair in expected for each in pair]


def gather(group: ProcessGroup, x: Tensor, change: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    outs = [blank(x, change) for _ in range(SIZE)] if group.getRank() == 1 else []
    group.gather([outs] if outs else [], [x], options("Gather", rootRank=1)).wait()
    return outs, [values(rank, x.dtype) for rank in range(SIZE if outs else 0)]


def scatter(group: ProcessGroup, x: Tensor, change: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    rank, out = group.getRank(), blank(x, change)
    parts = [[change(values(number, x.dtype)) for number in range(SIZE)]] if rank == 2 else []
    group.scatter([out], parts, options("Scatter", rootRank=2)).wait()
    return [out], [values(rank, x.dtype)]


def rows(group: ProcessGroup, x: Tensor, change: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Rank a sends a + b rows to rank b."""
    rank, ranks = group.getRank(), range(SIZE)
    lengths = [rank + each for each in ranks]
    out = blank(values(0, x.dtype, sum(lengths)), change)
    sent = change(torch.cat([values(rank, x.dtype, length) for length in lengths]))
    method(group, "all_to_all_single", "alltoall_base")(out, sent, lengths, lengths).wait()
    return [out], [torch.cat([values(each, x.dtype, rank + each) for each in ranks])]


def lists(group: ProcessGroup, x: Tensor, change: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    rank, ranks = group.getRank(), range(SIZE)
    outs = [blank(values(0, x.dtype, rank + each), change) for each in ranks]
    group.alltoall(outs, [change(values(rank, x.dtype, rank + each)) for each in ranks]).wait()
    return outs, [values(each, x.dtype, rank + each) for each in ranks]


def message(group: ProcessGroup, x: Tensor, change: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Around, and from two ranks to any."""
    rank, out = group.getRank(), blank(x, change)
    works = [group.recv([out], (rank - 1) % SIZE, 5), group.send([x], (rank + 1) % SIZE, 5)]
    for work in works:
        work.wait()
    outs, expected = [out], [values((rank - 1) % SIZE, x.dtype)]
    if rank:
        group.send([x], 0, 100_000).wait()
        return outs, expected
    for _ in range(2):
        outs.append(blank(x, change))
        work = group.recv_anysource(outs[-1:], 100_000)
        work.wait()
        expected.append(values(work._source_rank(), x.dtype))
    return outs, expected


MOVES: tuple[Move, ...] = (all_gather, into_one, several, gather, scatter, rows, lists, message)


@pytest.mark.parametrize("move", MOVES)
def test_every_type_and_layout(move: Move) -> None:
    def run(group: ProcessGroup, rank: int) -> list[str]:
        wrong = []
        for dtype in TYPES:
            for name, change in LAYOUTS.items():
                result, expected = move(group, change(values(rank, dtype)), change)
                same = [mine.tolist() == theirs.tolist() for mine, theirs in zip(result, expected, strict=True)]
                wrong += [] if all(same) else [f"{dtype}, {name}: {result}"]
        return wrong

    assert run_group(SIZE, run) == [[]] * SIZE


def test_tensors_without_elements_and_without_dimensions() -> None:
    def run(group: ProcessGroup, rank: int) -> list[Any]:
        none, one = [torch.ones(0, 3) for _ in range(2)], [torch.zeros(()) for _ in range(2)]
        group.allgather([none], [torch.ones(0, 3)]).wait()
        group.allgather([one], [torch.tensor(rank + 1.0)]).wait()
        method(group, "all_to_all_single", "alltoall_base")(torch.ones(0, 4), torch.ones(0, 4), [], []).wait()
        return [[list(each.shape) for each in none], [each.item() for each in one]]

    assert run_group(2, run) == [[[[0, 3]] * 2, [1.0, 2.0]]] * 2


def test_a_rank_may_gather_into_what_it_sends() -> None:
    def run(group: ProcessGroup, rank: int) -> list[float]:
        result = torch.full((4,), -1.0)
        own = result[2 * rank : 2 * rank + 2]
        own[:] = rank
        method(group, "all_gather_single", "_allgather_base")(result, own).wait()
        return result.tolist()  # type: ignore[no-any-return]

    assert run_group(2, run) == [[0, 0, 1, 1]] * 2


def test_forms_of_calls() -> None:
    """Torch's methods take lists or tensors, options or their words."""

    def run(group: ProcessGroup, rank: int) -> list[Any]:
        x, limit = torch.full((2,), float(rank)), timedelta(seconds=WAIT_S)
        outs = [torch.zeros(2), torch.zeros(2)]
        group.allgather(outs, x, timeout=limit).wait()
        at_root = [torch.zeros(2), torch.zeros(2)] if rank == 1 else []
        group.gather(at_root, x, 1, limit).wait()
        part, sum_of_parts = torch.zeros(2), torch.zeros(2)
        group.scatter(part, [x + 5, x + 6] if rank == 0 else [], root=0).wait()
        group.reduce_scatter(sum_of_parts, [x, x + 1], timeout=limit).wait()
        return [out.tolist() for out in (*outs, *at_root, part, sum_of_parts)]

    gathered = [[0.0, 0.0], [1.0, 1.0]]
    assert run_group(2, run) == [[*gathered, [5.0, 5.0], [1.0, 1.0]], [*gathered * 2, [6.0, 6.0], [3.0, 3.0]]]


REFUSED: list[tuple[Callable[[ProcessGroup, Tensor], Any], str]] = [
    (lambda g, x: g.allgather([[x, x]], [x.int()]), "2 tensors of float32 [4] came beside one of int32 [4]"),
    (lambda g, x: g.all_gather_single_coalesced([x], [x[:2]]), "expected 1 times as many elements of float32"),
    (lambda g, x: g.allgather_coalesced([[x], [x]], [x]), "2 lists of results came; expected one for each of the 1"),
    (lambda g, x: g.gather([], [x]), "no tensors came beside one of float32 [4]"),
    (lambda g, x: g.scatter([x], []), "no tensors came beside one of float32 [4]"),
    (lambda g, x: g.alltoall([x], [x.int()]), "1 tensors and 1 results of float32 and int32 came"),
    (lambda g, x: g.all_to_all_single(x, x, [3], [4]), "came with splits [3]; expected a number of rows"),
    (lambda g, x: g.all_to_all_single(x, x, [4], [-4]), "came with splits [-4]"),
    (lambda g, x: g.all_to_all_single(x[0], x, [], []), "float32 [] came with splits []"),
    (lambda g, x: g.all_to_all_single(x, x.int(), [], []), "a result of float32 came for a tensor of int32"),
    (lambda g, x: g.send([x], 0, 1), "a message between ranks 0 and 0 of 1; expected another rank of the group"),
    (lambda g, x: g.recv([x], 1, 1), "a message between ranks 0 and 1 of 1"),
    (lambda g, x: g.recv_anysource([x], 1 << 30), "tag 1073741824; expected 0 to 1073741823"),
    (lambda g, x: g.allgather([[x], [x]], [x]), "2 of them came in a list; expected one"),
    (lambda g, x: g.broadcast([x.to("meta")]), "a tensor of float32 [4] on 'meta' came"),
]


def test_what_cannot_be_moved_is_told() -> None:
    def run(group: ProcessGroup, rank: int) -> list[str]:
        results = []
        for call, _ in REFUSED:
            with pytest.raises(RuntimeError) as caught:
                call(group, torch.ones(4)).wait()
            results.append(str(caught.value))
        return results

    for (_, words), message in zip(REFUSED, run_group(1, run)[0], strict=True):
        assert words in message


def started(group: ProcessGroup, rank: int) -> tuple[Any, Tensor]:
    """An all-gather whose results are put back, and one of them."""
    outs = [torch.zeros(5, 2).t(), torch.zeros(5, 2).t()]
    return group.allgather([outs], [torch.full((2, 5), rank + 1.0)]), outs[1]


def test_each_way_to_wait() -> None:
    def run(group: ProcessGroup, rank: int) -> bool:
        waited, x = started(group, rank)
        assert waited.wait()
        in_future, y = started(group, rank)
        assert in_future.get_future().wait()[1] is y
        assert in_future.wait()
        work, z = started(group, rank)
        assert work.result()[1] is z
        polled, p = started(group, rank)
        until = time.monotonic() + WAIT_S
        while not polled.is_completed():
            assert time.monotonic() < until
        assert polled.is_success()
        assert polled.exception() is None
        return all((each == 2).all() for each in (x, y, z, p))

    assert run_group(2, run) == [True, True]


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_caller_says() -> None:
    def run(group: ProcessGroup, rank: int) -> None:
        if rank == 0:
            work, x = started(group, rank)
            with pytest.raises(RuntimeError, match=r"not all ranks have called it after 0\.1 s"):
                work.wait(timedelta(seconds=0.1))
            assert not work.is_completed()
            group.send([x], 1, 0).wait()
        else:
            group.recv([torch.ones(2, 5)], 0, 0).wait()
            work, x = started(group, rank)
        assert work.wait()
        assert (x == 2).all()

    run_group(2, run)


def test_a_message_is_waited_for_once() -> None:
    """With gloo alone a second wait is one for the next message."""

    def run(group: ProcessGroup, rank: int) -> list[float]:
        x = torch.ones(3)
        work = group.send([x], 1, 7) if rank == 0 else group.recv([x], 0, 7)
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.wait()
        group.allreduce([x]).wait()
        return x.tolist()  # type: ignore[no-any-return]

    assert run_group(2, run) == [[2.0] * 3] * 2


def test_a_message_of_another_size_or_type_is_not_taken(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks say what they wait for, and fail when they have waited long enough. The tensor stays as it was."""
    monkeypatch.setattr(messages, "LOOK_S", 0.05)
    monkeypatch.setattr(wait_notices, "FIRST_S", 0.1)

    def run(group: ProcessGroup, rank: int) -> str:
        x = torch.ones(4 + rank)
        work = group.send([x], 1, 3) if rank == 0 else group.recv([x], 0, 3)
        with pytest.raises(RuntimeError) as caught:
            work.wait(timedelta(seconds=1))
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), RuntimeError)
        assert (x == 1).all()
        return str(caught.value)

    sender, receiver = run_group(2, run)
    assert "waited to send a message of 4 elements of float32 with tag 3 to rank 1; one of another element" in sender
    assert "waited for a message of 5 elements of float32 with tag 3 from rank 0; one of another element" in receiver
    warnings_logged = {record.getMessage().rpartition(" since ")[0] for record in caplog.records}
    assert "waiting for a message of 5 elements of float32 with tag 3 from rank 0" in warnings_logged
    assert "waiting to send a message of 4 elements of float32 with tag 3 to rank 1" in warnings_logged


def test_tags_of_messages_are_told_apart_whatever_their_types() -> None:
    """All that gloo sees as a tag, of some tags and sizes."""
    group = Messages(dist.ProcessGroup(0, 2))
    tags = [0, 1, 65_535, 65_536, 100_000, (1 << 30) - 1]
    of_tags = [{group._slot([torch.ones(size)], 1, tag) for size in range(100)} for tag in tags]
    assert sum(map(len, of_tags)) == len(set().union(*of_tags))
    assert all(0 <= slot < 1 << 31 for slots in of_tags for slot in slots)
    assert [len(slots) for slots in of_tags] == [100, 100, 100, 1, 1, 1]


def test_a_peer_that_dies_is_told() -> None:
    def run(group: ProcessGroup, rank: int) -> None:
        if rank == 0:
            with pytest.raises(RuntimeError, match="omnireduce: waited for a message of 3 elements of float32"):
                group.recv([torch.ones(3)], 1, 7).wait(timedelta(seconds=0.1))

    run_group(2, run)
