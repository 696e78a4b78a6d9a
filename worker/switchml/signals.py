"""A thread that stops a context when a signal comes.

A handler runs in the main thread, on top of whatever that does, perhaps in the middle of a turn of the communicator. So
it only tells the thread, which stops the context. The main thread hears of that from what it waits for.
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

import click

from omnireduce.errors import OmniReduceError
from omnireduce.switchml import Context, Settings

SIGNALS = (signal.SIGINT, signal.SIGTERM)
Say = Callable[[str], object]


@contextmanager
def started(settings: Settings) -> Iterator[tuple[Context, Say]]:
    """The context of this process, started, and what prints on rank 0 alone; signals stop it."""
    context = Context.instance().start(settings)
    say: Say = click.echo if context.communicator.rank == 0 else nothing
    with SignalThread(context, say):
        yield context, say


def nothing(text: str) -> None:
    """The other ranks say nothing."""


class SignalThread:
    """`with SignalThread(context, say):` ends the program with the status of the signal that came, if one did."""

    def __init__(self, context: Context, say: Say) -> None:
        self._context, self._say = context, say
        self._came = queue.SimpleQueue[int | None]()  # a handler may use it, also on top of another one
        self._number = 0
        self._before: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)

    def __enter__(self) -> Self:
        self._say("Signal handler thread started. Waiting for any signals.")
        self._thread.start()
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._came.put(None)
        self._thread.join()
        self._say("Signal handler thread is exiting")
        if self._number and (error is None or isinstance(error, OmniReduceError)):
            if self._number == signal.SIGINT:
                raise KeyboardInterrupt from None
            sys.exit(128 + self._number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._came.put(number)

    def _run(self) -> None:
        while (number := self._came.get()) is not None:
            self._number = number
            self._say(f"Received {signal.Signals(number).name}. Stopping.")
            self._context.stop()
