"""The gate at the end of the process."""

from __future__ import annotations

import threading

import pytest

from omnireduce.support.exit_gate import ExitGate


def wait_for_ever(gate: ExitGate) -> None:
    while True:
        gate.check()


def test_the_gate_closes_when_the_last_thread_has_left() -> None:
    """Threads may come as long as another one is inside; a long wait ends."""
    gate, is_inside, left = ExitGate(), threading.Event(), list[str]()

    def second() -> None:
        with gate:
            left.append("second")

    def first() -> None:
        with gate:
            is_inside.set()
            with pytest.raises(SystemExit):
                wait_for_ever(gate)
            other = threading.Thread(target=second)
            other.start()
            other.join()
            left.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    is_inside.wait()
    gate.close()
    assert left == ["second", "first"]
    thread.join()
    with pytest.raises(SystemExit), gate:
        left.append("late")
    assert left == ["second", "first"]
