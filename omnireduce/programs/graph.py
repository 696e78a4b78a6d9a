"""A program as a graph: its expressions in order, who uses whom, and the same graph with some expressions replaced."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from omnireduce.programs.expressions import Expression

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
    """What depends on `starts`, these themselves not counted unless one depends on another."""
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


def way_around(
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
                way = [user, node]
                while way[-1] not in members:
                    way.append(before[way[-1]])
                return way[::-1]
            if user not in before:
                before[user] = node
                waiting.append(user)
    return None
