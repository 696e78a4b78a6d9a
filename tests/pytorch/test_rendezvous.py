"""Ranks whose launcher names no port meet, whoever has taken the port that was drawn for them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from local_cluster import WAIT_S, Ranks
from torch.distributed.rendezvous import _rendezvous_handlers

from omnireduce.protocol import wait_notices
from omnireduce.support.addresses import Address
from omnireduce.torch.backend import rendezvous
from omnireduce.torch.backend.rendezvous import MeetingPoint, SignpostRendezvous, drawn_ports, register_rendezvous

WAIT = timedelta(seconds=WAIT_S)
LOOPBACK = "127.0.0.1"
PREFIX = b"omnireduce a launch "


@pytest.fixture
def meeting_point(monkeypatch: pytest.MonkeyPatch) -> Iterator[MeetingPoint]:
    """Three ports that are free, of which the environment says the first."""
    with ExitStack() as stack:
        free = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(3)]
        ports = [each.getsockname()[1] for each in free]
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.setenv("MASTER_PORT", str(ports[0]))
    monkeypatch.setitem(_rendezvous_handlers, "env", _rendezvous_handlers["env"])
    yield MeetingPoint("a launch", LOOPBACK, ports)
    rendezvous._kept_store = None


def words(rank: int) -> str:
    return f"env://?rank={rank}&world_size=2"


def meet_as_ranks(meetings: list[SignpostRendezvous]) -> list[tuple[dist.Store, int, int]]:
    return Ranks(2, lambda rank: next(meetings[rank].begin(words(rank), WAIT))).results()


def check_shared(found: list[tuple[dist.Store, int, int]]) -> None:
    assert [(rank, size) for _, rank, size in found] == [(0, 2), (1, 2)]
    for rank, (store, _, _) in enumerate(found):
        store.set(f"said by {rank}", "a word")
        assert found[1 - rank][0].get(f"said by {rank}") == b"a word"


@pytest.mark.parametrize("taken", ["by nobody", "by one who says nothing", "by another launch"])
def test_ranks_meet_whoever_has_the_first_port(meeting_point: MeetingPoint, taken: str) -> None:
    with ExitStack() as stack:
        if taken == "by one who says nothing":
            stack.enter_context(socket.create_server((LOOPBACK, meeting_point.ports[0])))
        elif taken == "by another launch":
            other = SignpostRendezvous(meeting_point._replace(identity="another launch"))
            check_shared(meet_as_ranks([other, SignpostRendezvous(other._point)]))
            os.environ["MASTER_PORT"] = str(meeting_point.ports[0])  # the port that this launch was given
        meetings = [SignpostRendezvous(meeting_point), SignpostRendezvous(meeting_point)]
        check_shared(meet_as_ranks(meetings))
        assert all(meeting.is_current() for meeting in meetings)
        check_shared(meet_as_ranks(meetings))  # in the second group, too


def test_a_launch_without_a_free_port_says_what_to_do(meeting_point: MeetingPoint) -> None:
    with ExitStack() as stack:
        for port in meeting_point.ports:
            stack.enter_context(socket.create_server((LOOPBACK, port)))
        with pytest.raises(RuntimeError, match=r"none of the ports .* is free on this host; set MASTER_ADDR"):
            next(SignpostRendezvous(meeting_point).begin(words(0), WAIT))


def test_a_rank_says_where_it_has_looked_for_rank_0(
    meeting_point: MeetingPoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However often it has looked; and for whom it waits meanwhile."""
    monkeypatch.setattr(rendezvous, "PAUSE_S", 0)
    monkeypatch.setattr(wait_notices, "FIRST_S", 0)
    with pytest.raises(RuntimeError, match=rf"rank 0 has not come to 127.0.0.1 after 0.5 s.*{meeting_point.ports[2]}"):
        next(SignpostRendezvous(meeting_point).begin(words(1), timedelta(seconds=0.5)))
    assert "waiting for rank 0 to come to 127.0.0.1 since 0 s" in caplog.text


