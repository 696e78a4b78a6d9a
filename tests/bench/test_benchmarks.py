"""The benchmark against others: its cases and verdicts, its files and its command line."""

from __future__ import annotations

import io
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from click.testing import Result as Finished
from rich.console import Console

from benchmarks.__main__ import main
from benchmarks.contest.cases import MEMORY, Case, all_cases, target_cases
from benchmarks.contest.contest import BOUND, OURS, PEERS, SCAN, Entrant, Measured, Method, Result, labels, order
from benchmarks.contest.memory import Memory
from benchmarks.contest.outcomes import Outcome, Results, memory_outcome, outcome, rows_of
from benchmarks.contest.shaped import Setting, verdicts_of
from benchmarks.contest.targets import verdicts
from benchmarks.frameworks.training import Runs, Training, outcome_of
from benchmarks.harness.environments import HERE, Tree
from benchmarks.harness.verdicts import show_verdicts

LABELS = {
    "ours": OURS,
    "scan": SCAN,
    "bound": BOUND,
    "mpich": "mpich in place",
    "gloo": "gloo",
    "openmpi": "openmpi in place",
    "copying": "openmpi out of place",
    "agsparse": "AGsparse",
    "flat": "flat",
    "relays": "relays",
}


def measured(case: Case, shards: Sequence[int] = (), **ms: float) -> Measured:
    results = {
        LABELS[key]: Result(LABELS[key], key in ("mpich", "gloo"), [value] * 3, [0.1] * 3, shard_bytes=list(shards))
        for key, value in ms.items()
    }
    return Measured(case, case.density, case.density, case.density, results)


def complete(case: Case, **ms: float) -> Measured:
    """With all dense peers: those without a time are slow."""
    result = measured(case, **ms)
    for label in labels(case, PEERS) - result.results.keys():
        result.results[label] = Result(label, label != "AGsparse", [999.0] * 3, [0.1] * 3)
    return result


def command(*words: object) -> Finished:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_the_best_dense_peer_is_what_counts() -> None:
    lines = verdicts(complete(Case(MEMORY, 2, "100 MiB", 0.1), ours=10.0, scan=1.0, mpich=35.0, gloo=34.0))
    assert [(line.peer, line.ratio, line.met) for line in lines] == [("gloo", 3.4, False)]


def test_the_scan_is_a_bound() -> None:
    lines = verdicts(complete(Case(MEMORY, 4, "100 MiB", 0.01), ours=6.0, scan=4.0, mpich=60.0, gloo=99.0))
    assert [(line.peer, line.ratio, line.met) for line in lines] == [(SCAN, 1.5, True)]


@pytest.mark.parametrize(("ours", "met"), [(130.0, True), (131.0, False)])
def test_plain_sockets_bound_what_is_dense_over_tcp(ours: float, met: bool) -> None:
    """And nobody is to be beaten there: over loopback the service carries every byte twice."""
    lines = verdicts(measured(Case("tcp", 2, "100 MiB", 1.0), ours=ours, bound=100.0, mpich=70.0))
    assert [(line.peer, line.ratio, line.met) for line in lines] == [(BOUND, ours / 100, met)]


def test_small_tensors_have_a_limit_at_two_ranks_and_open_mpi_at_four() -> None:
    small = {ranks: Case(MEMORY, ranks, "4 KiB", 1.0, repeats=200) for ranks in (2, 4)}
    lines = verdicts(measured(small[2], ours=0.031, gloo=0.3))
    assert [(line.peer, line.met) for line in lines] == [("limit", False)]
    lines = verdicts(complete(small[4], ours=0.03, mpich=0.01))
    assert [(line.peer.split()[0], line.met) for line in lines] == [("openmpi", True)]
    assert [verdict.met for verdict in verdicts(measured(small[4], ours=0.03, mpich=0.04))] == [None]


def test_exchanges_one_after_the_other_have_targets_of_their_own() -> None:
    cold = Case(MEMORY, 2, "1 MiB", 1.0)
    row = replace(cold, repeats=50)
    assert (row.name, row.setup) == (f"{cold.name}, one after the other", cold.setup)
    assert [verdict.target for case in (cold, row) for verdict in verdicts(complete(case, ours=1.0))] == [
        ">= 0.6x",
        ">= 1x",
    ]


