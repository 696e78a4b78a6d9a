"""Parts of a shard that record their work. In a traced job they take the place of the plain parts."""

from __future__ import annotations

import selectors
from collections.abc import Sequence
from functools import partial
from typing import Any

from omnireduce.core.wire.control import Hello
from omnireduce.protocol.collective.reduction import Reduction
from omnireduce.runtime.tracing.links import traced_links
from omnireduce.runtime.tracing.trace import Origin, Recorder, SpanKind, now
from omnireduce.support.config import Trace
from omnireduce.transport.base import Link


class TracedReduction(Reduction):
    """A reduction that records its merges."""

    def __init__(self, recorder: Recorder, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._recorder = recorder

    def merge(self, slot: int, work_limit: int) -> int:
        start, written_before = now(), self.written
        work = super().merge(slot, work_limit)
        if work:
            self._recorder.add(SpanKind.MERGE, start, now(), detail=self.written - written_before)
        return work


class TracedSelector(selectors.EpollSelector):
    """A selector that records the waits of a shard, for all of its jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.recorders: list[Recorder] = []

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        start = now()
        ready = super().select(timeout)
        end = now()
        for recorder in self.recorders:
            recorder.add(SpanKind.WAIT, start, end)
        return ready


class JobTrace:
    """The recorder of one job on a shard, and the parts that use it."""

    def __init__(self, recorder: Recorder, selector: TracedSelector) -> None:
        self._recorder, self._selector = recorder, selector
        selector.recorders.append(recorder)
        self.reduction = partial(TracedReduction, recorder)

    def links(self, links: Sequence[Link]) -> list[Link]:
        """The links of all ranks, in order, each with the recorder."""
        return traced_links(links, self._recorder)

    def __enter__(self) -> JobTrace:
        return self

    def __exit__(self, *_: object) -> None:
        """Write nothing if the job could not be made."""
        self._selector.recorders.remove(self._recorder)
        self._recorder.discard()

    def close(self) -> None:
        """Write the trace."""
        self._selector.recorders.remove(self._recorder)
        self._recorder.write()


class ShardTraces:
    """Makes the traces of all jobs on one shard, which has to wait with `selector`."""

    def __init__(self, settings: Trace) -> None:
        self._settings, self.selector = settings, TracedSelector()

    def begin(self, job: str, hello: Hello) -> JobTrace:
        """Begin to record a job; `hello`: the hello of one of its ranks."""
        origin = Origin(job=job, kind="shard", number=hello.shard, ranks=hello.world_size, shards=hello.shards)
        return JobTrace(Recorder(self._settings, origin), self.selector)
