"""Ranks of one host combine a tensor in shared memory: one step of one rank at a time.

Each rank owns a region of memory, which it alone writes and all ranks of the host read. A tensor is cut into chunks, a
chunk into as many parts as there are ranks. Part p is combined by rank p. A rank takes three steps with each chunk:

    stage    copy my non-zero blocks of the other ranks' parts into my region, with their numbers
    combine  add what the others staged for my part to my own blocks, into my tensor and into my region
    collect  take the other parts' results from their regions into my tensor

After each step the rank publishes how many chunks it has come to in all collectives so far. These counters only grow.
A rank takes a step as soon as the others' counters allow it. So several chunks are under way at once, each in a slot of
the regions. Nothing is locked, and a rank that dies leaves nothing to clean up.

With several hosts a stripe has as many blocks as a chunk, and all of it is the part of the rank that sends it to its
shard. Then that rank takes two steps, and between them the shard adds what the other hosts have. What is shown has
slots of its own, so that the host goes on to sum while the shards work:

    combine  add what the others staged to my own blocks, into my tensor
    show     once the sum of all hosts is in my tensor, copy it to my region

Each rank has other rows of a sparse matrix. Rows take two steps each. On one host every rank needs all rows.

    stage    first the numbers of my rows, a slot full at a time; then my rows of the next chunk of the union
    combine  first copy and check the others' numbers; then add all ranks' rows of a chunk, into my result

Between the two each rank lists the union of the numbers. From then on all know which rows lie in whose slots, and how
large the result is. With several hosts the ranks of a host do that twice: first with the rows that they bring, then
with those that shards have returned. Before the second time a rank waits for its shards: it may not begin.

`regions` says where that memory has what; `chunk` and `rows` have the work of a step.
"""

from __future__ import annotations

from omnireduce.core.dtypes import Array
from omnireduce.kernels.chunk import collect_part, combine_part, show_part, stage_part
from omnireduce.kernels.compiling.jit import entry, inner, kernel, spliced
from omnireduce.kernels.exchange_row_steps import (
    count_rows,
    list_union,
    merge_rows,
    stage_numbers,
    stage_rows,
    take_numbers,
)
from omnireduce.kernels.instructions import give_way, publish
from omnireduce.kernels.regions import (
    BEGUN,
    BEGUN_AT,
    COLLECTED,
    COMBINED,
    DESCRIPTOR_WORDS,
    DESCRIPTORS,
    STAGED,
    SUMMED,
    anybody_sleeps,
    has_arrived,
    is_tail,
    lowest,
    part_of,
    slot_of,
)

YIELD_EVERY = 8  # fruitless looks between two offers of the processor to others
# What a step did; from DONE on, that the caller has something to do. UNION_LISTED: more rows of it.
WAITS, BEGAN, AGREED, COLLECTED_ONE, COMBINED_ONE, STAGED_ONE, UNION_LISTED, SHOWN_ONE = range(8)
DONE, DIFFERS, BROKEN, NEEDS_WAKE, NEEDS_MEMORY = range(8, 13)


@inner
def _note_last_rank(state: Array, ints: Array) -> None:
    s = state[0]
    first = last = ints[BEGUN_AT + s["number"] % 2]
    for rank in range(s["ranks"]):
        began_at = ints[rank * s["region_words"] + BEGUN_AT + s["number"] % 2]
        first = min(first, began_at)
        if began_at > last:
            last, s["last"] = began_at, rank
    s["late_ns"] = last - first


@inner
def _agree(state: Array, ints: Array) -> int:
    """Compare the descriptors of all ranks; all have begun."""
    s = state[0]
    offset = DESCRIPTORS + s["number"] % 2 * DESCRIPTOR_WORDS
    own_descriptor = s["me"] * s["region_words"] + offset
    words = 1 + (ints[own_descriptor] + 7) // 8
    for rank in range(s["ranks"]):
        other_descriptor = rank * s["region_words"] + offset
        for k in range(words):
            if ints[other_descriptor + k] != ints[own_descriptor + k]:
                s["culprit"] = rank
                return DIFFERS
    s["has_agreed"] = 1
    _note_last_rank(state, ints)
    return AGREED


