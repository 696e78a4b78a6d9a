"""Hellos that lie: about the world, about every other number, about having been in a job before."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import msgspec
from raw_peer import DATA

from omnireduce.core.status_messages import Status, StatusRequest
from omnireduce.core.wire.control import PROTOCOL_VERSION, Hello

from ..target import SMALL, Crowd, Peer, Target

EXTREMES = (0, -1, 1, 2, 1 << 20, 1 << 31, 1 << 32, 1 << 47, (1 << 62) - 1, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63))
FRACTIONS = (float("nan"), float("inf"), float("-inf"), -0.0, 1e-300, 1e300)
MAX_JOBS = 4  # limit of the daemon that `formations` attacks
TOO_MANY = "more jobs than there may be"
LONG_NAME, LONG_HOST = "j" * 120, "h" * 255
SURVIVED = {"survived": 1, "ticket": b"guessed" + bytes(25)}  # claims a place in a job to which it never belonged


def numbers() -> list[str]:
    """The fields of a Hello that are numbers or switches."""
    return [
        field.name
        for field in msgspec.structs.fields(Hello)
        if getattr(field.type, "__origin__", field.type) in (int, float, bool)
    ]


def _say(target: Target, job: Any, rank: Any, size: Any, local: bool, **fields: Any) -> str:
    """One hello on a connection of its own, and the answer."""
    with Peer(target, local=local) as peer:
        peer.hello(job, rank, size, **(SMALL | fields))
        return peer.answer()


def huge_worlds(target: Target, draw: random.Random) -> Iterator[str]:
    """Beside somebody who gathers, a survivor comes who says that the world is huge."""
    for number in itertools.count():
        job, size = f"huge-{number}", 1 << draw.randint(20, 62)
        with Peer(target) as first:
            first.hello(job, 0, 2, **SMALL)
            first.answer()
            yield _say(target, job, 1, size, number % 2 == 0, **SURVIVED, min_ranks=1)
        yield _say(target, target.gathering, 1, size, number % 2 == 0, **SURVIVED, min_ranks=1)


def extreme_hellos(target: Target, draw: random.Random) -> Iterator[str]:
    """Every number of a Hello is extreme in turn, or two are."""
    for number in itertools.count():
        for name in numbers():
            value = draw.choice((*EXTREMES, *FRACTIONS))
            fields = {draw.choice(numbers()): draw.choice(EXTREMES)} if number % 2 else {}
            fields[name] = value
            rank, size = fields.pop("rank", 0), fields.pop("world_size", 2)
            yield _say(target, f"extreme-{number}", rank, size, number % 2 == 0, **fields)


def _anything(draw: random.Random, depth: int = 0) -> Any:
    return draw.choice(
        (
            lambda: draw.getrandbits(draw.randint(1, 64)),
            lambda: -draw.getrandbits(draw.randint(1, 63)),
            lambda: draw.choice(FRACTIONS),
            lambda: draw.random() < 0.5,
            lambda: "".join(chr(draw.randint(1, 0x2FF)) for _ in range(draw.randint(0, 300))),
            lambda: draw.randbytes(draw.randint(0, 300)),
            lambda: None,
            lambda: [] if depth > 3 else [_anything(draw, depth + 1) for _ in range(draw.randint(0, 8))],
        )
    )()


def random_hellos(target: Target, draw: random.Random) -> Iterator[str]:
    """Some fields of a Hello are anything at all."""
    names = [field.name for field in msgspec.structs.fields(Hello)]
    for number in itertools.count():
        fields = {name: _anything(draw) for name in draw.sample(names, draw.randint(1, 4))}
        job, rank, size = fields.pop("job", f"random-{number}"), fields.pop("rank", 0), fields.pop("world_size", 2)
        yield _say(target, job, rank, size, draw.random() < 0.5, **fields)


def evict_running(target: Target, draw: random.Random) -> Iterator[str]:
    """A survivor's hello, from somebody who never was there, to an elastic job that runs."""
    while True:
        rank, size, local = draw.choice((0, 1, 2, 77)), draw.choice((1, 2, 3)), draw.random() < 0.5
        elastic = {"min_ranks": 1, "last_call_s": 0.0, **SURVIVED}
        yield _say(target, target.job, rank, size, local, **elastic)


def evict_gathering(target: Target, draw: random.Random) -> Iterator[str]:
    """A survivor of another version of the protocol comes to those who gather."""
    while True:
        version, local = draw.choice((PROTOCOL_VERSION + 1, PROTOCOL_VERSION - 1, 99)), draw.random() < 0.5
        different = {"slots": draw.choice((2, 5))}
        yield _say(target, target.gathering, draw.randrange(2), 2, local, version=version, **SURVIVED, **different)


def refused_hellos(target: Target, draw: random.Random) -> Iterator[str]:
    """Hellos whose refusal makes the longest lines of log."""
    for number in itertools.count():
        wrong = draw.choice(({"slots": 65}, {"slot_bytes": 65537}, {"host": "\n" * 200}, {"version": 4}, {"shards": 0}))
        fields: dict[str, Any] = {"host": LONG_HOST} | wrong
        yield _say(target, f"{LONG_NAME}{number % 1000}", 0, 2, number % 2 == 0, **fields)


def formations(target: Target, draw: random.Random) -> Iterator[str]:
    """Parts of elastic jobs on a shard that is not their first, more than there may be; each fills a slot.

    One that gathers in the place of a generation that still runs has no memory until that has given back its own: so
    either number alone stays within the limit.
    """
    slot_bytes, message = 4 << 20, bytes((4 << 20) - 1)
    with Crowd(100) as crowd:
        for number in itertools.count(1):
            peer = Peer(target, local=draw.random() < 0.2)
            crowd.add(peer)
            part = {"shard": 1, "shards": 2, "formation": number, "slots": 2, "slot_bytes": slot_bytes}
            peer.hello(f"formed-{draw.randrange(2)}", 0, draw.choice((1, 1, 2)), **part)
            answer = peer.answer()
            if answer == "Welcome" and not peer.descriptors:
                peer.frame(DATA, 0, slot_bytes, message)  # one byte is missing: it stays there
            yield answer
            with Peer(target) as asking:
                asking.say(StatusRequest(PROTOCOL_VERSION))
                status = asking.event()[2]
                if isinstance(status, Status) and max(status.running, status.gathering) > MAX_JOBS:
                    yield TOO_MANY
