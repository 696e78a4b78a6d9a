"""A fused AllReduce as block programs: what shards run on the sum of each block, and keep for the next step.

Each tensor but the one that is reduced is a column of the shards' state. The result for each element goes into a
register, or at once into the column that is updated, if nothing needs the old value any more. A norm, or a sum of a
whole tensor, ends a phase: the shards add up, the ranks get the totals, and the next phase uses them as numbers. A
value that a later phase needs is kept in a column of its own. The instructions round as the operations of the language
do, so the results have the same bits as those of other schedules, but for what follows from totals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from omnireduce.core.block_program import (
    FIRST_COLUMN,
    MAX_COLUMNS,
    MAX_INSTRUCTIONS,
    MAX_SCALARS,
    MAX_TOTALS,
    REGISTERS,
    Operation,
)
from omnireduce.errors import UsageError
from omnireduce.programs.communication import AllGather
from omnireduce.programs.expressions import (
    Arithmetic,
    Bool,
    Cast,
    Constant,
    Expression,
    Float32,
    Input,
    Ite,
    Pointwise,
    Sqrt,
    Tensor,
    short,
)
from omnireduce.programs.layouts import Layout
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.stages import FusedAllReduce
from omnireduce.programs.whole_tensor_operations import Norm, ReduceTensor, Summation, Update, WholeReduction

IN_PLACE = {"+": Operation.ADD, "-": Operation.SUBTRACT, "*": Operation.MULTIPLY, "/": Operation.DIVIDE}
FROM_RIGHT = {"+": Operation.ADD, "-": Operation.SUBTRACT_FROM, "*": Operation.MULTIPLY, "/": Operation.DIVIDE_INTO}

NO_REGISTER = f"the program needs more than {REGISTERS} values at once, and a shard has no more registers"


class Lowered(NamedTuple):
    """A pipeline as block programs. `columns`: of which tensor, or value of an earlier phase, each column is;
    `reduced`: the tensor that is summed; `gather`: what all ranks get."""

    phases: list[Phase]
    columns: list[Expression]
    reduced: Tensor
    gather: AllGather


def lowered(pipeline: Pipeline) -> Lowered:
    """The block programs of a pipeline whose work on tensors is one fused AllReduce. Raises UsageError for another one,
    and for what has no instruction."""
    fused = [compound for compound in pipeline.compounds if isinstance(compound, FusedAllReduce)]
    if len(fused) != 1:
        raise UsageError(f"{pipeline.name} has {len(fused)} fused all-reduces; expected one: fuse_into makes it")
    return _Lowering(pipeline, fused[0]).run()


class _Lowering:
    def __init__(self, pipeline: Pipeline, stage: FusedAllReduce) -> None:
        self._pipeline, self._stage = pipeline, stage
        self._check()
        self._gather = stage.gathers[0]
        self._phase_of = dict[Expression, int]()
        for node in pipeline.nodes:
            self._phase_of[node] = max((self._first_phase(operand) for operand in node.operands), default=0)
        self._last = self._phase_of[self._gather]
        late = [phase for phase in self._phase_of.values() if phase > self._last]
        if any(late):
            raise UsageError(f"{pipeline.name} computes with totals after its result: leave that to another program")
        self._updated = {update.value: update for update in stage.updates} | {
            update.value.operands[0]: update for update in stage.updates if isinstance(update.value, AllGather)
        }
        self._columns: list[Expression] = list(dict.fromkeys([*self._tensors()]))
        self._location = {column: FIRST_COLUMN + at for at, column in enumerate(self._columns)}
        self._location[stage.reduce_scatter] = 0
        self._computed, mixing = set[Expression](), Mixing(pipeline, self._phase_of, self._updated)
        self._mixes, self._absorbed = mixing.mixes, mixing.absorbed
        self._free: list[int] = []

    def _used_in(self, user: Expression) -> int:
        """In which phase `user` needs its operands: what is updated or gathered is at the end."""
        return self._last if isinstance(user, Update | AllGather) else self._phase_of[user]

    def _first_phase(self, operand: Expression) -> int:
        """In which phase an operand can be used first."""
        phase = self._phase_of.get(operand, 0)
        return phase + 1 if isinstance(operand, WholeReduction) else phase

    def _check(self) -> None:
        pipeline, stage = self._pipeline, self._stage
        if stage.reduce_scatter.reduction is not Summation:
            raise UsageError(f"{pipeline.name} does not reduce by Summation: shards run programs on sums only")
        if len(stage.gathers) != 1:
            raise UsageError(f"{pipeline.name} gathers {len(stage.gathers)} results; shards send one back")
        shape = stage.input.type.shape
        for node in pipeline.nodes:
            if not node.type.shape:
                self._check_number(node)
                continue
            if isinstance(node, Tensor) and node.type.layout is Layout.LOCAL and node is not stage.input:
                raise UsageError(f"{node.name} is Local: shards keep one tensor, not one for each rank")
            is_known = node in stage.nodes or isinstance(node, Tensor)
            if not is_known:
                raise UsageError(f"{short(node)} is computed outside of the fused all-reduce: only numbers may be")
            if node.type.shape != shape or node.type.dtype not in (Float32, Bool):
                raise UsageError(f"{short(node)} is {node.type}; shards compute with float32, in one shape")
        for node in pipeline.nodes:
            used = next((operand for operand in node.operands if isinstance(operand, AllGather | Update)), None)
            if used is not None and isinstance(node, Pointwise | WholeReduction):
                raise UsageError(f"{short(node)} uses {short(used)}, a result of the exchange: use what it is made of")

    def _check_number(self, node: Expression) -> None:
        """Ranks know numbers that are given or computed of numbers, and totals of what the shards have."""
        if isinstance(node, WholeReduction):
            if node.operands[0] is self._stage.input or not node.operands[0].type.shape:
                raise UsageError(f"{short(node)}: shards add up what they have; {short(node.operands[0])} is not there")
        elif not isinstance(node, Input | Constant | Pointwise):
            raise UsageError(
                f"{short(node)} is done outside of the fused all-reduce: only numbers may be computed there"
            )

    def _tensors(self) -> Iterable[Expression]:
        return (
            input_node
            for input_node in self._pipeline.inputs
            if input_node.type.shape and input_node is not self._stage.input
        )

    def run(self) -> Lowered:
        phases = [self._lower(phase) for phase in range(self._last + 1)]
        if len(self._columns) > MAX_COLUMNS:
            raise UsageError(
                f"{self._pipeline.name} keeps {len(self._columns)} tensors; expected {MAX_COLUMNS} at most"
            )
        for phase in phases:
            for resource, count, limit in phase.sizes:
                if count > limit:
                    raise UsageError(
                        f"{self._pipeline.name} needs {count} {resource} in one exchange; shards take {limit}: make "
                        "two programs of it, or let ranks compute a part of it"
                    )
        reduced = self._stage.input
        if not isinstance(reduced, Tensor):
            raise UsageError(f"{short(reduced)} is reduced; expected a Tensor, which each rank gives")
        return Lowered(phases, self._columns, reduced, self._gather)

    def _lower(self, number: int) -> Phase:
        """The instructions of one phase, in the order of the program."""
        phase, self._free = Phase(), list(range(REGISTERS - 1, 0, -1))
        for node in [node for node, location in self._location.items() if location < FIRST_COLUMN and number]:
            del self._location[node]
        if number:
            self._free.append(0)  # there is no sum
        elif self._last and any(self._used_in(user) for user in self._users(self._stage.reduce_scatter)):
            self._columns.append(self._stage.reduce_scatter)
            self._location[self._stage.reduce_scatter] = FIRST_COLUMN + len(self._columns) - 1
            phase.add(Operation.COPY, self._location[self._stage.reduce_scatter], 0)
        for node in self._pipeline.nodes:
            if self._phase_of[node] != number or node in self._absorbed or not self._is_work(node):
                continue
            if isinstance(node, WholeReduction):
                self._total(phase, node)
            else:
                self._compute(phase, node)
            self._computed.add(node)
            self._release(number)
        if number == self._last:
            self._finish(phase)
        return phase

    def _is_work(self, node: Expression) -> bool:
        shaped = bool(node.type.shape) or (isinstance(node, WholeReduction) and bool(node.operands[0].type.shape))
        return shaped and isinstance(node, Pointwise | WholeReduction)

    # where values are

    def _users(self, node: Expression) -> set[Expression]:
        """The users of `node`. Operations that share one instruction count as one."""
        users = set[Expression]()
        for user in self._pipeline.users[node]:
            users |= self._users(user) if user in self._absorbed else {user}
        return users

    def _waiting(self, node: Expression) -> set[Expression]:
        """The users that still need it, except for those at the end."""
        return {
            user
            for user in self._users(node)
            if user not in self._computed and not isinstance(user, Update | AllGather)
        }

    def _release(self, number: int) -> None:
        """Registers whose values nobody needs are free again."""
        for node, location in list(self._location.items()):
            if location < FIRST_COLUMN and location not in self._free and not self._is_needed(node):
                self._free.append(location)
                del self._location[node]

    def _is_needed(self, node: Expression) -> bool:
        at_end = any(isinstance(user, Update | AllGather) for user in self._users(node))
        return at_end or bool(self._waiting(node))

    def _target(self, node: Expression, operands: Sequence[Expression]) -> int:
        """The location of a node's value: the column that it updates, a column for a later phase, or a register."""
        update = self._updated.get(node)
        if update is not None:
            tensor = update.tensor
            waiting_users = self._waiting(tensor) - {node}
            if not waiting_users and (not operands or tensor not in operands[1:]) and not self._has_other_value(tensor):
                return self._location[tensor]
        if any(self._used_in(user) > self._phase_of[node] for user in self._users(node)):
            self._columns.append(node)
            return FIRST_COLUMN + len(self._columns) - 1
        if operands and self._may_replace(node, operands):
            return self._location[operands[0]]
        return self._register(node)

    def _may_replace(self, node: Expression, operands: Sequence[Expression]) -> bool:
        """Whether the value of a node can take the register of its first operand."""
        first = operands[0]
        at_end = any(isinstance(user, Update | AllGather) for user in self._users(first))
        return (
            self._location[first] < FIRST_COLUMN
            and not at_end
            and self._waiting(first) == {node}
            and all(self._location[operand] != self._location[first] for operand in operands[1:])
        )

    def _has_other_value(self, tensor: Tensor) -> bool:
        """Whether the column of a tensor has another value already."""
        location = self._location[tensor]
        return any(at == location for node, at in self._location.items() if node is not tensor)

    def _register(self, node: Expression) -> int:
        if not self._free:
            raise UsageError(f"{short(node)}: {NO_REGISTER}")
        return self._free.pop()

    # instructions

    def _total(self, phase: Phase, node: WholeReduction) -> None:
        number, operand = len(phase.totals), self._location[node.operands[0]]
        if isinstance(node, Norm):
            scratch = self._register(node)
            phase.add(Operation.COPY, scratch, operand)
            phase.add(Operation.SQUARE, scratch)
            phase.add(Operation.ADD_TO_TOTAL, scratch, third=number)
            self._free.append(scratch)
        elif isinstance(node, ReduceTensor) and node.reduction is Summation:
            phase.add(Operation.ADD_TO_TOTAL, operand, third=number)
        else:
            raise UsageError(f"{short(node)}: shards add up, and combine in no other way")
        phase.totals.append(node)

    def _compute(self, phase: Phase, node: Expression) -> None:
        mix = self._mixes.get(node)
        if mix is not None:
            target = self._target(node, [mix.first, mix.second])
            self._copy(phase, target, mix.first)
            phase.add(mix.operation, target, self._location[mix.second], *mix.scalars)
            self._store(node, target)
            return
        operands = [operand for operand in node.operands if operand.type.shape]
        target = self._target(node, operands)
        if isinstance(node, Arithmetic):
            self._arithmetic(phase, node, target)
        elif isinstance(node, Sqrt):
            self._copy(phase, target, operands[0])
            phase.add(Operation.SQUARE_ROOT, target)
        elif isinstance(node, Cast) and operands[0].type.dtype == node.type.dtype:
            self._copy(phase, target, operands[0])
        elif isinstance(node, Ite):
            self._choose(phase, node, target)
        else:
            raise UsageError(f"{short(node)}: shards have no instruction for it")
        self._store(node, target)

    def _store(self, node: Expression, target: int) -> None:
        """Note that the value of `node` is in `target` now, in place of another value."""
        if target < FIRST_COLUMN:
            for replaced in [replaced for replaced, location in self._location.items() if location == target]:
                del self._location[replaced]
        self._location[node] = target

    def _copy(self, phase: Phase, target: int, node: Expression) -> None:
        if self._location[node] != target:
            phase.add(Operation.COPY, target, self._location[node])

    def _arithmetic(self, phase: Phase, node: Arithmetic, target: int) -> None:
        left, right = node.operands
        if node.symbol in (">", "<"):
            self._compare(phase, node, target)
        elif node.symbol not in IN_PLACE:
            raise UsageError(f"{short(node)}: shards have no instruction for {node.symbol}")
        elif not right.type.shape:
            self._tensor_with_number(phase, node.symbol, left, Scalar(right), target)
        elif not left.type.shape:
            self._number_with_tensor(phase, node.symbol, Scalar(left), right, target)
        elif left is right:
            scratch = self._register(node)
            phase.add(Operation.COPY, scratch, self._location[left])
            self._copy(phase, target, left)
            phase.add(IN_PLACE[node.symbol], target, scratch)
            self._free.append(scratch)
        elif self._location[right] == target:
            phase.add(FROM_RIGHT[node.symbol], target, self._location[left])
        else:
            self._copy(phase, target, left)
            phase.add(IN_PLACE[node.symbol], target, self._location[right])

    def _tensor_with_number(self, phase: Phase, symbol: str, tensor: Expression, number: Scalar, target: int) -> None:
        """tensor symbol number."""
        self._copy(phase, target, tensor)
        if symbol == "*":
            phase.add(Operation.SCALE, target, 0, number)
        elif symbol == "/":  # not times its reciprocal: that rounds in another way
            self._with_filled_register(phase, Operation.DIVIDE, target, number)
        else:
            phase.add(Operation.ADD_SCALAR, target, 0, number._replace(negated=symbol == "-"))

    def _number_with_tensor(self, phase: Phase, symbol: str, number: Scalar, tensor: Expression, target: int) -> None:
        """number symbol tensor."""
        if symbol in "+*":
            self._tensor_with_number(phase, symbol, tensor, number, target)
            return
        self._copy(phase, target, tensor)
        self._with_filled_register(phase, FROM_RIGHT[symbol], target, number)

    def _with_filled_register(self, phase: Phase, operation: Operation, target: int, number: Scalar) -> None:
        """An operation with an array of one number."""
        if not self._free:
            raise UsageError(NO_REGISTER)
        phase.add(Operation.FILL, self._free[-1], 0, number)
        phase.add(operation, target, self._free[-1])

    def _compare(self, phase: Phase, node: Arithmetic, target: int) -> None:
        large, small = node.operands if node.symbol == ">" else reversed(node.operands)
        locations, borrowed = self._arrays(phase, [large, small])
        if locations[1] == target:
            scratch = self._register(node)
            borrowed.append(scratch)
            phase.add(Operation.COPY, scratch, target)
            locations[1] = scratch
        if locations[0] != target:
            phase.add(Operation.COPY, target, locations[0])
        phase.add(Operation.GREATER, target, locations[1])
        self._free += borrowed

    def _choose(self, phase: Phase, node: Ite, target: int) -> None:
        condition, if_true, if_false = node.operands
        locations, borrowed = self._arrays(phase, [condition, if_true, if_false])
        result = target if target not in locations[1:] and locations[1] != locations[2] else self._register(node)
        if locations[0] != result:
            phase.add(Operation.COPY, result, locations[0])
        if locations[1] == locations[2]:
            phase.add(Operation.COPY, result, locations[1])
        else:
            phase.add(Operation.SELECT, result, locations[1], third=locations[2])
        if result != target:
            phase.add(Operation.COPY, target, result)
            borrowed.append(result)
        self._free += borrowed

    def _arrays(self, phase: Phase, nodes: Sequence[Expression]) -> tuple[list[int], list[int]]:
        """The locations of operands as arrays, with numbers in registers of their own; and those registers."""
        locations, borrowed = list[int](), list[int]()
        for node in nodes:
            if node.type.shape:
                locations.append(self._location[node])
                continue
            scratch = self._register(node)
            phase.add(Operation.FILL, scratch, 0, Scalar(node))
            locations.append(scratch)
            borrowed.append(scratch)
        return locations, borrowed

    def _finish(self, phase: Phase) -> None:
        """Give updated tensors their new values, and all ranks the result."""
        result = self._location[self._gather.operands[0]]
        moves = [(self._location[update.tensor], self._value_of(update)) for update in self._stage.updates]
        moves = [(to, location) for to, location in moves if to != location]
        if {to for to, _ in moves} & {location for _, location in moves}:
            raise UsageError(f"{self._pipeline.name} exchanges tensors: let it compute something in between")
        if result != 0:
            moves.append((0, result))
        for to, location in moves:
            phase.add(Operation.COPY, to, location)

    def _value_of(self, update: Update) -> int:
        value = update.value
        return self._location[value.operands[0] if isinstance(value, AllGather) else value]