def test_a_target_has_no_verdict_where_a_competitor_is_absent() -> None:
    lines = verdicts(measured(Case(MEMORY, 4, "100 MiB", 0.01, kind="rows"), ours=1.0, agsparse=1.1))
    assert [(each.peer, each.met) for each in lines] == [("without gloo", None), ("AGsparse", False)]
    (line,) = verdicts(measured(Case(MEMORY, 2, "100 MiB", 0.1), ours=1.0, mpich=50.0, gloo=49.0))
    assert (line.peer, line.ratio, line.met) == ("without mpich, openmpi", None, None)
    without = complete(Case(MEMORY, 2, "100 MiB", 0.1), ours=1.0)
    del without.results["gloo"]
    (line,) = verdicts(without)
    assert (line.peer, line.met) == ("without gloo", None)
    show_verdicts(console := Console(record=True, width=140, file=io.StringIO()), [line])
    assert "NO VERDICT" in console.export_text()


@pytest.mark.parametrize(("busiest", "met"), [(115, True), (116, False)])
def test_the_busiest_shard_is_compared_with_the_mean(busiest: int, met: bool) -> None:
    shards = [busiest * 10**6, 10**8, 10**8, (200 - busiest) * 10**6]
    (line,) = verdicts(measured(Case("shm", 2, "100 MiB", 0.1, kind="skew"), shards, ours=1.0))
    assert (line.value, line.peer_value, line.met) == (busiest, 100, met)


def test_memory_has_limits() -> None:
    memory = Memory(Case(MEMORY, 2, "100 MiB", 1.0, kind="memory"), 63.0, 60.0, 65.0, 13.5, 99.0, 0, 6.0)
    lines = memory_outcome(memory).verdicts
    assert [(line.value, line.unit, line.peer_value, line.met) for line in lines] == [
        (63, "MiB", 64, True),
        (65, "MiB", 64, False),
        (6, "s", 5, False),
    ]


def test_entrants_take_turns_in_being_first_and_follow_different_ones() -> None:
    groups: list[Any] = ["service", "service", "service", "mpich", "mpich", "mpich", "openmpi", "openmpi", "gloo"]
    entrants = [Entrant(Method(str(number), "", "dense"), group) for number, group in enumerate(groups)]
    rounds = [order(entrants, number) for number in range(2 * len(entrants))]
    assert all(sorted(turn.label for turn in turns) == [each.label for each in entrants] for turns in rounds)
    assert {turns[0].label for turns in rounds} == {each.label for each in entrants}
    for turns in rounds:
        assert all(one.group != next_.group for one, next_ in itertools.pairwise(turns))
    pairs = [pair for turns in rounds for pair in itertools.pairwise(turns)]
    for entrant in entrants:
        assert len({one.label for one, next_ in pairs if next_ is entrant}) == 2
    assert order(entrants[:3], 1) == entrants[2::-1]


def test_a_case_without_a_target_has_no_verdict() -> None:
    for case in (Case(MEMORY, 2, "100 MiB", 0.1, "full"), Case("tcp", 4, "100 MiB", 1.0), Case("shm", 2, "1 MiB", 1.0)):
        assert verdicts(measured(case, ours=1.0, mpich=2.0, gloo=2.0, scan=1.0)) == []


def test_cases_differ_and_targets_come_first() -> None:
    for cases in (target_cases(), all_cases()):
        assert len({case.name for case in cases}) == len(cases)
    assert all_cases()[: len(target_cases())] == target_cases()


ONE, OTHER = (Case(MEMORY, 2, "16 MiB", density, rounds=40) for density in (1.0, 0.01))


def summary(folder: Path) -> list[dict[str, Any]]:
    report: list[dict[str, Any]] = json.loads((folder / "summary.json").read_text())
    return report


def test_files_are_complete_after_every_case(tmp_path: Path) -> None:
    results = Results(tmp_path / "new")
    for number, case in enumerate((ONE, OTHER), 1):
        results.add(outcome(measured(case, ours=1.0, mpich=2.0)))
        rows = json.loads((tmp_path / "new" / "rows.json").read_text())
        assert [(row["case"], row["entrant"]) for row in rows[-2:]] == [(case.name, OURS), (case.name, LABELS["mpich"])]
        assert len(summary(tmp_path / "new")) == number
        expected = {"case", "value", "unit", "peer", "peer_value", "ratio", "target", "met"}
        assert set(summary(tmp_path / "new")[-1]) == expected


def test_a_case_that_is_measured_again_replaces_its_own_entries(tmp_path: Path) -> None:
    small = Case(MEMORY, 2, "4 KiB", 1.0, repeats=200)
    before = Results(tmp_path)
    before.add(outcome(measured(small, ours=1.0, mpich=2.0, gloo=3.0)))
    before.add(outcome(measured(ONE, ours=1.0, mpich=2.0)))
    after = Results(tmp_path)
    assert (after.rows, after.verdicts) == (before.rows, before.verdicts)
    after.add(outcome(measured(small, ours=0.1)))
    assert [(row["case"], row["ms"]) for row in after.rows] == [(ONE.name, 1), (ONE.name, 2), (small.name, 0.1)]
    expected = [(ONE.name, 1), (f"{small.name}: p50", 0.1)]
    assert [(each["case"], each["value"]) for each in summary(tmp_path)] == expected


