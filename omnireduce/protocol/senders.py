"""The ranks that send blocks to a shard: all of them or, for hosts that share memory and for relays, one for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omnireduce.descriptor import Descriptor
from omnireduce.kernels.codecs.base import Codec
from omnireduce.protocol.hosts import Sharding
from omnireduce.protocol.reduction import Reduction
from omnireduce.protocol.shard_states import ProgramRun, ShardStates


class Senders:
    """The `ranks` that send blocks to shard `shard` in the current collective, the `reduction` that has a place for
    each, and the `readers` of its results. If hosts or relays send sums, the ranks `delegates` send them. In a
    collective that must not be summed on the way, every rank sends for itself, and `readers` get the results. `waits`:
    hosts go on with each result, as for tensors. `make` gives the work space for so many ranks. `marks`: results say
    which blocks one sender alone has. `states`: what programs keep here; None on a relay, which only passes sums on.
    `running`: the program of the current collective."""

    def __init__(
        self,
        ranks: int,
        delegates: Sequence[int],
        sharding: Sharding,
        shard: int,
        make: Callable[[int], Reduction],
        *,
        readers: Sequence[int] | None = None,
        states: ShardStates | None = None,
    ) -> None:
        self._everybody, self.delegates = tuple(range(ranks)), tuple(delegates)
        self._readers, self._marks = tuple(readers or self._everybody), readers is None
        self._dealing, self._shard = sharding, shard
        self.has_hosts = sharding.slot_bytes > 0
        self.states = states
        self.running: ProgramRun | None = None
        self._of_ranks = make(ranks)
        self._of_hosts = make(len(delegates)) if delegates else self._of_ranks
        self.ranks, self.readers, self.reduction = self._everybody, self._readers, self._of_ranks
        self.places = {rank: rank for rank in self.ranks}  # in the reduction
        self.waits = False

    def begin(self, descriptor: Descriptor, codec: Codec | None = None, key: int = 0) -> Reduction:
        """Begin a collective. `codec`: of its blocks; `key`: of the random numbers for sums. Raises CodecError, and
        ProtocolError when there is no room for what a program keeps."""
        by_host = self.delegates != () and descriptor.summed_by_host
        self.waits = by_host and not descriptor.has_rows and self.has_hosts
        self.ranks = self.delegates if by_host else self._everybody
        self.readers = self.delegates if by_host else self._readers
        self.places = {rank: place for place, rank in enumerate(self.ranks)}
        self.reduction = self._of_hosts if by_host else self._of_ranks
        stripes = self._dealing.layout(descriptor).stripes(self._shard)
        self.running = None
        if descriptor.program is not None and self.states is not None:
            self.running = self.states.begin(descriptor, descriptor.program, stripes)
        self.reduction.begin(descriptor, stripes, codec=codec, key=key, marks=self._marks, running=self.running)
        return self.reduction

    def end(self) -> bytes:
        """The program of the current collective has run on all blocks. Returns its totals."""
        assert self.running is not None
        assert self.states is not None
        done, self.running = self.running, None
        if done.program.drops:
            self.states.drop(done.program.state)
        return done.totals.tobytes()
