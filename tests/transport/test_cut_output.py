"""An exception of a signal handler may cut the output anywhere: what the peer gets then makes sense all the same."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from omnireduce.transport import framing
from omnireduce.transport.base import Control, Event, Link, Received

from .pairs import SLOT_BYTES, ShmPair, StreamPair, TcpPair

FILES = (framing.__file__, sys.modules[Link.__module__].__file__)
LAST = Control(b"the last words")


class CutError(Exception):
    """An error that the handler raises."""


@contextmanager
def cut_at(number: int) -> Iterator[None]:
    """Raise CutError before the instruction of that number in these files, if there are so many."""
    seen = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        nonlocal seen
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == number:
                raise CutError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def say_something(link: Link) -> None:
    link.send(0, 100)
    link.send_control(b"in between")
    link.send(1, SLOT_BYTES)
    link.flush()


@pytest.mark.parametrize("kind", [ShmPair, TcpPair])
def test_wherever_output_is_cut_nothing_comes_twice_and_last_words_come(kind: type[StreamPair]) -> None:
    whole, cuts = False, 0
    while not whole:
        cuts += 1
        pair = kind()
        pair.left.send_slots[:2] = 7
        try:
            with cut_at(cuts):
                say_something(pair.left)
            whole = True
        except CutError:
            pass
        pair.left.send_control(LAST.body)
        events: list[Event] = []
        while LAST not in events:
            assert select.select([pair.right], [], [], 20)[0], (cuts, events)
            pair.left.flush()
            events += pair.right.poll()
        pair.close()
        expected = [Received(0, 100), Control(b"in between"), Received(1, SLOT_BYTES), LAST]
        assert [each for each in expected if each in events] == events, cuts
        assert not whole or events == expected
    assert cuts > 200
