"""The meeting of the ranks of a launch before they have an aggregator: which ranks are told of it."""

from __future__ import annotations

import socket
import struct

import pytest
from local_cluster import READY_S, Ranks, descriptors_below, unique_job

from omnireduce.errors import RefusedError, TransportError
from omnireduce.runtime.embedded_messages import Compiling, EmbeddingFailed, News, Ready, decode_news, encode
from omnireduce.runtime.rank.embedded_aggregator import CARD, Invitations, await_invitation, socket_name

READY = Ready("127.0.0.1:4711", bytes(32))


def guest(address: str, content: bytes | None) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(address)
    if content is not None:
        sock.send(content)
    return sock


@pytest.mark.parametrize(
    "content",
    [None, b"x", b"x" * 1000, CARD.pack(0, 2), CARD.pack(2, 2), CARD.pack(2**32 - 1, 2), struct.pack("<I", 1)],
)
def test_who_shows_no_card_is_not_told(content: bytes | None) -> None:
    address = socket_name("", unique_job())
    invitations = Invitations(address, 2)
    stranger, rank = guest(address, content), guest(address, CARD.pack(1, 2))
    for _ in range(4):
        invitations.turn()
    assert invitations.missing == [1]
    for news in (Compiling(1, 2), READY):
        invitations.tell(news)
    assert invitations.missing == []
    assert [decode_news(rank.recv(4096)) for _ in range(2)] == [Compiling(1, 2), READY]
    invitations.close()
    with stranger, rank:
        assert stranger.recv(4096) == rank.recv(4096) == b""


def test_who_comes_late_is_told() -> None:
    address = socket_name("", unique_job())
    invitations = Invitations(address, 3)
    invitations.tell(READY)
    guests = [guest(address, CARD.pack(rank, 3)) for rank in (1, 2)]
    for _ in range(6):
        invitations.turn()
    assert invitations.missing == []
    invitations.close()
    for each in guests:
        with each:
            assert decode_news(each.recv(4096)) == READY


@pytest.mark.parametrize("is_told", [False, True])
def test_a_rank_that_comes_twice_is_of_another_launch(is_told: bool) -> None:
    """Also when the first one knows the address already, and has gone on."""
    address = socket_name("", unique_job())
    invitations = Invitations(address, 3)
    first = guest(address, CARD.pack(1, 3))
    for _ in range(2):
        invitations.turn()
    if is_told:
        invitations.tell(READY)
        first.close()
    with first, guest(address, CARD.pack(1, 3)) as second:
        invitations.turn()
        with pytest.raises(RefusedError, match=r"rank 1 has come twice: two launches .* another cluster\.job"):
            invitations.turn()
        invitations.tell(EmbeddingFailed("two launches"))
        assert decode_news(second.recv(4096)) == EmbeddingFailed("two launches")
    invitations.close()


def test_a_rank_that_has_hung_up_may_come_again() -> None:
    """Before it was told. That it is gone may be seen later than that it is here."""
    address = socket_name("", unique_job())
    invitations = Invitations(address, 2)
    first = guest(address, CARD.pack(1, 2))
    for _ in range(2):
        invitations.turn()
    with guest(address, CARD.pack(1, 2)) as second:
        invitations.turn()
        first.close()
        for _ in range(2):
            invitations.turn()
        invitations.tell(READY)
        assert decode_news(second.recv(4096)) == READY
    invitations.close()


def test_another_world_size_ends_it_for_all() -> None:
    address = socket_name("", unique_job())
    invitations = Invitations(address, 2)
    with guest(address, CARD.pack(2, 3)):
        invitations.turn()
        with pytest.raises(RefusedError, match="rank 2 was started as one of 3 workers"):
            invitations.turn()
    invitations.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "is gone"),
        (b"\xc1", "is of another version"),
        (encode(Ready("10.0.0.1:7400", bytes(32))), "is of another version"),
        (encode(Ready("127.0.0.1:4711", b"short")), "is of another version"),
        (encode(EmbeddingFailed("it rains")), "has none: it rains"),
    ],
)
def test_what_rank_0_says_is_checked(answer: bytes, message: str) -> None:
    job = unique_job()
    address = socket_name("", job)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as zero:
        zero.bind(address)
        zero.listen()
        one = Ranks(1, lambda _: await_invitation(address, job, 1, 2, limit_s=READY_S, say=lambda _: None))
        with zero.accept()[0] as rank:
            assert CARD.unpack(rank.recv(64)) == (1, 2)
            if answer:
                rank.send(answer)
        [error] = one.outcomes()
    assert isinstance(error, TransportError)
    assert message in str(error)


def test_a_rank_0_that_has_stopped_keeps_nobody_for_ever() -> None:
    """The queue of the stopped rank is full, so that a further rank cannot even connect."""
    job = unique_job()
    address = socket_name("", job)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as zero:
        zero.bind(address)
        zero.listen(0)
        with guest(address, None):
            one = Ranks(1, lambda _: await_invitation(address, job, 1, 2, limit_s=0.1, say=lambda _: None))
            [error] = one.outcomes()
    assert isinstance(error, TransportError)
    assert "is not on this host, or has stopped, after" in str(error)


def test_rank_0_without_descriptors_says_so() -> None:
    address = socket_name("", unique_job())
    invitations = Invitations(address, 2)
    with guest(address, None), descriptors_below(0), pytest.raises(TransportError, match="no descriptors left"):
        invitations.turn()
    invitations.close()


@pytest.mark.parametrize("news", [READY, Compiling(3, 9), EmbeddingFailed("why")])
def test_news_are_read_as_they_were_written(news: News) -> None:
    assert decode_news(encode(news)) == news


def test_names_of_different_launches_differ() -> None:
    names = {socket_name(*each) for each in (("a", "b"), ("b", "a"), ("", "a"), ("", "b"), ("\udcff", "b"))}
    assert len(names) == 5
    assert all(name.startswith("\0omnireduce-launch/") and len(name) < 108 for name in names)
