"""A rank of `omnireduce tune`. All ranks measure; rank 0 chooses, prints and writes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from rich.console import Console

import omnireduce as omni
from omnireduce.console.rank_processes import RankRequest
from omnireduce.console.tune.report import (
    COMPLETE,
    IMPOSSIBLE,
    PRUNED,
    SampleLog,
    open_log,
    print_table,
    values_of,
    write_tuned,
)
from omnireduce.console.tune.search import Circumstances, Point, Race, Search, Space, Value
from omnireduce.console.tune.workload import cases_of, make_workload
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.launcher_detection import detect_launch, job_name
from omnireduce.support.config import Config, load_config
from omnireduce.support.printing import carriers_text, make_console, short_count

HEATS = 4  # of a sample, after each of which it may be pruned; an even number, so that both are as often first
FINALISTS, LAST_FINALISTS = 8, 3  # best samples that are measured once more, and best of these that are measured again
GRID_FINALISTS = 4  # best points, which are measured once more beside that of the search
FINAL_TIMES = 3  # as many rounds as a sample has
NOISE = 0.1  # of the logarithm of a ratio
ENOUGH = 0.95  # of the best of the grid
MIN_SAMPLES, SAMPLES_OF_KEY = 20, 6


class Request(RankRequest, frozen=True, kw_only=True):
    """The options of `omnireduce tune`; see its --help. `holds` are keys, `overrides` have their values."""

    holds: tuple[str, ...]
    pattern: str | None
    elements: int
    arrays: int
    density: float
    in_order: bool
    samples: int | None
    rounds: int
    seed: int
    grid: bool
    log_path: str | None
    write_path: str | None


class Verdict(msgspec.Struct, frozen=True):
    """The message of rank 0 to its parent. `refusal`: why nothing was measured. `share`: of the best of the grid."""

    refusal: str = ""
    share: float | None = None

    @property
    def status(self) -> int:
        """The exit status."""
        return 1 if self.share is not None and self.share < ENOUGH else 0


def run(request: Request, config: Config) -> Verdict:
    """Search, as all ranks do."""
    with omni.connect(config) as comm, open_log(request.log_path if comm.rank == 0 else None) as log:
        return Session(request, config, comm, log).run()


class Session:
    """One search. `comm` carries what ranks exchange between samples."""

    def __init__(self, request: Request, config: Config, comm: Communicator, log: SampleLog) -> None:
        self._request, self._comm, self._log = request, comm, log
        self._is_rank_0 = comm.rank == 0
        in_memory = comm.in_memory and comm.local_size == comm.size
        self._space = Space(config, request.holds, Circumstances(comm.shards, in_memory, request.in_order))
        cases = cases_of(
            config, pattern=request.pattern, elements=request.elements, arrays=request.arrays, density=request.density,
            size=comm.size,
        )  # fmt: skip
        self._workload = make_workload(cases, comm.rank, comm.size, in_order=request.in_order)
        self._console: Console = make_console(quiet=not self._is_rank_0)
        self._samples, self._job = 0, job_name(config, detect_launch().job)
        step = f"a step of {len(cases)} array{'s' * (len(cases) > 1)}, {short_count(self._workload.nbytes)} bytes"
        shards = f"{comm.shards} shard{'s' * (comm.shards > 1)}"
        self._console.print(f"{comm.size} ranks, {shards}; {step}")

    def run(self) -> Verdict:
        """Search; the same on all ranks."""
        space, request = self._space, self._request
        if not space.free:
            return Verdict(f"nothing is free: {'; '.join(f'{key}: {reason}' for key, reason in space.held.items())}")
        samples = request.samples or max(MIN_SAMPLES, SAMPLES_OF_KEY * len(space.free))
        search = Search(space, samples=samples, seed=request.seed) if self._is_rank_0 else None
        best = self._choose_best(self._search(search, samples))
        return Verdict(share=self._compare_with_grid(best) if request.grid else None)

    def _search(self, search: Search | None, samples: int) -> list[Point]:
        """Take the samples, and return the best points."""
        for _ in range(samples):
            point: Point | None = self._value_of_rank_0(search and search.ask())
            if point is None:
                self._console.print("every point was measured")
                break
            ratio = self._sample(point, search.goes_on if search else None)
            if point == self._space.start and ratio is not None and abs(math.log(ratio)) > NOISE:
                self._console.print(
                    "the default beside itself should have 1.0x: this machine is busy; take more --rounds"
                )
            if search:
                search.tell(point, ratio)
        best: list[Point] = self._value_of_rank_0(search and search.best(FINALISTS))
        return best

    def _value_of_rank_0(self, x: Any) -> Any:
        """The value of rank 0."""
        return self._comm.broadcast_object(x, 0, name="tune")

    def _sample(
        self, point: Point, goes_on: Callable[[float, int], bool] | None, *, prunes: bool = True
    ) -> float | None:
        """Measure a point beside the default, and return its ratio; None where it was pruned, or cannot be."""
        space, config = self._space, self._space.config(point)
        self._samples += 1
        if config is None or not space.fits(config, self._comm.size):
            values = values_of(space.base) | point
            self._record_sample(IMPOSSIBLE, values, ())
            return None
        state = COMPLETE
        race = self._race([space.base, config])
        for heat in range(HEATS):
            race.run(math.ceil(self._request.rounds / HEATS))
            if prunes and heat < HEATS - 1 and not self._value_of_rank_0(goes_on and goes_on(race.ratio(1), heat)):
                state = PRUNED
                break
        scores = race.score(1), race.score(0), race.ratio(1)
        self._record_sample(state, values_of(config), scores)
        return scores[2] if state == COMPLETE else None

    def _record_sample(self, state: str, values: Mapping[str, Value], scores: tuple[float, ...]) -> None:
        self._log.add(self._samples, state, values, scores)
        score = f"{scores[2]:.3f}x" if scores else "none"
        self._console.print(
            f"sample {self._samples}: {score}{'' if state == COMPLETE else f' ({state})'}  {self._text_of(values)}"
        )

    def _race(self, configs: list[Config]) -> Race:
        return Race(configs, self._workload, f"{self._job}.{self._samples}")

    def _race_points(self, points: list[Point], times: int = FINAL_TIMES) -> Race:
        """A race of some points and the default. Each of them is first in one heat."""
        contenders = self._configs([self._space.start, *points])
        self._samples += 1
        race = self._race(contenders)
        for _ in contenders:
            race.run(math.ceil(times * self._request.rounds / len(contenders)))
        return race

    def _sorted_by_speed(self, points: list[Point], times: int = FINAL_TIMES) -> list[Point]:
        """The points in the order of a race."""
        race = self._race_points(points, times)
        return [points[index] for index in sorted(range(len(points)), key=lambda index: -race.ratio(1 + index))]

    def _choose_best(self, points: list[Point]) -> Point:
        """Measure the best points once more, in turns with the default, and the best of these again. Return the best
        one, which may be the default, and say and write what it is."""
        space = self._space
        if len(points) > LAST_FINALISTS:
            points = self._sorted_by_speed(points, 1)[:LAST_FINALISTS]
        contenders = [space.start, *points]
        index, verdict = 0, "no sample is faster than the default"
        if points:
            race = self._race_points(points)
            index = max(range(len(contenders)), key=race.ratio)
            if index:
                verdict = (
                    f"{race.ratio(index):.3f} times as fast as the default, which had {race.score(0):.4g} bytes per us"
                )
            verdict += f", carried by {carriers_text(race.carried)}"
        best = self._configs([contenders[index]])[0]
        print_table(self._console, space, best)
        self._console.print(verdict)
        if self._is_rank_0 and self._request.write_path is not None:
            user_config = load_config(
                self._request.config_file, overrides=self._request.overrides, environ=_environ_with_user_file()
            )
            write_tuned(
                self._request.write_path, user_config, best, space.free, f"Found by omnireduce tune: {verdict}."
            )
            self._console.print(f"written: {self._request.write_path}")
        return contenders[index]

    def _configs(self, points: Iterable[Point]) -> list[Config]:
        configs = [self._space.config(point) for point in points]
        return [config for config in configs if config is not None]

    def _compare_with_grid(self, best: Point) -> float:
        """Measure a small grid, its best points once more, and then that of the search and the best of these in turns.
        Return the ratio of the two. The last race has no part in the choice: of several points that are alike, the best
        one had luck."""
        self._console.print("the grid:")
        measured = [(self._sample(point, None, prunes=False), point) for point in self._space.grid()]
        ranked = sorted(
            (sample for sample in measured if sample[0] is not None), key=lambda sample: -(sample[0] or 0.0)
        )
        finalists = [point for _, point in ranked[:GRID_FINALISTS]]
        best_of_grid = self._sorted_by_speed(finalists)[0]
        race = self._race_points([best, best_of_grid])
        share, ratios = race.ratio(1, against=2), (race.ratio(1), race.ratio(2))
        comparison = ", the same point" if best == best_of_grid else f" ({self._text_of(best_of_grid)})"
        self._console.print(
            f"in turns: search {ratios[0]:.3f}x, best of {len(measured)} of the grid {ratios[1]:.3f}x{comparison}"
        )
        self._console.print(f"the search reaches {share:.1%} of the best of the grid; expected at least {ENOUGH:.0%}")
        return share

    def _text_of(self, values: Mapping[str, Value]) -> str:
        """The settings that differ from the default."""
        changed = {key: values[key] for key, value in self._space.start.items() if values[key] != value}
        return " ".join(f"{key}={value}" for key, value in changed.items()) or "the default, against itself"


def _environ_with_user_file() -> dict[str, str]:
    """The environment for a configuration, without the launcher's variables for ranks."""
    name = "OMNIREDUCE_CONFIG"
    return {name: os.environ[name]} if name in os.environ else {}
