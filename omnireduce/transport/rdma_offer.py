"""RDMA beside a connection by TCP: whether it is allowed or required, and how both ends agree on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from omnireduce.core.dtypes import Array
from omnireduce.core.wire.control import Endpoint
from omnireduce.core.wire.safe_text import shown
from omnireduce.errors import TransportError
from omnireduce.support.config import Config, Verbs
from omnireduce.transport.base import Link
from omnireduce.transport.tcp import TcpLink
from omnireduce.transport.verbs import import_rdma

if TYPE_CHECKING:
    from omnireduce.transport.verbs.connect import Offer

AUTO, RDMA = "auto", "verbs"  # values of transport.kind


def rdma_is_required(config: Config) -> bool:
    """Whether blocks must go by RDMA."""
    return config.transport.kind == RDMA


def rdma_of(config: Config) -> Verbs | None:
    """The settings of RDMA; None if it is not allowed."""
    return config.verbs if config.transport.kind in (AUTO, RDMA) else None


def check_rdma(config: Config) -> None:
    """Raises TransportError if RDMA is required, and no port can be used. The error lists the ports that there are."""
    if rdma_is_required(config):
        import_rdma()
        from omnireduce.transport.verbs.devices import choose

        choose(config.verbs, local_address="")


def offer_rdma(link: Link, config: Config, say: Callable[[str], None]) -> Offer | None:
    """A worker's readiness for RDMA with the aggregator at the other end of `link`. None if RDMA is not allowed, or,
    after `say` with the reason, not possible. Raises TransportError if it is required."""
    settings, protocol = rdma_of(config), config.protocol
    if settings is None or not isinstance(link, TcpLink):
        return None
    try:
        import_rdma()
        from omnireduce.transport.verbs.connect import Offer

        return Offer(link, settings, protocol.slots, protocol.slot_bytes, required=rdma_is_required(config))
    except TransportError as error:
        if rdma_is_required(config):
            raise
        say(str(error))
        return None


def take_answer(
    link: Link, offer: Offer, answer: Endpoint | None, note: str, config: Config, say: Callable[[str], None]
) -> Link:
    """The link by RDMA, if the aggregator has taken the `offer`. Else, after `say` with its `note`, `link` itself.
    Raises TransportError if RDMA is required or fails."""
    if answer is not None:
        return offer.accepted(answer)
    if rdma_is_required(config):
        raise TransportError(f"aggregator {link.peer} offers no RDMA: {shown(note)}; or choose transport.kind = 'tcp'")
    say(shown(note))
    offer.close()
    return link


def take_offer(
    link: Link, offered: Endpoint, settings: Verbs | None, send_slots: Array, receive_slots: Array
) -> tuple[Endpoint, Link]:
    """An aggregator's end of RDMA with a worker, and what to tell it. Raises TransportError when it cannot be used."""
    if settings is None:
        raise TransportError("the aggregator's transport.kind does not allow verbs")
    if not isinstance(link, TcpLink):
        raise TransportError(f"RDMA goes beside a connection by TCP; this one is by {link.kind}")
    import_rdma()
    from omnireduce.transport.verbs.connect import answer

    return answer(link, settings, offered, send_slots, receive_slots)
