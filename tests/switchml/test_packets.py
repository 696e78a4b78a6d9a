"""Jobs in packets: the dummy backend, and pre- and postprocessors, SwitchML's and those of a user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_cluster import ROOT, WAIT_S, Daemon, Ranks, configured, unique_job

from omnireduce.core.dtypes import Array
from omnireduce.errors import AbortedError, ClosedError, ConfigError, OmniReduceError, UsageError
from omnireduce.switchml import Context, CpuExponentQuantizer, JobSlice, PrePostProcessor, load_settings
from omnireduce.switchml.dummy import DummyExchange
from omnireduce.switchml.packets import exchange_slice
from omnireduce.switchml.settings import KEYS, Dummy

LARGEST = float(np.finfo(np.float32).max)
FAST = Dummy(bandwidth_mbps=0)


class FixedPoint(PrePostProcessor):
    """Floats as multiples of 1/64."""

    def setup_job_slice(self, job_slice: JobSlice) -> int:
        self.slice = job_slice
        return -(-job_slice.x.size // self.packet_numel)

    def needs_extra_batch(self) -> bool:
        return False

    def preprocess_single(self, packet: int, entries: Array, extra_info: Array) -> None:
        part = self.part(self.slice.x, packet)
        entries[: part.size] = part * 64

    def postprocess_single(self, packet: int, entries: Array, extra_info: Array) -> None:
        part = self.part(self.slice.out, packet)
        part[:] = entries[: part.size] / 64

    def part(self, tensor: Array, packet: int) -> Array:
        return tensor[packet * self.packet_numel : (packet + 1) * self.packet_numel]


class Largest(FixedPoint):
    """Each rank gets the largest of what all ranks have put into `extra_info`."""

    def needs_extra_batch(self) -> bool:
        return True

    def preprocess_single(self, packet: int, entries: Array, extra_info: Array) -> None:
        extra_info[0] = packet + self.slice.x[0]

    def postprocess_single(self, packet: int, entries: Array, extra_info: Array) -> None:
        if packet < self.slice.out.size:
            self.slice.out[packet] = extra_info[0]


class Unlucky(FixedPoint):
    def postprocess_single(self, packet: int, entries: Array, extra_info: Array) -> None:
        raise ArithmeticError("out of luck")


class Unmade(FixedPoint):
    def __init__(self, *arguments: Any) -> None:
        raise SystemExit("not today")


def written(folder: Path, *lines: str) -> str:
    path = folder / "switchml.cfg"
    path.write_text("\n".join(["[general]", *lines]) + "\n")
    return str(path)


def setting_for(kind: type) -> str:
    return f"prepostprocessor = {__name__}:{kind.__name__}"


DUMMY = ("backend = dummy", "num_workers = 8", "packet_numel = 16", "max_outstanding_packets = 12")
NO_LIMIT = ("[backend.dummy]", "bandwidth = 0")


def exchanged(x: Array, size: int, packet_numel: int, batch: int) -> Array:
    out = np.full_like(x, 7)
    exchange_slice(CpuExponentQuantizer(size, packet_numel, batch), JobSlice(x, out), DummyExchange(size, FAST, 1), "a")
    return out


shapes = {"packet_numel": st.integers(1, 9), "batch": st.integers(1, 5), "size": st.integers(1, 300)}
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(x=st.lists(finite, min_size=1, max_size=60), **shapes)
def test_the_quantizer_is_as_near_as_its_packets_allow(
    x: list[float], packet_numel: int, batch: int, size: int
) -> None:
    """Numbers of all exponents, zeros and subnormals included. A sum that is too large for float32 is infinite."""
    values = np.array(x, np.float32)
    result, sums = exchanged(values, size, packet_numel, batch), values.astype(np.float64) * size
    for at in range(0, values.size, packet_numel):
        part = slice(at, at + packet_numel)
        step = size * 2.0 ** np.frexp(np.abs(values[part]).max())[1] / (2**31 - 1 - size)
        allowed = size * step + np.maximum(np.abs(sums[part]) * 2.0**-23, 2.0**-149)
        near = np.abs(result[part].astype(np.float64) - sums[part]) <= allowed
        assert (near | (np.isinf(result[part]) & (np.abs(sums[part]) + allowed > LARGEST))).all()


@given(x=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=60), **shapes)
def test_integers_travel_as_they_are(x: list[int], packet_numel: int, batch: int, size: int) -> None:
    values = np.array(x, np.int32)
    with np.errstate(over="ignore"):
        assert (exchanged(values, size, packet_numel, batch) == values * np.int32(size)).all()


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_packet_that_is_not_finite_becomes_nan_and_no_other(odd: float) -> None:
    values = np.ones(12, np.float32)
    values[5] = odd
    result = exchanged(values, 2, 4, 2)
    assert np.isnan(result[4:8]).all()
    assert result[[*range(4), *range(8, 12)]] == pytest.approx(2.0)


def test_the_dummy_backend_needs_no_other_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """This process plays one of eight workers, and logs that nothing is exchanged."""
    path = written(tmp_path, *DUMMY, "num_worker_threads = 3", *NO_LIMIT)
    with Context().start(path) as context:
        x, out = np.arange(1000, dtype=np.int32), np.zeros(1000, np.int32)
        context.allreduce(x, out)
        assert (out == 8 * np.arange(1000)).all()
        assert (x == np.arange(1000)).all()
        floats = np.ones((10, 10), np.float32)
        for _ in range(2):
            context.allreduce_async(floats)
        context.wait_for_all_jobs(WAIT_S)
        assert floats == pytest.approx(64.0)
        comm = context.communicator
        assert (comm.rank, comm.size, comm.transport, context.stats.jobs_finished) == (0, 8, "dummy", 3)
    assert any("backend = dummy: nothing is exchanged" in record.getMessage() for record in caplog.records)


def test_a_worker_of_the_dummy_backend_is_not_alone_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMIX_RANK", "1")
    with pytest.raises(UsageError, match="does not give this process a rank and a size"):
        Context().start(written(tmp_path, "backend = dummy", *NO_LIMIT))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("instant_job_completion = true", *NO_LIMIT), 5.0),
        ((*NO_LIMIT, "process_packets = false"), 1.0),
        (("prepostprocessor = bypass", *NO_LIMIT), 5.0),
        ((setting_for(FixedPoint), *NO_LIMIT), 8.0),
    ],
)
def test_what_a_job_leaves(tmp_path: Path, lines: tuple[str, ...], expected: float) -> None:
    with Context().start(written(tmp_path, *DUMMY, *lines)) as context:
        out = np.full(100, 5, np.float32)
        context.allreduce(np.ones(100, np.float32), out)
    assert out == pytest.approx(expected)


def test_stop_wakes_who_waits_for_a_slow_network(tmp_path: Path) -> None:
    context = Context().start(written(tmp_path, *DUMMY, "[backend.dummy]", "bandwidth = 0.0001"))
    jobs = [context.allreduce_async(np.ones(1000, np.float32)) for _ in range(3)]
    with pytest.raises(TimeoutError):
        jobs[0].wait(0.01)
    waiting = Ranks(len(jobs), lambda number: jobs[number].wait(WAIT_S))
    context.stop()
    assert [type(outcome) for outcome in waiting.outcomes()] == [ClosedError] * 3


def pair(daemon: Daemon, path: str, run: Callable[[Context], Any]) -> list[Any]:
    """Results of two ranks that share this host; an error is the result of its rank."""
    settings = load_settings(path, environ={})
    config = configured(daemon.addresses, f"cluster.job={unique_job('packets')}")

    def start(rank: int) -> Any:
        with Context().start(settings._replace(config=config), rank=rank, size=2) as context:
            return run(context)

    return Ranks(2, start).outcomes()


def test_a_processor_of_the_users_own_on_one_host(daemon: Daemon, tmp_path: Path) -> None:
    """Ranks exchange what it puts into packets; rank 1 has twice as much."""

    def run(context: Context) -> list[float]:
        x = np.arange(100, dtype=np.float32) / 64 * (1 + context.communicator.rank)
        for job in [context.allreduce_async(x, np.zeros_like(x)) for _ in range(2)]:
            assert (job.wait(WAIT_S) == np.arange(100) * 3 / 64).all()
        return [0.0]

    lines = (setting_for(FixedPoint), "packet_numel = 8", "max_outstanding_packets = 4")
    assert pair(daemon, written(tmp_path, *lines), run) == [[0.0]] * 2


def test_all_ranks_get_the_largest_extra_info(daemon: Daemon, tmp_path: Path) -> None:
    def run(context: Context) -> list[float]:
        x = np.full(6, 10 * context.communicator.rank, np.float32)
        values: list[float] = context.allreduce(x, np.zeros_like(x), timeout_s=WAIT_S).tolist()
        return values

    lines = (setting_for(Largest), "packet_numel = 1", "max_outstanding_packets = 2")
    assert pair(daemon, written(tmp_path, *lines), run) == [[10, 11, 12, 13, 14, 15]] * 2


def test_a_processor_that_fails_ends_the_job_of_all(daemon: Daemon, tmp_path: Path) -> None:
    """Each rank hears of it, also one that has not called it yet."""

    def run(context: Context) -> OmniReduceError:
        with pytest.raises(OmniReduceError) as caught:
            context.allreduce(np.ones(8, np.float32), timeout_s=WAIT_S)
        return caught.value

    errors = pair(daemon, written(tmp_path, setting_for(Unlucky)), run)
    assert any(isinstance(error, UsageError) for error in errors)
    for error in errors:
        assert isinstance(error, UsageError | AbortedError | ClosedError)
        assert "out of luck" in str(error)


def test_a_processor_that_cannot_be_made(tmp_path: Path) -> None:
    context = Context()
    with pytest.raises(UsageError, match="the prepostprocessor Unmade cannot be made: SystemExit: not today"):
        context.start(written(tmp_path, *DUMMY, setting_for(Unmade)))
    with context.start(written(tmp_path, *DUMMY, *NO_LIMIT)):
        assert context.allreduce(np.ones(3, np.int32)).tolist() == [8, 8, 8]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("prepostprocessor = nowhere:X",), "2: general.prepostprocessor: nowhere:X cannot be loaded: ModuleNotFound"),
        (("prepostprocessor = os:getcwd",), "2: .*: os:getcwd is .*; expected a class that derives from omnireduce"),
        (
            ("prepostprocessor = omnireduce.switchml:PrePostProcessor",),
            "2: .* is abstract; expected a class that has n",
        ),
        (("num_workers = 2", "rank = 3"), "3: general.rank: got 3, expected less than num_workers, which is 2"),
        ((*DUMMY, "num_worker_threads = 13"), "5: general.max_outstanding_packets: got 12, expected at least one for"),
        ((*DUMMY, "[backend.dummy]", "bandwidth = -1"), '7: .*: got "-1", expected a number from 0 on'),
        ((*DUMMY, "[backend.dummy]", "bandwidth = nan"), '7: .*: got "nan", expected a number from 0 on'),
    ],
)
def test_errors_have_their_place(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    path = written(tmp_path, *lines)
    with pytest.raises(ConfigError, match=f"{path}:{message}"):
        load_settings(path, environ={})


def test_the_file_to_copy_has_every_key_with_the_value_that_switchml_has() -> None:
    path = ROOT / "configs" / "switchml.cfg"
    results, section = dict[str, str](), ""
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            results[f"{section}.{key.strip()}"] = value.strip()
    assert results.keys() == {each for each in KEYS if not each.startswith("backend.dpdk.")}
    settings = load_settings(path, environ={})
    assert (settings.rank, settings.size, settings.config.transport.threads) == (0, 1, 4)
    assert settings.in_packets == (CpuExponentQuantizer, 256, 256, Dummy(100_000.0, True))
    assert not {"backend", "prepostprocessor", "backend.dummy.bandwidth"} & set(settings.unused)
