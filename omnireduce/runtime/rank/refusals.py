"""Refusals: a rank refuses a call, before any data of the call has travelled, and tells the other ranks.

The other ranks may wait for this rank already, or would mistake its next call for the refused call. So a refusal takes
the place of the call. If all ranks refuse, each has its own error, and the job goes on. If some do not refuse, these
have begun to send. Then the job ends on all ranks, with the refused call in the error, as if the calls had differed.

A collective with parts of any size carries the reason in place of a part: see `protocol.collective.ragged_parts`. Then
all ranks get a UsageError, and the job goes on.

A rank does not wait for its own refusal, because its user needs the error at once. A thread makes sure that the other
ranks hear it.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import numpy as np

from omnireduce.core.descriptor import Descriptor
from omnireduce.core.dtypes import BYTES
from omnireduce.errors import OmniReduceError
from omnireduce.protocol.collective.dense_operands import DenseTensor
from omnireduce.runtime.rank.calls.single import Call, CallContext
from omnireduce.runtime.rank.channels import RankChannels
from omnireduce.runtime.rank.engine import Engine
from omnireduce.runtime.rank.reported_errors import is_reported, mark_reported, reason_of
from omnireduce.support.exit_gate import exit_gate

SETTLE_S = 2.0  # the longest wait of a rank that leaves for the others to hear its refusal


def refusal_call(context: CallContext, reason: str) -> Call[None]:
    """The call that takes the place of a refused one: without data, with the reason."""
    empty = np.zeros(0, BYTES)
    descriptor = Descriptor("refusal", "", "uint8", (0,), item_bytes=1, refused=reason)
    return Call(
        descriptor, DenseTensor(empty, empty, context.layout(descriptor), descriptor.element.zero_mask), lambda: None
    )


def tell_ranks(channels: RankChannels, error: Exception) -> None:
    """Tell the other ranks that this rank refuses the next collective because of `error`. Does nothing if they know of
    the error, or if the job is over."""
    if is_reported(error):
        return
    mark_reported(error)
    ordinary, urgent = channels.ordinary, channels.urgent
    if ordinary.context.size == 1:
        return
    reason, replacement = reason_of(error), error.__dict__.pop("replacement", None)
    with suppress(OmniReduceError):
        if replacement is not None:
            _start(ordinary.engine, replacement(reason), reason)
            return
    _start(ordinary.engine, refusal_call(ordinary.context, reason), reason)
    if urgent.engine is not ordinary.engine:  # the others may call it in the urgent channel
        _start(urgent.engine, refusal_call(urgent.context, reason), reason)


def _start(engine: Engine, call: Call[Any], reason: str) -> None:
    """Start a call in place of a refused one. In a signal handler that interrupts a collective, start it afterwards."""
    if engine.inside:
        engine.afterwards(lambda: _start(engine, call, reason))
        return
    with suppress(OmniReduceError, RuntimeError):  # the job is over; or no thread starts, and the next call drives it
        [handle] = engine.submit(call)
        previous, engine.refused = engine.refused, (handle, reason)
        if previous is None or previous[0].done():
            threading.Thread(target=_await_refusals, args=(engine,), name="omnireduce-refusal", daemon=True).start()


def _await_refusals(engine: Engine) -> None:
    with exit_gate, suppress(OmniReduceError):
        while engine.refused is not None and not engine.refused[0].done():
            engine.refused[0].wait()


def settle(engine: Engine) -> None:
    """Before a rank leaves, wait until the others have reached the calls that it has refused."""
    if engine.refused is None or engine.inside:
        return
    handle, reason = engine.refused
    try:
        handle.wait(SETTLE_S)
    except TimeoutError:
        engine.abort(f"left after it had refused a call: {reason}")
    except OmniReduceError:  # the job is over
        pass