class Scalar(NamedTuple):
    """A number of an instruction: that of a node without dimensions, or its negative."""

    node: Expression
    negated: bool = False

    @property
    def key(self) -> tuple[object, bool]:
        """A key that is equal for equal scalars."""
        return (self.node.array.tobytes() if isinstance(self.node, Constant) else self.node), self.negated


@dataclass
class Phase:
    """The instructions of one exchange: the code without its scalars, these, and the totals that it gives."""

    code: list[tuple[Operation, int, int, int]] = field(default_factory=list)
    scalars: list[Scalar] = field(default_factory=list)
    totals: list[WholeReduction] = field(default_factory=list)

    def add(self, operation: Operation, target: int, operand: int = 0, *scalars: Scalar, third: int = 0) -> None:
        location = self._index_of(list(scalars)) if scalars else third
        self.code.append((operation, target, operand, location))

    def _index_of(self, scalars: list[Scalar]) -> int:
        """The index of these scalars, one behind the other; they are added if needed."""
        for at in range(len(self.scalars) - len(scalars) + 1):
            if [scalar.key for scalar in self.scalars[at : at + len(scalars)]] == [scalar.key for scalar in scalars]:
                return at
        self.scalars += scalars
        return len(self.scalars) - len(scalars)

    @property
    def sizes(self) -> list[tuple[str, int, int]]:
        """The counts that have a limit: a name, the count, and the most that there may be."""
        return [
            ("instructions", len(self.code), MAX_INSTRUCTIONS),
            ("numbers", len(self.scalars), MAX_SCALARS),
            ("norms and sums", len(self.totals), MAX_TOTALS),
        ]


