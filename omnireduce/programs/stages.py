"""Stages, the units that a runner executes: a single expression, or several that a rewrite has put together.

Fused            element-wise stages in one pass over memory
FusedAllReduce   ReduceScatter, computations on the parts, AllGather
Overlapped       a MatMul in chunks of rows, each of which is reduced while the next one is computed
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from omnireduce.errors import UsageError
from omnireduce.programs.communication import AllGather, AllReduce, ReduceScatter
from omnireduce.programs.expressions import Constant, Expression, Input, Pointwise, Tensor, Type
from omnireduce.programs.layouts import Layout
from omnireduce.programs.whole_tensor_operations import MatMul, Update

Changes = Mapping[Expression, Expression]


def in_order(outputs: Iterable[Expression]) -> list[Expression]:
    """All expressions that `outputs` are made of, each once, operands before users; the same order on every rank."""
    ordered: dict[Expression, None] = {}
    for output in outputs:
        waiting = [(output, False)]
        while waiting:
            node, is_ready = waiting.pop()
            if node in ordered:
                continue
            if is_ready:
                ordered[node] = None
            else:
                waiting.append((node, True))
                waiting.extend((operand, False) for operand in reversed(node.operands) if operand not in ordered)
    return list(ordered)


def users_of(nodes: Sequence[Expression]) -> dict[Expression, list[Expression]]:
    """For each of `nodes`, which of them have it as an operand."""
    users: dict[Expression, list[Expression]] = {node: [] for node in nodes}
    for node in nodes:
        for operand in dict.fromkeys(node.operands):
            users[operand].append(node)
    return users


def reachable(starts: Iterable[Expression], users: Mapping[Expression, Sequence[Expression]]) -> set[Expression]:
    """Expressions that depend on `starts`. These themselves count only if one depends on another."""
    dependents: set[Expression] = set()
    waiting = list(starts)
    while waiting:
        for user in users[waiting.pop()]:
            if user not in dependents:
                dependents.add(user)
                waiting.append(user)
    return dependents


def between(nodes: Sequence[Expression], members: Collection[Expression]) -> set[Expression]:
    """`members`, and what both depends on one of them and is needed by one; `nodes` are in order."""
    users = users_of(nodes)
    after, before = set(members), set(members)
    for node in nodes:
        if any(operand in after for operand in node.operands):
            after.add(node)
    for node in reversed(nodes):
        if any(user in before for user in users[node]):
            before.add(node)
    return after & before


def rebuilt(nodes: Sequence[Expression], changes: Changes) -> dict[Expression, Expression]:
    """Each of `nodes`, which are in order, as it is once `changes` are made. Raises UsageError where a user of what has
    changed does not go with it."""
    new_nodes: dict[Expression, Expression] = {}
    for node in nodes:
        new_nodes[node] = (
            changes[node] if node in changes else node.with_operands([new_nodes[operand] for operand in node.operands])
        )
    return new_nodes


def path_around(
    members: Collection[Expression], users: Mapping[Expression, Sequence[Expression]]
) -> list[Expression] | None:
    """A way that leaves `members` and comes back: its first and last expression are members, those between are not.
    None where there is no such way."""
    before: dict[Expression, Expression] = {}
    waiting = []
    for member in members:
        for user in users[member]:
            if user not in members and user not in before:
                before[user] = member
                waiting.append(user)
    while waiting:
        node = waiting.pop()
        for user in users[node]:
            if user in members:
                path = [user, node]
                while path[-1] not in members:
                    path.append(before[path[-1]])
                return path[::-1]
            if user not in before:
                before[user] = node
                waiting.append(user)
    return None


@dataclass(frozen=True, eq=False)
class Fused:
    """Element-wise stages that are evaluated in one pass, piece by piece. `nodes` are in order."""

    nodes: tuple[Expression, ...]

    def mapped(self, changes: Mapping[Expression, Expression]) -> Fused:
        """This stage with its expressions replaced as `changes` say."""
        return Fused(tuple(changes[node] for node in self.nodes))


@dataclass(frozen=True, eq=False)
class FusedAllReduce:
    """An AllReduce with computations between its two halves. `nodes` are in order: one ReduceScatter, computations on
    slices, and AllGathers of their results. The properties follow from `nodes`; a lowering reads them."""

    nodes: tuple[Expression, ...]

    def mapped(self, changes: Mapping[Expression, Expression]) -> FusedAllReduce:
        """This stage with its expressions replaced as `changes` say."""
        return FusedAllReduce(tuple(changes[node] for node in self.nodes))

    @property
    def reduce_scatter(self) -> ReduceScatter:
        return next(node for node in self.nodes if isinstance(node, ReduceScatter))

    @property
    def input(self) -> Expression:
        """The Local value that is reduced."""
        return self.reduce_scatter.operands[0]

    @property
    def updates(self) -> tuple[Update, ...]:
        """Tensors that get a new value here: sliced state, and replicated ones that get a result."""
        return tuple(node for node in self.nodes if isinstance(node, Update))

    @property
    def gathers(self) -> tuple[AllGather, ...]:
        """The results that all ranks get whole."""
        return tuple(node for node in self.nodes if isinstance(node, AllGather))

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The sliced tensors that are read or updated: rank i has the i-th part of each."""
        tensors = [operand for node in self.nodes for operand in node.operands if isinstance(operand, Tensor)]
        return tuple(dict.fromkeys(tensor for tensor in tensors if tensor.type.layout.is_sliced))


