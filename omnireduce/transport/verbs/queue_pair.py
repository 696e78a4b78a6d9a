"""A reliable connection of verbs: a queue pair, its registered slots and its completions.

Everything is made once, for the life of the link. Each write carries 32 bits of immediate data, which announce it.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import secrets
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pyverbs.enums as enums
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel, cqe_status_to_str
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QPAttr, QPCap, QPEx, QPInitAttrEx
from pyverbs.wr import SGE, RecvWR

from omnireduce.core.dtypes import Array
from omnireduce.core.wire.control import Endpoint
from omnireduce.errors import TransportError
from omnireduce.support.config import Verbs
from omnireduce.transport.verbs.devices import MTU_BYTES, STATES, Choice, opening
from omnireduce.transport.verbs.link import Failure, Write

MTU_CODES = {size: code for code, size in MTU_BYTES.items()}
MIN_RNR_TIMER = 12  # 0.64 ms, for a peer that is not ready; only a peer that breaks the credit rules ever is
BATCH = 32  # completions per poll
EVENT_LINK = "anon_inode:[infinibandevent]"
FATAL = {  # events after which writes may be lost
    enums.IBV_EVENT_DEVICE_FATAL: "a fatal error, or its removal",
    enums.IBV_EVENT_QP_FATAL: "a fatal error of the queue pair",
    enums.IBV_EVENT_QP_REQ_ERR: "an invalid request of the peer",
    enums.IBV_EVENT_QP_ACCESS_ERR: "an access that is not allowed to the peer",
    enums.IBV_EVENT_CQ_ERR: "an error of the completion queue",
}
MEMORY_REFUSED = (errno.ENOMEM, errno.EAGAIN)  # beyond the limit of locked memory


class VerbsQueuePair:
    """The end of one connection. `send_slots`, `receive_slots`: uint8 (slots, slot bytes), registered here.

    The peer may write to the receive slots, and to nothing else. Raises TransportError when the device refuses.
    """

    def __init__(self, choice: Choice, settings: Verbs, send_slots: Array, receive_slots: Array) -> None:
        self.choice, self._settings = choice, settings
        self._slot_bytes = receive_slots.shape[1]
        self._depth = 2 * len(send_slots)  # a message and a credit of each slot may be under way
        self.unacknowledged = 0
        self._port_is_down = False  # as last reported; it may come back before the next write
        self._owned = ExitStack()
        try:
            with opening:
                self._open(send_slots, receive_slots)
        except PyverbsError as error:
            self.close()
            raise TransportError(_error_text(error, send_slots.nbytes + receive_slots.nbytes)) from error
        except BaseException:
            self.close()
            raise

    def _open(self, send_slots: Array, receive_slots: Array) -> None:
        enter, port = self._owned.enter_context, self.choice.port
        known_descriptors = _event_descriptors()
        self._context = context = enter(Context(name=port.device))
        self._alarms = _new_descriptor(known_descriptors)
        self._channel = enter(CompChannel(context))
        self._completed = _new_descriptor(known_descriptors | {self._alarms})
        self._epoll = enter(select.epoll())
        self.descriptor = self._epoll.fileno()
        self._epoll.register(self._alarms, select.EPOLLIN)
        self._epoll.register(self._completed, select.EPOLLIN)
        domain = enter(PD(context))
        self._completions = enter(CQ(context, 4 * self._depth, None, self._channel, 0))
        self._completions.req_notify()
        self._armed = True  # the descriptor shows the next completion
        local, remote = enums.IBV_ACCESS_LOCAL_WRITE, enums.IBV_ACCESS_REMOTE_WRITE
        send_region = enter(MR(domain, send_slots.nbytes, local, address=send_slots.ctypes.data))
        receive_region = enter(MR(domain, receive_slots.nbytes, local | remote, address=receive_slots.ctypes.data))
        self._slots = [
            SGE(send_slots.ctypes.data + slot * self._slot_bytes, 0, send_region.lkey)
            for slot in range(len(send_slots))
        ]
        self._no_bytes = SGE(receive_slots.ctypes.data, 0, receive_region.lkey)
        self._receive = enter(RecvWR(sg=[self._no_bytes], num_sge=1))  # verbs need an address, even for no bytes
        self._queue = enter(QPEx(context, self._attributes(domain)))
        self._queue.to_init(self._with_access(QPAttr(port_num=port.number)))
        for _ in range(self._depth):
            self._queue.post_recv(self._receive)
        self.endpoint = Endpoint(
            gid=self.choice.gid.text,
            lid=port.lid,
            queue=self._queue.qp_num,
            sequence=secrets.randbits(24),
            key=receive_region.rkey,
            address=receive_slots.ctypes.data,
            mtu=self._settings.path_mtu or port.mtu,
        )

    def _attributes(self, domain: Any) -> QPInitAttrEx:
        capacity = QPCap(max_send_wr=2 * self._depth, max_recv_wr=self._depth, max_send_sge=1, max_recv_sge=1)
        return QPInitAttrEx(
            qp_type=enums.IBV_QPT_RC,
            scq=self._completions,
            rcq=self._completions,
            cap=capacity,
            sq_sig_all=1,
            pd=domain,
            comp_mask=enums.IBV_QP_INIT_ATTR_PD | enums.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            send_ops_flags=enums.IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM,
        )

    def _with_access(self, attributes: QPAttr) -> QPAttr:
        attributes.qp_access_flags = enums.IBV_ACCESS_REMOTE_WRITE | enums.IBV_ACCESS_LOCAL_WRITE
        return attributes

    def connect(self, peer: Endpoint) -> None:
        """Prepare writes to `peer`, which connects to this end. Raises TransportError."""
        settings, port = self._settings, self.choice.port
        if peer.address + len(self._slots) * self._slot_bytes > 1 << 64:
            raise TransportError(f"the peer's slots, from address {peer.address} on, end beyond 2**64")
        attributes = self._with_access(QPAttr(port_num=port.number))
        attributes.path_mtu = MTU_CODES[min(peer.mtu, self.endpoint.mtu)]
        attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = peer.queue, peer.sequence, self.endpoint.sequence
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        attributes.min_rnr_timer, attributes.rnr_retry = MIN_RNR_TIMER, settings.retry_count
        attributes.timeout, attributes.retry_cnt = settings.ack_timeout, settings.retry_count
        route = GlobalRoute(
            dgid=_gid(peer.gid), sgid_index=self.choice.gid.index, hop_limit=64, traffic_class=settings.traffic_class
        )
        attributes.ah_attr = AHAttr(
            port_num=port.number, is_global=1, gr=route, dlid=peer.lid, sl=settings.service_level
        )
        try:
            self._queue.to_rts(attributes)
        except PyverbsError as error:
            raise TransportError(f"cannot connect {port} to the GID {peer.gid}: {error}") from error
        self._peer = peer

    def write(self, slot: int, nbytes: int, immediate: int) -> None:
        """Write the first `nbytes` bytes of send slot `slot` into the peer's receive slot of that number.

        Raises TransportError.
        """
        slot_memory = self._slots[slot]
        slot_memory.length = nbytes
        self._post(slot_memory, self._peer.address + slot * self._slot_bytes, immediate)

    def announce(self, immediate: int) -> None:
        """Send the immediate data `immediate` with a write of no bytes. Raises TransportError."""
        self._post(self._no_bytes, self._peer.address, immediate)

    def _post(self, memory: SGE, address: int, immediate: int) -> None:
        queue = self._queue
        if self._port_is_down and (trouble := self._port_trouble()):
            raise TransportError(f"RDMA failed: the device takes no write{trouble}")
        try:
            queue.wr_start()
            queue.wr_id = 0
            queue.wr_flags = enums.IBV_SEND_SIGNALED
            queue.wr_rdma_write_imm(self._peer.key, address, socket.htonl(immediate))  # pyverbs swaps only what arrives
            queue.wr_set_sge(memory)
            queue.wr_complete()
        except PyverbsError as error:
            raise TransportError(f"RDMA failed: the device takes no write: {error}") from error
        self.unacknowledged += 1

    def poll(self) -> Iterator[Write | Failure]:
        """The events since the last call. Afterwards `descriptor` becomes readable with the next event."""
        return self._with_failures(self._poll())

    def drain(self) -> Iterator[Write | Failure]:
        """The events since the last call, without a system call. Events of the device itself are left to `poll`."""
        return self._with_failures(self._drain())

    def _with_failures(self, outcomes: Iterator[Write | Failure]) -> Iterator[Write | Failure]:
        try:
            yield from outcomes
        except PyverbsError as error:
            yield self._failed(str(error))

    def _failed(self, reason: str) -> Failure:
        return Failure(f"RDMA failed: {reason}{self._port_trouble()}")

    def _port_trouble(self) -> str:
        """A text to add to a failure if the port is not active; empty if it is."""
        port = self.choice.port
        try:
            state = self._context.query_port(port.number).state
        except PyverbsError:
            return f"; the device {port.device} is gone"
        if state == enums.IBV_PORT_ACTIVE:
            return ""
        return f"; {port.device} port {port.number} is {STATES.get(state, state)}"

    def _poll(self) -> Iterator[Write | Failure]:
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._alarms:
                yield from self._take_alarm()
                continue
            self._channel.get_cq_event(self._completions)
            self._completions.ack_events(1)
            self._armed = False
        yield from self._drain()
        if not self._armed:
            self._completions.req_notify()
            self._armed = True
            yield from self._drain()  # completions from before the request would never be shown

    def _take_alarm(self) -> Iterator[Write | Failure]:
        """Handle an event of the device. A fatal error ends the link, and so does a port that goes down during writes.

        Soft-RoCE may never complete such writes: a write that finds no route stops the retries of the writes before it.
        """
        alarm = self._context.get_async_event()
        alarm.ack()
        name = FATAL.get(alarm.event_type)
        if name is not None:
            yield self._failed(f"the device reports {name}")
            return
        yield from self._drain()
        self._port_is_down = bool(self._port_trouble())
        if self._port_is_down and self.unacknowledged:
            yield self._failed("the port went down while writes were under way")

    def _drain(self) -> Iterator[Write | Failure]:
        count = BATCH
        while count == BATCH:
            count, completions = self._completions.poll(BATCH)
            for completion in completions:
                if completion.status != enums.IBV_WC_SUCCESS:
                    yield self._failed(cqe_status_to_str(completion.status))
                    return
                if completion.opcode == enums.IBV_WC_RECV_RDMA_WITH_IMM:
                    self._queue.post_recv(self._receive)
                    yield Write(completion.imm_data, completion.byte_len)
                elif completion.opcode == enums.IBV_WC_RDMA_WRITE:
                    self.unacknowledged -= 1
                else:
                    yield self._failed(f"the peer did something else than a write (opcode {completion.opcode})")
                    return

    def close(self) -> None:
        """Release everything. May be called twice."""
        with opening, suppress(PyverbsError):  # if the device is gone, nothing is left to release
            self._owned.close()

    def abandon(self) -> None:
        """In a forked child: keep the verbs objects, which belong to the parent. The device cannot tell the child from
        the parent, so nothing is destroyed."""
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in (self._context.cmd_fd, self._alarms, self._completed):
            os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
        _abandoned.append(self._owned.pop_all())


_abandoned: list[ExitStack] = []  # never destroyed: each object would report an error


def _gid(text: str) -> GID:
    """A peer's GID. Raises TransportError."""
    try:
        return GID(ipaddress.IPv6Address(text).exploded)
    except ValueError:
        raise TransportError(f"the peer's GID is {text!r}, expected eight groups of hexadecimal digits") from None