class Scaled(NamedTuple):
    """A product of a number and a tensor."""

    product: Expression
    number: Expression
    tensor: Expression


class FusedInstruction(NamedTuple):
    """An instruction for several operations, of which those in `absorbed` are no work of their own."""

    operation: Operation
    first: Expression
    second: Expression
    scalars: tuple[Scalar, ...]
    absorbed: list[Expression]


class Mixing:
    """The mixes of a program. `phase_of`: when each expression is computed; `updated`: which value is for what.

    `mixes`: by the last operation of each; `absorbed`: the others, which are no work of their own.
    """

    def __init__(
        self, pipeline: Pipeline, phase_of: Mapping[Expression, int], updated: Mapping[Expression, Update]
    ) -> None:
        self._pipeline, self._phase_of, self._updated = pipeline, phase_of, updated
        self.mixes, self.absorbed = dict[Expression, FusedInstruction](), set[Expression]()
        for node in reversed(pipeline.nodes):
            if node not in self.absorbed and (mix := self._combine(node)) is not None:
                self.mixes[node] = mix
                self.absorbed.update(mix.absorbed)

    def _combine(self, node: Expression) -> FusedInstruction | None:
        """`a * x + b * y`, `a * x + b * (y * y)`, `x + b * y` or `x - b * y` as one instruction, if `node` is that."""
        if not isinstance(node, Arithmetic) or node.symbol not in "+-" or not all(x.type.shape for x in node.operands):
            return None
        left, right = node.operands
        if left is right:
            return None
        first, second = self._scaled(left, node), self._scaled(right, node)
        if node.symbol == "+" and first and second:
            if self._updates(node, second.tensor):
                first, second, left, right = second, first, right, left
            square = self._squared(second.tensor, second.product)
            absorbed = [first.product, second.product, *([second.tensor] if square is not None else [])]
            operation = Operation.MIX if square is None else Operation.MIX_SQUARE
            operand = second.tensor if square is None else square
            if operand is first.tensor:
                return None
            return FusedInstruction(
                operation, first.tensor, operand, (Scalar(first.number), Scalar(second.number)), absorbed
            )
        if node.symbol == "+" and first and not second:
            left, second = right, first
        if second is None or second.tensor is left:
            return None
        number = Scalar(second.number, negated=node.symbol == "-")
        return FusedInstruction(Operation.ADD_SCALED, left, second.tensor, (number,), [second.product])

    def _updates(self, node: Expression, tensor: Expression) -> bool:
        return node in self._updated and self._updated[node].tensor is tensor

    def _is_inner(self, node: Expression, user: Expression) -> bool:
        """Whether only `user` needs it, in the same phase."""
        is_same_phase = self._phase_of[node] == self._phase_of[user]
        other_users = [candidate for candidate in self._pipeline.users[node] if candidate is not user]
        return is_same_phase and not other_users and node not in self._updated and node not in self._pipeline.outputs

    def _scaled(self, node: Expression, user: Expression) -> Scaled | None:
        """The parts of `number * tensor`."""
        if not isinstance(node, Arithmetic) or node.symbol != "*" or not self._is_inner(node, user):
            return None
        left, right = node.operands
        if bool(left.type.shape) == bool(right.type.shape):
            return None
        return Scaled(node, right, left) if left.type.shape else Scaled(node, left, right)

    def _squared(self, node: Expression, user: Expression) -> Expression | None:
        """The tensor of `tensor * tensor`."""
        is_square = isinstance(node, Arithmetic) and node.symbol == "*" and node.operands[0] is node.operands[1]
        return node.operands[0] if is_square and self._is_inner(node, user) else None
