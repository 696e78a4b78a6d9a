"""Random programs mean the same before and after random rewrites: in the interpreter, and on real ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from local_cluster import Daemon, configured, run_job
from random_programs import REWRITES, inputs_for, joined, own_parts, programs, results_of, rewritten

from omnireduce import Communicator
from omnireduce.core.dtypes import Array
from omnireduce.programs import Pipeline, runner

SEEDS = (1, 2)


def test_rewrites_change_no_result() -> None:
    """Bit for bit, in the interpreter, with parts that differ in size. Each rewrite was legal often: else this would
    prove nothing."""
    legal: Counter[str] = Counter()

    @settings(max_examples=200)
    @given(st.data(), programs(), st.integers(0, 99), st.integers(2, 4))
    def check(data: st.DataObject, pipeline: Pipeline, seed: int, ranks: int) -> None:
        before = results_of(pipeline, seed, ranks)
        after, done = rewritten(data.draw, pipeline)
        legal.update(done)
        results = results_of(after, seed, ranks)
        assert results.keys() == before.keys()
        for name in before:
            np.testing.assert_array_equal(
                results[name], before[name], err_msg=f"{name} after {done}\n{pipeline}\n{after}"
            )

    for _ in range(10):
        check()
        if all(legal[rewrite] >= 10 for rewrite in REWRITES):
            return
    raise AssertionError(f"rewrites that were legal: {legal}")


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Iterator[None]:
    """So that a pass takes several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "PIECE_BYTES", 64)
        yield


@settings(max_examples=12, phases=(Phase.explicit, Phase.reuse, Phase.generate))  # to shrink over real ranks takes long
@given(st.data(), st.lists(programs(), min_size=4, max_size=4))
def test_ranks_do_what_the_interpreter_says(daemon: Daemon, data: st.DataObject, pipelines: list[Pipeline]) -> None:
    """With compound stages, which the interpreter does not know, over an aggregator: four ranks, or two groups of two
    that send to each other. Twice with other values: the second run uses arrays of the first one."""
    afters = [rewritten(data.draw, pipeline)[0] for pipeline in pipelines]

    def run(comm: Communicator) -> list[dict[str, Array]]:
        found = []
        for each in afters:
            ranks = comm.size // each.groups
            given = (own_parts(inputs_for(each, seed, ranks), comm.rank % ranks) for seed in SEEDS)
            found += [each.run(comm, values) for values in given]
        return found

    outcomes = run_job(configured(daemon.addresses), 4, run)
    runs = [(*pair, seed) for pair in zip(pipelines, afters, strict=True) for seed in SEEDS]
    for at, (before, after, seed) in enumerate(runs):
        ranks = 4 // after.groups
        expected = results_of(before, seed, ranks)
        for name, output in zip(after.output_names, after.outputs, strict=True):
            first = (output.type.group or 0) * ranks
            result = joined([outcome[at][name] for outcome in outcomes[first : first + ranks]], output.type.layout)
            assert np.shape(result) == np.shape(expected[name])
            np.testing.assert_array_equal(result, expected[name], err_msg=f"{name}\n{before}\n{after}")
            assert sum(name in outcome[at] for outcome in outcomes) == (4 if output.type.group is None else ranks)
