"""The simulator finds bugs. `make mutations` hunts all of them; here are a few that take seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from .mutate import BY_NAME, MUTATIONS, Mutation, MutationError, hunt, install, misfits, mutated
from .mutations import admission, aggregator, coding, hosts, joining, kernels, relays, runtime, worker

FEW = (
    "worker returns a credit before it reads",
    "worker finishes out of order",
    "the short last block is not stored",
    "shard returns a slot that it still reads",
    "a rank that went still counts",
    "ranks in the order of their arrival",
    "windows of a message may overlap",
)


def test_every_mutation_fits_the_product() -> None:
    assert list(misfits()) == []
    assert len(BY_NAME) == len(MUTATIONS)


def test_the_documentation_counts_them() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    table = text.partition("| part | mutations |")[2].partition("\n\n")[0]
    results = [int(row.split("|")[2]) for row in table.splitlines()[2:]]
    parts = (worker, aggregator, coding, kernels, hosts, admission, runtime, joining, relays)
    assert results == [len(part.MUTATIONS) for part in parts]


@pytest.mark.parametrize("name", FEW)
def test_the_simulator_catches(name: str) -> None:
    result = hunt(BY_NAME[name])
    assert result.caught_by, result
    assert result.verdict


def test_a_mutation_that_breaks_nothing_is_not_caught() -> None:
    harmless = Mutation(
        "harmless", "omnireduce.core.blocks_and_stripes", "nothing", "        return self.elements // self.block_size",
        "        return self.elements // int(self.block_size)", within=3,
    )  # fmt: skip
    result = hunt(harmless)
    assert not result.caught_by, result


def test_a_test_that_cannot_run_catches_nothing() -> None:
    result = hunt(replace(BY_NAME["windows of a message may overlap"], test="tests/protocol/test_no_such.py"))
    assert not result.caught_by, result


def test_a_mutation_that_does_not_fit_says_so() -> None:
    with pytest.raises(MutationError, match="has its snippet 0 times"):
        mutated(Mutation("x", "omnireduce.core.blocks_and_stripes", "nothing", "not there", ""), "source")


def test_a_mutation_that_comes_too_late_says_so() -> None:
    with pytest.raises(MutationError, match="is imported already"):
        install(BY_NAME[FEW[0]])
