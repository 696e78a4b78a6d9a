"""Pre- and postprocessors, which load tensors of jobs into packets and unload sums: SwitchML's interface, for classes
that users write.

A job is a series of packets. `batch` packets are under way at once: packet `p + batch` uses the memory of packet `p`.
Beside its entries a packet carries a small number, `extra_info`, of which all ranks get the largest. A class that needs
it before the first entries asks for an extra batch: its packets carry only `extra_info`, for those that follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from omnireduce.core.dtypes import Array


class JobSlice(NamedTuple):
    """The part of a job that one thread exchanges: `x` is read, the sums go to `out`. Both are flat, of float32 or
    int32, and may be the same memory."""

    x: Array
    out: Array


class PrePostProcessor(ABC):
    """A class of your own derives from this; `prepostprocessor = module:Class` in switchml.cfg names it.

    Each thread of a context has one. `num_workers`: the number of ranks whose entries are added; `packet_numel`: the
    entries of a packet; `max_batch`: the packets of a long job that are under way at once.

    Entries are int32 in the byte order of this machine. Their sums wrap. All ranks return the same numbers from
    `setup_job_slice` and `needs_extra_batch`.
    """

    def __init__(self, num_workers: int, packet_numel: int, max_batch: int) -> None:
        self.num_workers, self.packet_numel, self.max_batch = num_workers, packet_numel, max_batch

    @abstractmethod
    def setup_job_slice(self, job_slice: JobSlice) -> int:
        """Begin with a part of a job. Return how many packets it needs, the extra batch not counted."""

    @abstractmethod
    def needs_extra_batch(self) -> bool:
        """Whether a batch with `extra_info` alone goes first, so that all packets are numbered from that one on."""

    @abstractmethod
    def preprocess_single(self, packet: int, entries: Array, extra_info: Array) -> None:
        """Fill packet number `packet`: `entries`, int32 (packet_numel,), and `extra_info`, int16 (1,). Both
        still have what another packet has left there."""

    @abstractmethod
    def postprocess_single(self, packet: int, entries: Array, extra_info: Array) -> None:
        """Take the sums of `entries` of all ranks, and the largest `extra_info`. Packets may come in any order."""

    def cleanup_job_slice(self) -> None:  # noqa: B027  many have nothing to do
        """The part of the job is over."""


class Bypass(PrePostProcessor):
    """Moves packets, and touches neither their entries nor the tensors."""

    def setup_job_slice(self, job_slice: JobSlice) -> int:
        return -(-job_slice.x.size // self.packet_numel)

    def needs_extra_batch(self) -> bool:
        return False

    def preprocess_single(self, packet: int, entries: Array, extra_info: Array) -> None: ...

    def postprocess_single(self, packet: int, entries: Array, extra_info: Array) -> None: ...


class CpuExponentQuantizer(PrePostProcessor):
    """Sends floats as integers, scaled so that the sum of a packet's largest elements fits.

    `extra_info` is the exponent of the largest magnitude of a packet: all ranks scale by the largest one of all ranks,
    so it travels a batch ahead. A packet with an infinite or NaN element becomes NaN. int32 is sent as it is. After
    Sapio et al., "Scaling Distributed Machine Learning with In-Network Aggregation", NSDI 2021.
    """

    NOT_FINITE = np.iinfo(np.int16).max
    SMALLEST = -149  # of the exponents of float32

    def setup_job_slice(self, job_slice: JobSlice) -> int:
        self._slice, self._is_float = job_slice, job_slice.x.dtype == np.float32
        self._packets = -(-job_slice.x.size // self.packet_numel)
        self._packets_ahead = min(self.max_batch, self._packets) if self._is_float else 0
        self._scales = np.ones(self._packets)
        return self._packets

    def needs_extra_batch(self) -> bool:
        return bool(self._is_float)

    def preprocess_single(self, packet: int, entries: Array, extra_info: Array) -> None:
        number = packet - self._packets_ahead
        if number >= 0:
            part = self._part(self._slice.x, number)
            scaled = np.rint(part * self._scales[number]) if self._is_float else part
            entries[: part.size] = np.nan_to_num(scaled)
        if self._is_float and packet < self._packets:
            extra_info[0] = self._exponent(self._part(self._slice.x, packet))

    def postprocess_single(self, packet: int, entries: Array, extra_info: Array) -> None:
        number = packet - self._packets_ahead
        if number >= 0:
            part = self._part(self._slice.out, number)
            with np.errstate(over="ignore"):  # infinity says it
                part[:] = entries[: part.size] / self._scales[number] if self._is_float else entries[: part.size]
        if self._is_float and packet < self._packets:
            exponent = int(extra_info[0])
            limit = np.iinfo(np.int32).max - self.num_workers  # each rank may round up
            self._scales[packet] = np.nan if exponent == self.NOT_FINITE else limit / (self.num_workers * 2.0**exponent)

    def _part(self, tensor: Array, number: int) -> Array:
        return tensor[number * self.packet_numel : (number + 1) * self.packet_numel]

    def _exponent(self, part: Array) -> int:
        largest = float(np.abs(part).max())
        if not np.isfinite(largest):
            return self.NOT_FINITE
        return int(np.frexp(largest)[1]) if largest else self.SMALLEST


BUILT_IN: Mapping[str, type[PrePostProcessor]] = {"cpu_exponent_quantizer": CpuExponentQuantizer, "bypass": Bypass}
