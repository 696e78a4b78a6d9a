"""How long the next message is."""

from __future__ import annotations

from typing import NamedTuple

LONGER = 4  # times as long as the shortest is the longest message
SHARE = 64  # a message that is longer than the shortest one is at most so much of all that goes to its shard


class Lengths(NamedTuple):
    """The blocks of a message take up to `shortest` to `longest` bytes together, or one block alone takes more.

    Of a small tensor messages are short: only what has arrived can come back. Of a large one they are longer: each
    costs both sides the same, whatever its length.
    """

    shortest: int
    longest: int

    @classmethod
    def up_to(cls, longest: int) -> Lengths:
        """For a network."""
        return cls(longest // LONGER, longest)

    def of(self, nbytes: int) -> int:
        """The bytes of a message, where so many go to its shard in all."""
        return min(self.longest, max(self.shortest, nbytes // SHARE))

    def most(self, block_bytes: int) -> int:
        """The most blocks of any message."""
        return max(1, self.longest // block_bytes)

    def blocks(self, block_bytes: int, sent: int, at: int, end: int) -> int:
        """The most blocks of the next message. `sent`: the blocks that went before it, which were found below block
        `at` of `end`. What follows is taken to be as dense."""
        if self.shortest == self.longest or at <= 0:
            return max(1, self.shortest // block_bytes)
        return max(1, self.of(sent * end // at * block_bytes) // block_bytes)
