"""Text from peers, made safe for a log line or a message."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

SHOWN = 200  # characters of a peer's malformed message that an error repeats
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what bytes from a peer can make msgspec raise


def listed(names: Sequence[str]) -> str:
    """Names as a text for a peer: at most four of them, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def shown(text: str) -> str:
    """A peer's text, made safe for a log line or a message: as it is, or escaped if it cannot be printed."""
    return text if text.isprintable() else repr(text)
