"""Lists in the environment and on the command line."""

from __future__ import annotations

import re

import pytest

from omnireduce.errors import ConfigError
from omnireduce.support.config import load_config


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("CLUSTER_AGGREGATORS", "node1:7400", ("node1:7400",)),
        ("CLUSTER_AGGREGATORS", "node1:7400, [::1]:7401", ("node1:7400", "[::1]:7401")),
        ("CLUSTER_AGGREGATORS", '"node1:7400,node2:7400"', ("node1:7400", "node2:7400")),
        ("BENCH_DENSITY", "0.5,0.01", (0.5, 0.01)),
        ("BENCH_DENSITY", "0.5", 0.5),
        ("BENCH_DTYPE", "float32,int8", ("float32", "int8")),
        ("BENCH_DTYPE", "int8", "int8"),
    ],
)
def test_a_list_needs_no_brackets(name: str, text: str, value: object) -> None:
    section, _, key = name.lower().partition("_")
    config = load_config(environ={f"OMNIREDUCE_{name}": text})
    assert getattr(getattr(config, section), key) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node1", 'got "node1", expected "HOST:PORT" with a port up to 65535, such as'),
        ("node1:7400,node2", 'got "node2", expected "HOST:PORT"'),
        ("node1:7400,", 'got "", expected "HOST:PORT"'),
        ('["node1:7400", node2]', "expected a list of"),
    ],
)
def test_a_list_in_the_wrong_form_says_which_one_is_expected(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config(environ={"OMNIREDUCE_CLUSTER_AGGREGATORS": text})
