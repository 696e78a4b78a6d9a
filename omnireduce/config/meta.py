"""Helpers for the schema of the configuration: meanings, units, limits, and types that several sections use."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct


class Section(Struct, frozen=True):
    """A section of the configuration. `MEANING` stands in the reference; docstrings do not, as Python can leave them
    out (-OO)."""

    MEANING: ClassVar[str]


def meta(
    meaning: str, unit: str = "", *, allowed: str = "", path_but: tuple[str, ...] | None = None, **limits: Any
) -> Meta:
    """The meaning of a key, its unit and its limits. `allowed` says in words what is allowed, if the limits do not.
    `path_but`: the value is a path, unless it is one of these words."""
    extra = {"unit": unit, "allowed": allowed} | ({} if path_but is None else {"path_but": path_but})
    return Meta(description=meaning, extra=extra, **limits)


ADDRESS_ALLOWED = '"HOST:PORT" (an IPv6 address in brackets)'
LISTEN_ALLOWED = f'{ADDRESS_ALLOWED} or ":PORT", which is every address of this host'
Address = Annotated[str, meta("", allowed=ADDRESS_ALLOWED)]
FilePath = Annotated[
    str,
    Meta(
        pattern=r"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{0,4096}\Z",
        extra={
            "allowed": 'a path without control characters; "" for none',
            "path_but": ("",),
        },
    ),
]
