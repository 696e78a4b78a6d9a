"""The dashboard of Grafana and the alerts of Prometheus ask for metrics, and labels, that the daemon exports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from local_cluster import ROOT

from omnireduce.aggregator.metrics import ShardCollector
from omnireduce.core.status_messages import JobStatus, LateRank, Status, Stragglers, Traffic

RULES = ROOT / "deploy" / "prometheus" / "omnireduce.rules.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "omnireduce.json"
NAME, LABEL = re.compile(r"\bomnireduce_\w+"), re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")
BY = re.compile(r"\bby \(([^)]*)\)")
SHOWN = re.compile(r"\{\{\s*(?:with )?(?:\$labels\.)?(\w+)\s*\}\}")
WORDS = {"value", "end"}  # words in templates that are no labels


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The labels of each metric of a shard on which something of everything happens."""
    waiting = Stragglers(what="a sum", ranks=[1], total=1, who="rank 1", seconds=1.0)
    job = JobStatus(
        name="a", generation=1, world_size=2, joined=2, age_s=1.0, team="t", traffic=Traffic(blocks=1, rank_blocks=1),
        waiting=waiting, late=[LateRank(rank=1, seconds=1.0)],
    )  # fmt: skip
    gathering = JobStatus(name="b", generation=0, world_size=2, joined=1, age_s=0.0, missing=[1], team="t")
    status = Status(
        shard="s", pid=1, version="1", uptime_s=1.0, connections=1, running=1, gathering=1, traffic=Traffic(),
        jobs_started=1, jobs_ended=0, aborts={"lost": 1}, refused=1, jobs=[job, gathering],
    )  # fmt: skip
    results: dict[str, set[str]] = {}
    for metric in ShardCollector(lambda: {"s": status}).collect():
        for sample in metric.samples:
            results.setdefault(sample.name, set()).update(sample.labels)
    return results


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return result


def expressions() -> Iterator[tuple[str, str]]:
    """All expressions, and the texts that show their labels."""
    for rule in rules():
        yield rule["expr"], " ".join(rule["annotations"].values())
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
            yield f'{name}{{{label}="x"}}', ""


def test_metrics_and_labels_exist(exported: dict[str, set[str]]) -> None:
    for expression, text in expressions():
        names = NAME.findall(expression)
        assert names, expression
        assert set(names) <= exported.keys(), expression
        known = set.intersection(*(exported[name] for name in names))
        assert set(LABEL.findall(expression)) <= known, expression
        grouped = {word.strip() for listed in BY.findall(expression) for word in listed.split(",")}
        assert grouped <= known, expression
        left = grouped or (set() if re.match(r"(sum|max)\(", expression) else known)
        assert set(SHOWN.findall(text)) <= left | WORDS, (expression, text)


def test_what_is_about_jobs_tells_teams_apart(exported: dict[str, set[str]]) -> None:
    """The names of jobs of two teams may be the same."""
    about_jobs = [
        each for each in expressions() if "team" in set.union(*(exported[name] for name in NAME.findall(each[0])))
    ]
    assert len(about_jobs) > 10
    for expression, text in about_jobs:
        grouped = BY.findall(expression)
        assert all("team" in listed for listed in grouped), expression
        assert "team" in SHOWN.findall(text) or not text, (expression, text)
    panels_of_jobs = [target["expr"] for panel in panels() for target in panel["targets"] if "$job" in target["expr"]]
    assert all('team=~"$team"' in expression for expression in panels_of_jobs)


def test_a_metric_that_is_not_there_is_seen(exported: dict[str, set[str]]) -> None:
    assert "omnireduce_job_waiting_seconds" in exported
    assert "omnireduce_job_waiting_minutes" not in exported
    assert exported["omnireduce_job_late_seconds_total"] == {"shard", "job", "team", "rank"}


def test_every_panel_has_its_place() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_alerts_are_whole() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool here; Debian's package prometheus has it")
def test_prometheus_takes_the_rules() -> None:
    result = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
