"""Helpers for the schema of the configuration: meanings, units, limits, and types that several sections use."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta


def meta(meaning: str, unit: str = "", *, allowed: str = "", **limits: Any) -> Meta:
    """What a key means, its unit and its limits. `allowed` says in words what is allowed, where the limits do not."""
    return Meta(description=meaning, extra={"unit": unit, "allowed": allowed}, **limits)


ADDRESS_ALLOWED = '"HOST:PORT" (an IPv6 address in brackets)'
FilePath = Annotated[
    str,
    Meta(
        pattern=r"^[^\x00-\x1f\x7f-\xa0\xad\ud800-\udfff\"\\]{0,4096}\Z",
        extra={"allowed": 'a path without control characters, quotes and backslashes; "" for none'},
    ),
]
