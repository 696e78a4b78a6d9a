"""The exchange of one rank with the other ranks of its host, in memory that each of them writes and all read.

The step function is compiled (`kernels.exchange_steps`). This module keeps the collectives under way in order, and says
which ranks this rank waits for. It is pure: the memory is an array, and an effect wakes a sleeping rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from omnireduce.core.descriptor import REMEMBERED, Descriptor
from omnireduce.core.dtypes import Array
from omnireduce.core.status_messages import LISTED
from omnireduce.core.wire.control import Report
from omnireduce.kernels.chunk import BATCH
from omnireduce.kernels.exchange_steps import (
    BROKEN,
    DIFFERS,
    DONE,
    NEEDS_MEMORY,
    NEEDS_WAKE,
    WAITS,
    await_step,
    next_step,
    run,
    run_with_rows,
)
from omnireduce.kernels.regions import (
    ASLEEP,
    BEGUN,
    BEGUN_AT,
    COLLECTED,
    COMBINED,
    COMPILED,
    DESCRIPTOR_WORDS,
    DESCRIPTORS,
    LEFT,
    LINE,
    ROWS_AT,
    SLOTS,
    STAGED,
    STATE,
    SUMMED,
    anybody_left,
    anybody_sleeps,
    get_counter,
    set_counter,
)
from omnireduce.protocol.collective.collective import Collective
from omnireduce.protocol.collective.dense_operands import AGREEMENT, RowBlocks, TensorBlocks
from omnireduce.protocol.collective.effects import Wake
from omnireduce.protocol.collective.row_operands import RowSum
from omnireduce.protocol.host.exchange_state import Counts, Group, HostAccount, PassKind, preset
from omnireduce.protocol.host.faults import HostError, ShortageError, check_begun, encoded_at
from omnireduce.protocol.host.local_ranks import LocalRanks
from omnireduce.protocol.host.row_memory import HostRows

_NO_NOTES = np.zeros(0, np.uint8)


class MemoryPass(NamedTuple):
    """One pass of `blocks` through memory. `notes`: for a sum, the flags of each block, as in `HostSum`.
    `delayed_ranks`: the ranks, counted within the host, that have to wait for a shard before they begin."""

    collective: Collective
    blocks: TensorBlocks | RowBlocks
    kind: PassKind
    notes: Array = _NO_NOTES
    delayed_ranks: frozenset[int] = frozenset()


def passes_of(collective: Collective, ranks: int, hosts: int) -> list[MemoryPass]:
    """The passes of a collective through the memory of a host with `ranks` ranks. The job has `hosts` hosts."""
    blocks, host_sum = collective.operand.blocks, collective.host_sum
    if isinstance(host_sum, RowSum):
        layout, no_rows = host_sum.layout, host_sum.returned()
        delayed_ranks = frozenset(shard % ranks for shard in range(layout.shards) if layout.takes_part(shard))
        return [
            MemoryPass(collective, host_sum.blocks, "sums of rows"),
            MemoryPass(collective, no_rows, "returned rows", delayed_ranks=delayed_ranks),
        ]
    if host_sum is not None:
        return [MemoryPass(collective, blocks, "sum", host_sum.notes)]
    if hosts > 1:
        return [MemoryPass(collective, AGREEMENT, "agreement")]
    return [MemoryPass(collective, blocks, "rows" if isinstance(blocks, RowBlocks) else "tensor")]


def _lowest_of_others(counters: Array) -> Array:
    """For each rank, the lowest counter of the other ranks."""
    if counters.size < 2:
        return np.full(counters.size, np.iinfo(np.int64).max)
    lowest, second = np.sort(counters)[:2]
    lowest_others: Array = np.where(counters == lowest, second, lowest)
    return lowest_others


def ranks_delayed_by_shards(counters: Array, s: Any, number: int, delayed_ranks: Collection[int]) -> list[int]:
    """The other ranks that this rank may wait for in pass `number`, while shards owe them results. Arguments as in
    `late_ranks`."""
    behind = counters[:, BEGUN] <= number if delayed_ranks else counters[:, COMBINED] <= s["base"] + s["collected"]
    return [
        rank
        for rank in np.flatnonzero(behind).tolist()
        if rank != s["me"] and (not delayed_ranks or rank in delayed_ranks)
    ]


def late_ranks(counters: Array, s: Any, delayed_ranks: Collection[int]) -> list[int]:
    """The other ranks that could take a step and have not. `counters`: int64 (ranks, words), the beginning of each
    region; `s`: an element of STATE; `delayed_ranks`: ranks that have to wait for a shard before they begin."""
    begun, staged, combined, collected = (counters[:, counter] for counter in (BEGUN, STAGED, COMBINED, COLLECTED))
    has_begun = begun > s["number"]
    late = ~has_begun
    late[[rank for rank in delayed_ranks if combined[rank] >= s["base"]]] = False  # it has done the pass before
    staged, combined, collected = (column - s["base"] for column in (staged, combined, collected))
    # With several hosts compare the ranks' own sums, not results: a rank that waits for a shard is not late.
    summed = counters[:, SUMMED] - s["base"] if s["shards"] else combined
    free = np.minimum(summed, _lowest_of_others(summed)) if s["shards"] else _lowest_of_others(collected)
    could = has_begun & (staged < s["chunks"]) & (free > staged - s["slots"])
    if has_begun.all():
        could |= (summed < staged) & (_lowest_of_others(staged) > summed)
        could |= (collected < combined) & (_lowest_of_others(combined) > collected)
    return [rank for rank in np.flatnonzero(late | could).tolist() if rank != s["me"]]


PAGE = 4096
EXTRA_BYTES = 4096  # room in each slot for counts and padding: so a block that fits a slot of a link fits here, too
BY_ITSELF, RETIRED, FAILED = 1, 2, 3  # why a rank has left: its work is done, an aggregator has stopped, or a fault
_STATE_INDEX = {name: at for at, name in enumerate(STATE.names or ())}  # the index of each word of the state
_COUNTS = slice(_STATE_INDEX[Counts._fields[0]], _STATE_INDEX[Counts._fields[-1]] + 1)
STEPS, LOOKS = 16, 128  # limits for one call of the kernel: signals and other threads wait until it returns


def region_bytes(slots: int, slot_bytes: int, hosts: int = 1) -> int:
    """The size of one rank's region, in whole pages. With several hosts it also has slots for results of shards."""
    slots *= 1 if hosts == 1 else 2
    return (SLOTS * 8 + slots * (slot_bytes + EXTRA_BYTES) + PAGE - 1) // PAGE * PAGE