@inner
def _has_to_show(state: Array, ints: Array) -> bool:
    """Whether the sum of all hosts is there of what this rank shows next, and a slot is free."""
    s = state[0]
    chunk = s["combined"]
    if not s["shards"] or chunk == s["summed"] or not has_arrived(state, chunk):
        return False
    return bool(lowest(ints, state, COLLECTED) > s["base"] + chunk - s["slots"])


@inner
def _has_free_slot(state: Array, ints: Array) -> bool:
    """Whether nobody needs any more what this rank has staged where the next chunk goes."""
    s = state[0]
    oldest = s["staged"] - s["slots"]
    if s["shards"]:  # who combines puts the sum there, too
        return bool(s["summed"] > oldest and lowest(ints, state, SUMMED) > s["base"] + oldest)
    return bool(lowest(ints, state, COLLECTED) > s["base"] + oldest)


@kernel
def next_step(state: Array, ints: Array) -> int:
    """The step that the others' counters allow now, and that helps them most. WAITS: none; DONE: all are taken."""
    s = state[0]
    base = s["base"]
    if not s["has_begun"]:
        return BEGAN if s["may_begin"] else WAITS
    if s["has_agreed"]:
        chunk = s["collected"]
        if s["wants_room"]:
            return NEEDS_MEMORY
        if chunk == s["chunks"]:
            return UNION_LISTED if s["is_listing"] else DONE
        if chunk < s["combined"] and lowest(ints, state, COMBINED) > base + chunk:
            return COLLECTED_ONE
        chunk = s["summed"] if s["shards"] else s["combined"]
        if _has_to_show(state, ints):
            return SHOWN_ONE
        if chunk < s["staged"] and lowest(ints, state, STAGED) > base + chunk:
            return COMBINED_ONE
    if s["staged"] < s["chunks"] and _has_free_slot(state, ints):
        return STAGED_ONE
    if not s["has_agreed"] and lowest(ints, state, BEGUN) > s["number"]:
        return AGREED
    return WAITS


@spliced
def _stage(state: Array, ints: Array, words: Array, source: Array, target: Array, origin: int, chunk: int) -> None:
    """Stage the parts of all other ranks of a chunk."""
    s = state[0]
    at = slot_of(state, s["me"], chunk)
    for rank in range(s["ranks"]):
        if rank == s["me"]:
            continue
        count = 0
        if not s["silent"]:
            first, start, stop = part_of(state, chunk, rank)
            count = stage_part(state, ints, words, source, target, origin, start, stop, at, start - first)
        ints[at + rank] = count
        s["staged_blocks"] += count


@spliced
def _collect(state: Array, ints: Array, words: Array, target: Array, origin: int, chunk: int) -> bool:
    """Collect the parts of all other ranks of a chunk. Returns whether their regions are in order."""
    s = state[0]
    for rank in range(s["ranks"]):
        if rank != s["me"]:
            count = collect_part(state, ints, words, target, origin, chunk, rank)
            if count < 0:
                s["culprit"] = rank
                return False
            s["collected_blocks"] += count
    return True


@spliced
def _combine(
    state: Array, ints: Array, words: Array, source: Array, target: Array, origin: int, chunk: int, positions: Array,
    plan: Array, marked: Array, notes: Array, scratch: Array, bits: Array,
) -> bool:  # fmt: skip
    """Combine this rank's part of a chunk. Returns whether the others' regions are in order."""
    s = state[0]
    count = combine_part(
        state, ints, words, source, target, origin, chunk, positions, plan, marked, notes, scratch, bits
    )
    if count < 0:
        s["culprit"] = -1 - count
        return False
    s["result_blocks"] += count
    _, start, stop = part_of(state, chunk, s["me"])
    if stop > start:
        s["is_dense"] = 2 * count > stop - start
    return True


