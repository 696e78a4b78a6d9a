"""Negotiation of the next collectives, in whatever order the ranks become ready. A pure state machine.

Ranks meet in rounds. In a round each rank has one byte for every known name: 1 if it is ready for that name. The
minimum over all ranks shows which names are ready everywhere. A name that is not known, or has other terms than before,
is news. All ranks tell their news after the round, and give new names the same numbers.

Programs do the same in each step. So after some steps with the same names there are no rounds: all ranks take these
names in the order of the last step, each rank as soon as it is ready itself. If a rank cannot go on so, because its
program does something else, it spoils the batch that is due: it brings zeros and a mark. All ranks see the mark, drop
the result, and meet in rounds again. The cause may be a program that waits for one name of a batch before it submits
the next. So from then on a batch has only names that became ready in one round.

A rank that has no more data joins: it is ready for whatever the others are ready for, until all have joined.

The model is the negotiation of Horovod, and its cache of responses: Sergeev and Del Balso, "Horovod: fast and easy
distributed deep learning in TensorFlow", 2018. There each cycle has a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.data_parallel.operations import JOIN, REFUSAL, WITHOUT_DATA, Batch, Request, fused
from omnireduce.errors import UsageError

NO_NEWS, NAMES_FROM = 0, 1  # indices in a round's bytes
MAX_PENDING, MAX_NAMES = 1 << 12, 1 << 14
ALIKE_STEPS, MAX_ALIKE_STEPS = 2, 64
FORGIVEN_AFTER = 64  # batches without a round: then a spoiled one is as if it were the first


@dataclass
class KnownName:
    """A name that all ranks know. All had `request` in round `agreed_round`; `changed`: later requests, by rank."""

    index: int  # among a round's bytes
    request: Request | None = None
    agreed_round: int = 0
    changed: dict[int, Request] = field(default_factory=dict)

    def request_of(self, rank: int) -> Request | None:
        """The request of this rank, as the others know it."""
        return self.changed.get(rank, self.request)


class Agreement:
    """The negotiation, as rank `rank` of `size` knows it. Batches have up to `fusion_bytes` bytes."""

    def __init__(self, rank: int, size: int, fusion_bytes: int) -> None:
        self._rank, self._size, self._fusion_bytes = rank, size, fusion_bytes
        self.pending: dict[str, Request] = {}  # this rank is ready for them
        self._known: dict[str, KnownName] = {}  # those unused for the longest time first
        self._names: list[str] = []  # the known names, in the order of their index
        self._news: dict[str, Request] = {}  # pending requests that other ranks have not heard of
        self.joined: list[int] = []  # ranks that have no more data, in the order in which all have heard of it
        self.last_joined = 0
        self._step: list[str] = []  # what was agreed, up to the first name that came again
        self._last_step: list[str] = []
        self._alike_steps, self._alike_steps_needed = 0, ALIKE_STEPS
        self._order: list[str] = []  # the names of a step without rounds; empty: there are rounds
        self._members: frozenset[str] = frozenset()  # `_order` as a set
        self._batches: list[Batch] = []  # the batches of `_order`
        self._due: list[Batch] = []  # batches of this step that are still to come
        self._missing: set[str] = set()  # names of the batch that is due for which this rank is not ready
        self._has_others = False  # a name is pending that is not in `_order`
        self._batches_done = 0  # batches without a round
        self._is_careful = False  # a batch was spoiled
        self.rounds = 0

    @property
    def has_rounds(self) -> bool:
        return not self._order

    @property
    def has_room(self) -> bool:
        """Whether this rank may be ready for one more."""
        return len(self.pending) < MAX_PENDING

    def submit(self, request: Request) -> None:
        """Note that this rank is ready for a request. Raises UsageError if it may not be submitted now."""
        name = request.name
        pending = self.pending
        if (
            name in self._missing and name not in pending and JOIN not in pending and len(pending) < MAX_PENDING
            and self._known[name].request == request
        ):  # fmt: skip
            pending[name] = request  # most often
            self._missing.remove(name)
            return
        if name in self.pending:
            raise UsageError(f"'{name}' is under way already: wait for it, or choose another name")
        if not self.has_room:
            raise UsageError(f"{MAX_PENDING} collectives are under way already: wait for some of them")
        if JOIN in self.pending:
            raise UsageError(f"'{name}' after join: this rank has said that it has no more data")
        if name == JOIN and self.pending:
            raise UsageError(f"join while '{next(iter(self.pending))}' is under way: wait for it first")
        self.pending[name] = request
        known = self._known.get(name)
        if known is None or known.request_of(self._rank) != request:
            self._news[name] = request
        self._has_others = self._has_others or name not in self._members

    def withdraw(self, name: str) -> None:
        """Note that this rank is no longer ready for this name."""
        self.pending.pop(name, None)
        self._news.pop(name, None)

    def request(self, name: str) -> Request:
        """The request of all ranks by this name, which was agreed."""
        request = self._known[name].request
        assert request is not None
        return request

    # with rounds

    def bytes_of_round(self) -> Array:
        """The bytes of this rank for the next round: uint8, equally many on all ranks."""
        flags = np.full(NAMES_FROM + len(self._known), self._rank in self.joined, np.uint8)
        flags[NO_NEWS] = not self._news
        if JOIN in self._known:
            flags[self._known[JOIN].index] = 0
        for name in self.pending.keys() - self._news.keys():
            flags[self._known[name].index] = 1
        return flags

    def news(self) -> list[Request]:
        """The requests that this rank must tell the others."""
        return list(self._news.values())

    def agree(self, minimum: Array) -> tuple[list[Batch], bool]:
        """Take the minimum of all ranks' bytes. Return the next batches, and whether all ranks tell their news then."""
        self.rounds += 1
        all_joined = len(self.joined) == self._size
        names = [self._names[at] for at in np.flatnonzero(minimum[NAMES_FROM:])]
        ready = [name for name in names if name == JOIN or not all_joined]
        agreed, failed = list[Request](), list[Batch]()
        for name in ready:
            known = self._known.pop(name)
            request, error = self._terms(name, known)
            if error:
                failed.append(Batch((name,), error))
            else:
                self._known[name] = KnownName(known.index, request, self.rounds)
                agreed.append(request)
            self.pending.pop(name, None)
        if failed:
            self._renumber_names(list(self._known))
            self._forget_steps()
        if JOIN in ready:  # the next one is news again
            self.last_joined, self.joined = self.joined[-1], []
            del self._known[JOIN]
            self._renumber_names(list(self._known))
        self._learn([request.name for request in agreed if request.name != JOIN])
        return [*fused(agreed, self._fusion_bytes), *failed], not minimum[NO_NEWS]

    def _terms(self, name: str, known: KnownName) -> tuple[Request, str]:
        """The request by this name, and why it cannot be done: empty if it can."""
        requests = {
            rank: known.request_of(rank) for rank in range(self._size) if name == JOIN or rank not in self.joined
        }
        request = next(candidate for candidate in requests.values() if candidate is not None)
        for rank, rank_request in requests.items():
            if rank_request is not None and rank_request.kind == REFUSAL:
                return request, f"rank {rank} refused '{name}': {rank_request.terms}"
        if len(set(requests.values())) > 1:
            return request, _describe_difference(name, requests)
        if name != JOIN and self.joined and request.kind not in WITHOUT_DATA:
            return request, f"'{name}' is {request.kind}: rank {self.joined[0]} has joined, and has no data for that"
        return request, ""

    def take_news(self, news: Sequence[Sequence[Request]]) -> None:
        """Take the new requests of all ranks, by rank."""
        for rank, requests in enumerate(news):
            for request in requests:
                known = self._known.pop(request.name, None)
                if known is None:
                    known = KnownName(NAMES_FROM + len(self._names))
                    self._names.append(request.name)
                known.changed[rank] = request
                self._known[request.name] = known
                if request.name == JOIN and rank not in self.joined:
                    self.joined.append(rank)
        self._forget_names()
        known_requests = {
            name: self._known[name].request_of(self._rank) if name in self._known else None for name in self.pending
        }
        self._news = {name: request for name, request in self.pending.items() if known_requests[name] != request}

    def _forget_names(self) -> None:
        """Forget old names if there are too many. Those agreed in this round stay: they are yet to be done."""
        spare = len(self._known) - MAX_NAMES
        if spare > 0:
            recent = set(list(self._known)[spare + MAX_NAMES // 2 :]) | {JOIN}
            self._renumber_names(
                [name for name, known in self._known.items() if name in recent or known.agreed_round == self.rounds]
            )
            self._forget_steps()

    def _renumber_names(self, names: Sequence[str]) -> None:
        """Keep these of the known names, in this order."""
        self._names = sorted(names, key=lambda name: self._known[name].index)
        for index, name in enumerate(self._names, NAMES_FROM):
            self._known[name].index = index
        self._known = {name: self._known[name] for name in names}

    # steps that are alike

    def _learn(self, names: Sequence[str]) -> None:
        if self.joined:
            self._forget_steps()
            return
        for name in names:
            if name in self._step:
                self._alike_steps = self._alike_steps + 1 if set(self._step) == set(self._last_step) else 0
                self._last_step, self._step = self._step, []
            self._step.append(name)
        if self._alike_steps >= self._alike_steps_needed and set(self._step) <= set(self._last_step):
            self._order = self._last_step
            self._members = frozenset(self._order)
            self._has_others = not self.pending.keys() <= self._members
            self._batches = self._make_batches(self._order)
            rest = [name for name in self._order if name not in self._step]
            self._due = self._make_batches(rest) if rest else list(self._batches)
            self._look_for_missing()

    def _make_batches(self, names: Sequence[str]) -> list[Batch]:
        groups = groupby(names, lambda name: self._known[name].agreed_round if self._is_careful else 0)
        return [
            batch for _, group in groups for batch in fused([self.request(name) for name in group], self._fusion_bytes)
        ]

    def _look_for_missing(self) -> None:
        self._missing = {
            name for name in self._due[0].names if name not in self.pending or self.pending[name] != self.request(name)
        }

    @property
    def due(self) -> Batch:
        """The next batch."""
        return self._due[0]

    @property
    def is_ready(self) -> bool:
        """Whether this rank is ready for the batch that is due."""
        return not self._missing

    def is_stuck(self, *, waits: bool) -> bool:
        """Whether the batch that is due may never be ready here. `waits`: the program waits for something."""
        return bool(self._missing) and (waits or self._has_others or bool(self._news))

    def finish_due(self, *, spoiled: bool) -> None:
        """The batch that was due is done, or some rank has spoiled it."""
        if spoiled:
            is_first = self._batches_done >= FORGIVEN_AFTER
            self._alike_steps_needed = ALIKE_STEPS if is_first else min(2 * self._alike_steps_needed, MAX_ALIKE_STEPS)
            self._is_careful = True
            self._forget_steps()
            return
        for name in self._due.pop(0).names:
            del self.pending[name]
        self._batches_done += 1
        self._due = self._due or list(self._batches)
        self._look_for_missing()

    def _forget_steps(self) -> None:
        self._step, self._last_step, self._order, self._batches, self._due = [], [], [], [], []
        self._alike_steps, self._missing, self._batches_done = 0, set(), 0


def _describe_difference(name: str, requests: dict[int, Request | None]) -> str:
    """A message with the different requests of two ranks."""
    (first_rank, first_request), *others = requests.items()
    other_rank, other_request = next((rank, request) for rank, request in others if request != first_request)
    texts = (str(request or "nothing") for request in (first_request, other_request))
    return f"'{name}' differs between ranks: rank {first_rank} has {next(texts)}, rank {other_rank} has {next(texts)}"
