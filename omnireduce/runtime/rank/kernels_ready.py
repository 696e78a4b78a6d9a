"""Kernels of a rank: which of them it makes ready before it joins, and which when a collective first needs them.

A job whose aggregator rank 0 has started is on one host, and its ranks exchange tensors only in memory. There the
kernels that only some collectives need are made ready when the first of those starts. The other ranks may wait
meanwhile, so the rank says in its region that it compiles: that time does not count towards their time limit. In other
jobs nobody could say so to other hosts, and everything is made ready before the rank joins.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress

from omnireduce.core.descriptor import Descriptor
from omnireduce.errors import OmniReduceError
from omnireduce.kernels.compiling.claims import Kernel, are_kept
from omnireduce.kernels.compiling.jit import kernel_files
from omnireduce.kernels.warm import (
    Progress,
    aggregator_kernels,
    first_kernels,
    make_ready,
    progress_text,
    reducer_kernel,
    row_kernels,
    take_trouble,
    worker_kernels,
)
from omnireduce.protocol.host.exchange import HostExchange
from omnireduce.protocol.host.exchange_state import storage_of
from omnireduce.runtime.rank.joining import memory_key
from omnireduce.support.config import Config
from omnireduce.support.logs import BoundLog, tagged
from omnireduce.support.progress import Throttle, Ticker

SIGN_S = 0.5  # between two signs that a rank compiles; at least four within the time limit of the others


def progress_of(rank: int, log: BoundLog) -> Progress:
    """The function that reports, on rank 0, how far the kernels are compiled. It logs warnings, because a program
    without a set-up of logs shows nothing below this level."""

    def say(done_s: float, total_s: float) -> None:
        if rank == 0:
            text = progress_text(done_s, total_s)
            log.warning("%s", text, extra=tagged("compiling", done_s=round(done_s, 1), total_s=round(total_s, 1)))

    return Throttle(say)


def aggregator_sums(config: Config, size: int) -> bool:
    """Whether the aggregator that rank 0 starts for a job of `size` has to be able to sum: for the job itself, or for a
    group of it, if then nobody else could compile the kernels for it."""
    return not only_in_memory(config, size) or kernel_files().folder is None


def only_in_memory(config: Config, size: int) -> bool:
    """Whether the ranks of a job on one host exchange tensors only in memory, and the aggregator sums nothing."""
    shares = config.transport.host_exchange != "off" and not config.protocol.state_bytes
    return size > 1 and shares and bool(memory_key())


def needed_at_first(config: Config, size: int, *, is_embedded: bool) -> list[Kernel]:
    """The kernels that a rank of a job of `size` makes ready before it joins. `is_embedded`: rank 0 has started the
    aggregator, or that of the job whose group this is."""
    in_memory = config.transport.host_exchange != "off"
    if not is_embedded:
        return worker_kernels(in_memory=in_memory)
    if only_in_memory(config, size):
        return first_kernels()
    kernels, others = worker_kernels(in_memory=in_memory), aggregator_kernels()
    if are_kept(others) or kernel_files().folder is None:
        return kernels
    return [*kernels, *others]  # the aggregator has compiled none: it loads these


class CompilingSigns:
    """Signs in the memory of a job and of its groups, while this rank compiles kernels: the ranks there that wait for
    this one do not count that time towards their time limit, `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._interval_s = min(SIGN_S, timeout_s / 4)
        self._exchanges = list[weakref.ref[HostExchange]]()

    def add_exchanges(self, exchanges: Sequence[HostExchange]) -> None:
        """From now on, sign in these exchanges as well."""
        living = [exchange for exchange in self._exchanges if exchange() is not None]
        self._exchanges = [*living, *map(weakref.ref, exchanges)]

    @contextmanager
    def signing(self) -> Iterator[None]:
        """Sign while the block runs."""
        self._sign()
        with Ticker(self._sign, self._interval_s):
            yield

    def _sign(self) -> None:
        for reference in self._exchanges:
            if (exchange := reference()) is not None:
                exchange.say_compiling(time.monotonic())


def make_kernels_ready(
    kernels: Sequence[Kernel], progress: Progress, signs: CompilingSigns, find_aggregators: Callable[[], None],
    tell_aggregators: Callable[[threading.Event], None],
) -> None:  # fmt: skip
    """Compile, or load, what this rank needs, and `find_aggregators` the other ranks of its host. If there is something
    to compile, both go on at the same time, and then `tell_aggregators` tells the aggregators, until the event is set.
    `signs` are for ranks of the job whose group this is. Raises what `find_aggregators` raises."""
    if are_kept(kernels):
        make_ready(kernels, progress)
        find_aggregators()
        return
    stop, search = threading.Event(), Future[None]()

    def find_and_tell() -> None:
        try:
            find_aggregators()
        except BaseException as error:
            search.set_exception(error)
            return
        search.set_result(None)
        with suppress(OmniReduceError):  # the join itself will raise it
            tell_aggregators(stop)

    def progress_or_end(done_s: float, total_s: float) -> None:
        progress(done_s, total_s)
        if search.done():
            search.result()

    threading.Thread(target=find_and_tell, name="omnireduce-meet", daemon=True).start()
    try:
        with signs.signing():
            make_ready(kernels, progress_or_end)
    finally:
        stop.set()
    search.result()


class KernelsOnDemand:
    """Makes ready what a collective needs in memory, before it begins."""

    def __init__(self, signs: CompilingSigns, progress: Progress) -> None:
        self._signs, self._progress = signs, progress
        self._ready = set[tuple[str, bool]]()  # element types, and whether for rows

    def __call__(self, descriptor: Descriptor) -> None:
        """Return once the kernels for such a collective are ready."""
        key = descriptor.element.name, descriptor.has_rows
        if key in self._ready or descriptor.refused:  # a refusal has no elements, and the other ranks wait for it
            return
        kernels = [reducer_kernel(storage_of(descriptor.element)), *(row_kernels() if descriptor.has_rows else [])]
        with self._signs.signing():
            make_ready(kernels, self._progress)
        self._ready.add(key)


def log_kernel_trouble(log: BoundLog, *, is_first: bool) -> None:
    """Log once what was wrong with the files of kernels, on the rank that is first on its host."""
    if (trouble := take_trouble()) and is_first:
        log.warning("%s", trouble, extra=tagged("kernels_not_kept"))
