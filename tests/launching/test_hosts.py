"""Hosts, hostfiles, and which ranks run where."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnireduce import ConfigError
from omnireduce.launching.hosts import Host, discovered, is_here, parse_hosts, place, place_on, read_hostfile


def test_hosts_of_the_command_line() -> None:
    assert parse_hosts("node1:4, user@node-2.example:12,node3") == [
        Host("node1", 4), Host("user@node-2.example", 12), Host("node3", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "node1:", ":4", "node1:0", "node1:x", "a b:2", "-oProxy:1", "n1:2,,n2:2", "n:²"])
def test_a_wrong_host_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"-H: got '.*', expected HOST:SLOTS"):
        parse_hosts(text)


def test_a_host_stands_once() -> None:
    with pytest.raises(ConfigError, match="got host a twice"):
        parse_hosts("a:1,b:1,a:2")


def test_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\nnode1 slots=4\n\nnode2:2  # the other\nnode3\nnode4 max_slots=3\n")
    assert read_hostfile(path) == [Host("node1", 4), Host("node2", 2), Host("node3", 1), Host("node4", 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node1 slots=4\nnode2 4\n", "line 2: got 'node2 4', expected HOST slots=N"),
        ("node1 slots=0\n", "line 1: got 'node1:0'"),
        ("node1 slots=2 gpus=2\n", "line 1: got"),
        ("\n# nothing\n", "got no host"),
    ],
)
def test_a_wrong_line_of_a_hostfile_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_hostfile(path)
    with pytest.raises(ConfigError, match="no such file"):
        read_hostfile(tmp_path / "none")


def test_a_discovery_script_may_leave_out_slots() -> None:
    assert discovered("a:2\n\nb\n", "script", 3) == [Host("a", 2), Host("b", 3)]
    with pytest.raises(ConfigError, match="script: got"):
        discovered("a:2\nwhat is this\n", "script", 3)


def test_ranks_fill_hosts_in_order() -> None:
    slots = place([Host("a", 2), Host("b", 3)], 4)
    assert [(each.rank, each.host, each.local_rank, each.local_size) for each in slots] == [
        (0, "a", 0, 2), (1, "a", 1, 2), (2, "b", 0, 2), (3, "b", 1, 2),
    ]  # fmt: skip
    assert [(each.cross_rank, each.cross_size) for each in slots] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [(each.cross_rank, each.cross_size) for each in place([Host("a", 2), Host("b", 1)], 3)] == [
        (0, 2), (0, 1), (1, 2),
    ]  # fmt: skip


def test_too_few_slots_say_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"-np 3: the hosts a:2 have 2 slots: give more, as in -H a:3"):
        place([Host("a", 2)], 3)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=40))
def test_places_are_those_of_a_slow_count(names: list[str]) -> None:
    slots = place_on(names)
    for rank, slot in enumerate(slots):
        mates = [at for at, name in enumerate(names) if name == names[rank]]
        across = {each.host: each.rank for each in slots if each.local_rank == slot.local_rank}
        assert (slot.rank, slot.host, slot.local_size) == (rank, names[rank], len(mates))
        assert slot.local_rank == mates.index(rank)
        assert slot.cross_size == len(across)
    for local in range(len(names)):
        mine = [each for each in slots if each.local_rank == local]
        assert sorted(each.cross_rank for each in mine) == list(range(len(mine)))


def test_this_host_has_several_names() -> None:
    assert is_here("localhost")
    assert is_here("127.0.0.1")
    assert not is_here("127.0.0.2")
    assert not is_here("nobody@localhost")
