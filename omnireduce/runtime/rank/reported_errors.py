"""Errors of one rank of which the other ranks hear, and what is noted on such an error: see `refusals`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from omnireduce.core.descriptor import REFUSED_BYTES
from omnireduce.errors import OmniReduceError

E = TypeVar("E", bound=Exception)


class Refusing(Protocol):
    """An object whose `refuse` reaches other ranks: a communicator, or a queue for one of its names."""

    def refuse(self, error: Exception) -> None: ...


@contextmanager
def report_errors_to(others: Refusing) -> Iterator[None]:
    """A context that tells the other ranks of an error, because they are about to begin the same call."""
    try:
        yield
    except Exception as error:
        others.refuse(error)
        raise


def mark_reported(error: E, name: str = "") -> E:
    """Note on the error that the other ranks know of it; return it. `name`: only ranks that wait for this name do."""
    error.__dict__.setdefault("reported", set()).add(name)
    return error


def reported_names(error: Exception) -> set[str]:
    """The names given to `mark_reported`."""
    return set(error.__dict__.get("reported", ()))


def is_reported(error: Exception, name: str = "") -> bool:
    """Whether the other ranks know of the error; with a `name`, the ranks that wait for this name."""
    return not {"", name}.isdisjoint(reported_names(error))


def set_replacement(error: Exception, make: Callable[[str], Any]) -> None:
    """Note on `error`, which refuses a call, that the call can carry the refusal: `make` makes this call from the
    reason."""
    error.__dict__["replacement"] = make


def reason_of(error: Exception) -> str:
    """The reason of a refusal, in one line that can be sent."""
    text = " ".join(str(error).split())
    if not isinstance(error, OmniReduceError) or not text:
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    data = text.encode(errors="backslashreplace")
    return text if len(data) <= REFUSED_BYTES else data[: REFUSED_BYTES - 3].decode(errors="ignore") + "…"
