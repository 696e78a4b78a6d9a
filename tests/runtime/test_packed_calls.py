"""Parts that differ in size: ragged arrays and objects."""

from __future__ import annotations

import collections
import datetime
import decimal
import itertools
import os
import zoneinfo
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from local_cluster import Daemon, configured, run_job, start_job
from msgspec.msgpack import Ext, encode
from oracle import bits
from test_movement import DTYPES, raw
from transports import by_transports, over

from omnireduce import AbortedError, Communicator, Config, UsageError
from omnireduce.protocol.collective.ragged_parts import packed, packet_count
from omnireduce.runtime.rank.calls.objects import CODECS, MAX_DEPTH, FrontObject, from_bytes, to_bytes

PLAIN_DATA: list[Any] = [
    None, True, 3, -(2**63) + 1, 2**63, 2**200, -(2**200), 1.5, 1j, "text", b"bytes", bytearray(b"more"), (1, (2, 3)),
    (), [1, [2]], {"a": {1: None}}, {(1, "x"): 2, None: 3, 1.5: 4}, {1, 2}, frozenset([3, (4,)]),
    datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC), datetime.datetime(2026, 1, 2),
    datetime.time(1, 2, 3, 4), datetime.datetime(2026, 10, 25, 2, 30, fold=1), datetime.timedelta(3, 4, 5),
    datetime.time(1, tzinfo=datetime.timezone(datetime.timedelta(hours=-3))), {n: n for n in range(5000)},
    datetime.timedelta(-3, 4), decimal.Decimal("1.50"), collections.OrderedDict(b=1, a=[2]), collections.Counter("aab"),
]  # fmt: skip
ARRAYS: list[Any] = [
    np.arange(6).reshape(2, 3), np.zeros((0, 4)), np.array(3), np.ones(2, ml_dtypes.bfloat16), np.array(["ab", "c"]),
    np.array(["2026-01-02"], "M8[D]"), np.arange(10)[::3], np.ones(2, ">f8"), np.float32(1.5), np.bool_(True),
]  # fmt: skip


