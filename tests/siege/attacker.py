"""The attacker as a process: it strikes at a bounded rate, and yields the cores to everybody else."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from .kinds import BY_NAME, Kind
from .target import Target

GO, HALT = "go", "halt"  # what an attacker may be told
NICEST = 19


@dataclass
class Tally:
    """What an attacker did from GO to HALT: the words that came of its strokes, its time on a core, all in seconds."""

    event: str = "tally"
    words: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def add(self, other: Tally) -> None:
        self.words += other.words
        self.cpu_s += other.cpu_s
        self.wall_s += other.wall_s

    def __str__(self) -> str:
        words = ", ".join(f"{word} {count}" for word, count in self.words.most_common(6))
        wall_s = self.wall_s or 1.0
        return f"{self.words.total() / wall_s:.0f} strokes/s, {self.cpu_s / wall_s:.0%} of a core: {words}"


def serve(pipe: Connection, kind: str, target: Target, seed: int, nice: int) -> None:
    """Attack whenever told to, until the other end of the pipe is closed."""
    os.nice(nice)
    draw = random.Random(seed)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            if pipe.recv() == GO:
                pipe.send(_attack(pipe, BY_NAME[kind], target, draw))


def _attack(pipe: Connection, kind: Kind, target: Target, draw: random.Random) -> Tally:
    """Strike until there is word."""
    tally, began, cpu = Tally(), time.monotonic(), time.process_time()
    strokes, due = kind.attack(target, draw), began
    while not pipe.poll(max(0.0, due - time.monotonic())):
        due = max(due + 1 / kind.rate, time.monotonic())
        try:
            word = next(strokes, "over")
        except (OSError, AssertionError) as error:
            word = type(error).__name__
            strokes = kind.attack(target, draw)
        if word == "over":
            strokes = kind.attack(target, draw)
        tally.words[word] += 1
    pipe.recv()
    strokes.close()  # type: ignore[attr-defined]  # it is a generator: its connections go
    tally.cpu_s, tally.wall_s = time.process_time() - cpu, time.monotonic() - began
    return tally
