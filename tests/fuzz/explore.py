"""Runs a target on its corpus and on what hypothesis makes of it."""

from __future__ import annotations

import faulthandler
import hashlib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from hypothesis import HealthCheck, given, seed, settings

from .connections import TARGETS as CONNECTIONS
from .inputs import corpus, inputs
from .machines import TARGETS as MACHINES
from .processes import TARGETS as PROCESSES
from .seeds import folder

Run = Callable[[bytes], str]
LIGHT = MACHINES | CONNECTIONS  # without processes
HANG_S = 120.0  # limit for one input: longer than any wait in a target


def opened(target: str) -> AbstractContextManager[Run]:
    """A function that plays inputs of this target. The end of the context checks what only the end can show."""
    return PROCESSES[target]() if target in PROCESSES else nullcontext(LIGHT[target])


def names() -> list[str]:
    return [*LIGHT, *PROCESSES]


def play_corpus(target: str, run: Run) -> dict[str, str]:
    """Outcome of each file of the corpus."""
    return {name: _watched(run, data) for name, data in corpus(target).items()}


def _watched(run: Run, data: bytes) -> str:
    """Play one input; a hang ends the process, and says where it was."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    try:
        return run(data)
    finally:
        faulthandler.cancel_dump_traceback_later()


def explore(target: str, run: Run, examples: int, number: int) -> Counter[str]:
    """Play `examples` inputs that follow from the seed `number`; return how often each outcome came.

    An input that fails is made as small as it gets and kept beside the corpus before the error is raised.
    """
    outcomes: Counter[str] = Counter()
    failing: list[bytes] = []

    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(inputs(target))
    def play(data: bytes) -> None:
        failing.append(data)
        outcomes[_watched(run, data)] += 1
        failing.pop()

    try:
        play()
    except BaseException as error:
        if failing:
            error.add_note(f"target {target}, seed {number}: the input is kept in {_keep(target, failing[-1])}")
        raise
    return outcomes


def _keep(target: str, data: bytes) -> Path:
    file = folder(target) / f"found-{hashlib.sha256(data).hexdigest()[:12]}.bin"
    file.write_bytes(data)
    return file
