"""An optimizer whose state lives on the aggregator shards."""

from __future__ import annotations

import math
import re
import secrets
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from omnireduce.core.block_program import FIRST_COLUMN, PROGRAM_ELEMENTS, SUM, Assembly, BlockProgram, Operation
from omnireduce.core.dtypes import Array
from omnireduce.core.hyperparameters import number
from omnireduce.errors import UsageError, a_type
from omnireduce.optimizers.parts import Memory, Part, as_weights, check_tables, parameters_of, parts_of
from omnireduce.optimizers.rules import SCRATCH, WEIGHTS, Lamb, Rule, Step, check_rule
from omnireduce.optimizers.saved_state import (
    NUMBER_BITS,
    STEP,
    Save,
    SavedParts,
    Shapes,
    check_state,
    discard_part,
    key_of,
    publish_part,
    share_of,
    write_part,
)
from omnireduce.runtime.rank import global_communicator
from omnireduce.runtime.rank.calls.arguments import check_root, find_overlap
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.error_agreement import check_agreement, run_agreed
from omnireduce.runtime.rank.handles import Handle
from omnireduce.runtime.rank.reported_errors import report_errors_to

NORM_EPS = 1e-6  # is added to the norm, as torch does


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """The longest `norm` of all gradients, or the largest `value` of each element; None: any. Raises UsageError for
    what is no positive number, and for both."""

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        for name in ("norm", "value"):
            setting = getattr(self, name)
            if setting is None:
                continue
            limit = number(f"clip_{name}", setting)
            if not 0 < limit < math.inf:
                raise UsageError(f"clip_{name} is {limit:g}; expected more than 0, or None not to clip")
            object.__setattr__(self, name, limit)
        if self.norm is not None and self.value is not None:
            raise UsageError("clip_norm and clip_value are both given; expected one of them")

    def factor(self, norm: float | None) -> float:
        """The factor for gradients of this norm; NaN if the norm is NaN, and 1 where no norm is clipped."""
        if self.norm is None or norm is None:
            return 1.0
        factor = self.norm / (norm + NORM_EPS)
        return 1.0 if factor >= 1 else factor


T = TypeVar("T")
MAX_AT_ONCE = 16  # exchanges that are under way, where each parameter has its own
Steps = Sequence[tuple[Part, Step]]


def start_squares(group: Communicator, steps: Steps, rule: Rule, gradients: Mapping[str, Any]) -> Callable[[], float]:
    """Start to add up the squares of the gradients. The returned function gives the sum."""
    handles = [(part.start(group, _squares(rule, step), gradients), step.scale) for part, step in steps]
    return lambda: sum(float(handle.wait().totals[0]) * scale**2 for handle, scale in handles)


def _squares(rule: Rule, step: Step) -> BlockProgram:
    """The program whose total is the sum of the squares of the gradient. It changes nothing."""
    code = Assembly()
    code.add(Operation.SQUARE, SUM)
    code.add(Operation.ADD_TO_TOTAL, SUM)
    return code.program(step.state, 1 + len(rule.columns), len(rule.cells), totals=1, returns=False)


def start_update(group: Communicator, steps: Steps, rule: Rule, gradients: Mapping[str, Any]) -> Callable[[], None]:
    """Start to update the weights."""
    if isinstance(rule, Lamb):
        return _start_update_by_norms(group, steps, rule, gradients)
    handles = [part.start(group, rule.program(step), gradients) for part, step in steps]

    def end() -> None:
        for (part, _), handle in zip(steps, handles, strict=True):
            handle.wait()
            part.finish()

    return end


def _start_update_by_norms(
    group: Communicator, steps: Steps, rule: Lamb, gradients: Mapping[str, Any]
) -> Callable[[], None]:
    results = _run_in_turn(lambda item: item[0].start(group, rule.norms(item[1]), gradients), steps)
    norms = [[math.sqrt(total) for total in result.totals] for result in results]

    def end() -> None:
        updates = [(part, rule.apply(step, *norm)) for (part, step), norm in zip(steps, norms, strict=True)]
        for _ in _run_in_turn(lambda item: item[0].start(group, item[1], {}), updates):
            pass
        for part, _ in steps:
            part.finish()

    return end


