"""Text from peers, made safe for a log line or a message."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

SHOWN = 200  # characters of a peer's malformed message that an error repeats
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # errors of msgspec for bytes of a peer


def listed(names: Sequence[str]) -> str:
    """Names as a text for a peer: at most four of them, and the number of the others."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def shown(text: str) -> str:
    """A peer's text, made safe for a log line or a message: unchanged, or escaped if it cannot be printed."""
    return text if text.isprintable() else repr(text)
