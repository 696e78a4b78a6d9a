"""Codecs on real daemons: for which calls they are, codecs of a user's own, and what is said of one that is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job, start_job
from transports import BY_SHARDS, KINDS, by_transports, over

from omnireduce import AbortedError, CodecError, Communicator, ConfigError, UsageError
from omnireduce.core.dtypes import Array
from omnireduce.kernels.codecs.table import BUILT_IN
from omnireduce.runtime.rank.channels import _warn_unused_codec

HERE = Path(__file__).parent
OWN = ("own_codecs:Doubles", "own_codecs:Unlucky", "own_codecs:Clumsy")


def integers(rank: int, size: int = 100_003) -> Array:
    """So small that most codecs send them as they are. Half of the blocks are zeros."""
    x = np.random.default_rng(rank).integers(-7, 8, size).astype(np.float32)
    x[(np.arange(size) // 256 + rank) % 4 > 1] = 0
    return x


@pytest.mark.parametrize(("codec", "kind"), by_transports(BUILT_IN, KINDS))
def test_all_ranks_get_the_same_and_fewer_bytes_travel(daemon: Daemon, kind: str, codec: str) -> None:
    def run(comm: Communicator) -> tuple[Array, int]:
        before, x = comm.statistics().sent_bytes, integers(comm.rank)
        assert comm.allreduce(x, codec=codec) is x
        return x, comm.statistics().sent_bytes - before

    results = run_job(configured(daemon.addresses, *over(kind)), 3, run)
    share = BUILT_IN[codec].block_bytes(256) / 1024
    for x, sent in results:
        assert x.tobytes() == results[0][0].tobytes()
        assert sent < 50_001 * 4 * share * 1.1 + 4096
    if codec in ("bf16", "fp16", "int8"):
        assert (results[0][0] == integers(0) + integers(1) + integers(2)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_codec_of_the_configuration_is_for_sums_and_means_of_float32(daemon: Daemon, kind: str) -> None:
    config = configured(daemon.addresses, *over(kind), "protocol.codec=sign")

    def run(comm: Communicator) -> None:
        mine = np.full(64, comm.rank + 1.5, np.float32)
        assert set(comm.allreduce(mine.copy())) == {1.0}
        assert set(comm.allreduce(mine.copy(), op="mean")) == {1.0}
        assert set(comm.allreduce(mine.copy(), op="max")) == {2.5}
        assert set(comm.allreduce(mine.copy(), codec="none")) == {4.0}
        assert set(comm.allreduce(mine.astype(np.float64))) == {4.0}
        assert set(comm.allreduce(np.full(64, 2))) == {4}
        group = comm.allreduce({"a": mine.copy(), "b": np.full(64, 2)})
        assert (set(group["a"]), set(group["b"])) == ({1.0}, {4})
        assert set(comm.allreduce([mine.copy()], codec="int8")[0]) == {4.0}
        assert set(comm.allreduce_rows(np.array([3]), mine.reshape(1, 64), 9)[1][0]) == {4.0}
        assert set(comm.allreduce_async(mine.copy()).wait()) == {1.0}

    run_job(config, 2, run)


def idle_codecs(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.fields["codec"] for record in caplog.records if getattr(record, "event", "") == "codec_idle"]


def test_ranks_that_share_memory_exchange_exactly_and_one_says_so_once(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of a codec that is named in a call."""
    _warn_unused_codec.cache_clear()
    config = configured(daemon.addresses, "protocol.codec=sign")

    def run(comm: Communicator) -> set[float]:
        results = {float(x) for _ in range(3) for x in comm.allreduce(np.full(64, 1.5, np.float32))}
        return results | set(comm.allreduce([np.full(64, 1.5, np.float32)], codec="own_codecs:Doubles")[0])

    assert run_job(config, 2, run) == [{3.0}] * 2
    assert idle_codecs(caplog) == ["sign", "own_codecs:Doubles"]


