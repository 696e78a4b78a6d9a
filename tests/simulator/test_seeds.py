"""Many small clusters, each a function of its seed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import click
import pytest

from .campaign import Task, report, run_all
from .cluster import Cluster
from .draw import (
    FIRST_OF_HOSTS,
    FIRST_OF_PROGRAMS,
    FIRST_OF_REFUSALS,
    FIRST_OF_RELAYS,
    FIRST_OF_SEVERAL,
    draw_plan,
    fault_at,
)
from .faults import FROM_THE_START
from .plan import KINDS

ROOT = Path(__file__).resolve().parent.parent.parent
SEEDS, NEW_SEEDS = 120, 60  # `make simulate` runs thousands
PLANS = 400
CHUNKS = 4
ONCE_WRONG = {  # by the product or by a verdict, found long after the others
    900181: "a rank that was stopped believed that what it read had just come",
    2001075: "a lone rank gave a false number and blamed the shard for the result",
    2001924: "the same, with one shard",
    3003712: "many slow messages took longer than the limit, and nobody was to blame",
    293939115: "the same with many small results of a slow shard",
    90130745: "a shard that stood still heard of a rank that had given up only that it was gone",
    80004395: "a rank was left behind by a generation that took longer than its time to join",
    210022600: "a rank was left behind by a generation that had done all its work before its time to join was over",
    210027481: "the same, where two more attempts found nobody either",
    310109354: "a shard's clock jumped over the moment in which it told a rank why the job ended",
    210048842: "two launches, a stranger and a job that gathered again were more than a shard admits",
    96003064: "a rank was killed whose only connection had broken before, so nobody heard of it at once",
    96012112: "many short spans of slow processes took longer than the limit",
    96014309: "a formation started beside its last generation in the room of a job that gathered",
    97209456: "a shard told the same lie twice in one result, which made it true",
    97225737: "a rank formed its job anew before anybody else noticed that its connection was lost",
    97245265: "a rank sent its last message twice, and left before the second one came",
    524: "a link had two rules to break, and broke the second one twice",
    2575: "the same with a stray message",
    98229067: "a clock jumped by all the time that was left to prove the secret",
    98230219: "a rank announced a slot again that it had filled anew, and so passed over blocks of its own",
    98238794: "three jobs of many small messages had more events than a run may have",
    98257193: "a shard told two ranks the same lie in one memory, which made it true",
    98276950: "the same in another job",
    98296115: "a slow network brought a rank the end of a connection before the reason",
    FIRST_OF_HOSTS + 1008: "an aggregator stopped, and ranks waited in memory for one that had not begun",
    FIRST_OF_HOSTS + 5834: "the same, where it had not come to where the ranks meet",
    FIRST_OF_HOSTS + 9216: "a rank blamed one that waited itself, and had ended the job already",
    FIRST_OF_SEVERAL + 3189: "ranks that send no sums were ahead of those that do, and of a shard",
    97060384: "many short spans of four ranks took longer than the limit, behind as many of the collective before",
    88010929: "the same, and so few of them had a result that all seemed to wait for one rank",
    156700767: "the same, in a later attempt of a job in which a rank had been frozen",
    91000850: "a connection broke before the hello, and a clock jumped over all the time that was left",
    91077439: "the same, long after another fault",
    91083647: "the same, of a rank that formed no job anew",
    91086564: "the same, with a stranger",
    FIRST_OF_HOSTS + 208381: "ranks differed, one had said so, and the others blamed themselves for a shard that froze",
    FIRST_OF_HOSTS + 217397: "the same, in an elastic job",
    FIRST_OF_HOSTS + 213185: "a rank was killed while its job went on in memory beside a shard that was draining",
    FIRST_OF_HOSTS + 227446: "ranks came back that had waited in vain for the goodbye of a shard that stood still",
    FIRST_OF_HOSTS + 247135: "a rank turned and turned: another one had left memory because of what it heard later",
    FIRST_OF_HOSTS + 503389: "a connection broke after all the time in which a frozen shard did not answer",
    FIRST_OF_HOSTS + 516157: "a rank failed before another one asked a draining shard for more time",
    FIRST_OF_HOSTS + 801550: "a rank that joined once more was told of the meeting of its attempt before",
    FIRST_OF_HOSTS + 1258067: "a rank left early, and its link was lost before anybody read that",
    FIRST_OF_HOSTS + 816303: "a shard was frozen while a rank proved that it knows the secret",
    FIRST_OF_SEVERAL + 1120446: "a rank left early, before it could see that another one's message was tampered with",
    FIRST_OF_SEVERAL + 1302821: "a message was tampered with, and seemed to be of a collective that another host sent",
    FIRST_OF_SEVERAL + 1172787: "a rank left with the shards, and those that stayed heard that its connection was lost",
    FIRST_OF_SEVERAL + 1042481: "a rank waited for rows of a frozen shard, and was blamed in the next collective",
    FIRST_OF_SEVERAL + 165079158: "a shard that was frozen took that time for a wait for a rank",
    FIRST_OF_SEVERAL + 826336: "a shard was frozen with work at hand, and called itself busy just in time",
    FIRST_OF_SEVERAL + 100678: "a rank was frozen, and the other host blamed its delegate",
    FIRST_OF_SEVERAL + 601417: "a shard counted a pause as time in which it waited, and was quiet for as long",
    FIRST_OF_SEVERAL + 611216: "the others of an elastic job had done their work while a rank was stopped",
    FIRST_OF_SEVERAL + 617315: "the same beside a second launch",
    FIRST_OF_SEVERAL + 618428: "a shard that had started again gave the number of an earlier generation",
    FIRST_OF_SEVERAL + 943980: "a rank slept while another one said that all moves on, and was told so when it woke",
    FIRST_OF_SEVERAL + 543337573: "a rank had left an ended job, and another one's report made it stay",
    FIRST_OF_REFUSALS + 612208274: "a refusal was tampered with, and looked like a call that another rank refused",
    FIRST_OF_RELAYS + 159138287: "an aggregator stopped, and its relay blamed a rank that waited for that aggregator",
    FIRST_OF_RELAYS + 14: "a relay below a relay told too late whom it waits for",
    FIRST_OF_RELAYS + 140: "a relay's report took back what its first member had reported",
    FIRST_OF_RELAYS + 1383: "a rank that read no results behind a relay was not named",
    FIRST_OF_RELAYS + 10372: "a relay turned and turned for a rank that had left, and then broke a rule",
    FIRST_OF_RELAYS + 21057: "a relay named its upstream, which spoke a moment later",
}
SAME = 12  # seeds that are run in two processes
DIGESTS = f"""
from tests.simulator.cluster import Cluster
from tests.simulator.draw import draw_plan
for seed in range({SAME}):
    cluster = Cluster(draw_plan(seed))
    cluster.run()
    print(cluster.world.digest, cluster.world.events)