def _run_in_turn(start: Callable[[T], Handle[Any]], items: Iterable[T]) -> Iterator[Any]:
    """The results of one collective for each item, in order. Up to `MAX_AT_ONCE` are under way at once."""
    handles = deque[Handle[Any]]()
    for item in items:
        handles.append(start(item))
        if len(handles) == MAX_AT_ONCE:
            yield handles.popleft().wait()
    while handles:
        yield handles.popleft().wait()


NAME = re.compile(r"[A-Za-z0-9.-]{1,40}")
_group_counts: WeakKeyDictionary[Communicator, tuple[object, Counter[str]]] = WeakKeyDictionary()
"""The number of groups made for optimizers of each name, in the present formation of a communicator."""


class ShardedOptimizer:
    """Updates `params` on the aggregators. In a step each rank sends blocks of its gradients, and gets blocks of new
    weights. The state of the rule lives on the shards only, each part once.

    `params`: a dict, by name, or a list of C-contiguous arrays of float32, which are changed in place; the same names
    and shapes on all ranks. At the first use all ranks get the weights of rank `root`: where theirs may be others, all
    call `restore` before they compute the first gradients. `rule`: such as `Adam(lr=1e-3)`; it may be replaced between
    two steps, on all ranks alike, by one of the same kind: to change the learning rate, for instance. `tables`: names
    of matrices whose gradients are given as rows, as those of embeddings.

    `clip_norm`: the mean of the gradients of all ranks is made no longer than this, all parameters taken together;
    `gradient_norm` is then how long it was in the last step. `clip_value`: no element of the mean is larger than this,
    or less than minus this. Only one of both may be given, the same on all ranks. `comm`: the ranks (None: the global
    communicator). All ranks call all methods in the same order: that tells optimizers of one `name` apart. Those that
    different threads use need names of their own.

    Construction raises UsageError for parameters that cannot be. The first use raises RefusedError when the shards have
    no room for what the rule keeps (`aggregator.max_job_bytes`), and what `Communicator.create_group` raises.
    """

    def __init__(
        self, params: Mapping[str, Array] | Sequence[Array], rule: Rule,
        *, clip_norm: float | None = None, clip_value: float | None = None, tables: Collection[str] = (),
        comm: Communicator | None = None, root: int = 0, name: str = "optimizer",
    ) -> None:  # fmt: skip
        self.comm = global_communicator.running() if comm is None else comm
        check_rule(rule)
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise UsageError(f"name {name!r}: expected up to 40 letters, digits, '.' and '-'")
        self._name, self._rule, self.steps = name, rule, 0
        self._clipping = Clipping(norm=clip_norm, value=clip_value)
        self.gradient_norm: float | None = None
        parameters = parameters_of(params)
        names = self._names = [parameter.name for parameter in parameters]
        check_tables(tables, names)
        shared = find_overlap([parameter.weights for parameter in parameters])
        if shared:
            first, second = (names[at] for at in sorted(shared))
            raise UsageError(f"{first} and {second} share memory; expected each array once")
        if rule.needs_rows and (not_tables := sorted(set(names) - set(tables))):
            raise UsageError(
                f"{type(rule).__name__} is for rows: name {', '.join(not_tables)} in tables, or leave them out"
            )
        block_size = min(self.comm.config.protocol.block_size, PROGRAM_ELEMENTS)
        self._parts = parts_of(parameters, set(tables), block_size, separate=isinstance(rule, Lamb))
        self._memory = Memory(parameter.weights for parameter in parameters)
        self._root, self._committed_state = root, dict[str, Any]()
        self._group: Communicator | None = None
        self._formation: object = None  # of `comm`, when the group was made

    @property
    def rule(self) -> Rule:
        return self._rule

    @rule.setter
    def rule(self, rule: Rule) -> None:
        if type(rule) is not type(self._rule):
            raise UsageError(f"rule is {a_type(rule)}; expected {a_type(self._rule)}, as before")
        if rule.columns != self._rule.columns:
            raise UsageError("rule keeps other numbers than before: a momentum cannot come or go")
        self._rule = rule

    @property
    def state_bytes(self) -> int:
        """The bytes on the shard that keeps the most, weights included. Ranks keep nothing."""
        tensors = [(part.layout.elements, part.layout.block_size) for part in self._parts]
        return self.comm.state_bytes(tensors, 1 + len(self._rule.columns), len(self._rule.cells))

    def _ready_group(self) -> Communicator:
        """The communicator of the steps. Raises UsageError when its job was formed anew."""
        if self._group is None:
            self._group = self._open_group_with(self._root, lambda group: self._send_weights(group, self._root))
        elif self._formation is not self.comm.formation:
            raise UsageError("the job was formed anew, and the shards have forgotten what they kept; call restore")
        return self._group

    def _open_group_with(self, root: int, begin: Callable[[Communicator], None]) -> Communicator:
        """A new communicator of the steps, after `begin`."""
        group = self._open_group(root)
        try:
            begin(group)
        except BaseException:
            group.shutdown()
            raise
        return group

    def _open_group(self, root: int) -> Communicator:
        self._formation = self.comm.formation
        number = _next_group_number(self._name, self.comm)
        check_agreement(self.comm, [("root", str(root)), *self._terms()], f"{self._name}.alike")
        group = self.comm.create_group(name=f"{self._name}.{number}", state_bytes=self.state_bytes)
        group.drives_in_background = False  # the thread that ends a step drives it
        return group

    def _terms(self) -> Iterator[tuple[str, str]]:
        """The settings that all ranks must share."""
        yield "the rule", type(self._rule).__name__
        yield "clip_norm", str(self._clipping.norm)
        yield "clip_value", str(self._clipping.value)
        yield "what the rule keeps", ", ".join((*self._rule.columns, *self._rule.cells)) or "nothing"
        shapes = {
            parameter.name: f"float32{list(parameter.weights.shape)} as {part.kind}"
            for part in self._parts for parameter in part.parameters
        }  # fmt: skip
        yield from ((f"parameter {name}", shapes[name]) for name in self._names)

    def step(self, gradients: Mapping[str, Any] | Sequence[Any]) -> None:
        """Make one step with the mean of the gradients of all ranks; afterwards all have the same weights.

        `gradients`: by name, or in the order of the parameters: float32 arrays like them; of `tables` pairs (indices,
        rows). A gradient that is missing, or None, is zero on this rank. Raises UsageError for a gradient that does not
        fit; otherwise what `allreduce` raises: after an error the weights of the ranks may differ, until `restore`.
        """
        self.begin_step(gradients)()

    def begin_step(self, gradients: Mapping[str, Any] | Sequence[Any]) -> Callable[[], None]:
        """Start a `step`; what it returns ends it. Gradients and parameters belong to the step until then. Several
        optimizers may have a step under way."""
        with report_errors_to(self):
            checked = self.check_gradients(gradients)
        if self._clipping.norm is None:
            return self.begin_update(checked)
        squares_of_all = self.begin_squares(checked)
        return lambda: self.begin_update(checked, math.sqrt(squares_of_all()))()

    def check_gradients(self, gradients: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        """Gradients as they travel, by name. Raises UsageError for those that do not fit."""
        gradients_by_name = self._by_name(gradients)
        return {
            name: self._separate_from_weights(gradient)
            for part in self._parts
            for name, gradient in part.check_gradients(gradients_by_name).items()
        }

    def begin_squares(self, gradients: Mapping[str, Any]) -> Callable[[], float]:
        """Start to add up the squares of the mean of the gradients of all ranks; what this returns waits for the
        sum."""
        return start_squares(self._ready_group(), self._steps(), self._rule, gradients)

    def begin_update(self, gradients: Mapping[str, Any], norm: float | None = None) -> Callable[[], None]:
        """Start the update of a step with these gradients; what this returns ends it. `norm`: where it is clipped, that
        of all gradients that are clipped together."""
        group, self.gradient_norm = self._ready_group(), norm
        self.steps += 1
        return start_update(group, self._steps(self._clipping.factor(norm)), self._rule, gradients)

    def _by_name(self, gradients: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        if not isinstance(gradients, Mapping | Sequence):
            raise UsageError(f"gradients is {a_type(gradients)}; expected a dict or a list")
        if not isinstance(gradients, Mapping):
            if len(gradients) != len(self._names):
                raise UsageError(
                    f"{len(gradients)} gradients; expected {len(self._names)}, None for one that is missing"
                )
            gradients = dict(zip(self._names, gradients, strict=True))
        if unknown := sorted(map(str, set(gradients) - set(self._names))):
            raise UsageError(f"gradients of {', '.join(unknown)}; expected some of {', '.join(self._names)}")
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def _separate_from_weights(self, gradient: Any) -> Any:
        """The gradient, or its rows; a copy if it shares memory with weights, which a step writes. For instance, the
        gradient of w² / 2 is w."""
        if isinstance(gradient, tuple):
            return tuple(map(self._separate_from_weights, gradient))
        return gradient.copy() if self._memory.overlaps(gradient) else gradient

    def refuse(self, error: Exception) -> None:
        """Let the other ranks, which are about to use the optimizer, know that this one does not: see
        `Communicator.refuse`."""
        (self.comm if self._group is None else self._group).refuse(error)

    def _steps(self, factor: float = 1.0) -> list[tuple[Part, Step]]:
        """This step of each part. `factor`: what the mean is multiplied by."""
        scale, limit = factor / self.comm.size, self._clipping.value
        return [(part, Step(self.steps, scale, part.state, part.layout.block_size, limit)) for part in self._parts]

    def close(self) -> None:
        """Give back what the shards keep. The next use begins anew."""
        if self._group is not None:
            self._group.shutdown()
            self._group = None

    def __enter__(self) -> ShardedOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # the state

    def state_dict(self, root: int | None = 0) -> dict[str, Any]:
        """The state on the shards: {"step": steps, "state": {parameter: {column: array}}}, on rank `root`, or on all
        ranks if that is None; elsewhere {}. One array after the other comes to that rank.

        An array is like the parameter; what is kept for each row has one number for a row.
        """
        with report_errors_to(self):
            is_receiver = root is None or check_root(root, self.comm.size) == self.comm.rank
        state: dict[str, Any] = {parameter.name: {} for part in self._parts for parameter in part.parameters}
        for name, column, values in self._fetch(is_receiver=is_receiver):
            state[name][column] = values
        return {STEP: self.steps, "state": state} if is_receiver else {}

    def _fetch(self, *, is_receiver: bool) -> Iterator[tuple[str, str, Array]]:
        """The state on the shards, one array after the other: the parameter, the name of the state, and the array."""
        group = self._ready_group()
        for part in self._parts:
            for column, at, is_cell in self._state_layout:
                code = Assembly()
                code.fetch(at, is_cell=is_cell)
                for name, values in part.receive(
                    group, self._program_for_all_blocks(part, code), is_receiver=is_receiver
                ).items():
                    yield name, column, values[:, 0].copy() if is_cell else values

    @property
    def _state_layout(self) -> list[tuple[str, int, bool]]:
        """The state of the rule: its name, the number of its operand or cell, and whether it is a cell."""
        columns = [(column, FIRST_COLUMN + at, False) for at, column in enumerate(self._rule.columns, 1)]
        return columns + [(column, at, True) for at, column in enumerate(self._rule.cells)]

    @property
    def _shapes(self) -> Shapes:
        """The shapes of the state by parameter: one number for each weight, or for each row."""
        return {
            parameter.name: {
                column: parameter.weights.shape[: 1 if is_cell else None] for column, _, is_cell in self._state_layout
            }
            for part in self._parts
            for parameter in part.parameters
        }

    def initial_state(self, parameter: str) -> dict[str, Array]:
        """The state of a parameter before its first step, as in a `state_dict`."""
        shapes = self._shapes[parameter]
        return {column: np.full(shape, self._rule.initial, np.float32) for column, shape in shapes.items()}

    def _program_for_all_blocks(self, part: Part, code: Assembly, *, returns: bool = True) -> BlockProgram:
        rule = self._rule
        return code.program(part.state, 1 + len(rule.columns), len(rule.cells), every_block=True, returns=returns)

    def load_state_dict(self, state: Mapping[str, Any] | None, root: int = 0) -> None:
        """Go on from a `state_dict` and from the weights that rank `root` has; those of the others are ignored. None or
        {} on that rank: begin anew.

        Raises UsageError on all ranks for a state of another rule or other parameters, before anything is sent.
        """
        with report_errors_to(self.comm):
            is_root = self.comm.rank == check_root(root, self.comm.size)
        arrays = run_agreed(
            self.comm,
            f"{self._name}.state",
            lambda: check_state(state, self._shapes) if is_root and state else {},
        )
        steps = state[STEP] if is_root and state else 0
        self._restart(root, steps, lambda name, column: arrays[name][column] if arrays else None)

    def _restart(self, root: int, steps: int, state_of: Callable[[str, str], Array | None]) -> None:
        """Begin anew with the weights of `root`, after as many `steps` as that rank has done. The new state is the sum
        over all ranks of `state_of(parameter, column)`: this rank's share, with zeros in the rest, or None."""
        self.close()  # its job may have failed
        self._group = self._open_group_with(root, lambda group: self._send_state(group, root, steps, state_of))

    def _send_state(
        self, group: Communicator, root: int, steps: int, state_of: Callable[[str, str], Array | None]
    ) -> None:
        self._send_weights(group, root)
        self.steps = int(group.broadcast(np.array([steps]), root)[0])
        for part in self._parts if self.steps else ():
            for column, at, is_cell in self._state_layout:
                pairs = {parameter.name: (parameter, state_of(parameter.name, column)) for parameter in part.parameters}
                values = {
                    name: as_weights(array, parameter)
                    for name, (parameter, array) in pairs.items()
                    if array is not None
                }
                code = Assembly()
                code.store(at, is_cell=is_cell)
                part.send(group, self._program_for_all_blocks(part, code, returns=False), values or None)

    def save(self, folder: str | Path) -> None:
        """Write the state on the shards into `folder`, which all ranks see. Each rank writes a part; see `saved_state`.

        The files of an earlier call stay until all ranks have written. A rank has its part in memory, and one whole
        array at a time. Raises UsageError on all ranks when one cannot write; otherwise what `state_dict` raises.
        """
        shares = dict[str, Array]()
        number = self.comm.broadcast_object(secrets.randbits(NUMBER_BITS), name=f"{self._name}.save")
        for name, column, values in self._fetch(is_receiver=True):
            shares[key_of(name, column)] = share_of(values, self.comm.rank, self.comm.size)
        save = Save(number, self.steps, self.comm.rank, self.comm.size)
        try:
            run_agreed(self.comm, f"{self._name}.written", lambda: write_part(folder, save, shares))
        except BaseException:
            discard_part(folder, save.rank)
            raise
        run_agreed(self.comm, f"{self._name}.saved", lambda: publish_part(folder, save))

    def load(self, folder: str | Path, root: int = 0) -> None:
        """Go on from a `folder` that `save` has written, with any number of ranks, and from the weights of rank `root`.

        Raises UsageError on all ranks for a folder that has no whole state of these parameters.
        """
        parts = run_agreed(self.comm, f"{self._name}.load", lambda: SavedParts(folder, self._shapes))
        self._restart(root, parts.steps, lambda name, column: parts.read(name, column, self.comm.rank, self.comm.size))

    def commit(self) -> None:
        """Keep a copy of the shards' state on each rank, for `restore`. The caller keeps the weights."""
        self._committed_state = self.state_dict(None)

    def restore(self, root: int = 0) -> None:
        """Go on from the last commit of rank `root` and from its weights, after the job was formed anew or a step has
        failed; before the first commit: begin anew. A rank that has just joined calls it, too."""
        self.load_state_dict(self._committed_state, root)

    def _send_weights(self, group: Communicator, root: int) -> None:
        """Give the shards and all ranks the weights of `root`, and set the state to its initial values."""
        self.steps, root = 0, check_root(root, self.comm.size)
        for part in self._parts:
            code = Assembly()
            for _, at, is_cell in self._state_layout:
                code.add(Operation.FILL, SCRATCH if is_cell else at, 0, self._rule.initial)
                if is_cell:
                    code.add(Operation.STORE_CELL, SCRATCH, third=at)
            code.store(WEIGHTS)
            values = (
                {parameter.name: parameter.weights for parameter in part.parameters} if self.comm.rank == root else None
            )
            part.send(group, self._program_for_all_blocks(part, code), values)


def _next_group_number(name: str, comm: Communicator) -> int:
    """The number of the next group of this name, which tells it from earlier groups. The count starts anew when the job
    is formed anew, so that a rank that has just joined counts like the others."""
    formation, counts = _group_counts.get(comm, (None, Counter[str]()))
    if formation is not comm.formation:
        formation, counts = _group_counts[comm] = comm.formation, Counter()
    counts[name] += 1
    return counts[name]