@pytest.mark.parametrize(("ranks", "settings"), [(1, ()), (2, (BY_SHARDS,))])
def test_codecs_that_work_are_no_news(
    daemon: Daemon, ranks: int, settings: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    _warn_unused_codec.cache_clear()
    config = configured(daemon.addresses, *settings)
    run_job(config, ranks, lambda comm: comm.allreduce(np.ones(8, np.float32), codec="sign"))
    assert idle_codecs(caplog) == []


def test_wrong_codecs_are_refused_and_the_job_goes_on(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        x = np.ones(8, np.float32)
        for codec, message in (("int9", "expected none, bf16"), (8, "codec is an int; expected a str")):
            with pytest.raises(UsageError, match=message):
                comm.allreduce(x, codec=codec)  # type: ignore[arg-type]
        for wrong in (np.ones(8), np.ones(8, np.int32)):
            with pytest.raises(UsageError, match=r"no codec works on .*: expected an allreduce of float32"):
                comm.allreduce(wrong, codec="int8")
        with pytest.raises(UsageError, match="expected at most 16384 with a codec"):
            comm.allreduce(x, codec="int8", block_size=1 << 15)
        for group, op in (([np.ones(8)], "sum"), ([x], "max")):
            with pytest.raises(UsageError, match="codec 'int8' works on no array of the group"):
                comm.allreduce(group, op=op, codec="int8")  # type: ignore[call-overload]
        assert set(comm.allreduce(x, codec="int8")) == {2.0}

    run_job(configured(daemon.addresses, BY_SHARDS), 2, run)


@pytest.mark.parametrize(
    ("codecs", "message"), [(("int8", "bf16"), "codec int8; rank 1 .* codec bf16"), (("int8", "none"), "codec int8")]
)
@pytest.mark.parametrize("setting", [BY_SHARDS, "transport.host_exchange=auto"])
def test_ranks_with_different_codecs_are_told(
    daemon: Daemon, codecs: tuple[str, str], message: str, setting: str
) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(AbortedError, match=message) as raised:
            comm.allreduce(np.ones(8, np.float32), codec=codecs[comm.rank])
        assert raised.value.culprit == "ranks 0 and 1"

    run_job(configured(daemon.addresses, setting), 2, run)


def test_ranks_with_different_seeds_are_told(daemon: Daemon) -> None:
    configs = [
        configured(daemon.addresses, BY_SHARDS, "protocol.codec=ternary", f"protocol.codec_seed={rank}")
        for rank in range(2)
    ]

    def run(comm: Communicator) -> None:
        with pytest.raises(AbortedError, match=r"seed 0.* seed 1"):
            comm.allreduce(np.ones(8, np.float32))

    run_job(configs, 2, run)


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


@pytest.mark.usefixtures("importable")
def test_a_codec_of_ones_own() -> None:
    with Daemon(2, f"aggregator.codecs={','.join(OWN)}") as daemon:
        config = configured(daemon.addresses, BY_SHARDS, "protocol.codec=own_codecs:Doubles")
        results = run_job(config, 3, lambda comm: comm.allreduce(integers(comm.rank)))
        assert all((x == integers(0) + integers(1) + integers(2)).all() for x in results)

        def run(comm: Communicator) -> str:
            with pytest.raises(AbortedError) as raised:
                comm.allreduce(integers(comm.rank), codec="own_codecs:Unlucky")
            return str(raised.value)

        for text in start_job(configured(daemon.addresses, BY_SHARDS), 2, run).results():
            assert "the codec 'own_codecs:Unlucky' failed: ArithmeticError: out of luck" in text
        assert run_job(config, 1, lambda comm: comm.size) == [1]  # the daemon goes on
        assert "event=codec_failed" in daemon.log
        assert "shard_died" not in daemon.log
        assert "Traceback" in daemon.log


@pytest.mark.usefixtures("importable")
def test_a_codec_that_fails_on_a_rank_ends_the_job() -> None:
    with Daemon(1, f"aggregator.codecs={OWN[2]}") as daemon:

        def run(comm: Communicator) -> None:
            error = CodecError if comm.rank == 1 else AbortedError
            with pytest.raises(error, match="a 13"):
                comm.allreduce(np.full(8, 12 + comm.rank, np.float32), codec=OWN[2])

        run_job(configured(daemon.addresses, BY_SHARDS), 2, run)


def test_an_aggregator_that_does_not_name_a_codec_refuses_it(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(AbortedError, match=r"'own_codecs:Doubles' is not known here; .* aggregator\.codecs"):
            comm.allreduce(np.ones(8, np.float32), codec="own_codecs:Doubles")

    run_job(configured(daemon.addresses, BY_SHARDS), 2, run)


def test_an_unknown_codec_in_the_configuration_of_a_worker(daemon: Daemon) -> None:
    with pytest.raises(ConfigError, match=r"protocol\.codec: the codec 'nowhere:Codec' cannot be loaded"):
        Communicator(configured(daemon.addresses, "protocol.codec=nowhere:Codec"), rank=0, size=1)


def test_blocks_that_are_too_large_for_codecs(daemon: Daemon) -> None:
    with pytest.raises(ConfigError, match=r"protocol\.block_size 32768: expected at most 16384 with a codec"):
        Communicator(configured(daemon.addresses, "protocol.codec=int8", "protocol.block_size=32768"), rank=0, size=1)

    def run(comm: Communicator) -> Array:
        return comm.allreduce(np.full(8, 1.001, np.float32), block_size=1 << 15)

    config = configured(daemon.addresses, BY_SHARDS, "protocol.codec=sign")
    assert run_job(config, 1, run)[0][0] == np.float32(1.001)


def test_an_unknown_codec_in_the_configuration_of_a_daemon() -> None:
    from local_cluster import Process

    with Process(sys.executable, "-m", "omnireduce.aggregator", "--set", "aggregator.codecs=nowhere:Codec") as daemon:
        assert daemon.wait() == 2
        assert "aggregator.codecs: the codec 'nowhere:Codec' cannot be loaded: ModuleNotFoundError" in daemon.log


def test_the_aggregator_of_a_job_finds_the_codec_that_its_ranks_use() -> None:
    config = configured([], BY_SHARDS, "protocol.codec=own_codecs:Doubles")
    results = run_job(config, 2, lambda comm: comm.allreduce(integers(comm.rank)))
    assert all((x == integers(0) + integers(1)).all() for x in results)
