"""Bugs of the kernels, compiled without the cache."""

from __future__ import annotations

from .base import Mutation

_PACK = "omnireduce.kernels.nonzero_blocks"
_REDUCE = "omnireduce.kernels.reduce"
_MERGE = "omnireduce.kernels.merge_indices"
_RUNS = "omnireduce.kernels.index_runs"
_ROWS = "omnireduce.kernels.exchange_row_steps"
_ROW_TESTS = "tests/protocol/test_host_rows.py::"

MUTATIONS = (
    Mutation(
        "a -0 stays in place",
        _PACK,
        "ranks differ in the sign of a zero",
        "if (bits != 0 or not in_place) and",
        "if not in_place and",
    ),
    Mutation(
        "another target keeps its junk",
        _PACK,
        "zero blocks are not cleared out of place",
        "if (bits != 0 or not in_place) and",
        "if bits != 0 and",
    ),
    Mutation(
        "rows of other shards",
        _PACK,
        "a shard gets rows of another",
        "        shard = numbers[p] // stripe % shards\n",
        "        shard = (numbers[p] // stripe + 1) % shards\n",
    ),
    Mutation(
        "mean of those that contributed",
        _REDUCE,
        "ranks whose block is zero do not count",
        "        _divide(total, divisor)\n",
        "        _divide(total, present)\n",
    ),
    Mutation(
        "minimum of those that contributed",
        _REDUCE,
        "a block that is zero on a rank does not take part",
        "    elif present < ranks and op == MIN:\n",
        "    elif present < 0 and op == MIN:\n",
    ),
    Mutation(
        "product of those that contributed",
        _REDUCE,
        "a block that is zero on a rank does not take part",
        "    if op == PROD and present < ranks:\n",
        "    if op == PROD and present < 0:\n",
    ),
    Mutation(
        "sums in another order",
        _REDUCE,
        "sums depend on more than the ranks' values",
        "    for r in range(ranks):\n        offset = part[r]\n        if offset == ABSENT:\n",
        "    for r in range(ranks):\n        offset = part[ranks - 1 - r]\n        if offset == ABSENT:\n",
    ),
    Mutation(
        "a lone contributor is the next rank",
        _MERGE,
        "a rank keeps a block to which another contributed",
        "mark = last + 1\n",
        "mark = last + 2\n",
    ),
    Mutation(
        "indices may repeat",
        _MERGE,
        "a block may come twice in a message",
        "        if index <= previous or index >= high:\n",
        "        if index < previous or index >= high:\n",
    ),
    Mutation(
        "a run goes on in the stripes of others",
        _RUNS,
        "blocks of a dense tensor get the numbers of another shard",
        "            number += step + (shards - 1) * stripe_blocks\n",
        "            number += step\n",
    ),
    Mutation(
        "a run has blocks of several marks",
        _RUNS,
        "a rank keeps a block to which another contributed",
        "(index != expected and index != expected + gap)",
        "((index ^ expected) & NUMBER_MASK and index != expected + gap)",
    ),
    Mutation(
        "a step of any length",
        "omnireduce.kernels.index_steps",
        "a step may go on for ever, and bits of it are lost",
        "position == listed.size or shift == STEP_BYTES * BITS",
        "position == listed.size",
        test="tests/kernels/test_step_kernels.py::test_no_list_does_harm",
    ),
    Mutation(
        "numbers inside a host may repeat",
        _ROWS,
        "a rank lists a row twice",
        "            if number <= previous or",
        "            if number < previous or",
        test=_ROW_TESTS + "test_numbers_that_do_not_ascend_or_are_out_of_range",
    ),
    Mutation(
        "any number of rows inside a host",
        _ROWS,
        "a rank announces more rows than there are",
        'count > s["full_blocks"]',
        "count < 0",
        test=_ROW_TESTS + "test_a_count_that_cannot_be",
    ),
    Mutation(
        "rows inside a host are copied where one rank has them",
        _ROWS,
        "a mean that is not divided",
        'may_copy = s["op"] == SUM and s["storage"] < FLOAT16',
        'may_copy = s["storage"] < FLOAT16',
        test=_ROW_TESTS + "test_allreduce_rows[float32-mean]",
    ),
)
