"""The attacker as a process: it attacks at a bounded rate, and yields the cores to everybody else."""

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

GO, HALT = "go", "halt"  # commands to an attacker
NICEST = 19


@dataclass
class Tally:
    """Work of an attacker from GO to HALT: the words that its steps yielded, seconds on a core, seconds in all."""

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
        return f"{self.words.total() / wall_s:.0f} steps/s, {self.cpu_s / wall_s:.0%} of a core: {words}"


def serve(pipe: Connection, kind: str, target: Target, seed: int, nice: int) -> None:
    """Attack from each GO to the next HALT, until the other end of the pipe is closed."""
    os.nice(nice)
    draw = random.Random(seed)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            if pipe.recv() == GO:
                pipe.send(_attack(pipe, BY_NAME[kind], target, draw))


def _attack(pipe: Connection, kind: Kind, target: Target, draw: random.Random) -> Tally:
    """Make steps of the attack until a command comes."""
    tally, began, cpu = Tally(), time.monotonic(), time.process_time()
    steps, due = kind.attack(target, draw), began
    while not pipe.poll(max(0.0, due - time.monotonic())):
        due = max(due + 1 / kind.rate, time.monotonic())
        try:
            word = next(steps, "over")
        except (OSError, AssertionError) as error:
            word = type(error).__name__
            steps = kind.attack(target, draw)
        if word == "over":
            steps = kind.attack(target, draw)
        tally.words[word] += 1
    pipe.recv()
    steps.close()  # type: ignore[attr-defined]  # it is a generator: its connections go
    tally.cpu_s, tally.wall_s = time.process_time() - cpu, time.monotonic() - began
    return tally
