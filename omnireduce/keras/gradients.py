"""The gradients of an optimizer or a tape: their names, groups, and which of them are combined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from omnireduce.core.dtypes import Array
from omnireduce.data_parallel.horovod_names import Compression, NoneCompressor
from omnireduce.data_parallel.scaling import Adasum, Average, Sum, make_scaling
from omnireduce.data_parallel.session import ProcessSet, global_process_set
from omnireduce.errors import UsageError
from omnireduce.keras.collectives import Combining
from omnireduce.keras.values import call_with_arrays

Groups = int | Sequence[Sequence[Any]] | None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of `DistributedOptimizer`. Raises UsageError for arguments that cannot be.

    `local`: the ids of variables whose gradients stay as they are but for a division by the number of ranks, unless
    `scale_local_gradients` is False.
    """

    name: str | None = None
    compression: type[NoneCompressor] = Compression.none
    backward_passes_per_step: int = 1
    op: Any = Average
    gradient_predivide_factor: float = 1.0
    average_aggregated_gradients: bool = False
    num_groups: int = 0
    groups: Groups = None
    process_set: ProcessSet = global_process_set
    sparse_as_dense: bool = False
    local: frozenset[int] = frozenset()
    scale_local_gradients: bool = True

    def __post_init__(self) -> None:
        if self.op not in (Average, Sum, Adasum):
            raise UsageError(f"op is {self.op!r}: expected Average, Sum or Adasum for gradients")
        self._combining_for(1)  # raises what is wrong with it
        if not isinstance(self.backward_passes_per_step, int) or self.backward_passes_per_step < 1:
            raise UsageError(f"backward_passes_per_step is {self.backward_passes_per_step}: expected 1 or more")
        if isinstance(self.groups, int) and self.num_groups:
            raise UsageError("both num_groups and groups are given: expected one of them")
        if self.group_count < 0:
            raise UsageError(f"num_groups is {self.group_count}: expected 0 (no groups) or more")

    @property
    def group_count(self) -> int:
        return self.groups if isinstance(self.groups, int) else self.num_groups

    def _combining_for(self, size: int) -> Combining:
        """The way to combine gradients of `size` ranks: an average may be divided in part before the sum, in part after
        it."""
        scaling = make_scaling(None, self.op).predivided(self.gradient_predivide_factor, size)
        return Combining(scaling, self.compression, self.process_set)

    def combine(self, prefix: str, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """These gradients, combined with those of other ranks. `prefix`: before their names, on all ranks the same.

        A gradient that is None counts as zeros: other ranks may have one.
        """
        size = self.process_set.size()
        if size == 1 or not self.process_set.included():
            return list(gradients)
        grads = [
            keras.ops.zeros(variable.shape, variable.dtype) if gradient is None else dense(gradient)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        shared = [at for at, variable in enumerate(variables) if id(variable) not in self.local]
        if self.scale_local_gradients:
            grads = [gradient if at in shared else gradient / size for at, gradient in enumerate(grads)]
        groups = self._groups([variables[at] for at in shared])
        combining = self._combining_for(size)

        def host(arrays: list[Array]) -> list[Array]:
            named = [
                (f"{prefix}: gradient {group[0]} of {len(arrays)}", [arrays[at] for at in group]) for group in groups
            ]
            results = dict(
                zip((at for group in groups for at in group), _flatten(combining.combine(named)), strict=True)
            )
            return [results[at] for at in range(len(arrays))]

        for at, gradient in zip(shared, call_with_arrays(host, [grads[at] for at in shared]), strict=True):
            grads[at] = gradient
        return grads

    def _groups(self, variables: Sequence[Any]) -> list[list[int]]:
        """The indices of these variables, by group. A variable of no group has a group of its own."""
        count = len(variables)
        if self.group_count:
            group_size = -(-count // self.group_count)
            return [list(range(start, min(start + group_size, count))) for start in range(0, count, group_size)]
        if not self.groups:
            return [[at] for at in range(count)]
        indices = {id(variable): at for at, variable in enumerate(variables)}
        groups = [[indices[id(variable)] for variable in group if id(variable) in indices] for group in self.groups]  # type: ignore[union-attr]
        grouped = [at for group in groups for at in group]
        if len(set(grouped)) < len(grouped):
            raise UsageError("groups: expected each variable in one group; some are there twice")
        return [group for group in groups if group] + [[at] for at in range(count) if at not in grouped]


def dense(gradient: Any) -> Any:
    """A gradient of some rows of a table, which TensorFlow has, as one of the whole table. Others stay as they are."""
    if not hasattr(gradient, "dense_shape"):
        return gradient
    import tensorflow as tf

    return tf.convert_to_tensor(gradient)


def _flatten(groups: Sequence[Sequence[Array]]) -> list[Array]:
    return [array for group in groups for array in group]