@pytest.mark.parametrize("silent", [False, True])
def test_a_rank_waits_longer_only_after_a_port_was_silent(
    meeting_point: MeetingPoint, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not because rank 0 comes late: a program that takes a port later, and says nothing, would then hold it up."""
    waits, asked = [], rendezvous._ask_signpost

    def noted(meeting_point: MeetingPoint, port: int, wait_s: float) -> Address | None:
        waits.append(wait_s)
        if len(waits) > rounds * len(meeting_point.ports):
            raise InterruptedError
        return asked(meeting_point, port, wait_s)

    rounds, first_s, longest_s = 6, 0.01, 0.08
    monkeypatch.setattr(rendezvous, "_ask_signpost", noted)
    monkeypatch.setattr(rendezvous, "FIRST_WAIT_S", first_s)
    monkeypatch.setattr(rendezvous, "LONGEST_WAIT_S", longest_s)
    monkeypatch.setattr(rendezvous, "PAUSE_S", 0)
    with ExitStack() as stack:
        if silent:
            stack.enter_context(socket.create_server((LOOPBACK, meeting_point.ports[0])))
        with pytest.raises(InterruptedError):
            next(SignpostRendezvous(meeting_point).begin(words(1), WAIT))
    assert (min(waits), max(waits)) == (first_s, longest_s if silent else first_s)


def test_who_says_a_little_now_and_then_takes_no_more_time_than_who_is_silent(meeting_point: MeetingPoint) -> None:
    """Each byte comes in time; together they would take for ever."""
    with socket.create_server((LOOPBACK, meeting_point.ports[0])) as listener, ExitStack() as stack:
        is_over = threading.Event()

        def trickle() -> None:
            with listener.accept()[0] as guest, suppress(OSError):
                while not is_over.wait(0.05):
                    guest.send(b"x")

        thread = threading.Thread(target=trickle)
        thread.start()
        stack.callback(thread.join)
        stack.callback(is_over.set)
        with pytest.raises(rendezvous._SilentError):
            rendezvous._ask_signpost(meeting_point, meeting_point.ports[0], 0.5)


@pytest.mark.parametrize("reply", [b"", b"x" * 1000, *(PREFIX + port for port in (b"99999\n", b"\n", b"\xb2\n", b"7"))])
def test_what_somebody_else_says_is_no_port(meeting_point: MeetingPoint, reply: bytes) -> None:
    with socket.create_server((LOOPBACK, meeting_point.ports[0])) as listener:

        def answer(_: int) -> None:
            with listener.accept()[0] as guest:
                guest.sendall(reply)

        ranks = Ranks(1, answer)
        assert rendezvous._ask_signpost(meeting_point, meeting_point.ports[0], WAIT_S) is None
        ranks.results()


def test_where_the_user_says_so_torch_meets_in_its_own_way(
    meeting_point: MeetingPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def way_of_torch(url: str, **options: Any) -> Iterator[str]:
        yield url

    monkeypatch.setitem(_rendezvous_handlers, "env", way_of_torch)
    register_rendezvous(meeting_point)
    store, *_ = next(_rendezvous_handlers["env"]("env://?rank=0&world_size=1"))
    assert isinstance(store, dist.TCPStore)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert next(_rendezvous_handlers["env"]("env://")) == "env://"


def test_ports_are_those_of_the_launch() -> None:
    assert drawn_ports("a") == drawn_ports("a")
    assert drawn_ports("a")[0] != drawn_ports("b")[0]
    assert len(set(drawn_ports("a"))) > 1
    assert all(20000 <= port < 32000 for port in drawn_ports("a"))


def test_a_store_of_the_user_is_not_kept() -> None:
    """Two prefixes are those of the group and the device."""
    store = dist.TCPStore(LOOPBACK, 0, None, is_master=True, wait_for_workers=False)
    prefixed = dist.PrefixStore("cpu", dist.PrefixStore("0", store))
    assert not rendezvous.is_made_by_torch(prefixed)
    assert rendezvous.is_made_by_torch(
        dist.PrefixStore("cpu", dist.PrefixStore("0", dist.PrefixStore("default_pg", store)))
    )
    assert not rendezvous.is_made_by_torch(dist.HashStore())