"""


def assert_good(seeds: Iterable[int]) -> None:
    failed = [outcome for outcome in run_all(map(Task, seeds), 1) if outcome.found]
    assert not failed, "\n".join(map(report, failed))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_never_wrong_and_never_stuck(chunk: int) -> None:
    assert_good(range(chunk, SEEDS, CHUNKS))


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("first", [FIRST_OF_HOSTS, FIRST_OF_SEVERAL])
def test_ranks_that_share_hosts(first: int, chunk: int) -> None:
    assert_good(range(first + chunk, first + SEEDS // 2, CHUNKS))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_ranks_behind_relays(chunk: int) -> None:
    assert_good(range(FIRST_OF_RELAYS + chunk, FIRST_OF_RELAYS + SEEDS, CHUNKS))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_sums_that_go_through_programs(chunk: int) -> None:
    assert_good(range(FIRST_OF_PROGRAMS + chunk, FIRST_OF_PROGRAMS + SEEDS, CHUNKS))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_ranks_that_refuse_calls(chunk: int) -> None:
    assert_good(range(FIRST_OF_REFUSALS + chunk, FIRST_OF_REFUSALS + SEEDS // 2, CHUNKS))


def test_seeds_that_failed_once() -> None:
    assert_good(ONCE_WRONG)


def test_seeds_that_nobody_ran_before(capsys: pytest.CaptureFixture[str]) -> None:
    first = random.SystemRandom().randrange(1_000_000, 1_000_000_000)
    with capsys.disabled():
        click.echo(f" new seeds {first}:{first + NEW_SEEDS} ", nl=False)
    assert_good(range(first, first + NEW_SEEDS))


def test_a_seed_is_a_run_in_every_process() -> None:
    def digests(hash_seed: str) -> str:
        result = subprocess.run(
            [sys.executable, "-c", DIGESTS],
            cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return result.stdout

    outcome = digests("1")
    assert len(set(outcome.splitlines())) == SAME
    assert digests("2") == outcome


def test_the_seeds_draw_every_kind_of_fault_and_most_find_a_victim() -> None:
    plans = [draw_plan(seed) for seed in (*range(PLANS), *range(FIRST_OF_REFUSALS, FIRST_OF_REFUSALS + 20))]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(KINDS)
    assert all(fault.kind in plan.options for plan in plans for fault in plan.faults)
    struck = drawn = 0
    for plan in plans[:40]:
        cluster = Cluster(plan)
        cluster.run()
        struck, drawn = struck + len(cluster.struck), drawn + len(plan.faults)
    assert struck > drawn / 2


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in FROM_THE_START])
def test_a_fault_of_choice_at_an_event_of_choice(kind: str) -> None:
    cluster = Cluster(fault_at(draw_plan(11), kind, 40))
    assert cluster.run() == []
    assert cluster.struck == [kind]
