"""The length of the next message."""

from __future__ import annotations

from typing import NamedTuple

LONGER = 4  # times as long as the shortest is the longest message
SHARE = 64  # a message that is longer than the shortest one is at most so much of all that goes to its shard


class MessageSizing(NamedTuple):
    """The blocks of a message take `shortest` to `longest` bytes together, or one block alone takes more.

    Messages of a small tensor are short: only what has arrived can come back. Those of a large one are longer: each
    message costs both sides the same, whatever its length.
    """

    shortest: int
    longest: int

    @classmethod
    def up_to(cls, longest: int) -> MessageSizing:
        """Lengths for a network."""
        return cls(longest // LONGER, longest)

    def of(self, nbytes: int) -> int:
        """The bytes of a message, if so many go to its shard in all."""
        return min(self.longest, max(self.shortest, nbytes // SHARE))

    def most(self, block_bytes: int) -> int:
        """The most blocks of any message."""
        return max(1, self.longest // block_bytes)

    def blocks(self, block_bytes: int, sent: int, at: int, end: int) -> int:
        """The most blocks of the next message. `sent` blocks went before it; they were found below block `at` of `end`.
        The rest is taken to be as dense."""
        if self.shortest == self.longest or at <= 0:
            return max(1, self.shortest // block_bytes)
        return max(1, self.of(sent * end // at * block_bytes) // block_bytes)