@spliced
def _take_step(
    state: Array, ints: Array, words: Array, source: Array, target: Array, origin: int, outcome: int, chunk: int,
    positions: Array, plan: Array, marked: Array, notes: Array, scratch: Array, bits: Array,
) -> bool:  # fmt: skip
    """Take the step `outcome` with a chunk. Returns whether the others' regions are in order."""
    s = state[0]
    if outcome == COLLECTED_ONE:
        return _collect(state, ints, words, target, origin, chunk)
    if outcome == COMBINED_ONE:
        return _combine(
            state, ints, words, source, target, origin, chunk, positions, plan, marked, notes, scratch, bits
        )
    if outcome == SHOWN_ONE:
        s["shown_blocks"] += show_part(state, ints, words, target, origin, chunk, notes)
        return True
    _stage(state, ints, words, source, target, origin, chunk)
    return True


@inner
def _chunk_and_counter(state: Array, outcome: int) -> tuple[int, int]:
    """The chunk that the step `outcome` is about, and the counter that says it is taken."""
    s = state[0]
    if outcome == STAGED_ONE:
        return s["staged"], STAGED
    if outcome == COLLECTED_ONE:
        return s["collected"], COLLECTED
    if outcome == COMBINED_ONE and s["shards"]:
        return s["summed"], SUMMED
    return s["combined"], COMBINED


@inner
def _set_count(state: Array, counter_word: int, chunks: int) -> None:
    """Set the number of chunks that have taken the step `counter_word`."""
    s = state[0]
    if counter_word == STAGED:
        s["staged"] = chunks
    elif counter_word == COLLECTED:
        s["collected"] = chunks
    elif counter_word == SUMMED:
        s["summed"] = chunks
    else:
        s["combined"] = chunks


@spliced
def step(
    state: Array, ints: Array, words: Array, source: Array, source_tail: Array, target: Array, target_tail: Array,
    positions: Array, plan: Array, marked: Array, notes: Array, scratch: Array, bits: Array,
) -> int:  # fmt: skip
    """Take one step, if the others' counters allow one. Returns which it was, or DIFFERS or BROKEN and the `culprit`.

    `ints`, `words`: the regions of all ranks, (ranks × region words,), as int64 and uint64. `source`, `target`: uint64
    (full blocks, words per block), and the short last block of each, filled up with zeros, (0 or 1, words per block);
    the same memory if the collective is `in_place`. `notes`: with several hosts, uint8 (blocks,), zeros at first, and
    what is known of each block, as in `chunk`. The others are work space: `positions`, `plan` and `marked`, int64 (3,
    ranks), (BATCH, 1 + ranks) and (BATCH,); `scratch`, float32 (2, elements per block), and `bits`, the same memory as
    uint32.
    """
    s = state[0]
    own_region = s["me"] * s["region_words"]
    outcome = next_step(state, ints)
    if outcome in (WAITS, DONE):
        return outcome
    if outcome == BEGAN:
        s["has_begun"] = 1
        publish(ints, own_region + BEGUN, s["number"] + 1)
        return outcome
    if outcome == AGREED:
        return _agree(state, ints)
    chunk, counter_word = _chunk_and_counter(state, outcome)
    origin = 0
    if is_tail(state, chunk):
        source, target, origin = source_tail, target_tail, s["full_blocks"]
    is_fine = _take_step(
        state, ints, words, source, target, origin, outcome, chunk, positions, plan, marked, notes, scratch, bits
    )  # fmt: skip
    if not is_fine:
        return BROKEN
    _set_count(state, counter_word, chunk + 1)
    publish(ints, own_region + counter_word, s["base"] + chunk + 1)
    return outcome


@inner
def _agree_on_rows(state: Array, ints: Array, numbers: Array, lists: Array) -> int:
    outcome = _agree(state, ints)
    wrong = count_rows(state, ints, numbers, lists) if outcome == AGREED else -1
    if wrong >= 0:
        state[0]["culprit"] = wrong
        return BROKEN
    return outcome


@inner
def _combine_rows(
    state: Array, ints: Array, words: Array, numbers: Array, lists: Array, listed: Array, union: Array, rows: Array,
    result: Array, plan: Array, scratch: Array, bits: Array,
) -> int:  # fmt: skip
    """Take the others' numbers of a chunk, or all ranks' rows."""
    s = state[0]
    own_region, chunk = s["me"] * s["region_words"], s["combined"]
    if chunk < s["number_chunks"]:
        wrong = take_numbers(state, ints, numbers, chunk, lists, listed)
        if wrong >= 0:
            s["culprit"] = wrong
            return BROKEN
    else:
        merge_rows(state, words, lists, listed, union, rows, result, chunk, plan, scratch, bits)
    s["summed"] = s["combined"] = s["collected"] = chunk + 1
    for counter_word in (SUMMED, COMBINED, COLLECTED):
        publish(ints, own_region + counter_word, s["base"] + chunk + 1)
    return COMBINED_ONE


