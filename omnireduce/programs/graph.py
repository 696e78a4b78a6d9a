"""A program as a graph: its expressions in order, who uses whom, and the same graph with some expressions replaced."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from omnireduce.programs.expressions import Expression

Changes = Mapping[Expression, Expression]


def in_order(outputs: Iterable[Expression]) -> list[Expression]:
    """All expressions that `outputs` are made of, each once, operands before users; the same order on every rank."""
    found: dict[Expression, None] = {}
    for output in outputs:
        waiting = [(output, False)]
        while waiting:
            node, is_ready = waiting.pop()
            if node in found:
                continue
            if is_ready:
                found[node] = None
            else:
                waiting.append((node, True))
                waiting.extend((each, False) for each in reversed(node.operands) if each not in found)
    return list(found)


def users_of(nodes: Sequence[Expression]) -> dict[Expression, list[Expression]]:
    """For each of `nodes`, which of them have it as an operand."""
    found: dict[Expression, list[Expression]] = {each: [] for each in nodes}
    for node in nodes:
        for operand in dict.fromkeys(node.operands):
            found[operand].append(node)
    return found


def reachable(starts: Iterable[Expression], users: Mapping[Expression, Sequence[Expression]]) -> set[Expression]:
    """What depends on `starts`, these themselves not counted unless one depends on another."""
    found: set[Expression] = set()
    waiting = list(starts)
    while waiting:
        for each in users[waiting.pop()]:
            if each not in found:
                found.add(each)
                waiting.append(each)
    return found


def between(nodes: Sequence[Expression], members: Collection[Expression]) -> set[Expression]:
    """`members`, and what both depends on one of them and is needed by one; `nodes` are in order."""
    users = users_of(nodes)
    after, before = set(members), set(members)
    for node in nodes:
        if any(each in after for each in node.operands):
            after.add(node)
    for node in reversed(nodes):
        if any(each in before for each in users[node]):
            before.add(node)
    return after & before


def rebuilt(nodes: Sequence[Expression], changes: Changes) -> dict[Expression, Expression]:
    """Each of `nodes`, which are in order, as it is once `changes` are made. Raises UsageError where a user of what has
    changed does not go with it."""
    found: dict[Expression, Expression] = {}
    for node in nodes:
        found[node] = changes[node] if node in changes else node.with_operands([found[each] for each in node.operands])
    return found


def way_around(
    members: Collection[Expression], users: Mapping[Expression, Sequence[Expression]]
) -> list[Expression] | None:
    """A way that leaves `members` and comes back: its first and last expression are members, those between are not.
    None where there is no such way."""
    before: dict[Expression, Expression] = {}
    waiting = []
    for member in members:
        for each in users[member]:
            if each not in members and each not in before:
                before[each] = member
                waiting.append(each)
    while waiting:
        node = waiting.pop()
        for each in users[node]:
            if each in members:
                way = [each, node]
                while way[-1] not in members:
                    way.append(before[way[-1]])
                return way[::-1]
            if each not in before:
                before[each] = node
                waiting.append(each)
    return None