def test_two_commands_share_one_summary(tmp_path: Path) -> None:
    Results(tmp_path, "rows.json").add(outcome(measured(ONE, ours=1.0, mpich=2.0)))
    Results(tmp_path, "testbed.json").add(outcome(measured(OTHER, ours=1.0, mpich=2.0)))
    assert [each["case"] for each in summary(tmp_path)] == [ONE.name, OTHER.name]
    for file in ("rows.json", "testbed.json"):
        assert len(json.loads((tmp_path / file).read_text())) == 2


def test_files_of_another_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[{"entrant": "omnireduce"}]')
    result = command("run", "--results", tmp_path)
    assert (result.exit_code, "of another version: remove rows.json and summary.json" in result.output) == (2, True)
    (tmp_path / "rows.json").write_text("[{")
    result = command("run", "--results", tmp_path)
    assert (result.exit_code, "rows.json: not what a run wrote" in result.output) == (2, True)


RESUMED = ("run", "--quick", "--only", ONE.name, "--resume", "--results")


def test_resuming_leaves_out_what_is_complete(tmp_path: Path) -> None:
    Results(tmp_path).add(outcome(complete(ONE, ours=1.0, mpich=2.0)))
    result = command(*RESUMED, tmp_path)
    assert result.exit_code == 0, result.output
    (line,) = summary(tmp_path)
    assert (line["case"], line["ratio"]) == (ONE.name, 2)


