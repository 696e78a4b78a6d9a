"""RDMA that fails: every failure ends the job with the error that TCP would give, and names the peer.

Processes that die are in tests/cluster, over verbs as well.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from cluster_checks import FAILURE_S, assert_serves, expect_round
from local_cluster import ROOT, WAIT_S, Daemon, Ranks, configured, eventually, open_files, run_job, start_job, workers
from transports import BY_SHARDS, over

from omnireduce import Communicator
from omnireduce.errors import TransportError
from omnireduce.support.config import Verbs
from omnireduce.transport.slot_memory import private_slots
from omnireduce.transport.verbs import devices as verbs_devices
from omnireduce.transport.verbs.devices import choose, get_device_list, list_ports
from omnireduce.transport.verbs.link import Failure, Write
from omnireduce.transport.verbs.queue_pair import VerbsQueuePair

VERBS = "transport.kind=verbs"
OVER = over("verbs")
LARGE = ("--elements", "1000000")  # several messages; one round follows the other
QUICK = ("verbs.ack_timeout=17", "verbs.retry_count=3")  # 0.54 s each: broken after 2.1 s, also when emulated
OPEN = "security.allow_no_secret=true"
SLOTS, SLOT_BYTES = 2, 65536


def call(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, timeout=WAIT_S)


def ip_link(interface: str, state: str) -> None:
    call("ip", "link", "set", interface, state)


def devices() -> set[str]:
    return {port.device for port in list_ports()}


def resources() -> list[str]:
    """The kernel's lines on rxe0: memory regions, queue pairs and completion queues of the whole host."""
    result = subprocess.run(["rdma", "resource", "show"], check=True, capture_output=True, text=True, timeout=WAIT_S)
    return [line for line in result.stdout.splitlines() if "rxe0" in line]


def queue(settings: Verbs) -> VerbsQueuePair:
    slots = (private_slots(SLOTS, SLOT_BYTES), private_slots(SLOTS, SLOT_BYTES))
    return VerbsQueuePair(choose(settings, local_address=""), settings, *slots)


def failure(queue: VerbsQueuePair) -> str:
    """The reason that the queue gives within the bound."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for news in queue.poll():
            if isinstance(news, Failure):
                return news.reason
    raise AssertionError("no failure was reported")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(2, VERBS, *QUICK) as result:
        yield result


@pytest.fixture
def cable() -> Iterator[str]:
    """The interface of rxe1, whose other end is rxe2's; in place again afterwards."""
    yield "cable1"
    ip_link("cable1", "up")


@pytest.fixture
def spare() -> Iterator[str]:
    """The interface of rxe3, whose other end, spare2, is rxe4's; a test may remove each of them."""
    call("ip", "link", "add", "spare1", "mtu", 9000, "type", "veth", "peer", "name", "spare2", "mtu", 9000)
    ends = ("rxe3", "spare1", "192.168.61.1"), ("rxe4", "spare2", "192.168.61.2")
    try:
        for _, interface, address in ends:
            call("ip", "addr", "add", f"{address}/24", "dev", interface)
            ip_link(interface, "up")
            options = f"net.ipv4.conf.{interface}"
            call("sysctl", "-q", "-w", f"{options}.accept_local=1", f"{options}.rp_filter=0")
        for device, interface, _ in ends:
            call(ROOT / "vagrant" / "provision" / "rxe.sh", device, interface)
        yield "spare1"
    finally:  # in case the test has not removed it
        for command in ("rdma link delete rxe3", "rdma link delete rxe4", "ip link delete spare1"):
            subprocess.run(command.split(), check=False, capture_output=True, timeout=WAIT_S)


