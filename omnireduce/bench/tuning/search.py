"""The choice of the next point to measure: Optuna's TPE sampler, and its median pruner.

The sampler is that of Bergstra et al., "Algorithms for Hyper-Parameter Optimization", 2011: it draws points where good
samples are dense and bad ones are not. The pruner ends a sample that is worse than the median after as many rounds.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from omnireduce.bench.tuning.space import Point, Space
from omnireduce.errors import ConfigError
from omnireduce.extras import install

_STEP = 2  # values
_GAIN = 1.05  # a ratio that is more than noise
_MOST_KNOWN = 50  # proposals that were measured before, one after another; then the search is over


def check_library() -> None:
    """Raise ConfigError where Optuna is not installed."""
    try:
        import optuna  # noqa: F401  whether it is there
    except ImportError:
        raise ConfigError(f"omnireduce tune needs optuna: {install('optuna', 'tune')}") from None


class Search:
    """A search for the point with the largest ratio, of so many `samples`. The first one is the start itself."""

    def __init__(self, space: Space, *, samples: int, seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        first = list(self._first(space))[: max(1, samples // 2)]
        self._many_first = len(first)
        before = len(first) + 3  # so many samples are no guess of the sampler, and are not pruned
        with warnings.catch_warnings():  # of what may change in a later release
            warnings.simplefilter("ignore")
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=before)
        pruner = optuna.pruners.MedianPruner(n_startup_trials=before)
        self._study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
        self._pruned = optuna.trial.TrialState.PRUNED
        self._space = space
        self._trial: Any = None
        self._known: dict[tuple[object, ...], float | None] = {}
        self._complete: list[tuple[float, Point]] = []
        for trial in first:
            self._study.enqueue_trial(trial)

    @staticmethod
    def _first(space: Space) -> Iterator[dict[str, int]]:
        """The start, whose ratio says how far from 1 noise alone takes a sample; then what differs from it in one key,
        which is some way up or down. Of many keys, random points would differ in all at once."""
        start = {key: values.index(space.start[key]) for key, values in space.free.items()}
        yield start
        for step in (_STEP, -_STEP):
            for key, at in start.items():
                moved = min(max(at + step, 0), len(space.free[key]) - 1)
                if moved != at:
                    yield start | {key: moved}

    def ask(self) -> Point | None:
        """A point that was not measured yet; None where there seems to be none."""
        for _ in range(_MOST_KNOWN):
            if len(self._known) == self._space.size:
                return None
            trial = self._trial = self._study.ask()
            at = {key: trial.suggest_int(key, 0, len(values) - 1) for key, values in self._space.free.items()}
            point = {key: self._space.free[key][i] for key, i in at.items()}
            if tuple(point.values()) not in self._known:
                return point
            known = self._known[tuple(point.values())]
            self._tell(known)
        return None

    def goes_on(self, ratio: float, stage: int) -> bool:
        """Whether the sample is worth more rounds, after `stage` of its parts."""
        self._trial.report(ratio, stage)
        return not self._trial.should_prune()

    def tell(self, point: Point, ratio: float | None) -> None:
        """Record the ratio of the sample; None if it was pruned, or is impossible."""
        self._known[tuple(point.values())] = ratio
        if ratio is not None:
            self._complete.append((ratio, point))
        self._tell(ratio)
        if len(self._known) == self._many_first:
            self._combine()

    def _combine(self) -> None:
        """Make a next sample that joins all values which were good alone."""
        start, best = self._space.start, dict(self._space.start)
        for _, point in sorted(
            (sample for sample in self._complete if sample[0] > _GAIN), key=lambda sample: sample[0]
        ):
            best |= {key: value for key, value in point.items() if value != start[key]}
        self._study.enqueue_trial({key: self._space.free[key].index(value) for key, value in best.items()})

    def _tell(self, ratio: float | None) -> None:
        if ratio is None:
            self._study.tell(self._trial, state=self._pruned)
        else:
            self._study.tell(self._trial, ratio)

    def best(self, most: int) -> list[Point]:
        """Up to so many points, the best first; not the start."""
        others = [sample for sample in self._complete if sample[1] != self._space.start]
        return [point for _, point in sorted(others, key=lambda sample: -sample[0])[:most]]
