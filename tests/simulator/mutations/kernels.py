"""Bugs of the kernels, compiled without the cache."""

from __future__ import annotations

from .base import Mutation

_PACK = "omnireduce.kernels.pack"
_REDUCE = "omnireduce.kernels.reduce"
_MERGE = "omnireduce.kernels.merge"
_RUNS = "omnireduce.kernels.runs"

MUTATIONS = (
    Mutation(
        "a -0 stays in place",
        _PACK,
        "ranks differ in the sign of a zero",
        "elif bits != 0 or not in_place:",
        "elif not in_place:",
    ),
    Mutation(
        "another target keeps its junk",
        _PACK,
        "zero blocks are not cleared out of place",
        "elif bits != 0 or not in_place:",
        "elif bits != 0:",
    ),
    Mutation(
        "rows of other shards",
        _PACK,
        "every shard gets every row",
        "if number // stripe % shards == shard:",
        "if number // stripe % shards >= 0:",
    ),
    Mutation(
        "mean of those that contributed",
        _REDUCE,
        "ranks whose block is zero do not count",
        "            total[i] /= ranks\n",
        "            total[i] /= present\n",
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
        "    for r in range(ranks):\n        at = part[r]\n        if at == ABSENT:\n",
        "    for r in range(ranks):\n        at = part[ranks - 1 - r]\n        if at == ABSENT:\n",
    ),
    Mutation(
        "a lone contributor is the next rank",
        _MERGE,
        "a rank keeps a block to which another contributed",
        "sole = last + 1 if",
        "sole = last + 2 if",
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
        "((index ^ expected) & NUMBER and index != expected + gap)",
    ),
)