def _event_descriptors() -> set[int]:
    """All open descriptors of verbs events, because pyverbs does not give the descriptors of its channels."""
    descriptors = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == EVENT_LINK:
                descriptors.add(int(name))
        except OSError:  # closed meanwhile
            continue
    return descriptors


def _new_descriptor(known_descriptors: set[int]) -> int:
    """The descriptor of verbs events that is not in `known_descriptors`. Raises TransportError unless there is exactly
    one."""
    new = _event_descriptors() - known_descriptors
    if len(new) != 1:
        raise TransportError(
            f"{len(new)} RDMA event channels were opened at once, expected 1: does another library use RDMA in this "
            "process? Join before it starts, or choose transport.kind = 'tcp'"
        )
    return new.pop()


def _error_text(error: PyverbsError, nbytes: int) -> str:
    if getattr(error, "error_code", 0) not in MEMORY_REFUSED:
        return f"the RDMA device refuses: {error}"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return (
        f"cannot register {nbytes} bytes of slots: {error}; the limit of locked memory is "
        f"{'unlimited' if limit == resource.RLIM_INFINITY else f'{limit} bytes'}: raise it (ulimit -l unlimited, or "
        "LimitMEMLOCK=infinity of a systemd unit), or lower protocol.slots or protocol.slot_bytes"
    )
