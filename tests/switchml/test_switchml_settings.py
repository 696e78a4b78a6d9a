"""`switchml.cfg`: where it is looked for, what its keys set, what is said of a wrong one."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import numpy as np
import pytest

from omnireduce.errors import ConfigError
from omnireduce.switchml import Context, CpuExponentQuantizer, load_settings
from omnireduce.switchml.settings import KEYS, Dummy

TUTORIAL = """\
# as SwitchML's build writes it, with what its tutorial changes
[general]
rank = 0
num_workers = 1
num_worker_threads = 4      ; of 1, 4 and 8
max_outstanding_packets = 256
packet_numel = 131072
backend = dummy
scheduler = fifo
prepostprocessor = cpu_exponent_quantizer
instant_job_completion = false
controller_ip = 127.0.0.1
controller_port = 50099
timeout = 10
timeout_threshold = 100
timeout_threshold_increment = 100

[backend.dummy]
bandwidth = 100000.0
process_packets = true
"""
RDMA = """\
general.packet_numel = 64
general.backend = rdma
[backend.rdma]
msg_numel = 1024
device_name = mlx5_0
device_port_id = 2
gid_index = 3
"""


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_what_the_keys_set(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path / "a.cfg", TUTORIAL), environ={})
    assert (settings.rank, settings.size) == (0, 1)
    assert settings.config.transport.threads == 4
    assert settings.in_packets == (CpuExponentQuantizer, 131072, 256, Dummy(100_000.0, True))
    assert set(settings.unused) == {
        *("controller_ip", "controller_port", "timeout", "timeout_threshold", "timeout_threshold_increment")
    }
    over = load_settings(written(tmp_path / "b.cfg", TUTORIAL.replace("= dummy", "= dpdk")), environ={})
    assert (over.config.protocol.block_size, over.in_packets) == (1024, None)
    assert {"backend", "prepostprocessor", "backend.dummy.bandwidth", "packet_numel above 1024"} <= set(over.unused)
    assert not {"rank", "num_workers", "num_worker_threads", "packet_numel"} & set(over.unused)


def test_the_device_counts_with_its_backend(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path / "a.cfg", RDMA), environ={})
    verbs = settings.config.verbs
    assert (verbs.device, verbs.port, verbs.gid_index, settings.config.protocol.block_size) == ("mlx5_0", 2, 3, 64)
    assert (settings.rank, settings.size, settings.unused) == (None, None, ("backend", "backend.rdma.msg_numel"))
    other = load_settings(written(tmp_path / "b.cfg", RDMA.replace("= rdma", "= dpdk")), environ={})
    assert other.config.verbs.device == "auto"
    assert "backend.rdma.device_name" in other.unused


def test_a_launcher_knows_rank_and_size_better(tmp_path: Path) -> None:
    path = written(tmp_path / "a.cfg", "[general]\nrank = 1\nnum_workers = 3\n")
    assert load_settings(path, environ={})[1:3] == (1, 3)
    settings = load_settings(path, environ={"RANK": "0", "WORLD_SIZE": "2"})
    assert (settings.rank, settings.size, settings.unused) == (None, None, ("rank", "num_workers"))


def test_what_stands_above_the_file(tmp_path: Path) -> None:
    places = [written(tmp_path / "switchml.cfg", TUTORIAL)]
    toml = written(tmp_path / "a.toml", "[transport]\nthreads = 2\n")
    environ = {"OMNIREDUCE_TRANSPORT_THREADS": "3"}
    sources = [(None, {}, ()), (toml, {}, ()), (toml, environ, ()), (toml, environ, ["transport.threads=5"])]
    threads = [
        load_settings(path, environ=variables, overrides=overrides, places=places).config.transport.threads
        for path, variables, overrides in sources
    ]
    assert threads == [4, 2, 3, 5]


def test_the_first_file_counts_and_none_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings(environ={}).source == ""
    written(tmp_path / f"switchml-{socket.gethostname()}.cfg", "[general]\nnum_worker_threads = 2\n")
    assert load_settings(environ={}).config.transport.threads == 2
    written(tmp_path / "switchml.cfg", "[general]\nnum_worker_threads = 3\n")
    assert load_settings(environ={}).config.transport.threads == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[general]\nranks = 0", "2: general.ranks: unknown key, expected one of rank, .* (did you mean rank?)"),
        ("[generel]", "1: generel: unknown section, expected one of general, .* (did you mean general?)"),
        ("rank = 0", "1: rank: unknown key, expected one of general.rank"),
        ("[general]\n\nrank = -1", '3: general.rank: got "-1", expected an int from 0 to 2147483647'),
        ("[general]\nnum_worker_threads = 65", '2: general.num_worker_threads: got "65", expected an int from 1 to 64'),
        ("[general]\nbackend = gloo", '2: general.backend: got "gloo", expected one of dummy, dpdk, rdma'),
        (
            "[general]\nprepostprocessor = mine",
            "2: general.prepostprocessor: got .* expected one of cpu_exponent_quant",
        ),
        ("[general]\ninstant_job_completion = maybe", '2: .*: got "maybe", expected true or false'),
        ("[general]\nrank", '2: got "rank", expected a section in brackets, or key = value'),
        ("[general]\nrank = 0\nrank = 1", "3: general.rank: given a second time, first in line 2"),
        ("[general]\npacket_numel = 100", "2: general.packet_numel: protocol.block_size: got 100, expected an int"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path / "a.cfg", text)
    with pytest.raises(
        ConfigError, match=f"{path}:{message}".replace("(", r"\(").replace(")", r"\)").replace("?", r"\?")
    ):
        load_settings(path, environ={})


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.cfg: no such file"):
        load_settings(tmp_path / "none.cfg", environ={})
    (tmp_path / "a.cfg").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"a\.cfg: not UTF-8"):
        load_settings(tmp_path / "a.cfg", environ={})


def test_a_context_says_once_which_keys_mean_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "a.cfg", TUTORIAL)
    with caplog.at_level(logging.INFO, "omnireduce"), Context().start(path) as context:
        context.allreduce(np.ones(3, np.float32))
    [line] = [record.getMessage() for record in caplog.records if "mean nothing" in record.getMessage()]
    assert line.startswith(f"{path}: these keys mean nothing here: controller_ip, controller_port, timeout")


def test_every_key_has_words_for_what_it_allows() -> None:
    assert all(allowed.text for allowed in KEYS.values())
