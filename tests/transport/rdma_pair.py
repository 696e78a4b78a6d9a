"""The verbs pair over real queues. Importing this raises TransportError where there is no active RDMA port."""

from __future__ import annotations

from collections.abc import Sequence

from pyverbs.wr import SGE

from omnireduce.core.dtypes import Array
from omnireduce.support.config import Verbs
from omnireduce.transport.verbs.devices import choose
from omnireduce.transport.verbs.link import QueuePair
from omnireduce.transport.verbs.queue_pair import VerbsQueuePair

from .pairs import VerbsPair

SETTINGS = Verbs()
CHOICE = choose(SETTINGS, local_address="")


class RdmaPair(VerbsPair):
    """Both ends on the same port."""

    name = "rdma"

    def connected(self, left: Sequence[Array], right: Sequence[Array]) -> tuple[QueuePair, QueuePair]:
        one, two = VerbsQueuePair(CHOICE, SETTINGS, *left), VerbsQueuePair(CHOICE, SETTINGS, *right)
        one.connect(two.endpoint)
        two.connect(one.endpoint)
        return one, two

    def overlong(self, queue: QueuePair, nbytes: int, immediate: int) -> None:
        assert isinstance(queue, VerbsQueuePair)
        slot = queue._slots[0]
        queue._post(SGE(slot.addr, nbytes, slot.lkey), queue._peer.address, immediate)
