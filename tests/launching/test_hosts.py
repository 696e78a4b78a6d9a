"""The hosts on which ranks run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnireduce import ConfigError
from omnireduce.launch.hosts import Host, is_this_host, place_ranks, place_ranks_on
from omnireduce.support.addresses import own_addresses


def test_ranks_fill_hosts_in_order() -> None:
    slots = place_ranks([Host("a", 2), Host("b", 3)], 4)
    assert [(slot.rank, slot.host, slot.local_rank, slot.local_size) for slot in slots] == [
        (0, "a", 0, 2), (1, "a", 1, 2), (2, "b", 0, 2), (3, "b", 1, 2),
    ]  # fmt: skip
    assert [(slot.cross_rank, slot.cross_size) for slot in slots] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [(each.cross_rank, each.cross_size) for each in place_ranks([Host("a", 2), Host("b", 1)], 3)] == [
        (0, 2), (0, 1), (1, 2),
    ]  # fmt: skip


def test_too_few_slots_say_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"-np 3: the hosts a:2 have 2 slots: give more, as in -H a:3"):
        place_ranks([Host("a", 2)], 3)
    with pytest.raises(
        ConfigError, match=r"the hosts me@\[fd00::1\]:1 have 1 slots: give more, as in -H me@\[fd00::1\]:2"
    ):
        place_ranks([Host("me@fd00::1", 1)], 2)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=40))
def test_places_are_those_of_a_slow_count(names: list[str]) -> None:
    slots = place_ranks_on(names)
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
    assert is_this_host("localhost")
    assert is_this_host("127.0.0.1")
    assert all(map(is_this_host, own_addresses()))
    assert not is_this_host("127.0.0.2")
    assert not is_this_host("192.0.2.254")
    assert not is_this_host("nobody@localhost")
