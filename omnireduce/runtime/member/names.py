"""Names of collectives, each of which belongs to one thread."""

from __future__ import annotations

import threading
import weakref

from omnireduce.errors import UsageError

MOST_NAMES = 4096  # that are remembered for certain; at most twice as many are


class Names:
    """A name belongs to the thread that used it first, until that thread has ended.

    Two threads that use one name in turn may do so in another order on another rank, and nothing would tell their
    tensors apart. A program may use a new name in each step. So names that were not used for long are forgotten: those
    in use move from the older table to the newer one, and when that is full, it becomes the older one.
    """

    def __init__(self) -> None:
        self._newer: dict[str, weakref.ref[threading.Thread]] = {}
        self._older: dict[str, weakref.ref[threading.Thread]] = {}

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def claim(self, name: str, thread: threading.Thread) -> None:
        """Raise UsageError if the name belongs to another thread; else it belongs to `thread` from now on."""
        known = self._newer.get(name)
        if known is not None and known() is thread:  # nearly always
            return
        known = known or self._older.get(name)
        owner = None if known is None else known()
        if owner is not None and owner is not thread and owner.is_alive():
            raise UsageError(
                f"the name '{name}' belongs to thread '{owner.name}', which used it first; thread '{thread.name}' must "
                "use another one: the ranks tell threads apart by the names of their collectives, and nothing else"
            )
        if len(self._newer) >= MOST_NAMES:
            self._older, self._newer = self._newer, {}
        self._newer[name] = weakref.ref(thread)