Reducer = AllReduce | ReduceScatter | FusedAllReduce


@dataclass(frozen=True, eq=False)
class Overlapped:
    """A MatMul in `chunks` chunks of rows, and the reduction of its result, chunk by chunk."""

    matmul: MatMul
    reducer: Reducer
    chunks: int

    @property
    def nodes(self) -> tuple[Expression, ...]:
        return (self.matmul, *nodes_of(self.reducer))

    @property
    def reduction(self) -> AllReduce | ReduceScatter:
        """The reduction whose operand is the product."""
        return self.reducer.reduce_scatter if isinstance(self.reducer, FusedAllReduce) else self.reducer

    def mapped(self, changes: Mapping[Expression, Expression]) -> Overlapped:
        """This stage with its expressions replaced as `changes` say."""
        matmul, reducer = changes[self.matmul], self.reducer
        after = reducer.mapped(changes) if isinstance(reducer, FusedAllReduce) else changes[reducer]
        assert isinstance(matmul, MatMul)
        assert isinstance(after, AllReduce | ReduceScatter | FusedAllReduce)
        return Overlapped(matmul, after, self.chunks)


Compound = Fused | FusedAllReduce | Overlapped
Stage = Expression | Compound


def nodes_of(stage: Stage) -> tuple[Expression, ...]:
    """The expressions of a stage."""
    return (stage,) if isinstance(stage, Expression) else stage.nodes


def in_stages(
    nodes: Sequence[Expression], compounds: Sequence[Compound], names: Mapping[Expression, str]
) -> list[Stage]:
    """The stages of a program, each after those whose results it needs: the order in which all ranks run them. Inputs
    are no stages. Raises UsageError if compounds need one another's results in a cycle."""
    users = users_of(nodes)
    for compound in compounds:
        check_no_cycle(compound, users, names)
    stage_of: dict[Expression, Stage] = {node: compound for compound in compounds for node in compound.nodes}
    for node in nodes:
        if not isinstance(node, Input | Constant):
            stage_of.setdefault(node, node)
    waits: dict[Stage, set[Stage]] = {stage: set() for stage in stage_of.values()}
    for node, stage in stage_of.items():
        waits[stage] |= {
            stage_of[operand] for operand in node.operands if operand in stage_of and stage_of[operand] is not stage
        }
    index = {node: at for at, node in enumerate(nodes)}
    first = sorted(waits, key=lambda stage: max(index[node] for node in nodes_of(stage)))
    ordered: dict[Stage, None] = {}
    while len(ordered) < len(first):
        ready = next((stage for stage in first if stage not in ordered and waits[stage] <= ordered.keys()), None)
        if ready is None:
            stuck = [names.get(nodes_of(stage)[-1], "") for stage in first if stage not in ordered]
            raise UsageError(f"{', '.join(filter(None, stuck))} would wait for one another: leave one of them out")
        ordered[ready] = None
    return list(ordered)


def check_no_cycle(
    stage: Compound, users: Mapping[Expression, Sequence[Expression]], names: Mapping[Expression, str]
) -> None:
    """Raises UsageError if a stage needs another result that needs the stage."""
    path = path_around(set(stage.nodes), users)
    if path is not None:
        named = [names[node] for node in path if node in names]  # the others belong to a stage with a name
        steps = ", ".join(f"{later} needs {earlier}" for earlier, later in pairwise(named))
        raise UsageError(
            f"together they would form a cycle, {' -> '.join(named)}: {steps}. Take {', '.join(named[1:-1])} along, "
            f"or leave {named[0]} or {named[-1]} out"
        )


def kind_of(stage: Fused) -> Type:
    """The type of what the pass computes. A Replicated expression among Sliced ones is computed in parts, too."""
    types = [node.type for node in stage.nodes if node.type.shape and isinstance(node, Pointwise)]
    return next((kind for kind in types if kind.layout is not Layout.REPLICATED), types[0])
