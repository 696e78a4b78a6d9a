"""Integers that a user gives."""

from __future__ import annotations

import operator

from omnireduce.errors import UsageError, a_type

LONGEST_BITS = 1024  # of an integer that an error may still show


def whole(value: object, what: str) -> int:
    """An integer of any type as an int. Raises UsageError, also for a bool: it is most likely a mix-up."""
    try:
        if not isinstance(value, bool):
            number = operator.index(value)  # type: ignore[arg-type]  # that is the question
            if number.bit_length() > LONGEST_BITS:
                raise UsageError(f"{what} is an integer of {number.bit_length()} bits, which is out of any range")
            return number
    except TypeError:
        pass
    raise UsageError(f"{what} is {value!r}, {a_type(value)}; expected an int")
