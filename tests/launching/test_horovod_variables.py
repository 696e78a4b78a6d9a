"""Horovod's variables: one table says what they mean, for every program that loads a configuration."""

from __future__ import annotations

import logging

import pytest

from omnireduce import ConfigError, load_config
from omnireduce.support.config import horovod
from omnireduce.support.config.horovod import (
    ROWS,
    SHORTEST_CYCLE_S,
    WITHOUT_EFFECT,
    VariableRow,
    settings_of,
    variables_without_effect,
)
from omnireduce.support.config.validation import KEYS

GIVEN = {  # variable: its text, and the value of its key
    "HOROVOD_FUSION_THRESHOLD": ("33554432", 33554432),
    "HOROVOD_CYCLE_TIME": ("2.5", 0.0025),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("120", 120),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("900", 900),
    "HOROVOD_STALL_CHECK_DISABLE": ("1", 0),
    "HOROVOD_TIMELINE": ("/gpu.json", "/gpu.json"),
    "HOROVOD_TIMELINE_MARK_CYCLES": ("1", True),
    "HOROVOD_LOG_LEVEL": ("TRACE", "debug"),
    "HOROVOD_GLOO_TIMEOUT_SECONDS": ("45", 45),
}


def value_of(key: str, environ: dict[str, str]) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(load_config(environ=environ), section), name)


def test_every_row_has_an_example() -> None:
    assert {row.variable for row in ROWS} == GIVEN.keys()
    assert all(row.key in KEYS for row in ROWS)
    assert not {row.variable for row in ROWS} & WITHOUT_EFFECT.keys()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.variable)
def test_a_variable_sets_its_key(row: VariableRow) -> None:
    text, value = GIVEN[row.variable]
    assert list(settings_of({row.variable: text}, {row.key})) == [(row.variable, row.key, value)]
    assert value_of(row.key, {row.variable: text}) == value


@pytest.mark.parametrize("text", ["0", "0.05", "0.1"])
def test_no_cycle_is_too_short(text: str) -> None:
    """Horovod allows 0."""
    assert value_of("queue.cycle_s", {"HOROVOD_CYCLE_TIME": text}) == SHORTEST_CYCLE_S
    with pytest.raises(ConfigError, match=r"queue\.cycle_s: got .*expected"):
        load_config(overrides=[f"queue.cycle_s={SHORTEST_CYCLE_S / 2}"])  # it is the least that the key allows
    with pytest.raises(ConfigError, match="HOROVOD_CYCLE_TIME"):
        load_config(environ={"HOROVOD_CYCLE_TIME": "-1"})


def test_what_concerns_another_library_has_its_reason() -> None:
    assert variables_without_effect({"HOROVOD_CCL_BGT_AFFINITY": "3"}, set()) == {
        "HOROVOD_CCL_BGT_AFFINITY": "CCL is not used"
    }


def test_a_variable_for_a_key_that_is_not_there_says_so() -> None:
    assert list(settings_of({"HOROVOD_CYCLE_TIME": "1"}, set())) == []
    assert "HOROVOD_CYCLE_TIME" in variables_without_effect({"HOROVOD_CYCLE_TIME": "1"}, set())


def test_our_own_variable_and_an_override_count_more() -> None:
    environ = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "45"}
    assert value_of("cluster.join_timeout_s", environ) == 45
    assert value_of("cluster.join_timeout_s", environ | {"OMNIREDUCE_CLUSTER_JOIN_TIMEOUT_S": "7"}) == 7
    assert load_config(overrides=["cluster.join_timeout_s=8"], environ=environ).cluster.join_timeout_s == 8


@pytest.mark.parametrize("text", ["1", "true", "YES"])
def test_a_switch_that_is_off_leaves_the_key_alone(text: str) -> None:
    name = "HOROVOD_STALL_CHECK_DISABLE"
    assert list(settings_of({name: text}, {"stall.abort_s"})) == [(name, "stall.abort_s", 0)]
    assert list(settings_of({name: "0"}, {"stall.abort_s"})) == []


def test_a_wrong_value_names_its_variable() -> None:
    with pytest.raises(ConfigError, match=r"HOROVOD_GLOO_TIMEOUT_SECONDS: .*got 'soon', expected a number"):
        load_config(environ={"HOROVOD_GLOO_TIMEOUT_SECONDS": "soon"})
    with pytest.raises(ConfigError, match=r"HOROVOD_LOG_LEVEL: log.level: got"):
        load_config(environ={"HOROVOD_LOG_LEVEL": "loud"})


def test_what_means_nothing_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(horovod, "_has_warned", False)
    environ = {"HOROVOD_AUTOTUNE_LOG": "x", "HOROVOD_SURPRISE": "1", "HOROVOD_RANK": "0"}
    with caplog.at_level(logging.WARNING, "omnireduce"):
        for _ in range(2):
            load_config(environ=environ)
    [record] = caplog.records
    assert record.__dict__["fields"] == {"variables": ["HOROVOD_AUTOTUNE_LOG", "HOROVOD_SURPRISE"]}
    assert "omnireduce tune" in record.getMessage()


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "OMNIRUN_RANK"])
def test_other_ranks_say_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str) -> None:
    monkeypatch.setattr(horovod, "_has_warned", False)
    load_config(environ={"HOROVOD_SURPRISE": "1", name: "1"})
    assert not caplog.records
