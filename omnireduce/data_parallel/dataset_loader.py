"""A dataset, dealt out to the ranks of a job in batches.

In each epoch every sample comes once, on one rank. All ranks together see the batches that one process would see. The
samples of a batch go to the ranks in turn. All ranks have the same number of steps, so that no rank waits for a step
that another rank does not take. In each step each rank has a sample: if the last batch has fewer samples than there are
ranks, they are put into the batch before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.data_parallel.default_communicator import communicator
from omnireduce.data_parallel.sampling import Sampling
from omnireduce.errors import UsageError, a_type
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.error_agreement import check_agreement
from omnireduce.runtime.rank.reported_errors import report_errors_to

ToTensor = Callable[[Array], Any]


class Loader:
    """The batches of one rank: iterate over it once in each epoch. Its length is the number of steps.

    `epoch`: the number of the next epoch, from 0. It grows when an iteration comes to its end; see `set_epoch`.
    `share`: the samples of the last batch, of those of an average rank. It is 1.0 if all ranks have equally many.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        rank: int,
        size: int,
        seed: int = 0,
        shuffle: bool = True,
        to_tensor: ToTensor = lambda values: values,
    ) -> None:
        self.epoch, self.share = 0, 1.0
        self._rank, self._size, self._dataset, self._to_tensor = rank, size, dataset, to_tensor
        total = count_samples(dataset)
        _check(total, batch_size, size)
        self._sampling = Sampling(total, shuffle=shuffle, seed=seed, pads=False)
        ends = [*range(batch_size, total, batch_size), total]
        if len(ends) > 1 and total - ends[-2] < size:
            del ends[-2]
        self._bounds = list(pairwise([0, *ends]))  # of the batches of all ranks together

    def set_epoch(self, epoch: int) -> None:
        """The next iteration has the order of this epoch: all ranks say the same. To go on from a checkpoint, or to
        see the same epoch again."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._bounds)

    def batches(self) -> list[list[int]]:
        """The numbers of the samples that this rank takes in the next epoch, step by step."""
        self._sampling.begin(self.epoch)
        self._sampling.deal(self._rank, self._size)
        indices = self._sampling.indices
        return [indices[self._samples_before(start) : self._samples_before(end)] for start, end in self._bounds]

    def _samples_before(self, at: int) -> int:
        """The number of samples of this rank among the first `at` samples of all ranks."""
        return (at - self._rank + self._size - 1) // self._size

    def __iter__(self) -> Iterator[Any]:
        for numbers, (start, end) in zip(self.batches(), self._bounds, strict=True):
            self.share = len(numbers) * self._size / (end - start)
            yield self._batch(numbers)
        self.epoch += 1

    def _batch(self, numbers: list[int]) -> Any:
        columns = self._dataset
        if _is_columns(columns):
            return _map_columns(lambda column: self._to_tensor(column[numbers]), columns)
        return _stack([columns[number] for number in numbers], self._to_tensor)


def partition_dataset(
    dataset: Any,
    batch_size: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    to_tensor: ToTensor = lambda values: values,
    comm: Communicator | None = None,
) -> tuple[Loader, int]:
    """Deal out a dataset to the ranks; return this rank's loader, and the least size of its batches, but the last one.
    All ranks call this with the same arguments.

    `dataset`: an array of NumPy, a tuple or dict of such of one length, or another object with `len()` and `[]`, as a
    list, that returns samples, which are stacked. `batch_size`: of all ranks together. It is divided among them. If it
    cannot be divided evenly, some batches have one sample more. `shuffle`: in another order each epoch, drawn from
    `seed`. `to_tensor`: what becomes of each array of a batch. `comm`: instead of the global communicator.

    Raises UsageError for an empty dataset, for a batch or a dataset of fewer samples than ranks, and where ranks
    differ; otherwise what has ended the job.
    """
    comm = communicator(comm)
    with report_errors_to(comm):
        samples = count_samples(dataset)
    arguments = {"samples of the dataset": samples, "batch_size": batch_size, "seed": seed, "shuffle": shuffle}
    check_agreement(comm, [(name, str(value)) for name, value in arguments.items()], "partition_dataset")
    loader = Loader(
        dataset, batch_size, rank=comm.rank, size=comm.size, seed=seed, shuffle=shuffle, to_tensor=to_tensor
    )
    return loader, batch_size // comm.size


def _is_columns(dataset: Any) -> bool:
    """Whether it has arrays, whose first dimension counts samples."""
    return isinstance(dataset, dict | tuple | np.ndarray)


def count_samples(dataset: Any) -> int:
    """The number of its samples. Raises UsageError for an object that is no dataset."""
    if isinstance(dataset, np.ndarray):
        dataset = (dataset,)
    if _is_columns(dataset):
        columns = list(dataset.values() if isinstance(dataset, dict) else dataset)
        if wrong_types := [type(column).__name__ for column in columns if not isinstance(column, np.ndarray)]:
            raise UsageError(
                f"the dataset is {a_type(dataset)} with a {wrong_types[0]}: expected arrays of NumPy in it, of all "
                "samples; single samples may be in a list"
            )
        shapes = [column.shape for column in columns]
        if any(len(shape) == 0 or shape[0] != shapes[0][0] for shape in shapes):
            raise UsageError(f"arrays of the dataset are {shapes}: expected one first dimension, which counts samples")
        return int(shapes[0][0]) if shapes else 0
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"dataset is {a_type(dataset)}: expected arrays, or an object with len() and [] that has samples"
        )
    return len(dataset)


def _check(total: int, batch_size: object, size: int) -> None:
    if not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise UsageError(f"batch_size is {batch_size!r}: expected how many samples all ranks together take in a step")
    if not total:
        raise UsageError("the dataset is empty: expected samples")
    if batch_size < size:
        raise UsageError(
            f"batch_size is {batch_size} for {size} ranks: expected {size} or more, since it is that of all ranks"
        )
    if total < size:
        raise UsageError(f"the dataset has {total} samples for {size} ranks: expected one or more for each rank")


def _map_columns(function: Callable[[Array], Any], x: Any) -> Any:
    if isinstance(x, dict):
        return {key: function(column) for key, column in x.items()}
    return tuple(function(column) for column in x) if isinstance(x, tuple) else function(x)


def _stack(samples: list[Any], to_tensor: ToTensor) -> Any:
    """Samples as one: arrays with a dimension more, in the tuples, lists or dicts in which the samples have them."""
    first = samples[0]
    parts = _parts_of(first)
    for sample in samples:
        if (sample_parts := _parts_of(sample)) != parts:
            raise UsageError(
                f"samples cannot be stacked: one has {parts}, another one {sample_parts}; expected the same"
            )
    if isinstance(first, dict):
        return {key: _stack([sample[key] for sample in samples], to_tensor) for key in first}
    if isinstance(first, list | tuple):
        return tuple(_stack(list(nested), to_tensor) for nested in zip(*samples, strict=True))
    try:
        stacked = np.stack([_array_of(sample) for sample in samples])
    except ValueError as error:
        raise UsageError(f"samples cannot be stacked: {error}; expected arrays of one shape") from error
    return to_tensor(stacked)


def _parts_of(sample: Any) -> str:
    """The structure that all stacked samples must share, in words. Shapes of arrays are compared later."""
    if isinstance(sample, dict):
        return f"the keys {sorted(map(repr, sample))}"
    return f"{len(sample)} parts" if isinstance(sample, list | tuple) else "no parts"


def _array_of(x: Any) -> Array:
    return np.asarray(x.numpy() if hasattr(x, "numpy") else x)