@inner
def step_with_rows(
    state: Array, ints: Array, words: Array, numbers: Array, lists: Array, listed: Array, union: Array, rows: Array,
    result: Array, plan: Array, scratch: Array, bits: Array,
) -> int:  # fmt: skip
    """`step` of a collective of rows: `numbers`, int64 (n,), ascending, and `rows`; the other arrays as in `rows`.
    NEEDS_MEMORY: there is no room for `listed` and `union`, or, once the union is listed, for `result`."""
    s = state[0]
    own_region = s["me"] * s["region_words"]
    outcome = next_step(state, ints)
    if outcome == BEGAN:
        s["has_begun"] = 1
        publish(ints, own_region + BEGUN, s["number"] + 1)
    elif outcome == AGREED:
        return _agree_on_rows(state, ints, numbers, lists)
    elif outcome == UNION_LISTED:
        list_union(state, lists, listed, union)
    elif outcome == COMBINED_ONE:
        return _combine_rows(state, ints, words, numbers, lists, listed, union, rows, result, plan, scratch, bits)
    elif outcome == STAGED_ONE:
        chunk = s["staged"]
        if chunk < s["number_chunks"]:
            stage_numbers(state, ints, numbers, chunk)
        else:
            stage_rows(state, words, lists, listed, union, rows, chunk)
        s["staged"] = chunk + 1
        publish(ints, own_region + STAGED, s["base"] + chunk + 1)
    return outcome


@kernel
def await_step(state: Array, ints: Array, looks: int) -> bool:
    """Look up to `looks` times whether the others' counters allow a step; return whether they do."""
    for look in range(looks):
        if next_step(state, ints) != WAITS:
            return True
        if look % YIELD_EVERY == YIELD_EVERY - 1:
            give_way()
    return False


@entry
def run(
    state: Array, ints: Array, words: Array, source: Array, source_tail: Array, target: Array, target_tail: Array,
    positions: Array, plan: Array, marked: Array, notes: Array, scratch: Array, bits: Array, woken: Array, steps: int,
    looks: int,
) -> int:  # fmt: skip
    """Take up to `steps` steps, until all are taken. Return earlier after `looks` looks in turn that allowed none, and
    with NEEDS_WAKE when another rank sleeps, and its number in `woken`, int64 (ranks,), is not the one of this sleep.

    Returns what the last step did.
    """
    fruitless, outcome = 0, WAITS
    while steps > 0:
        outcome = step(
            state, ints, words, source, source_tail, target, target_tail, positions, plan, marked, notes, scratch, bits
        )
        if outcome == WAITS:
            fruitless += 1
            if fruitless >= looks:
                return outcome
            if fruitless % YIELD_EVERY == 0:
                give_way()
            continue
        if outcome >= DONE:
            return outcome
        state[0]["taken"] += 1
        if anybody_sleeps(state, ints, woken):
            return NEEDS_WAKE
        fruitless, steps = 0, steps - 1
    return outcome


@entry
def run_with_rows(
    state: Array, ints: Array, words: Array, numbers: Array, lists: Array, listed: Array, union: Array, rows: Array,
    result: Array, plan: Array, scratch: Array, bits: Array, woken: Array, steps: int, looks: int,
) -> int:  # fmt: skip
    """`run` of a collective of rows; see `step_with_rows`."""
    outcome = WAITS
    while steps > 0:
        if not await_step(state, ints, looks):
            return WAITS
        outcome = step_with_rows(state, ints, words, numbers, lists, listed, union, rows, result, plan, scratch, bits)
        if outcome >= DONE:
            return outcome
        state[0]["taken"] += 1
        if anybody_sleeps(state, ints, woken):
            return NEEDS_WAKE
        steps -= 1
    return outcome
