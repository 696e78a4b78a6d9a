"""Configurations that take turns on the same data.

One round: every contender fills its arrays, meets its other ranks, and sums them through a queue; this is timed. The
first one of a round is the last one of the next. A round takes as long as its slowest rank.

Rounds come in heats. For each heat the contenders form their jobs anew, in another order: of two equal jobs, the one
that was there first may be slower. A heat begins with rounds that are not timed. From these the queue learns that steps
are alike. In the last of these every element is checked.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

import omnireduce as omni
from omnireduce.console.tune.workload import Workload
from omnireduce.data_parallel.queue import Queue
from omnireduce.errors import ConfigError, OmniReduceError
from omnireduce.support.config import Config, override_config
from omnireduce.support.extras import install

Value = int | float
Point = dict[str, Value]  # a value for each key that is free


@dataclass(frozen=True, slots=True)
class Parameter:
    """A key and its values, in order: neighbours are alike. `grid`: those of a small grid. `counts_for`: where it has
    an effect; see `Circumstances`."""

    key: str
    values: tuple[Value, ...]
    grid: tuple[Value, ...] = ()
    counts_for: str = ""


_KIB, _MIB = 1 << 10, 1 << 20
PARAMETERS = (
    Parameter("protocol.block_size", (32, 64, 128, 256, 512, 1024, 2048), (64, 256, 1024)),
    Parameter("protocol.scan_span", (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536), (), "messages"),
    Parameter("protocol.stripe_blocks", (8, 16, 32, 64, 128, 256, 512), (), "shards"),
    Parameter("protocol.slots", (2, 3, 4, 6, 8), (), "messages"),
    Parameter(
        "protocol.slot_bytes", (256 * _KIB, 512 * _KIB, _MIB, 3 << 19, 2 * _MIB, 4 * _MIB), (512 * _KIB, 3 << 19),
        "messages",
    ),
    Parameter("transport.threads", (0, 1, 2, 4, 8), (), "shards"),
    Parameter(
        "queue.fusion_bytes", (0, 64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB),
        (0, 256 * _KIB, _MIB, 16 * _MIB),
    ),
    Parameter("queue.cycle_s", (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03), (), "rounds"),
)  # fmt: skip
BY_KEY = {parameter.key: parameter for parameter in PARAMETERS}


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Conditions for keys to have an effect. `in_memory`: ranks exchange tensors in memory alone, and aggregators get
    none. `in_order`: every step is like the last one, so that the queue has no rounds."""

    shards: int
    in_memory: bool
    in_order: bool

    def why_without_effect(self, parameter: Parameter) -> str:
        """Why a key changes nothing here; empty if it may."""
        if parameter.counts_for == "rounds":
            return "steps that are alike have no rounds" if self.in_order else ""
        if parameter.counts_for and self.in_memory:
            return "ranks sum in memory that they share"
        return "there is one shard" if parameter.counts_for == "shards" and self.shards < 2 else ""


class Space:
    """The keys that are free, and the values that each may take; that of `base` is among them."""

    def __init__(self, base: Config, held: Sequence[str], circumstances: Circumstances) -> None:
        self.base = base
        self.held = dict.fromkeys(held, "held")
        for parameter in PARAMETERS:
            reason = circumstances.why_without_effect(parameter)
            if reason and parameter.key not in self.held:
                self.held[parameter.key] = reason
        self.free = {
            parameter.key: self._values(parameter) for parameter in PARAMETERS if parameter.key not in self.held
        }

    def _values(self, parameter: Parameter) -> tuple[Value, ...]:
        return tuple(sorted({*parameter.values, value_of(self.base, parameter.key)}))

    @property
    def size(self) -> int:
        """The number of points."""
        return math.prod(len(values) for values in self.free.values())

    @property
    def start(self) -> Point:
        """The point of `base`."""
        return {key: value_of(self.base, key) for key in self.free}

    def grid(self) -> Iterator[Point]:
        """A small grid. Keys without values for it stay as in `base`."""
        axes = [BY_KEY[key].grid or (value,) for key, value in self.start.items()]
        for values in itertools.product(*axes):
            yield dict(zip(self.free, values, strict=True))

    def config(self, point: Mapping[str, Value]) -> Config | None:
        """The configuration at a point; None where its values do not go together."""
        try:
            return override_config(self.base, point, source="tune")
        except ConfigError:
            return None

    def fits(self, config: Config, world_size: int) -> bool:
        """Whether an aggregator, as `config` has it, admits such a job."""
        protocol = config.protocol
        return (world_size + 1) * protocol.slots * protocol.slot_bytes <= config.aggregator.max_job_bytes