def test_a_pulled_cable(cable: str) -> None:
    """The control connection does not go over the cable: it is the writes that fail."""
    overrides = [*OVER, "verbs.device=rxe1", *QUICK]
    with (
        Daemon(1, VERBS, "verbs.device=rxe2", *QUICK) as daemon,
        workers(daemon, 2, *LARGE, overrides=overrides) as ranks,
    ):
        for worker in ranks:
            expect_round(worker, "round", 1)
        pulled = time.monotonic()
        ip_link(cable, "down")
        for worker in ranks:
            error = worker.expect("error")
            assert error["type"] == "AbortedError"
            assert "RDMA failed" in error["text"], error
            assert error["at"] - pulled < FAILURE_S
        ip_link(cable, "up")
        assert_serves(daemon, *overrides)


def test_a_network_card_that_is_removed(spare: str) -> None:
    """With the interface below it, a Soft-RoCE device goes for good: its jobs end, the daemon does not."""
    overrides = [*OVER, "verbs.device=rxe3", *QUICK]
    with (
        Daemon(1, "verbs.device=rxe4", *QUICK) as daemon,
        workers(daemon, 2, *LARGE, overrides=overrides) as ranks,
    ):
        for worker in ranks:
            expect_round(worker, "round", 1)
        removed = time.monotonic()
        with subprocess.Popen(["ip", "link", "delete", spare]) as removal:
            for worker in ranks:
                error = worker.expect("error")
                assert error["type"] == "AbortedError", error
                assert re.search("RDMA failed: .*; (rxe[34] port 1 is down|the device rxe[34] is gone)", error["text"])
                assert error["at"] - removed < FAILURE_S
            assert removal.wait(WAIT_S) == 0, "someone holds the device back"
        assert eventually(lambda: not {"rxe3", "rxe4"} & devices())
        assert_serves(daemon, *over("tcp"))


def test_a_port_that_goes_down_while_writes_are_under_way(spare: str) -> None:
    """Soft-RoCE would not complete them: the one that finds no route stops the retries of the one before it."""
    sender, receiver = queue(Verbs(device="rxe3", ack_timeout=20)), queue(Verbs(device="rxe4"))
    with closing(sender), closing(receiver):
        sender.connect(receiver.endpoint)  # the receiver is not connected, and acknowledges nothing
        sender.announce(0)
        ip_link(spare, "down")
        sender.announce(0)
        assert failure(sender) == "RDMA failed: the port went down while writes were under way; rxe3 port 1 is down"


def test_a_port_that_is_down_may_come_back_before_the_next_write(spare: str) -> None:
    sender, receiver = queue(Verbs(device="rxe3")), queue(Verbs(device="rxe4"))
    with closing(sender), closing(receiver):
        sender.connect(receiver.endpoint)
        receiver.connect(sender.endpoint)
        ip_link(spare, "down")
        assert eventually(lambda: list(sender.poll()) == [] and sender._port_is_down)
        with pytest.raises(TransportError, match="RDMA failed: the device takes no write; rxe3 port 1 is down"):
            sender.announce(0)
        ip_link(spare, "up")
        assert eventually(lambda: sender._port_trouble() == "")
        sender.announce(7)  # also before the sender has read that its port is back
        news: list[Write | Failure] = []
        assert eventually(lambda: bool(news.extend(receiver.poll()) or news))
        assert news == [Write(7, 0)]
        assert eventually(lambda: list(sender.poll()) == [] and not sender.unacknowledged)


def test_a_device_that_is_removed_waits_for_its_job(spare: str) -> None:
    """Soft-RoCE lets those who use a device finish; nobody new gets it."""
    with Daemon(1, "verbs.device=rxe4") as daemon, contextlib.ExitStack() as behind_the_job:
        settings = [*OVER, "verbs.device=rxe3"]
        with workers(daemon, 2, *LARGE, overrides=settings) as ranks:
            for worker in ranks:
                expect_round(worker, "round", 1)
            removal = behind_the_job.enter_context(subprocess.Popen(["rdma", "link", "delete", "rxe3"]))
            assert eventually(lambda: "rxe3" not in devices())
            with pytest.raises(TransportError, match=r"'rxe3'.*this host has .*rxe0 port 1"):
                choose(Verbs(device="rxe3"), local_address="")
            for worker in ranks:
                since = worker.expect("round")["round"]
                expect_round(worker, "round", since + 3)
            assert removal.poll() is None
        assert removal.wait(WAIT_S) == 0
        assert_serves(daemon, *over("tcp"))