class HostExchange:
    """The exchange of one rank with the other ranks of its host. `me`: its number, counted within the host.

    `regions`: uint8 (ranks, region bytes), see `region_bytes`; this rank writes its own region, and reads the others.
    `names`: the names of the ranks, for errors and warnings. `local_ranks`: their ranks in the job; None if the job has
    no others. With several hosts the shards get the blocks below `summed_blocks`, and the caller reports their results
    with `results_arrived`. One turn takes up to `steps` steps. It also ends after `looks` looks at the counters of the
    other ranks that allowed no step.
    """

    def __init__(
        self,
        regions: Array,
        me: int,
        names: Sequence[str],
        slots: int,
        slot_bytes: int,
        local_ranks: LocalRanks | None = None,
        *,
        steps: int = STEPS,
        looks: int = LOOKS,
    ) -> None:
        ranks = len(regions)
        self.local_ranks = local_ranks or LocalRanks(tuple(range(ranks)))
        self._has_other_hosts = self.local_ranks.hosts > 1
        self._steps, self._looks = steps, looks
        self.names, self.me, self._ranks = names, me, ranks
        self._ints, self._words = regions.reshape(-1).view(np.int64), regions.reshape(-1).view(np.uint64)
        self._region_words, self._slot_words = regions.shape[1] // 8, (slot_bytes + EXTRA_BYTES) // 8
        self._group = Group(me, ranks, slots, self._region_words, self._slot_words, slot_bytes)
        self._preset = lru_cache(REMEMBERED)(partial(preset, self._group))
        self._state = np.zeros(1, STATE)
        self._state_words = self._state.view(np.int64)
        self._state_words[: len(self._group) - 1] = self._group[:-1]  # before any collective
        self._positions, self._marked = np.zeros((3, ranks), np.int64), np.zeros(BATCH, np.int64)
        self._plan = np.zeros((BATCH, 1 + ranks), np.int64)
        self._scratch, self._bits = np.zeros((2, 0), np.float32), np.zeros((2, 0), np.uint32)
        self._rows = HostRows(names)
        self._woken = np.zeros(ranks, np.int64)  # the number of the last sleep from which each rank was woken
        self._sleep = 0  # odd while this rank sleeps
        self._queue: deque[MemoryPass] = deque()
        self._begun_passes = self._begun_chunks = 0  # passes before the current pass, and their chunks
        self._taken_steps = 0  # steps in the current pass
        self._is_prepared = False  # the state is that of the first pass of the queue
        self._is_stopped = False
        # A rank that left for one of these reasons ends the job as soon as this rank waits for it.
        self.fatal_reasons = [BY_ITSELF]
        self.own_blocks = 0  # the non-zero blocks that this rank brought to tensors
        self.sent_bytes = self.received_bytes = 0  # bytes of blocks put into this rank's region, and taken from others
        self._account = HostAccount()
        self.moved_at = 0.0  # when a step was taken last

    # collectives

    @property
    def largest_block_bytes(self) -> int:
        """The size of the largest block that fits in one slot."""
        size: int = (self._slot_words - self._group.count_words - 2 * LINE) * 8
        return size

    @property
    def is_busy(self) -> bool:
        """A collective is under way."""
        return bool(self._queue)

    def submit(self, collective: Collective, now: float) -> int:
        """Queue a collective, which all ranks of the host queue in the same order. Returns how many passes it has."""
        if not self._queue:
            self.moved_at = now
        passes = passes_of(collective, self._ranks, self.local_ranks.hosts)
        self._queue.extend(passes)
        return len(passes)

    def report(self, now: float) -> Report:
        """The statistics of the collectives so far, and the ranks that this rank waits for."""
        late_s = self._account.late_s
        late = sorted(late_s, key=lambda rank: -late_s[rank])[:LISTED]
        awaited, numbers = self.awaited_ranks(), self.local_ranks.ranks
        collective = str(self.current) if awaited else ""
        return Report(
            **self._account.totals, sent_bytes=self.sent_bytes, received_bytes=self.received_bytes,
            late=[numbers[rank] for rank in late], late_s=[late_s[rank] for rank in late],
            what=collective, behind=[numbers[rank] for rank in awaited[:LISTED]], total=len(awaited),
            waited_s=max(0.0, now - self.moved_at) if awaited else 0.0,
        )  # fmt: skip

    def advance(self, now: float) -> Iterator[Collective | Wake]:
        """Take the steps that the counters of the other ranks allow, up to the limit of one turn. Yields a collective
        for each pass that is complete here, and ranks to wake.

        Raises MismatchError when the ranks have begun different collectives, HostError when a region is not in order,
        and ShortageError when there is no memory for rows.
        """
        while self._queue:
            memory_pass = self._queue[0]
            collective, blocks = memory_pass.collective, memory_pass.blocks
            if not self._is_prepared:
                self._ints[self.me * self._region_words + BEGUN_AT + self._begun_passes % 2] = int(now * 1e9)
                self._prepare(memory_pass)
            outcome = (
                self._run_with_rows(blocks) if isinstance(blocks, RowBlocks) else self._run(blocks, memory_pass.notes)
            )
            if (taken := int(self._state_words[_STATE_INDEX["taken"]])) != self._taken_steps:
                self._taken_steps, self.moved_at = taken, now
            if outcome == WAITS:
                return
            if outcome == NEEDS_WAKE:
                yield from self._wake_sleepers()
            elif outcome == DONE:
                self._finish(collective.descriptor)
                yield collective
                return  # one collective in a turn: other threads may wait for theirs
            elif outcome == DIFFERS:
                self._check_begun(collective)
            elif outcome == BROKEN:
                raise HostError(int(self._state[0]["culprit"]))
            elif outcome != NEEDS_MEMORY:
                return  # enough for one turn

    def _run(self, blocks: TensorBlocks, notes: Array) -> int:
        outcome: int = run(
            self._state, self._ints, self._words,
            source=blocks.source, source_tail=blocks.source_tail, target=blocks.target, target_tail=blocks.target_tail,
            positions=self._positions, plan=self._plan, marked=self._marked, notes=notes,
            scratch=self._scratch, bits=self._bits, woken=self._woken, steps=self._steps, looks=self._looks,
        )  # fmt: skip
        return outcome

    def _run_with_rows(self, blocks: RowBlocks) -> int:
        row_memory = self._rows
        outcome: int = run_with_rows(
            self._state, self._ints, self._words,
            numbers=blocks.numbers, lists=row_memory.lists, listed=row_memory.listed, union=row_memory.union,
            rows=blocks.rows if len(blocks.rows) else row_memory.result, result=row_memory.result,
            plan=self._plan, scratch=self._scratch, bits=self._bits,
            woken=self._woken, steps=self._steps, looks=self._looks,
        )  # fmt: skip
        if outcome == NEEDS_MEMORY:
            row_memory.make_room(self._state, blocks)
        return outcome

    def _prepare(self, memory_pass: MemoryPass) -> None:
        """Set the state for the first step, and put the descriptor into the region, where other ranks compare it."""
        collective, blocks = memory_pass.collective, memory_pass.blocks
        constant = self._preset(collective.descriptor, collective.operand.layout, memory_pass.kind)
        state, ints, row_count = self._state_words, self._ints, 0
        state[:] = constant.state
        state[_STATE_INDEX["number"]], state[_STATE_INDEX["base"]] = self._begun_passes, self._begun_chunks
        if isinstance(blocks, TensorBlocks):
            state[_STATE_INDEX["in_place"]], state[_STATE_INDEX["silent"]] = blocks.in_place, blocks.silent
        else:
            row_count = len(blocks.numbers)
        if collective.descriptor.element.is_narrow:
            self._make_scratch(collective.operand.layout.block_size)
        self._taken_steps = 0
        at = self._descriptor_at(self.me)
        ints[at : at + constant.encoded.size] = constant.encoded
        ints[at + ROWS_AT] = row_count
        self._is_prepared = True

    def _make_scratch(self, block_size: int) -> None:
        if self._scratch.shape[1] != block_size:
            self._scratch = np.zeros((2, block_size), np.float32)
            self._bits = self._scratch.view(np.uint32)

    def _descriptor_at(self, rank: int) -> int:
        at: int = rank * self._region_words + DESCRIPTORS + self._begun_passes % 2 * DESCRIPTOR_WORDS
        return at

    def _finish(self, descriptor: Descriptor) -> None:
        state, block_bytes = self._state_words, descriptor.block_bytes
        counts = Counts._make(state[_COUNTS].tolist())
        results = int(state[_STATE_INDEX["shown_blocks"]]) if self._has_other_hosts else counts.result_blocks
        # Each rank adds up all rows itself: it sends no sums
        results = 0 if state[_STATE_INDEX["number_chunks"]] else results
        self.own_blocks += counts.staged_blocks + counts.own_blocks
        self.sent_bytes += (counts.staged_blocks + results) * block_bytes
        self.received_bytes += counts.collected_blocks * block_bytes
        if not self._has_other_hosts:  # else the shards count
            self._account.count(counts, descriptor, says_who_is_late=self.me == 0)  # the first rank says it for all
        self._begun_chunks += int(state[_STATE_INDEX["chunks"]])
        self._begun_passes += 1
        self._queue.popleft()
        self._rows.clear()
        self._is_prepared = False

    # several hosts

    @property
    def current(self) -> Collective | None:
        """The collective that is exchanged now."""
        return self._queue[0].collective if self._queue else None

    @property
    def summed_blocks(self) -> int:
        """The block below which this rank's sums of the current collective are ready for the shards. -1 if rows are not
        summed yet, if an empty tensor has not passed its only chunk, and before the collective has begun."""
        s, memory_pass = self._state[0], self._queue[0]
        blocks = memory_pass.collective.operand.layout.blocks
        if isinstance(memory_pass.blocks, RowBlocks):
            return blocks if memory_pass.kind == "returned rows" else -1
        if self._is_prepared and s["summed"] == s["chunks"]:
            return blocks
        return int(min(s["summed"] * s["chunk_blocks"], s["full_blocks"])) if self._is_prepared and blocks else -1

    def results_arrived(self, blocks: int) -> None:
        """Shards have returned the sums of all hosts to this rank, for the current collective, up to block `blocks`.
        Raises ShortageError when there is no memory to put returned rows in order."""
        if not self._is_prepared:
            return
        self._state[0]["arrived"] = blocks
        memory_pass = self._queue[0]
        if not self._state[0]["may_begin"] and blocks == memory_pass.collective.operand.layout.blocks:
            self._begin_returned_rows(memory_pass)

    def _begin_returned_rows(self, memory_pass: MemoryPass) -> None:
        """All rows that the shards owe this rank have come: begin to hand them over to the other ranks."""
        assert isinstance(memory_pass.collective.host_sum, RowSum)
        try:
            returned = memory_pass.collective.host_sum.returned()
        except MemoryError as error:
            raise ShortageError("the rows that aggregators returned") from error
        self._queue[0] = memory_pass._replace(blocks=returned)
        self._ints[self._descriptor_at(self.me) + ROWS_AT] = len(returned.numbers)
        self._state[0]["may_begin"] = 1

    # waiting

    @property
    def can_go_on(self) -> bool:
        """Whether a step can be taken now."""
        if not self._queue or self._is_stopped:
            return False
        return not self._is_prepared or bool(next_step(self._state, self._ints) != WAITS)

    def await_step(self) -> bool:
        """Look for a moment whether a step can be taken; return whether it can. Other threads may use the processor
        meanwhile. If another thread submits or advances at the same time, the answer may be out of date."""
        if not self._queue or self._is_stopped:
            return False
        return not self._is_prepared or bool(await_step(self._state, self._ints, self._looks))

    def fall_asleep(self) -> bool:
        """Let other ranks wake this rank from now on, when they have moved. Returns False if a step can be taken."""
        self._sleep += 1 + self._sleep % 2
        self._publish(ASLEEP, self._sleep)
        if self.can_go_on or (not self._is_stopped and any(self.departed(reason) for reason in self.fatal_reasons)):
            self.wake_up()
            return False
        return True

    def stop(self) -> None:
        """Take no further step: the job is over, though the reason may not be known yet. If another rank has ended it,
        this rank says that it has left, too. So the others do not think that it is late."""
        self._is_stopped = True
        if self.has_failed:
            self._publish(LEFT, FAILED)

    def wake_up(self) -> None:
        """Tell the other ranks that this rank is awake."""
        if self._sleep % 2 and self._ints.size:
            self._sleep += 1
            self._publish(ASLEEP, self._sleep)

    def leave(self, reason: int = BY_ITSELF) -> Iterator[Wake]:
        """Tell the others that this rank takes no further step."""
        if self._ints.size:
            self._publish(LEFT, reason)
            yield from self._wake_sleepers()

    def departed(self, reason: int) -> list[int]:
        """The ranks whose next step this rank waits for, though they have left."""
        if not (self._is_prepared and anybody_left(self._state, self._ints)):
            return []
        departed = [rank for rank in range(self._ranks) if self._read(rank, LEFT) == reason]
        # Counters are read after `departed`: a rank takes no step after it has left.
        awaited, s = self.awaited_ranks(), self._state[0]
        # This rank also waits for a rank that left before it began or, with several hosts, before it passed results on.
        shown_chunks = s["base"] + s["chunks"] if s["shards"] else 0
        awaited += [
            rank
            for rank in departed
            if self._read(rank, BEGUN) <= s["number"] or self._read(rank, COMBINED) < shown_chunks
        ]
        return [rank for rank in departed if rank in awaited]

    @property
    def has_failed(self) -> bool:
        """A rank has ended the job because of a fault. The aggregator will tell the other ranks about it."""
        return any(self._read(rank, LEFT) == FAILED for rank in range(self._ranks) if self._is_prepared)

    def say_compiling(self, now: float) -> None:
        """Say that this rank compiles kernels, before it begins its next collective. Any thread may call this."""
        ints = self._ints
        if ints.size:
            set_counter(ints, self.me * self._region_words + COMPILED, int(now * 1e9))

    def compiled_at(self) -> float:
        """The last time when a rank that this rank waits for said that it compiles; 0: never. The other late ranks may
        wait for that rank themselves, in a group."""
        return max((self._read(rank, COMPILED) / 1e9 for rank in self.awaited_ranks()), default=0.0)

    def _read(self, rank: int, counter: int) -> int:
        return int(get_counter(self._ints, rank * self._region_words + counter))

    def _publish(self, counter: int, value: int) -> None:
        set_counter(self._ints, self.me * self._region_words + counter, value)

    def _wake_sleepers(self) -> Iterator[Wake]:
        """Wake the ranks that sleep, once for each sleep."""
        if not anybody_sleeps(self._state, self._ints, self._woken):
            return
        for rank in range(self._ranks):
            sleep = self._read(rank, ASLEEP)
            if sleep % 2 and rank != self.me and sleep != self._woken[rank]:
                self._woken[rank] = sleep
                yield Wake(rank)

    def awaited_ranks(self, *, except_departed: int | None = None) -> list[int]:
        """The other ranks that could take a step, but have not. It leaves out ranks that wait for others, and ranks
        that have left for the reason `except_departed`."""
        if not self._is_prepared:
            return []
        counters = self._counters
        late = late_ranks(counters, self._state[0], self._queue[0].delayed_ranks)
        return [rank for rank in late if counters[rank, LEFT] != except_departed]

    @property
    def _counters(self) -> Array:
        return self._ints.reshape(self._ranks, self._region_words)[:, :DESCRIPTORS].copy()

    def delayed_by_shards(self) -> list[int]:
        """The other ranks that this rank waits for, and that may wait for a shard themselves."""
        return ranks_delayed_by_shards(self._counters, self._state[0], self._begun_passes, self._queue[0].delayed_ranks)

    def close(self) -> None:
        """Release the memory; nothing is exchanged any more."""
        self._queue.clear()
        self._rows.clear()
        self._is_prepared = False
        self._ints, self._words = np.empty(0, np.int64), np.empty(0, np.uint64)

    def _check_begun(self, collective: Collective) -> None:
        """Compare the descriptors of all ranks. They may differ only if all ranks have refused their call."""
        encoded, s = [encoded_at(self._ints, self._descriptor_at(rank)) for rank in range(self._ranks)], self._state[0]
        check_begun(collective.number, encoded, int(s["culprit"]), self.local_ranks.ranks, self.names)
        s["has_agreed"] = 1