def value_of(config: Config, key: str) -> Value:
    """The value of a key that can be tuned."""
    section, _, name = key.partition(".")
    value: Value = getattr(getattr(config, section), name)
    return value


def read_holds(holds: Sequence[str]) -> tuple[list[str], list[str]]:
    """The keys of `--hold section.key` and `--hold section.key=value`, and the overrides among them. Raises
    ConfigError."""
    keys, overrides = [], []
    for hold in holds:
        key, equals, _ = hold.partition("=")
        key = key.strip()
        if key not in BY_KEY:
            raise ConfigError(f"--hold: got {hold!r}, expected section.key or section.key=value of {', '.join(BY_KEY)}")
        keys.append(key)
        if equals:
            overrides.append(hold)
    if len(set(keys)) == len(PARAMETERS):
        raise ConfigError("--hold: every parameter is held; expected at least one that is free")
    return keys, overrides


_STEP = 2  # values
_GAIN = 1.05  # a ratio that is more than noise
_MAX_REPEATS = 50  # proposals that were measured before, one after another; then the search is over


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
        first_trials = list(self._first_trials(space))[: max(1, samples // 2)]
        self._first_count = len(first_trials)
        startup_trials = len(first_trials) + 3  # so many samples are no guess of the sampler, and are not pruned
        with warnings.catch_warnings():  # of what may change in a later release
            warnings.simplefilter("ignore")
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=startup_trials)
        pruner = optuna.pruners.MedianPruner(n_startup_trials=startup_trials)
        self._study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
        self._pruned = optuna.trial.TrialState.PRUNED
        self._space = space
        self._trial: Any = None
        self._measured: dict[tuple[object, ...], float | None] = {}
        self._complete: list[tuple[float, Point]] = []
        for trial in first_trials:
            self._study.enqueue_trial(trial)

    @staticmethod
    def _first_trials(space: Space) -> Iterator[dict[str, int]]:
        """The start, whose ratio says how far from 1 noise alone takes a sample; then what differs from it in one key,
        which is some way up or down. Of many keys, random points would differ in all at once."""
        start = {key: values.index(space.start[key]) for key, values in space.free.items()}
        yield start
        for step in (_STEP, -_STEP):
            for key, index in start.items():
                neighbour = min(max(index + step, 0), len(space.free[key]) - 1)
                if neighbour != index:
                    yield start | {key: neighbour}

    def ask(self) -> Point | None:
        """A point that was not measured yet; None where there seems to be none."""
        for _ in range(_MAX_REPEATS):
            if len(self._measured) == self._space.size:
                return None
            trial = self._trial = self._study.ask()
            indices = {key: trial.suggest_int(key, 0, len(values) - 1) for key, values in self._space.free.items()}
            point = {key: self._space.free[key][i] for key, i in indices.items()}
            if tuple(point.values()) not in self._measured:
                return point
            ratio = self._measured[tuple(point.values())]
            self._finish_trial(ratio)
        return None

    def goes_on(self, ratio: float, stage: int) -> bool:
        """Whether the sample is worth more rounds, after `stage` of its parts."""
        self._trial.report(ratio, stage)
        return not self._trial.should_prune()

    def tell(self, point: Point, ratio: float | None) -> None:
        """Record the ratio of the sample; None if it was pruned, or is impossible."""
        self._measured[tuple(point.values())] = ratio
        if ratio is not None:
            self._complete.append((ratio, point))
        self._finish_trial(ratio)
        if len(self._measured) == self._first_count:
            self._propose_combination()

    def _propose_combination(self) -> None:
        """Make a next sample that joins all values which were good alone."""
        start, best = self._space.start, dict(self._space.start)
        for _, point in sorted(
            (sample for sample in self._complete if sample[0] > _GAIN), key=lambda sample: sample[0]
        ):
            best |= {key: value for key, value in point.items() if value != start[key]}
        self._study.enqueue_trial({key: self._space.free[key].index(value) for key, value in best.items()})

    def _finish_trial(self, ratio: float | None) -> None:
        if ratio is None:
            self._study.tell(self._trial, state=self._pruned)
        else:
            self._study.tell(self._trial, ratio)

    def best(self, count: int) -> list[Point]:
        """Up to so many points, the best first; not the start."""
        others = [sample for sample in self._complete if sample[1] != self._space.start]
        return [point for _, point in sorted(others, key=lambda sample: -sample[0])[:count]]


WARM_UP = 3  # a queue takes two steps that are alike before it leaves its rounds


class Contender:
    """A configuration, and a job of these ranks that uses it."""

    def __init__(self, config: Config, job: str, stack: ExitStack) -> None:
        self.comm = stack.enter_context(omni.connect(config, job=job))
        self.queue = Queue(self.comm)

    def step(self, workload: Workload, number: int) -> float:
        """Seconds that this rank's step takes."""
        workload.fill(number)
        self.comm.barrier()
        start = time.perf_counter()
        workload.submit(self.queue, number)
        return time.perf_counter() - start


class Race:
    """Contenders, the first of which the others are compared with. All ranks make it, and use it alike."""

    def __init__(self, configs: Sequence[Config], workload: Workload, job: str) -> None:
        self._configs, self._workload, self._job = configs, workload, job
        self._heats = self._round = 0
        self._seconds = np.empty((len(configs), 0))
        self.carried = Counter[str]()  # bytes of this rank's tensors, by transport

    def run(self, rounds: int) -> None:
        """A heat of so many rounds. Raises what `connect` raises, AbortedError, and OmniReduceError where a sum is
        wrong."""
        size = len(self._configs)
        order = [(self._heats + i) % size for i in range(size)]
        with ExitStack() as stack:
            by_index = {i: Contender(self._configs[i], f"{self._job}.{self._heats}.{i}", stack) for i in order}
            contenders = [by_index[i] for i in range(size)]
            self._warm_up(contenders)
            seconds = np.zeros((size, rounds))
            for column in range(rounds):
                for i in order if self._round % 2 else reversed(order):
                    seconds[i, column] = contenders[i].step(self._workload, self._round)
                self._round += 1
            slowest = contenders[0].comm.allreduce(seconds, op="max")
            for contender in contenders:
                contender.comm.barrier()
                contender.queue.close()
                self.carried += contender.comm.statistics().carried
        self._heats += 1
        self._seconds = np.concatenate([self._seconds, slowest], axis=1)

    def _warm_up(self, contenders: list[Contender]) -> None:
        wrong = 0
        for index in range(WARM_UP):
            for contender in contenders:
                contender.step(self._workload, self._round)
                wrong += self._workload.wrong(self._round) if index == WARM_UP - 1 else 0
            self._round += 1
        if contenders[0].comm.allreduce(np.array([wrong]))[0]:
            raise OmniReduceError("sums are wrong: nothing can be tuned")

    def score(self, contender: int) -> float:
        """Bytes per microsecond: of one rank's step, by its median time."""
        return float(self._workload.nbytes / (np.median(self._seconds[contender]) * 1e6))

    def ratio(self, contender: int, against: int = 0) -> float:
        """The speed relative to another contender. A time counts by its ratio to the geometric mean of its round, a
        contender by the median of these. So of any three the ratios fit together."""
        logs = np.log(self._seconds)
        medians = np.median(logs - logs.mean(axis=0), axis=1)
        return float(np.exp(medians[against] - medians[contender]))