def test_a_device_that_is_removed_while_devices_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Removed:
        name = b"rxe9"

    there, lists = get_device_list(), [[Removed, *get_device_list()]]
    monkeypatch.setattr(verbs_devices, "get_device_list", lambda: lists.pop() if lists else there)
    assert devices() == {device.name.decode() for device in there}
    lists += [[Removed]] * 2  # it is still listed: then its failure is told
    with pytest.raises(TransportError, match="rxe9"):
        list_ports()


def test_a_forked_child_takes_nothing_from_its_parent(daemon: Daemon) -> None:
    """The device takes what a child destroys for its parent's; nor may the child read what came for the parent."""

    def work(comm: Communicator) -> float:
        comm.barrier()
        if comm.rank == 0:
            child = os.fork()
            if child == 0:
                comm.shutdown()
                gc.collect()
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return sum(float(comm.allreduce(np.ones(100_000, np.float32))[99]) for _ in range(3))

    assert run_job(configured(daemon.addresses, *OVER), 2, work) == [6.0, 6.0]


def test_a_receiver_whose_queue_is_full() -> None:
    """A peer that writes without credits finds no receive request, and fails instead of waiting for ever."""
    settings = Verbs(ack_timeout=10, retry_count=2)
    sender, receiver = queue(settings), queue(settings)
    sender.connect(receiver.endpoint)
    receiver.connect(sender.endpoint)
    for _ in range(4 * SLOTS):
        sender.announce(0)
    assert "RNR" in failure(sender)
    sender.close()
    receiver.close()


def test_a_device_that_takes_no_more_writes() -> None:
    sender, receiver = queue(Verbs()), queue(Verbs())
    sender.connect(receiver.endpoint)

    def flood() -> None:
        for _ in range(10_000):  # the receiver is not connected: nothing is acknowledged
            sender.announce(0)

    with pytest.raises(TransportError, match="RDMA failed: the device takes no write"):
        flood()
    sender.close()
    receiver.close()


def test_what_the_device_itself_reports_ends_the_link() -> None:
    """A completion queue that runs over; a fatal error of the device, or its removal, would come the same way."""
    sender, receiver = queue(Verbs()), queue(Verbs())
    sender.connect(receiver.endpoint)
    receiver.connect(sender.endpoint)

    def reported() -> bool:
        with contextlib.suppress(TransportError):  # so many writes at once are too many for the send queue as well
            sender.announce(0)
        assert all(isinstance(news, Write) for news in receiver.poll())
        return bool(select.select([sender._alarms], [], [], 0)[0])

    assert eventually(reported)
    assert "RDMA failed: the device reports an error of the completion queue" in failure(sender)
    sender.close()
    receiver.close()


def test_a_peer_that_writes_where_it_may_not() -> None:
    settings = Verbs(ack_timeout=10, retry_count=2)
    sender, receiver = queue(settings), queue(settings)
    sender.connect(receiver.endpoint)
    receiver.connect(sender.endpoint)
    sender.write(SLOTS - 1, SLOT_BYTES, 0)  # the last byte that it may write
    sender._slots[0].length = 8
    sender._post(sender._slots[0], receiver.endpoint.address + SLOTS * SLOT_BYTES, 0)
    assert "access" in failure(sender).lower()
    sender.close()
    receiver.close()


def test_threads_that_open_and_close_at_the_same_time() -> None:
    """Each finds the descriptor of its own channel, which pyverbs does not tell."""

    def work(_: int) -> set[int]:
        results = set()
        for _ in range(10):
            each = queue(Verbs())
            results.add(each.descriptor)
            assert list(each.poll()) == []
            each.close()
        return results

    assert all(Ranks(4, work).results())


