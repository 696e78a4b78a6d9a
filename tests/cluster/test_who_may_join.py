"""The shared secret between real processes: who knows it joins, nobody else does, and nothing shows it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cluster_checks import assert_serves
from local_cluster import (
    MPIRUN,
    READY_S,
    ROOT,
    WAIT_S,
    Daemon,
    Process,
    Ranks,
    children,
    configured,
    run_job,
    unique_job,
)
from raw_peer import RawPeer, framed
from transports import KINDS, TRANSPORTS, over

from omnireduce import Communicator, OmniReduceError, RefusedError, TransportError
from omnireduce.core.wire.control import (
    PROTOCOL_VERSION,
    Challenge,
    Greeting,
    Hello,
    Proof,
    Refused,
    Welcome,
    decode_control,
)
from omnireduce.protocol.joining.authentication import UNHEARD, Candidate
from omnireduce.support.config.schema import SECRET_VARIABLE
from omnireduce.support.secret import Secret
from omnireduce.transport.framing import CONTROL, FRAME

TEXT, OTHER = "correct horse battery staple", "Tr0ub4dor&3 and 28 bits more"
SECRET = Secret(TEXT.encode())


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.touch(0o600)
    file.write_text(TEXT + "\n")
    return str(file)


@pytest.fixture(scope="module")
def closed() -> Iterator[Daemon]:
    """A daemon of two shards that wants the secret, which it has from its environment."""
    with Daemon(2, environ={SECRET_VARIABLE: TEXT}) as daemon:
        yield daemon
        assert TEXT not in daemon.log


def join(daemon: Daemon, *overrides: str) -> OmniReduceError:
    """Why a worker cannot join."""
    with pytest.raises(OmniReduceError) as caught:
        Communicator(configured(daemon.addresses, "cluster.join_timeout_s=20", *overrides), rank=0, size=1)
    assert TEXT not in str(caught.value)
    assert OTHER not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_knows_the_secret_joins(closed: Daemon, secret_file: str, transport: str) -> None:
    config = configured(closed.addresses, *over(transport), f"security.secret_file={secret_file}")
    assert run_job(config, 3, lambda comm: comm.allreduce(np.ones(9)).tolist()) == [[3.0] * 9] * 3


def test_the_variable_will_do(closed: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, TEXT)
    assert_serves(closed)


@pytest.mark.parametrize("kind", KINDS)
def test_who_has_no_secret_is_told_what_to_do(closed: Daemon, kind: str) -> None:
    error = join(closed, *over(kind))
    assert isinstance(error, RefusedError)
    what = f"give the client the same security.secret_file or the variable {SECRET_VARIABLE}"
    assert str(error) in [
        f"aggregator {address} refused: the aggregator wants proof of a shared secret: {what}"
        for address in closed.addresses
    ]


def test_who_has_another_secret_is_told_so(closed: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, OTHER)
    error = join(closed)
    assert isinstance(error, RefusedError)
    assert "refused: the client has another secret than the aggregator: give both the same security." in str(error)


def test_an_aggregator_without_a_secret_is_not_trusted(daemon: Daemon, secret_file: str) -> None:
    """A worker with a secret does not fall back."""
    error = join(daemon, f"security.secret_file={secret_file}")
    assert isinstance(error, RefusedError)
    assert "refused: the client has a secret, the aggregator has none: give it the same" in str(error)


# strangers that speak the protocol


def played_back(peer: RawPeer) -> None:
    """The right proof, but for the nonce of another connection."""
    with RawPeer("{}:{}".format(*peer.sock.getpeername())) as first:
        candidate = Candidate(SECRET, bytes(32))
        first.send(framed(candidate.greeting))
        recorded = candidate.answer(first.control())
    assert isinstance(recorded, Proof)
    peer.send(framed(candidate.greeting))
    peer.control()
    peer.send(framed(recorded))


def sent_back(peer: RawPeer) -> None:
    """Send back the proof that the aggregator would give, if proofs did not name the role."""
    peer.send(framed(Greeting(PROTOCOL_VERSION, bytes(32))))
    challenge = peer.control()
    assert isinstance(challenge, Challenge)
    peer.send(framed(Proof(SECRET.proof("aggregator", bytes(32), challenge.nonce))))


def greeted_first(peer: RawPeer) -> None:
    peer.send(framed(Greeting(PROTOCOL_VERSION, bytes(32))))
    peer.control()
    peer.hello(unique_job(), 0, 1)


STRANGERS: dict[str, tuple[Callable[[RawPeer], object], str]] = {
    "a hello": (lambda peer: peer.hello(unique_job(), 0, 1), "wants proof"),
    "a hello after the greeting": (greeted_first, "wants proof"),
    "a proof without a greeting": (lambda peer: peer.send(framed(Proof(bytes(32)))), "wants proof"),
    "two greetings": (lambda peer: peer.send(2 * framed(Greeting(PROTOCOL_VERSION, bytes(32)))), "wants proof"),
    "a proof of an earlier connection": (played_back, "another secret"),
    "a proof of the other role": (sent_back, "another secret"),
    "a short nonce": (
        lambda peer: peer.say({"type": "Greeting", "version": PROTOCOL_VERSION, "nonce": bytes(31)}),
        "malformed control message",
    ),
    "another version": (
        lambda peer: peer.say({"type": "Greeting", "version": PROTOCOL_VERSION + 1, "key": "unknown"}),
        f"protocol version {PROTOCOL_VERSION + 1}, expected {PROTOCOL_VERSION}",
    ),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_a_stranger_is_refused_and_dropped(closed: Daemon, what: str) -> None:
    act, expected = STRANGERS[what]
    with RawPeer(closed.addresses[0]) as peer:
        act(peer)
        answer = peer.control()
        while isinstance(answer, Challenge):
            answer = peer.control()
        assert isinstance(answer, Refused)
        assert expected in answer.reason
        assert peer.is_closed()


def test_memory_is_passed_after_the_proof_only(closed: Daemon) -> None:
    """Over the Unix socket the Welcome brings descriptors; nothing before it does."""
    with RawPeer(closed.addresses[0], local=True) as peer:
        candidate = Candidate(SECRET, bytes(32))
        peer.send(framed(candidate.greeting))
        messages, results = [], []
        while not results:
            data, results, _, _ = socket.recv_fds(peer.sock, 65536, 4)
            length = FRAME.unpack_from(data)[2]
            messages.append(decode_control(data[FRAME.size : FRAME.size + length]))
            reply = candidate.answer(messages[-1]) if isinstance(messages[-1], Challenge | Proof) else None
            if reply is not None:
                peer.send(framed(reply))
            elif isinstance(messages[-1], Proof):
                peer.hello(unique_job(), 0, 1)
        for descriptor in results:
            os.close(descriptor)
    assert [type(message) for message in messages] == [Challenge, Proof, Welcome]


# false aggregators

FALSE_ANSWERS: dict[str, tuple[list[bytes], str]] = {
    "a welcome": ([framed(Welcome(1))], "answered the greeting with Welcome, without proof of the secret"),
    "a false proof": ([framed(Challenge(bytes(32))), framed(Proof(bytes(32)))], "does not know the secret"),
    "no msgpack": ([FRAME.pack(CONTROL, 0, 4) + b"\xc1\xc1\xc1\xc1"], "malformed control message"),
    "noise": ([b"\xee" * 100], "not a frame of this protocol"),
}


@pytest.mark.parametrize("what", FALSE_ANSWERS)
def test_a_false_aggregator_learns_nothing(secret_file: str, what: str) -> None:
    """The worker says no hello, and names the address."""
    answers, expected = FALSE_ANSWERS[what]
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        config = configured([address], "transport.kind=tcp", f"security.secret_file={secret_file}")
        ranks = Ranks(1, lambda _: Communicator(config, rank=0, size=1))
        server.settimeout(WAIT_S)
        messages = []
        with server.accept()[0] as sock:
            sock.settimeout(WAIT_S)
            for answer in answers:
                data = sock.recv(65536)
                messages.append(decode_control(data[FRAME.size :]))
                sock.sendall(answer)
            sock.shutdown(socket.SHUT_WR)
            [error] = ranks.outcomes()
            assert sock.recv(65536) == b""
    assert isinstance(error, TransportError)
    assert f"aggregator {address}" in str(error)
    assert expected in str(error)
    assert not any(isinstance(message, Hello) for message in messages)


def test_an_aggregator_that_hangs_up_before_the_hello_is_tried_again(secret_file: str) -> None:
    """Until the time to join is over: then the error says what may be wrong."""
    data: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def hang_up(_: int) -> None:
            with suppress(OSError):  # when the listener is shut down
                while True:
                    with server.accept()[0] as sock:
                        data.append(sock.recv(65536))

        others = Ranks(1, hang_up)
        limit = "cluster.join_timeout_s=0.5"
        config = configured([address], "transport.kind=tcp", limit, f"security.secret_file={secret_file}")
        with pytest.raises(TransportError) as caught:
            Communicator(config, rank=0, size=1)
        server.shutdown(socket.SHUT_RDWR)
        others.results()
    assert re.match(
        rf"cannot reach aggregator {address} by tcp: connection (closed|broken: .*) before the hello; does its "
        r"transport\.kind allow tcp, and does it want TLS \(security\.tls_ca here\); is `omnireduce aggregator`",
        str(caught.value),
    )
    assert len(data) > 1


def test_an_aggregator_that_never_proves_itself(secret_file: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        config = configured([address], "cluster.join_timeout_s=0.3", f"security.secret_file={secret_file}")
        with pytest.raises(RefusedError) as caught:
            Communicator(config, rank=0, size=1)
        what = rf"no proof of the secret came from aggregator {address} within 0\.[\d]+ s; "
        assert re.fullmatch(what + re.escape(UNHEARD), str(caught.value))


# places where the secret must not be seen


def family(pid: int) -> list[int]:
    """A process and all that come from it."""
    return [pid, *(each for child in children(pid) for each in family(child))]


def command_lines(pid: int) -> str:
    contents = [Path(f"/proc/{each}/cmdline").read_bytes() for each in family(pid)]
    return b"".join(contents).decode(errors="replace")


@pytest.mark.slow
@pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")
def test_ranks_under_mpirun_have_it_from_the_environment(closed: Daemon) -> None:
    """And none of the processes on the way shows it on its command line."""
    script = str(ROOT / "tests" / "cluster" / "looping_worker.py")
    command = [str(MPIRUN), "-n", "2", sys.executable, script, "--aggregators", ",".join(closed.addresses)]
    with Process(*command, environ={SECRET_VARIABLE: TEXT}) as launch:
        while '"round"' not in launch.line():
            pass
        assert "looping_worker" in command_lines(launch.pid)
        assert TEXT not in command_lines(launch.pid)
        assert TEXT not in command_lines(closed.pid)
        assert TEXT not in launch.log
        for pid in reversed(family(launch.pid)):
            os.kill(pid, 15)
        launch.wait()


# a daemon that all the network could join


def start(*arguments: str, environ: dict[str, str] | None = None) -> tuple[int, str]:
    """Start the aggregator program, which ends at once: its status and what it said."""
    with Process(sys.executable, "-m", "omnireduce.aggregator", *arguments, environ=environ) as process:
        return process.wait(READY_S), process.log


def test_a_name_that_cannot_be_looked_up_could_be_any_address() -> None:
    status, log = start("--listen", "no-such-host.invalid:7400")
    assert status == 2
    assert "aggregator.listen: no-such-host.invalid:7400 cannot be looked up now (" in log
    assert "security.allow_no_secret = true" in log


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:7400"])
def test_an_address_beyond_loopback_needs_a_secret(listen: str) -> None:
    status, log = start("--listen", listen)
    assert status == 2
    assert log.count("\n") == 1
    assert f"aggregator.listen: {listen} can be reached from other hosts, and without a secret all of them" in log
    assert f"security.secret_file or the variable {SECRET_VARIABLE}" in log
    assert "security.allow_no_secret = true" in log


def test_an_address_beyond_loopback_with_a_secret(secret_file: str) -> None:
    with Daemon(1, f"security.secret_file={secret_file}", listen="0.0.0.0:0") as daemon:
        config = configured([daemon.addresses[0].replace("0.0.0.0", "127.0.0.1")])
        with pytest.raises(RefusedError, match="wants proof of a shared secret"):
            Communicator(config, rank=0, size=1)
        proper = msgspec.structs.replace(
            config, security=msgspec.structs.replace(config.security, secret_file=secret_file)
        )
        assert run_job(proper, 2, lambda comm: comm.size) == [2, 2]


def test_an_address_beyond_loopback_that_is_meant_to_be_open() -> None:
    with Daemon(1, "security.allow_no_secret=true", listen="0.0.0.0:0") as daemon:
        config = configured([daemon.addresses[0].replace("0.0.0.0", "127.0.0.1")])
        assert run_job(config, 2, lambda comm: comm.size) == [2, 2]


def test_a_secret_that_cannot_be_used_is_one_line_and_status_2(tmp_path: Path) -> None:
    open_to_all = tmp_path / "secret"
    open_to_all.write_text(TEXT)
    open_to_all.chmod(0o644)
    for arguments, environ, expected in [
        (["--set", f"security.secret_file={open_to_all}"], {}, "mode 0644 lets others than its owner use it"),
        (["--set", f"security.secret_file={tmp_path}/none"], {}, "cannot be read: No such file"),
        ([], {SECRET_VARIABLE: "short"}, f"{SECRET_VARIABLE}: got a secret of 5 bytes, expected 16 to 4096"),
        (["--set", f"security.secret={TEXT}"], {}, "security.secret: a command line or a configuration is no place"),
    ]:
        status, log = start(*arguments, environ=environ)
        assert status == 2
        assert log.count("\n") == 1
        assert expected in log
        assert TEXT not in log


@pytest.mark.slow
def test_a_worker_program_says_what_is_missing(closed: Daemon) -> None:
    command = [sys.executable, "-m", "omnireduce.worker", "bench", "--set", f"cluster.aggregators={closed.addresses}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=READY_S, check=False)
    assert result.returncode == 1
    assert "Error: aggregator" in result.stderr
    assert "wants proof of a shared secret: give the client the same security.secret_file" in result.stderr
