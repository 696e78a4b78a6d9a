"""How ranks agree on what comes next, whatever the order in which each of them becomes ready. A pure machine.

Ranks meet in rounds. In a round each has one byte for every name that is known: 1 if it is ready for it. The least of
all ranks' bytes says who is ready everywhere. A name that is not known, or has other terms than before, is news: then
all ranks tell their news after the round, and number them alike.

Programs do the same in each step. So after some steps with the same names there are no rounds: all ranks take these
names in the order of the last step, each as soon as it is ready itself. A rank that cannot go on so, because its program
does something else, spoils the batch that is due: it brings zeros and a mark. All ranks see the mark, drop what came,
and meet in rounds again.

After the negotiation of Horovod, and its cache of responses: Sergeev and Del Balso, "Horovod: fast and easy distributed
deep learning in TensorFlow", 2018. There each cycle has a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from omnireduce.data_parallel.requests import Batch, Request, fused
from omnireduce.dtypes import Array
from omnireduce.errors import UsageError

NO_NEWS, NAMES_FROM = 0, 1  # where in a round's bytes
MOST_PENDING, MOST_NAMES = 1 << 12, 1 << 14
ALIKE_STEPS, MOST_ALIKE_STEPS = 2, 64


@dataclass
class Known:
    """A name that all ranks know. `changed`: by rank, what it has asked for since all had `request`."""

    place: int  # among a round's bytes
    request: Request | None = None
    changed: dict[int, Request] = field(default_factory=dict)

    def of(self, rank: int) -> Request | None:
        """What this rank has asked for, as the others know it."""
        return self.changed.get(rank, self.request)


class Agreement:
    """What rank `rank` of `size` knows. Batches take up to `fusion_bytes`."""

    def __init__(self, rank: int, size: int, fusion_bytes: int) -> None:
        self._rank, self._size, self._fusion_bytes = rank, size, fusion_bytes
        self.pending: dict[str, Request] = {}  # this rank is ready for them
        self._known: dict[str, Known] = {}  # the longest unused first
        self._step: list[str] = []  # what was agreed, up to the first name that came again
        self._last_step: list[str] = []
        self._alike, self._alike_needed = 0, ALIKE_STEPS
        self._due: list[Batch] = []  # of this step, without rounds
        self._order: list[str] = []  # of a step; empty: there are rounds
        self.rounds = 0

    @property
    def has_rounds(self) -> bool:
        return not self._order

    def submit(self, request: Request) -> None:
        """This rank is ready for it. Raises UsageError."""
        if request.name in self.pending:
            raise UsageError(f"'{request.name}' is under way already: wait for it, or choose another name")
        if len(self.pending) == MOST_PENDING:
            raise UsageError(f"{MOST_PENDING} collectives are under way already: wait for some of them")
        self.pending[request.name] = request

    def request(self, name: str) -> Request:
        """What all ranks have asked for by this name, which was agreed."""
        found = self._known[name].request
        assert found is not None
        return found

    # with rounds

    def bytes_of_round(self) -> Array:
        """What this rank brings to the next round: uint8. All ranks have as many."""
        found = np.zeros(NAMES_FROM + len(self._known), np.uint8)
        found[NO_NEWS] = not self.news()
        for name, known in self._known.items():
            found[known.place] = name in self.pending and self.pending[name] == known.of(self._rank)
        return found

    def news(self) -> list[Request]:
        """What this rank must tell the others."""
        return [each for each in self.pending.values() if not self._is_known(each)]

    def _is_known(self, request: Request) -> bool:
        return request.name in self._known and self._known[request.name].of(self._rank) == request

    def agree(self, least: Array) -> tuple[list[Batch], bool]:
        """Take the least bytes of all ranks; return what is done now, and whether all tell their news after that."""
        self.rounds += 1
        ready = [name for name, known in self._known.items() if least[known.place]]
        ready.sort(key=lambda name: self._known[name].place)
        failed, good = [], list[Request]()
        for name in ready:
            known = self._known.pop(name)
            asked = {rank: known.of(rank) for rank in range(self._size)}
            if len(set(asked.values())) == 1:
                request = asked[self._rank]
                assert request is not None
                self._known[name] = Known(known.place, request)
                good.append(request)
            else:
                failed.append(Batch((name,), _difference(name, asked)))
        if failed:
            self._known = {
                name: Known(NAMES_FROM + i, each.request, each.changed)
                for i, (name, each) in enumerate(sorted(self._known.items(), key=lambda item: item[1].place))
            }
            self._forget_steps()
        for name in ready:
            del self.pending[name]
        self._learn([each.name for each in good])
        return [*fused(good, self._fusion_bytes), *failed], not least[NO_NEWS]

    def hear(self, news: Sequence[Sequence[Request]]) -> None:
        """Take the news of all ranks, by rank."""
        for rank, requests in enumerate(news):
            for each in requests:
                known = self._known.pop(each.name, None) or Known(NAMES_FROM + len(self._known))
                known.changed[rank] = each
                self._known[each.name] = known
        self._forget_names()

    def _forget_names(self) -> None:
        """Keep the table small: programs may have a new name in each step."""
        spare = len(self._known) - MOST_NAMES
        if spare > 0:
            kept = list(self._known.items())[spare + MOST_NAMES // 2 :]
            self._known = {
                name: Known(NAMES_FROM + i, each.request, each.changed) for i, (name, each) in enumerate(kept)
            }

    # steps that are alike

    def _learn(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._step:
                self._alike = self._alike + 1 if set(self._step) == set(self._last_step) else 0
                self._last_step, self._step = self._step, []
            self._step.append(name)
        if self._alike >= self._alike_needed and set(self._step) <= set(self._last_step):
            self._order = self._last_step
            rest = [name for name in self._order if name not in self._step]
            self._due = self._batches(rest or self._order)

    def _batches(self, names: Sequence[str]) -> list[Batch]:
        return fused([self.request(name) for name in names], self._fusion_bytes)

    def due(self) -> tuple[Batch, bool]:
        """The next batch, and whether this rank is ready for it."""
        batch = self._due[0]
        return batch, all(
            name in self.pending and self.pending[name] == self._known[name].request for name in batch.names
        )

    def is_stuck(self, *, waits: bool) -> bool:
        """Whether the batch that is due may never be ready here. `waits`: the program waits for something."""
        return not self.due()[1] and (waits or bool(self.news()))

    def done(self, *, spoiled: bool) -> None:
        """The batch that was due is done, or some rank has spoiled it."""
        batch = self._due.pop(0)
        if spoiled:
            self._alike_needed = min(2 * self._alike_needed, MOST_ALIKE_STEPS)
            self._forget_steps()
            return
        for name in batch.names:
            del self.pending[name]
        if not self._due:
            self._due = self._batches(self._order)

    def _forget_steps(self) -> None:
        self._step, self._last_step, self._order, self._due, self._alike = [], [], [], [], 0


def _difference(name: str, asked: dict[int, Request | None]) -> str:
    """What two ranks have asked for."""
    first = asked[0]
    other = next(rank for rank, each in asked.items() if each != first)
    mine, theirs = (each or "nothing" for each in (first, asked[other]))
    return f"'{name}' differs between ranks: rank 0 has {mine}, rank {other} has {theirs}"