def test_resuming_measures_again_what_lacks_a_competitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the competitor is still missing, the exit status says that a target has no verdict."""
    without = outcome(measured(ONE, ours=1.0, mpich=2.0, gloo=1.5))
    Results(tmp_path).add(without)
    measured_cases: list[Case] = []
    monkeypatch.setattr("benchmarks.__main__.sweep", lambda cases, peers: measured_cases.extend(cases) or [without])
    result = command(*RESUMED, tmp_path)
    assert [case.name for case in measured_cases] == [ONE.name]
    assert (result.exit_code, "targets without a verdict: " in result.output) == (1, True)
    assert f"{ONE.name} (without mpich, openmpi)" in result.output
    assert summary(tmp_path)[0]["met"] is None


@pytest.mark.parametrize("options", [("--rounds", 3), ("--peers", "mpich"), ("--set", "protocol.slots=2")])
def test_a_run_with_other_options_leaves_the_results_alone(tmp_path: Path, options: tuple[object, ...]) -> None:
    Results(tmp_path).add(outcome(complete(ONE, ours=1.0)))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    word = "shaped" if options[0] == "--set" else "run"
    result = command(word, *options, "--results", tmp_path)
    assert result.exit_code == 2
    assert f"results of the defaults, and this is a run of {options[0]} {options[1]}: choose another" in result.output
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_other_way_round_as_well(tmp_path: Path) -> None:
    other = Results(tmp_path, options="--rounds 3")
    other.add(outcome(complete(ONE, ours=1.0)))
    assert Results(tmp_path, options="--rounds 3").rows == other.rows
    result = command(*RESUMED, tmp_path)
    assert (result.exit_code, "results of --rounds 3, and this is a run of the defaults" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [(["--only", "nonsense"], "no case's name contains 'nonsense'"), (["--peers", "nccl"], "--peers: got nccl")],
)
def test_wrong_options_are_told(options: list[str], expected: str) -> None:
    result = command("run", *options)
    assert result.exit_code == 2
    assert expected in result.output


def test_shaped_links_are_left_out_loudly_where_they_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = command("shaped", "--results", tmp_path)
    assert (result.exit_code, "run this as root" in result.output) == (1, True)
    result = command("shaped", "--only", "tcp", "--optional", "--results", tmp_path)
    assert (result.exit_code, "no case between shaped links has a name that contains 'tcp'" in result.output) == (
        0,
        True,
    )
    result = command("shaped", "--optional", "--results", tmp_path)
    assert (result.exit_code, "### NOT MEASURED: shaped links: " in result.output) == (0, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("layout", "load"), [("dedicated", 0.5), ("colocated", 0.75 * (0.25 + 0.5)), ("shared", 0.5 * (0.4375 + 0.5))]
)
def test_what_a_link_lets_pass_at_once_is_no_part_of_its_bound(layout: str, load: float) -> None:
    result = measured(Case("tcp", 4, "100 MiB", 0.25))
    assert Setting(layout, 4, "1gbit").bound_ms(result, 1e6, 0.5) == (load * 104_857_600 - 262_144) / 1e3
    tiny = measured(Case("tcp", 4, "64 KiB", 0.25))
    assert Setting(layout, 4, "1gbit").bound_ms(tiny, 1e6, 0.5) == 0


def test_on_shared_hosts_dense_tensors_are_compared_with_gloo_the_best_and_the_bound() -> None:
    setting, links = Setting("shared", 4, "1gbit"), "shared 1gbit"
    dense = measured(Case("tcp", 4, "100 MiB", 1.0, links=links), ours=10.0, gloo=15.0, openmpi=9.0, copying=20.0)
    lines = [
        (verdict.case.partition(": ")[2], verdict.peer, verdict.ratio, verdict.met)
        for verdict in verdicts_of(setting, dense, 9.5)
    ]
    assert lines == [
        ("", "gloo", 1.5, True), ("best", "openmpi in place", 0.9, False), ("bound", "union bound", 0.95, True),
    ]  # fmt: skip
    sparse = measured(Case("tcp", 4, "100 MiB", 0.1, links=links), ours=1.0, gloo=9.6, openmpi=9.5, copying=20.0)
    [line] = verdicts_of(setting, sparse, 1.0)
    assert (line.peer, line.ratio, line.met) == ("openmpi in place", 9.5, True)
    without = measured(Case("tcp", 4, "100 MiB", 1.0, links=links), ours=10.0, gloo=15.0)
    assert [verdict.met for verdict in verdicts_of(setting, without, 9.5)] == [True, None, True]


@pytest.mark.slow
def test_figures_of_the_same_rows_are_the_same_files(tmp_path: Path) -> None:
    result = command("plot", "--results", tmp_path)
    assert (result.exit_code, f"no rows to draw in {tmp_path}" in result.output) == (2, True)
    results = Results(tmp_path)
    for transport in ("shm", "tcp"):
        for ranks in (2, 4):
            for density in (1.0, 0.1, 0.0):
                case = Case(transport, ranks, "100 MiB", density)
                results.add(
                    outcome(measured(case, ours=10.0 * density + 1, mpich=20.0, gloo=30.0, scan=1.0, bound=9.0))
                )
    results.add(outcome(measured(Case("shm", 2, "100 MiB", 0.1, kind="skew"), [1, 1], ours=1.0)))
    shaped = Results(tmp_path, "testbed.json")
    one = outcome(measured(Case("tcp", 2, "100 MiB", 1.0, links="dedicated 1gbit"), ours=1.0, bound=1.0))
    more = {"layout": "dedicated", "rate": "1gbit", "share_of_least": 0.9}
    shaped.add(replace(one, rows=[row | more for row in one.rows]))
    racks = Results(tmp_path, "relays.json")
    for density in (1.0, 0.1):
        timed = measured(Case("tcp", 4, "16 MiB", density, links="racks 250mbit"), flat=2.0, relays=1.0)
        rows = [row | {"rate": "250mbit", "bound_ms": 0.9} for row in rows_of(timed)]
        racks.add(Outcome(timed.case, rows, []))
    trained = Results(tmp_path, "training.json")
    for model, links in (("digits", "this host"), ("digits", "1gbit"), ("embedding", "1gbit")):
        training = Training(model, 4, links)
        trained.add(outcome_of(training, {label: Runs([5.0], [90.0]) for label in training.labels}))
    for out in ("first", "second"):
        result = command("plot", "--results", tmp_path, "--out", tmp_path / out)
        assert result.exit_code == 0, result.output
    pictures = sorted((tmp_path / "first").iterdir())
    names = ("bound", "ranks-shm", "ranks-tcp", "relays", "speedup", "time-shm", "time-tcp", "training")
    assert [picture.name for picture in pictures] == [f"{name}.{kind}" for name in names for kind in ("png", "svg")]
    for picture in pictures:
        assert picture.read_bytes() == (tmp_path / "second" / picture.name).read_bytes()
        assert 1000 < picture.stat().st_size < 100_000


def test_an_older_checkout_is_told_only_what_it_knows(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "reference.toml").write_text('[transport]\nkind = "auto"\n')
    sets = ["transport.host_exchange=off", "transport.kind=shm", "nothing.here=1"]
    assert Tree(tmp_path, Path("python")).supported_settings(sets) == ["transport.kind=shm"]
    assert HERE.supported_settings(sets) == sets[:2]
