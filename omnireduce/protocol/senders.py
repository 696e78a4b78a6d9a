"""Who brings blocks to a shard: every rank for itself or, of hosts whose ranks share memory, one rank for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omnireduce.descriptor import Descriptor
from omnireduce.protocol.hosts import Dealing
from omnireduce.protocol.reduction import Reduction


class Senders:
    """The ranks that bring blocks to the current collective on shard `shard`, and the `reduction` that has a place for
    each. Where hosts send sums, `delegates[h]` sends for host h. `waits`: hosts go on with each result, as of tensors.
    `make` gives the work space for so many."""

    def __init__(
        self, ranks: int, delegates: Sequence[int], dealing: Dealing, shard: int, make: Callable[[int], Reduction]
    ) -> None:
        self._everybody, self.delegates = tuple(range(ranks)), tuple(delegates)
        self._dealing, self._shard = dealing, shard
        self._of_ranks = make(ranks)
        self._of_hosts = make(len(delegates)) if delegates else self._of_ranks
        self.ranks, self.reduction = self._everybody, self._of_ranks
        self.places = {rank: rank for rank in self.ranks}  # in the reduction
        self.waits = False

    def begin(self, descriptor: Descriptor) -> Reduction:
        """Begin a collective."""
        by_host = self.delegates != () and descriptor.summed_by_host
        self.waits = by_host and not descriptor.has_rows
        self.ranks = self.delegates if by_host else self._everybody
        self.places = {rank: place for place, rank in enumerate(self.ranks)}
        self.reduction = self._of_hosts if by_host else self._of_ranks
        self.reduction.begin(descriptor, self._dealing.layout(descriptor).stripes(self._shard))
        return self.reduction
