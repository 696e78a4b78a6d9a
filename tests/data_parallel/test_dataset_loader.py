"""Every sample comes once in an epoch, on one rank, in as many steps on all ranks."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from local_cluster import Daemon, configured, run_job

from omnireduce import Communicator, UsageError
from omnireduce.data_parallel import Loader, partition_dataset


def loaders(dataset: Any, batch_size: int, size: int, **more: Any) -> list[Loader]:
    return [Loader(dataset, batch_size, rank=rank, size=size, **more) for rank in range(size)]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, int, int]:
    size = draw(st.integers(1, 9))
    return size, draw(st.integers(size, 200)), draw(st.integers(size, 60))


@given(jobs(), st.integers(0, 3), st.booleans())
@example((3, 7, 6), 0, True)  # a last batch of one sample, for three ranks
@example((3, 3, 60), 0, True)
def test_every_sample_comes_once(job: tuple[int, int, int], seed: int, shuffle: bool) -> None:
    size, total, batch_size = job
    dealt = [loader.batches() for loader in loaders(range(total), batch_size, size, seed=seed, shuffle=shuffle)]
    everything = [number for batches in dealt for batch in batches for number in batch]
    assert sorted(everything) == list(range(total))
    assert len({len(batches) for batches in dealt}) == 1
    each_rank = [sum(map(len, batches)) for batches in dealt]
    assert each_rank == sorted(each_rank, reverse=True)  # the first ranks have what is left over
    assert each_rank[0] - each_rank[-1] <= 1
    for batches in zip(*dealt, strict=True):
        assert all(batches)
        assert max(map(len, batches)) - min(map(len, batches)) <= 1
    for step in list(zip(*dealt, strict=True))[:-1]:
        assert sum(map(len, step)) == batch_size
    assert sum(map(len, (batches[-1] for batches in dealt))) < batch_size + size


@given(jobs(), st.integers(0, 3))
def test_ranks_see_the_batches_of_one_process(job: tuple[int, int, int], epoch: int) -> None:
    size, total, batch_size = job
    [whole] = loaders(range(total), batch_size, 1)
    parts = loaders(range(total), batch_size, size)
    for part in (whole, *parts):
        part.set_epoch(epoch)
    together = [sorted(chain(*step)) for step in zip(*(part.batches() for part in parts), strict=True)]
    expected = [sorted(batch) for batch in whole.batches()]
    if len(together) < len(expected):  # the last batch has fewer samples than there are ranks
        expected[-2:] = [sorted(expected[-2] + expected[-1])]
    assert together == expected


def test_each_epoch_has_an_order_of_its_own_and_the_same_one_again() -> None:
    [loader] = loaders(np.arange(50), 10, 1, seed=3)
    first, second = [[batch.tolist() for batch in loader] for _ in range(2)]
    assert (first != second, loader.epoch) == (True, 2)
    loader.set_epoch(0)
    assert [batch.tolist() for batch in loader] == first
    next(iter(loader))  # one who has only looked is in the same epoch
    assert [batch.tolist() for batch in loader] == second
    [other] = loaders(np.arange(50), 10, 1, seed=4)
    assert [batch.tolist() for batch in other] != first
    [plain] = loaders(np.arange(50), 20, 1, shuffle=False)
    assert [batch.tolist() for batch in plain] == [list(range(20)), list(range(20, 40)), list(range(40, 50))]


def test_shares_add_up_to_the_number_of_ranks() -> None:
    parts = loaders(np.arange(37), 8, 3)
    for _ in zip(*parts, strict=True):
        assert sum(part.share for part in parts) == pytest.approx(3)


class Samples:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"pixels": np.full((2, 2), at, np.float32), "words": (at, [at, -at])}


def test_datasets_of_several_kinds() -> None:
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6)
    [loader] = loaders((x, y), 4, 1, shuffle=False)
    first = next(iter(loader))
    assert isinstance(first, tuple)
    assert [each.tolist() for each in first] == [x[:4].tolist(), [0, 1, 2, 3]]
    [loader] = loaders({"x": x, "y": y}, 6, 1, shuffle=False)
    assert {name: each.tolist() for name, each in next(iter(loader)).items()} == {"x": x.tolist(), "y": y.tolist()}
    [loader] = loaders(Samples(), 2, 1, shuffle=False, to_tensor=lambda values: ("tensor", values.tolist()))
    assert next(iter(loader)) == {
        "pixels": ("tensor", [[[0.0] * 2] * 2, [[1.0] * 2] * 2]),
        "words": (("tensor", [0, 1]), (("tensor", [0, 1]), ("tensor", [0, -1]))),
    }


@pytest.mark.parametrize(
    ("dataset", "batch_size", "message"),
    [
        (np.zeros(0), 4, "the dataset is empty: expected samples"),
        (np.zeros(9), 2, "batch_size is 2 for 3 ranks: expected 3 or more"),
        (np.zeros(2), 4, "the dataset has 2 samples for 3 ranks: expected one or more for each rank"),
        (np.zeros(9), 0, "batch_size is 0: expected how many samples"),
        (np.zeros(9), 4.5, "batch_size is 4.5: expected how many samples"),
        (np.zeros(()), 4, "expected one first dimension"),
        ((np.zeros(9), np.zeros(8)), 4, r"arrays of the dataset are \[\(9,\), \(8,\)\]: expected one first dimension"),
        ((), 4, "the dataset is empty: expected samples"),
        (([1, 2], [3, 4]), 4, "the dataset is a tuple with a list: expected arrays of NumPy in it, of all samples"),
        ({"x": np.zeros(9), "y": [0] * 9}, 4, "the dataset is a dict with a list: expected arrays of NumPy"),
        (iter([1]), 4, "dataset is a list_iterator: expected arrays, or an object with len"),
    ],
)
def test_what_cannot_be_dealt_out(dataset: Any, batch_size: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Loader(dataset, batch_size, rank=0, size=3)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([np.zeros(2), np.zeros(3)], r".*expected arrays of one shape"),
        ([(1, 2), (1, 2, 3)], "one has 2 parts, another one 3 parts; expected the same"),
        ([{"x": 1}, {"y": 1}], r"one has the keys \[\"'x'\"\], another one the keys \[\"'y'\"\]"),
        ([[1], 1], "one has 1 parts, another one no parts"),
    ],
)
def test_samples_of_different_shapes_cannot_be_stacked(samples: list[Any], message: str) -> None:
    [loader] = loaders(samples, 2, 1, shuffle=False)
    with pytest.raises(UsageError, match=f"samples cannot be stacked: {message}"):
        next(iter(loader))


def test_ranks_with_other_datasets_are_told_so(daemon: Daemon) -> None:
    def run(comm: Communicator) -> str:
        with pytest.raises(UsageError) as raised:
            partition_dataset(np.zeros(9 + comm.rank), 4, comm=comm)
        return str(raised.value)

    expected = "'samples of the dataset' differs between ranks: rank 0 has 9, rank 1 has 10"
    assert run_job(configured(daemon.addresses), 2, run) == [f"{expected}; expected the same on all ranks"] * 2