def test_too_little_memory_may_be_locked() -> None:
    program = (
        "from omnireduce.support.config import Verbs\n"
        "from omnireduce.transport.slot_memory import private_slots\n"
        "from omnireduce.transport.verbs.devices import choose\n"
        "from omnireduce.transport.verbs.queue_pair import VerbsQueuePair\n"
        "VerbsQueuePair(choose(Verbs(), ''), Verbs(), private_slots(3, 1 << 20), private_slots(3, 1 << 20))\n"
    )
    limited = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "prlimit", "--memlock=65536:65536"]
    command = [*limited, sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert "TransportError: cannot register 6291456 bytes of slots" in result.stderr
    assert "65536 bytes: raise it (ulimit -l unlimited" in result.stderr


def test_a_shard_that_has_no_descriptors_for_the_last_rank_tells_all() -> None:
    """No connection is closed without a reason, wherever descriptors run out. Those of the first rank are given back.

    Each rank takes a connection and, for RDMA, five descriptors more; the job takes two.
    """
    with Daemon(1, VERBS, *QUICK) as daemon:
        [shard] = daemon.shard_pids
        config = configured(daemon.addresses, *OVER)
        run_job(config, 2, lambda comm: comm.barrier())
        before, files = resources(), len(open_files(shard))
        limit, refused = resource.prlimit(shard, resource.RLIMIT_NOFILE), 0
        for spare in range(7, 15):
            resource.prlimit(shard, resource.RLIMIT_NOFILE, (files + spare, limit[1]))
            errors = [str(outcome) for outcome in start_job(config, 2, lambda comm: comm.barrier()).outcomes()]
            unexplained = f"aggregator {daemon.addresses[0]}: connection closed"
            assert not any(unexplained in error for error in errors), (spare, errors)
            are_named = ["the aggregator has no descriptors for this job: " in error for error in errors]
            assert are_named in ([False, False], [True, True]), (spare, errors)
            refused += all(are_named)
            assert eventually(lambda: len(open_files(shard)) <= files), (spare, open_files(shard))
        assert refused >= 3
        assert resources() == before
        resource.prlimit(shard, resource.RLIMIT_NOFILE, limit)
        assert run_job(config, 2, lambda comm: comm.transport) == ["verbs", "verbs"]


def test_a_device_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(TransportError, match=r"mlx5_0.*this host has rxe0 port 1 \(active\)"):
        choose(Verbs(device="mlx5_0"), local_address="")
    with pytest.raises(TransportError, match=r"has no GID with index 99; its table: 0: .* RoCE v2"):
        choose(Verbs(gid_index=99), local_address="")


def test_nothing_is_registered_or_made_for_a_collective(daemon: Daemon) -> None:
    def run(comm: Communicator) -> tuple[bool, str]:
        comm.allreduce(np.ones(1000, np.float32))
        before = resources()
        for _ in range(10):
            comm.allreduce(np.ones(300_000, np.float32))
        comm.barrier()
        return before == resources(), comm.transport

    assert run_job(configured(daemon.addresses, *OVER), 1, run) == [(True, "verbs")]


def test_auto_takes_rdma_on_the_way_and_says_why_not(daemon: Daemon) -> None:
    """Over the address of rxe0 it is verbs, unless the aggregator is on this host and shares memory."""
    with Daemon(1, "transport.kind=verbs", OPEN, listen="192.168.59.101:0") as far:
        assert run_job(configured(far.addresses, BY_SHARDS), 2, lambda comm: comm.transport) == ["verbs", "verbs"]
    with Daemon(1, "transport.kind=tcp", OPEN, listen="192.168.59.101:0") as far:
        assert run_job(configured(far.addresses), 1, lambda comm: comm.transport) == ["tcp"]
        with pytest.raises(
            TransportError, match=r"offers no RDMA: the aggregator's transport.kind does not allow verbs"
        ):
            run_job(configured(far.addresses, VERBS), 1, lambda comm: comm.transport)
