"""Messages that break one rule of the protocol each, sent by a rank (`RULES`) or by a shard (`LIES`).

Every one of them must end the job, with an error that blames the sender: no receiver can take one for an honest
message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.core.wire.blocks import HEADER_BYTES, MAX_BLOCKS, Header, message_list, read_header
from omnireduce.core.wire.control import Refused, encode_control
from omnireduce.errors import ProtocolError
from omnireduce.transport.base import Control, Credited, Event, Received

from .links import SimLink

_HEADER = struct.Struct("<QqIIIIII")
FAR = 1 << 40  # a block number that no tensor here has
NO_SLOT = 63  # more than any plan has

# A rule changes a message that is about to leave, given what the same link sent before in the same collective; it
# returns the new length, or None when this message is not one with which the rule could be broken.
Rule = Callable[[Array, int, Header, Header | None], int | None]


def _rewrite(slot: Array, header: Header) -> None:
    _HEADER.pack_into(slot.data, 0, *header)


def _indices(slot: Array, header: Header) -> Array:
    """The indices that the message lists: of runs, their first ones; of steps, none."""
    return np.empty(0, np.int64) if header.steps else message_list(slot, header)[:: 2 if header.runs else 1]


def _frontier_too_far(slot: Array, nbytes: int, header: Header, before: Header | None) -> int:
    _rewrite(slot, header._replace(frontier=FAR))
    return nbytes


def _frontier_back(slot: Array, nbytes: int, header: Header, before: Header | None) -> int:
    _rewrite(slot, header._replace(frontier=-1))
    return nbytes


def _frontier_kept(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    if before is None:
        return None
    _rewrite(slot, Header(header.collective, before.frontier, 0, header.block_bytes, 0))
    return HEADER_BYTES


def _index_past_frontier(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    indices = _indices(slot, header)
    if indices.size == 0:
        return None
    indices[-1] = header.frontier
    return nbytes


def _index_of_before(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    indices = _indices(slot, header)
    if indices.size == 0 or before is None or before.frontier < 1:
        return None
    indices[0] = before.frontier - 1
    return nbytes


def _index_negative(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    indices = _indices(slot, header)
    if indices.size == 0:
        return None
    indices[0] = -1  # in a result these bits mean: the last block that there could ever be
    return nbytes


def _indices_unordered(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    indices = _indices(slot, header)
    if indices.size < 2:
        return None
    indices[:2] = indices[1::-1].copy()
    return nbytes


def _index_twice(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    indices = _indices(slot, header)
    if indices.size < 2:
        return None
    indices[1] = indices[0]
    return nbytes


def _other_collective(slot: Array, nbytes: int, header: Header, before: Header | None) -> int:
    _rewrite(slot, header._replace(collective=header.collective + 1))
    return nbytes


def _other_block_size(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    if header.block_count:
        return None  # its length would tell
    _rewrite(slot, header._replace(block_bytes=header.block_bytes + 8))
    return nbytes


def _more_than_there_is(slot: Array, nbytes: int, header: Header, before: Header | None) -> int:
    _rewrite(slot, header._replace(block_count=1 << 20))
    return nbytes


def _longer(slot: Array, nbytes: int, header: Header, before: Header | None) -> int:
    return nbytes + 8


def _shorter_than_a_header(slot: Array, nbytes: int, header: Header, before: Header | None) -> int:
    return HEADER_BYTES // 2


def _bad_descriptor(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    if header.extra_bytes == 0:
        return None
    slot[nbytes - header.extra_bytes : nbytes] = 0xC1
    return nbytes


def _unexpected_extra(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    _rewrite(slot, header._replace(extra_bytes=8))
    return nbytes + 8


def _left_out_of_others(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    if header.left_out == 0:
        return None
    _indices(slot, header)[:] &= MAX_BLOCKS - 1  # without the marks: of nobody alone
    return nbytes


def _leaves_out(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    if header.block_count == 0:
        return None
    rest, fewer = slot[header.list_start : nbytes].copy(), header._replace(left_out=1)
    _rewrite(slot, fewer)
    slot[fewer.list_start : fewer.list_start + rest.size] = rest
    return fewer.list_start + rest.size


def _run_longer(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    return _run_of(slot, nbytes, header, lambda length: length + 1)


def _run_shorter(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    return _run_of(slot, nbytes, header, lambda length: length - 1)


def _run_of_none(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    return _run_of(slot, nbytes, header, lambda length: -length)


def _run_of(slot: Array, nbytes: int, header: Header, length: Callable[[int], int]) -> int | None:
    if header.runs == 0:
        return None
    last = message_list(slot, header)[-1:]
    last[0] = length(int(last[0]))
    return nbytes


def _run_of_no_block(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    if header.block_count:
        return None
    start = header.list_start
    slot[start + 16 : nbytes + 16] = slot[start:nbytes].copy()
    slot[start : start + 16] = 0
    _rewrite(slot, header._replace(runs=1))
    return nbytes + 16


def _indices_as_runs(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    if header.runs or header.steps or header.block_count % 2 or header.block_count == 0:
        return None
    _rewrite(slot, header._replace(runs=header.block_count // 2))  # they take as much room
    return nbytes


def _indices_as_steps(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    if header.runs or header.steps or header.block_count == 0:
        return None
    _rewrite(slot, header._replace(steps=8 * header.block_count))  # they take as much room
    return nbytes


def _step_without_end(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    if header.steps == 0:
        return None
    slot[header.list_stop - 1] |= 0x80
    return nbytes


def _step_nowhere(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    if header.steps < 2 or header.block_count < 2 or slot[header.list_stop - 2] >= 0x80:
        return None
    slot[header.list_stop - 1] = 0
    return nbytes


def _more_left_out(slot: Array, nbytes: int, header: Header, before: Header | None) -> int | None:
    _rewrite(slot, header._replace(left_out=header.block_count + 1))
    return nbytes


_BOTH: tuple[Rule, ...] = (
    _frontier_too_far, _frontier_back, _index_past_frontier, _index_of_before, _index_negative, _indices_unordered,
    _index_twice, _other_collective, _other_block_size, _more_than_there_is, _longer, _shorter_than_a_header,
    _more_left_out, _run_longer, _run_shorter, _run_of_none, _run_of_no_block,
    _indices_as_runs, _indices_as_steps, _step_without_end, _step_nowhere,
)  # fmt: skip
_MESSAGES = (*_BOTH, _frontier_kept, _bad_descriptor, _leaves_out)
_RESULTS = (*_BOTH, _unexpected_extra, _left_out_of_others)
_STRAY: dict[str, Event] = {  # events that have no place there, each before an honest message
    "stray message": Received(NO_SLOT, HEADER_BYTES),
    "stray credit": Credited(NO_SLOT),
    "stray control message": Control(encode_control(Refused("no"))),
}
TWICE = "the same message twice"
RULES: tuple[Rule | str, ...] = (*_MESSAGES, *_STRAY, TWICE)
UNHEARD = (*_STRAY, TWICE, _longer)  # a link may see these: then it is over, and nobody can be told by it
UNSEEN = _other_collective  # by a shard that has one rank only: it skips collectives in which it has no part
LIES: tuple[Rule | str, ...] = (*_RESULTS, *_STRAY)


class _Liar:
    """Changes what one link sends: breaks one rule that waits per message, so that two never undo each other."""

    def __init__(self, link: SimLink) -> None:
        self._waiting: dict[Rule | str, Callable[[], None]] = {}
        self._before = Header(-1, 0, 0, 0, 0)
        self._link, self._send_slot, self._send_message = link, link._send, link._send_message
        # this link alone lies, whatever made it: a class of its own would have to be chosen before anybody joins
        link._send, link._send_message = self._send, self._instead  # type: ignore[method-assign]

    def wait(self, rule: Rule | str, broken: Callable[[], None]) -> None:
        self._waiting.setdefault(rule, broken)

    def _send(self, slot: int, nbytes: int) -> None:
        self._pass_on(slot, nbytes, self._link.send_slots[slot], lambda length: self._send_slot(slot, length))

    def _instead(self, slot: int, message: Array) -> None:
        memory = np.zeros(self._link.send_slots.shape[1], np.uint8)
        memory[: message.size] = message
        self._pass_on(slot, message.size, memory, lambda length: self._send_message(slot, memory[:length]))

    def _pass_on(self, slot: int, nbytes: int, memory: Array, honest: Callable[[int], None]) -> None:
        try:
            header = read_header(memory, nbytes)
        except ProtocolError:  # on its way to another rank this result was changed already
            honest(nbytes)
            return
        rule, nbytes = self._break_one(memory, nbytes, header)
        self._before = header
        if rule in _STRAY:
            self._link._output.append(_STRAY[rule])
        honest(nbytes)
        if rule == TWICE:
            self._link.send_twice(slot, nbytes)
        if rule is not None:
            self._waiting.pop(rule)()

    def _break_one(self, memory: Array, nbytes: int, header: Header) -> tuple[Rule | str | None, int]:
        """The first rule that waits and that this message can break, and the length of the message now."""
        before = self._before if header.collective == self._before.collective else None
        for rule in self._waiting:
            changed = rule(memory, nbytes, header, before) if callable(rule) else nbytes
            if changed is not None:
                return rule, changed
        return None, nbytes


def break_rule(link: SimLink, rule: Rule | str, broken: Callable[[], None]) -> None:
    """Let `link` break `rule` with a message that it fits; call `broken` when that leaves."""
    liar = getattr(link._send, "__self__", None)
    (liar if isinstance(liar, _Liar) else _Liar(link)).wait(rule, broken)
