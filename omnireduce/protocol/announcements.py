"""The last news of waiting workers that the ranks of each generation have heard. All ranks are told each change."""

from __future__ import annotations

from collections.abc import Iterator

NEWS_S = 1.0  # between two news of who waits or is missing: telling all of each newcomer takes N² messages


class Announcements:
    """Generations whose ranks know that workers wait. Workers that come and go before that are not announced."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[int, float]] = {}  # how many, and when
        self._deserted: set[int] = set()  # all who waited have gone

    @property
    def deadline(self) -> float | None:
        """When `taken_back` has something to tell, if nobody comes before."""
        return min((self._told[generation][1] + NEWS_S for generation in self._deserted), default=None)

    def is_news(self, generation: int, workers: int, now: float) -> bool:
        """Whether the ranks have not heard yet that `workers` wait. From now on this counts as heard."""
        before, _ = self._told.pop(generation, (0, 0.0))
        if workers:
            self._told[generation] = workers, now
        return workers != before

    def nobody_waits(self, generation: int) -> None:
        """The last of those who waited has gone."""
        if generation in self._told:
            self._deserted.add(generation)

    def somebody_waits(self, generation: int) -> None:
        """A worker has come."""
        self._deserted.discard(generation)

    def taken_back(self, now: float) -> Iterator[int]:
        """The generations whose ranks must now hear that nobody waits any more."""
        for generation in [generation for generation in self._deserted if now >= self._told[generation][1] + NEWS_S]:
            self.forget(generation)
            yield generation

    def forget(self, generation: int) -> None:
        """The generation is over, or its ranks know that nobody waits."""
        self._told.pop(generation, None)
        self._deserted.discard(generation)