class Loud:
    """Runs code in its reader."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.getcwd, ()


def nested(depth: int) -> Any:
    x: Any = 1
    for _ in range(depth):
        x = [x]
    return x


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


@pytest.mark.parametrize(("dtype", "config"), by_transports(DTYPES), indirect=["config"], ids=str)
def test_ragged_allgather(config: Config, dtype: Any) -> None:
    cases = list(itertools.product([(0, 0, 0), (3, 0, 1), (1, 700, 20_000)], [(), (3,), (2, 0)]))

    def run(comm: Communicator) -> list[list[tuple[Any, ...]]]:
        results = [comm.allgather_ragged(raw(comm.rank, dtype, (items[comm.rank], *shape))) for items, shape in cases]
        return [[(part.dtype, part.shape, bits(part)) for part in parts] for parts in results]

    parts = [[raw(rank, dtype, (items[rank], *shape)) for rank in range(3)] for items, shape in cases]
    assert run_job(config, 3, run) == [[[(each.dtype, each.shape, bits(each)) for each in few] for few in parts]] * 3


def test_ragged_allgather_takes_one_exchange_and_moves_no_more_than_there_is(daemon: Daemon) -> None:
    def run(comm: Communicator) -> tuple[int, int]:
        comm.allgather_ragged(np.ones(100_000 if comm.rank == 0 else 0))
        return comm.statistics().collectives, comm.statistics().sent_bytes

    results = run_job(configured(daemon.addresses, *over("tcp")), 3, run)
    assert [collectives for collectives, _ in results] == [1, 1, 1]
    assert results[0][1] < 830_000
    assert max(sent for _, sent in results[1:]) < 10_000


def test_ragged_parts_that_do_not_fit_together(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        comm.allgather_ragged(np.ones((2, 3 + comm.rank)))

    for outcome in start_job(configured(daemon.addresses), 2, run).outcomes():
        assert isinstance(outcome, AbortedError)
        assert "allgather_ragged of float64, each of its items (3,)" in outcome.reason
        assert "(4,)" in outcome.reason


def test_objects(config: Config) -> None:
    def run(comm: Communicator) -> None:
        for root in range(3):
            mine = {"rank": comm.rank, "data": PLAIN_DATA}
            result = comm.broadcast_object(mine, root)
            assert (result is mine) == (comm.rank == root)
            assert result == {"rank": root, "data": PLAIN_DATA}
        for size in (0, 1015, 1016, 1017, 100_000):
            assert comm.allgather_object("x" * size * comm.rank) == ["x" * size * rank for rank in range(3)]
        assert comm.allgather_object(Loud, trust=True) == [Loud] * 3

    run_job(config, 3, run)


@pytest.mark.parametrize("x", PLAIN_DATA, ids=repr)
def test_plain_data_reads_back(x: Any) -> None:
    result = from_bytes(to_bytes(x, trust=False), trust=False, sender="rank 1")
    assert result == x
    assert type(result) is type(x)


@pytest.mark.parametrize("x", ARRAYS, ids=repr)
def test_arrays_read_back(x: Any) -> None:
    [result] = from_bytes(to_bytes([x], trust=False), trust=False, sender="rank 1")  # type: ignore[misc]
    assert same(result, np.ascontiguousarray(x) if x.ndim else x)
    assert isinstance(x, np.generic) or result.flags.writeable


@given(x=arrays.arrays(arrays.scalar_dtypes(), arrays.array_shapes(min_dims=0, min_side=0)))
def test_any_array_reads_back(x: Any) -> None:
    assert same(from_bytes(to_bytes(x, trust=False), trust=False, sender="rank 1"), x)


TEXTS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = TEXTS | st.tuples(TEXTS, TEXTS) | st.frozensets(TEXTS, max_size=3)


def typed(x: Any) -> Any:
    """`x` with the type of each of its parts: True is no 1 here, 0.0 no -0.0; sets have no order, dicts have one."""
    if isinstance(x, frozenset):
        return frozenset, frozenset(map(typed, x))
    if isinstance(x, dict):
        return dict, tuple((typed(key), typed(value)) for key, value in x.items())
    return (type(x), tuple(map(typed, x))) if isinstance(x, list | tuple) else (type(x), repr(x))


@given(x=st.recursive(TEXTS, lambda each: st.lists(each) | st.dictionaries(KEYS, each) | st.tuples(each, each)))
def test_anything_plain_reads_back(x: Any) -> None:
    result = from_bytes(to_bytes(x, trust=False), trust=False, sender="rank 1")
    assert typed(result) == typed(x)


@pytest.mark.parametrize(
    ("x", "what"),
    [
        (Loud(), "Loud is no plain data"),
        ([Loud], "Loud is no plain data"),
        (os.getcwd, "getcwd is no plain data"),
        ({"f": lambda: 0}, "<lambda> is no plain data"),
        (collections.defaultdict(int), "defaultdict is no plain data"),
        (np.array([None]), "an array of object is no plain data"),
        (np.zeros(2, [("a", "f4")]), "is no plain data"),
        (np.ma.array([1.0]), "MaskedArray is no plain data"),
        (np.dtype("f4"), "is no plain data"),
        (ValueError("x"), "ValueError is no plain data"),
        (np.zeros(3, "V0"), "is no plain data"),
        (nested(MAX_DEPTH + 1), "plain data is nested at most 64 deep"),
        (datetime.datetime(2026, 7, 1, tzinfo=zoneinfo.ZoneInfo("UTC")), r"a datetime with tzinfo zoneinfo.ZoneInfo"),
        (datetime.time(1, tzinfo=zoneinfo.ZoneInfo("UTC")), r"a time with tzinfo zoneinfo.ZoneInfo"),
        (datetime.datetime.now(datetime.timezone(datetime.timedelta(hours=1), "mine")), "with tzinfo"),
        (datetime.datetime.now(datetime.timezone(datetime.timedelta(microseconds=1))), "with tzinfo"),
        (np.str_("a\0"), "the str_ .* is no plain data"),
        (type("Mine", (np.float64,), {})(1.0), "the Mine .* is no plain data"),
    ],
)
def test_what_is_no_plain_data_is_refused_by_its_sender(x: object, what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        to_bytes(x, trust=False)
    assert "trust=True" in str(caught.value)


UNREADABLE: list[object] = [{2**k for k in range(4000)}, 1 << 20_000, np.zeros((0, 2**62), "i1"), set(range(70_000))]


@pytest.mark.parametrize("x", UNREADABLE, ids=lambda x: type(x).__name__)
def test_what_the_others_would_not_read_is_refused_by_its_sender(x: object) -> None:
    with pytest.raises(
        UsageError, match=r"cannot be sent: (\d+ keys with the same hash|Expected|more than 65536 keys)"
    ):
        to_bytes(x, trust=False)


def test_what_cannot_be_sent_at_all() -> None:
    with pytest.raises(UsageError, match="the generator cannot be sent: cannot pickle"):
        to_bytes((i for i in range(3)), trust=True)
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    with pytest.raises(UsageError, match="nested at most"):
        to_bytes(cyclic, trust=False)


def test_a_pickle_of_a_peer_is_not_read() -> None:
    with pytest.raises(UsageError, match="the object of rank 1 cannot be read"):
        from_bytes(to_bytes(Loud(), trust=True), trust=False, sender="rank 1")


NUMBER = {kind: number for number, kind in enumerate(CODECS)}


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (np.ndarray, []), (np.ndarray, 1), (np.ndarray, ["|O", [1], bytes(8)]), (np.ndarray, ["<f8", [2], bytes(8)]),
        (np.ndarray, ["<f8", [-1, -1], bytes(8)]), (np.ndarray, ["no type", [1], bytes(8)]),
        (np.ndarray, ["|V0", [2**40], b""]), (np.ndarray, ["<f8", [2**62, 4], bytes(8)]),
        (np.ndarray, ["<f8", ["a"], bytes(8)]), (np.ndarray, ["<f8", [1], 8]), (np.ndarray, ["O,f4", [1], bytes(12)]),
        (np.ndarray, ["<f8", 1, bytes(8)]), (np.generic, ["<f8", [3], bytes(8)]), (dict, [1, 2, 3]), (dict, [[1], 2]),
        (set, [[1]]), (int, "x"), (int, 2**40), (tuple, 3), (complex, ["1e5", 2]), (decimal.Decimal, "x"),
        (bytearray, 2**40), (bytearray, [1]), (set, "ab"), (tuple, {1: 2}), (list, [[1]]), (dict, [1, {}]),
        (set, [1] * 65), (dict, [1, 2] * 65), (set, [Ext(0, encode(hex(n * (2**61 - 1)))) for n in range(65)]),
        (bytes, "x"), (decimal.Decimal, [0, [1], 2]), (np.ndarray, ["<f8", [0] * 65, b""]),
        (np.ndarray, ["(2,)f4", [1], bytes(8)]),
        (np.ndarray, ["f4,f4", [1], bytes(8)]), (np.ndarray, ["<f8", [True], bytes(8)]),
        (np.generic, ["<M8[0s]", [], bytes(8)]), (np.ndarray, ["<m8[0s]", [1], bytes(8)]),
        (np.ndarray, ["a5", [0], b""]),
        (np.generic, ["<f8", [1], bytes(8)]), (int, "0x" + "1" * 5000), (decimal.Decimal, "1" * 5000),
        (datetime.datetime, ["2026-01-01T00:00:00." + "1" * 99, 0]), (datetime.time, ["10:00", 2]),
        (datetime.time, "10:00"),
        (datetime.date, "2026"), (datetime.timedelta, [2**60, 0, 0]),
    ],
)  # fmt: skip
def test_what_a_liar_says_is_refused(kind: type[Any], content: Any) -> None:
    with pytest.raises(UsageError, match="the object of rank 1 cannot be read"):
        from_bytes(encode(Ext(NUMBER[kind], encode(content))), trust=False, sender="rank 1")


def test_a_part_that_is_too_large(daemon: Daemon) -> None:
    """To the byte, and what it says can be done about."""
    limit = 2000

    def run(comm: Communicator) -> None:
        assert comm.allgather_ragged(np.ones(limit, np.int8))[0].size == limit
        for call in (
            lambda: comm.allgather_ragged(np.ones(limit + 1, np.int8)),
            lambda: comm.allgather_object("x" * limit),
        ):
            with pytest.raises(UsageError, match=r"bytes to send; expected at most protocol.max_part_bytes, 2000"):
                call()

    run_job(configured(daemon.addresses, "protocol.max_part_bytes=2000"), 1, run)


def test_ranks_that_allow_parts_of_other_sizes_are_told(daemon: Daemon) -> None:
    configs = [configured(daemon.addresses, f"protocol.max_part_bytes={size}") for size in (2000, 4000)]
    for outcome in start_job(configs, 2, lambda comm: comm.allgather_object("x")).outcomes():
        assert isinstance(outcome, AbortedError)
        assert "protocol.max_part_bytes in KiB, rounded up, 2" in outcome.reason
        assert "protocol.max_part_bytes in KiB, rounded up, 4" in outcome.reason


def test_ranks_that_trust_and_ranks_that_do_not(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(UsageError, match="trust is an int; expected True or False"):
            comm.allgather_object("x", trust=1)  # type: ignore[arg-type]
        comm.broadcast_object("x", trust=comm.rank == 1)

    for outcome in start_job(configured(daemon.addresses), 2, run).outcomes():
        assert isinstance(outcome, AbortedError)
        assert "broadcast_object of plain data" in outcome.reason
        assert "broadcast_object of pickles" in outcome.reason


def test_a_part_as_packets() -> None:
    rows = packed(np.arange(300, dtype=np.int32).reshape(100, 3))
    assert rows.shape == (packet_count(1200), 1024) == (2, 1024)
    assert rows.reshape(-1)[:1200].tobytes() == np.arange(300, dtype=np.int32).tobytes()
    assert rows.reshape(-1)[1200:-8].any() == np.False_
    assert rows.reshape(-1)[-8:].tobytes() == (100).to_bytes(8, "little")


def test_extensions_that_there_are_not() -> None:
    for code in (-2, len(CODECS)):
        with pytest.raises(UsageError, match="install the same omnireduce everywhere"):
            from_bytes(encode(Ext(code, b"")), trust=False, sender="rank 1")


def test_a_type_of_a_front_that_is_not_here_is_refused() -> None:
    data = encode(Ext(NUMBER[FrontObject], encode(["tool.Thing", b""])))
    with pytest.raises(UsageError, match=r"a tool\.Thing, which this rank does not know; import the same modules"):
        from_bytes(data, trust=False, sender="rank 1")


def test_an_object_nested_deeply_is_refused() -> None:
    assert from_bytes(to_bytes(nested(MAX_DEPTH), trust=False), trust=False, sender="rank 1") == nested(MAX_DEPTH)
    x = Ext(NUMBER[tuple], encode([]))
    for _ in range(MAX_DEPTH):
        x = Ext(NUMBER[tuple], encode([x]))
    with pytest.raises(UsageError, match="the object of rank 1 cannot be read: nested more than 64 deep"):
        from_bytes(encode(x), trust=False, sender="rank 1")


def test_a_map_is_refused_before_it_is_built() -> None:
    """Its keys could all have one hash."""
    with pytest.raises(UsageError, match=r"cannot be read: Expected .* got `object`"):
        from_bytes(encode({1: 2}), trust=False, sender="rank 1")


def test_errors_of_a_reader_are_short_and_can_be_shown() -> None:
    data = encode(Ext(NUMBER[decimal.Decimal], encode("\x1b[2J" * 10_000)))
    with pytest.raises(UsageError) as caught:
        from_bytes(data, trust=False, sender="rank 1")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@given(data=st.binary(max_size=200))
def test_bytes_that_are_no_object(data: bytes) -> None:
    with suppress(UsageError):  # nothing else; some bytes are an object
        from_bytes(data, trust=False, sender="rank 1")
