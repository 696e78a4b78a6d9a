"""Virtual time: an event queue, processes that take turns, and a clock for each of them."""

from __future__ import annotations

import heapq
import random
import struct
import zlib
from collections import deque
from collections.abc import Callable

from benchmarks.harness.inproc import UNLIMITED

TRACE_LINES = 200  # last events that a report shows
MAX_AHEAD_S = 1e5  # between the clocks of two hosts


class World:
    """The true time and everything that is going to happen. All randomness comes from `seed`, by name."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.events = 0  # number of events so far
        self.digest = 0  # digest of the times of all events: equal for equal runs
        self.trace: deque[str] = deque(maxlen=TRACE_LINES)
        self._now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._entered = 0
        self._at_event: dict[int, list[Callable[[], None]]] = {}

    def now(self) -> float:
        return self._now

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Let `action` happen at virtual `time`, in seconds."""
        self._entered += 1
        heapq.heappush(self._queue, (max(time, self._now), self._entered, action))

    def at_event(self, number: int, action: Callable[[], None]) -> None:
        """Let `action` happen between two events: when `number` of them have happened."""
        self._at_event.setdefault(number, []).append(action)

    def forget_events(self) -> None:
        """Drop what `at_event` has not yet done."""
        self._at_event.clear()

    def random(self, name: str) -> random.Random:
        """A stream of random numbers of its own for everything that has a name."""
        return random.Random(f"{self.seed}/{name}")

    def log(self, text: str) -> None:
        self.trace.append(f"{self._now:10.6f} #{self.events:<5} {text}")

    def run(self, done: Callable[[], bool], *, max_s: float, max_events: int) -> bool:
        """Run until `done` or a limit; return whether it is done. `max_s` counts from now."""
        end, last = self._now + max_s, self.events + max_events
        while not done():
            if not self._queue or self._queue[0][0] > end or self.events > last:
                return False
            self._now, _, action = heapq.heappop(self._queue)
            action()
            self.events += 1
            self.digest = zlib.crc32(struct.pack("d", self._now), self.digest)
            for extra in self._at_event.pop(self.events, ()):
                extra()
        return True


class Process:
    """Something that takes turns when woken. `latency_s()` is how long it takes to be scheduled.

    Its clock is `ahead_s` ahead of the true time: hosts have nothing in common but that their clocks never go back.
    """

    def __init__(self, world: World, name: str, latency_s: Callable[[], float], ahead_s: float = 0.0) -> None:
        self.world, self.name, self.latency_s = world, name, latency_s
        self.alive = True
        self.was_stalled = False
        self.slow_turn_s = 0.0
        self._ahead_s = ahead_s
        self._due: float | None = None  # true time
        self._stalled_since = self._stalled_until = 0.0

    def now(self) -> float:
        """Time on the clock of this process."""
        return self.world.now() + self._ahead_s

    def turn(self) -> None:
        raise NotImplementedError

    def wake(self) -> None:
        """There is news: take a turn soon."""
        self._wake_after(max(self.latency_s(), self.slow_turn_s))

    def wake_at(self, time: float) -> None:
        """Take a turn when this process' clock shows `time`, at the latest."""
        self._wake_after(time - self.now())

    def _wake_after(self, seconds: float) -> None:
        time = max(self.world.now() + seconds, self._stalled_until)
        if self.alive and (self._due is None or time < self._due):
            self._due = time
            self.world.at(time, self._take_turn)

    def stall(self, seconds: float) -> None:
        """Take no turn for a while, as if stopped by a signal."""
        self.was_stalled = True
        if not self.stalled:
            self._stalled_since = self.world.now()
        self._stalled_until = self.world.now() + seconds
        self._due = None
        self._wake_after(seconds)

    @property
    def stalled(self) -> bool:
        return self.world.now() < self._stalled_until

    @property
    def stalled_s(self) -> float:
        """For how long it has been stopped now."""
        return self.world.now() - self._stalled_since if self.stalled else 0.0

    def go_on(self) -> None:
        """End a stall."""
        self._stalled_until = 0.0
        self.wake()

    def jump(self, seconds: float) -> None:
        """Let the clock jump ahead, as after a virtual machine was stopped. What was to happen meanwhile is overdue."""
        self.was_stalled = True
        self._ahead_s += seconds
        self.wake()

    def read_slowly(self, turn_s: float) -> None:
        """From now on, read one event of each connection at a time, every `turn_s` seconds."""
        self.slow_turn_s = turn_s

    @property
    def max_events(self) -> int:
        """Number of events of a connection that are read at once."""
        return 1 if self.slow_turn_s else UNLIMITED

    def log(self, text: str) -> None:
        self.world.log(f"{self.name}: {text}")

    def _take_turn(self) -> None:
        if self.alive and self._due is not None and self.world.now() >= self._due:
            self._due = None
            self.turn()
