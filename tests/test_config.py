"""The configuration: the files that come with the project, every source of a value, every message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from omnireduce.core.dtypes import ELEMENT_TYPES
from omnireduce.errors import ConfigError
from omnireduce.support.config import (
    Cluster,
    Config,
    Protocol,
    check_config,
    load_config,
    override_config,
    reference_toml,
    whole_bytes,
)
from omnireduce.support.config.validation import KEYS

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


def write(folder: Path, text: str | bytes) -> Path:
    file = folder / "my.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def message(path: Path | str | None = None, *overrides: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides=overrides, environ=environ)
    return str(caught.value)


# The files that come with the project


def test_all_shipped_files_are_tested() -> None:
    names = {file.name for file in CONFIGS}
    assert names >= {
        "local.toml",
        "colocated.toml",
        "tcp-two-hosts.toml",
        "bench-sweep.toml",
        "reference.toml",
    }


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_shipped_file_loads_and_says_how_it_is_used(file: Path) -> None:
    load_config(file, environ={})
    head = file.read_text().split("\n[")[0]
    assert f"--config configs/{file.name}" in head or file.name == "reference.toml"
    assert "omnireduce aggregator" in head
    assert "mpirun -n 2" in head
    assert "omnireduce bench" in head


def test_reference_file_is_what_the_schema_generates() -> None:
    reference = next(file for file in CONFIGS if file.name == "reference.toml")
    how = "regenerate it: omnireduce config --reference > configs/reference.toml"
    assert reference.read_text() == reference_toml(), how
    assert load_config(reference, environ={}) == Config()


def test_every_key_is_documented_and_its_default_is_allowed() -> None:
    for key in KEYS.values():
        assert key.meaning
        assert key.allowed
        assert key.read(key.default) == key.default
        assert f"Allowed: {key.allowed}." in " ".join(reference_toml().replace("\n# ", " ").split())


def test_element_types_are_those_of_the_kernels() -> None:
    choices = get_args(get_args(get_args(KEYS["bench.dtype"].type)[0])[0])
    assert set(choices) == set(ELEMENT_TYPES)


# Sources of values


def test_without_any_source_the_defaults_hold() -> None:
    assert load_config(environ={"HOME": "/", "OMNIREDUCE_CONFIG": ""}) == Config()


def test_file_then_environment_then_overrides(tmp_path: Path) -> None:
    file = write(tmp_path, "[protocol]\nslots = 8\nblock_size = 64\nscan_span = 7\n")
    environ = {"OMNIREDUCE_PROTOCOL_BLOCK_SIZE": "128", "OMNIREDUCE_PROTOCOL_SLOTS": "16"}
    overrides = ["protocol.slots=32", "protocol.slots = 33"]
    config = load_config(file, overrides=overrides, environ=environ)
    assert config.protocol == Protocol(slots=33, block_size=128, scan_span=7)


def test_environment_names_the_file_and_an_argument_wins(tmp_path: Path) -> None:
    file = write(tmp_path, "protocol.slots = 8\n")
    assert load_config(environ={"OMNIREDUCE_CONFIG": str(file)}).protocol.slots == 8
    assert load_config(file, environ={"OMNIREDUCE_CONFIG": "no such file"}).protocol.slots == 8


def test_overrides_are_toml_values_or_bare_strings() -> None:
    config = load_config(
        overrides=[
            "transport.kind=tcp",
            'log.level="debug"',
            "cluster.job=4711",  # a job id of digits is still a name
            'cluster.aggregators=["[::1]:7400", "node-1:7401"]',
            "aggregator.listen=[::]:0",
            "bench.density=[1, 0.5]",
            "bench.elements=1_000",
            "cluster.timeout_s=5",
        ],
        environ={},
    )
    assert (config.transport.kind, config.log.level, config.cluster.job) == ("tcp", "debug", "4711")
    assert config.cluster.aggregators == ("[::1]:7400", "node-1:7401")
    assert config.aggregator.listen == "[::]:0"
    assert (config.bench.density, config.bench.elements, config.cluster.timeout_s) == ((1.0, 0.5), 1000, 5.0)


def test_config_is_immutable_and_hashable() -> None:
    config = load_config(environ={})
    with pytest.raises(AttributeError):
        config.cluster.timeout_s = 1.0  # type: ignore[misc]
    assert hash(config) == hash(Config())


def test_override_config_names_its_source() -> None:
    config = override_config(Config(), {"aggregator.listen": "0.0.0.0:9000"}, source="--listen")
    assert config.aggregator.listen == "0.0.0.0:9000"
    with pytest.raises(ConfigError, match=r"^--listen: aggregator\.listen: got \"nowhere\", expected"):
        override_config(config, {"aggregator.listen": "nowhere"}, source="--listen")


def test_check_config_checks_what_python_constructed() -> None:
    addresses: Any = ["a:1", "b:2"]
    assert check_config(Config(cluster=Cluster(aggregators=addresses))).cluster.aggregators == ("a:1", "b:2")
    with pytest.raises(ConfigError, match=r"^config: protocol\.block_size: got 12, expected"):
        check_config(Config(protocol=Protocol(block_size=12)))


# Messages


def test_message_names_file_key_given_and_allowed(tmp_path: Path) -> None:
    file = write(tmp_path, "[protocol]\nblock_size = 12\n")
    expected = "an int between 8 and 65536 that is a multiple of 8 (unit: elements)"
    assert message(file) == f"{file}: protocol.block_size: got 12, expected {expected}"
    assert message(None, OMNIREDUCE_CONFIG=str(file)) == message(file)
    variable = message(None, OMNIREDUCE_PROTOCOL_BLOCK_SIZE="12")
    assert variable == f"OMNIREDUCE_PROTOCOL_BLOCK_SIZE: protocol.block_size: got 12, expected {expected}"
    assert message(None, "protocol.block_size=12") == f"--set: protocol.block_size: got 12, expected {expected}"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("protocol.slots=1", "got 1, expected an int between 2 and 64"),
        ("protocol.slots=2.0", "got 2.0, expected an int"),
        ("protocol.slots=true", "got true, expected an int"),
        (
            "protocol.slot_bytes=65537",
            "expected an int between 65536 and 67108864 that is a multiple of 4096",
        ),
        (
            "transport.kind=carrier pigeon",
            'got "carrier pigeon", expected one of "auto", "shm", "tcp", "verbs"',
        ),
        ("transport.dead_peer_s=nan", "got NaN, expected a number between 0.5 and 600"),
        ("cluster.timeout_s=10s", 'got "10s", expected a number between 0.1 and 86400 (unit: seconds)'),
        ("cluster.timeout_s=inf", "expected a number between 0.1 and 86400 (unit: seconds)"),
        (
            "bench.density=[0.1, 1.1]",
            "got 1.1, expected a number between 0 and 1, or a non-empty list of these",
        ),
        ("bench.dtype=[]", "got [], expected one of"),
        (
            "bench.op=avg",
            'got "avg", expected one of "sum", "mean", "min", "max", "prod", or a non-empty list',
        ),
        ("cluster.aggregators=[a:1,b:2]", "leave out the brackets, or put each text in quotes"),
        ("bench.elements=[]", "got [], expected an int between 0 and 1099511627776, or a non-empty list of these"),
        ("cluster.aggregators=a", 'got "a", expected "HOST:PORT" with a port up to 65535'),
        ('cluster.aggregators=["a:1", "A:1"]', 'got "A:1" twice'),
        ('cluster.aggregators=["[::1]:7", "[0::1]:7"]', 'got "[0::1]:7" twice'),
        ('cluster.aggregators=["a:1", "b:0"]', 'got "b:0", expected a port between 1 and 65535'),
        ('cluster.aggregators=["a:1", "b"]', 'got "b", expected "HOST:PORT"'),
        ("cluster.job=two words", 'got "two words", expected a string of 1 to 128 characters'),
        ("log.level=0x" + "f" * 5000, "got a huge int, expected one of"),
        ("log.level=" + "x" * 5000, '..., expected one of "debug"'),
    ],
)
def test_message_says_what_was_given_and_is_allowed(override: str, expected: str) -> None:
    text = message(None, override)
    assert text.startswith(f"--set: {override.partition('=')[0]}: got ")
    assert expected in text
    assert len(text) < 350


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[protocol]\nblocksize = 8",
            "protocol.blocksize: unknown key, expected one of block_size, slot_bytes, ",
        ),
        ("[protocol]\nblocksize = 8", "(did you mean block_size?)"),
        (
            "[protcol]\nblock_size = 8",
            "protcol: unknown section, expected one of cluster, elastic, transport, verbs, ",
        ),
        ("[protcol]\nblock_size = 8", "(did you mean protocol?)"),
        ("block_size = 8", "block_size: unknown section, "),
        ("block_size = 8", "(did you mean protocol.block_size?)"),
        ("[cluster]\nslots = 8", "(did you mean protocol.slots?)"),
        ("protocol = 8", "protocol: got 8, expected a table [protocol]"),
        ("[[protocol]]\nslots = 8", "protocol: got ["),
        ("protocol.slots.x = 8", 'protocol.slots: got {"x": 8}, expected an int'),
        ('["a\\nb"]', "'a\\nb': unknown section"),
        ("[log]\nlevel = 1979-05-27\n", 'log.level: got "1979-05-27", expected one of'),
        ("[protocol", "not valid TOML: "),
        ("[log]\nlevel = 1\nlevel = 2\n", "not valid TOML: "),
        (b"\xff", "not UTF-8 (at byte 0), expected a TOML file"),
        ("[log]".encode("utf-16"), "is UTF-16, expected a TOML file in UTF-8"),
        ("x = " + "[" * 9999, "not valid TOML: "),
        ("x = " + "1" * 9999, "not valid TOML: "),
    ],
)
def test_message_about_a_file(tmp_path: Path, text: str | bytes, expected: str) -> None:
    file = write(tmp_path, text)
    result = message(file)
    assert result.startswith(f"{file}: ")
    assert expected in result
    assert len(result.splitlines()) == 1


def test_message_about_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert message(tmp_path / "none.toml") == f"{tmp_path}/none.toml: no such file, expected a TOML file"
    assert message(tmp_path) == f"{tmp_path}: is a directory, expected a TOML file"
    assert message("a\nb") == "'a\\nb': no such file, expected a TOML file"
    assert message(write(tmp_path, "") / "x").endswith("my.toml/x: cannot be read: Not a directory")
    assert "null" in message("a\0b")


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("OMNIREDUCE_PROTOCOL_BLOCKSIZE", "protocol.blocksize: unknown key, "),
        ("OMNIREDUCE_PROTOCOL_BLOCKSIZE", "(did you mean block_size?)"),
        ("OMNIREDUCE_PROTOCOL", "protocol: unknown key, "),
        ("OMNIREDUCE_PROTOCOLS_SLOTS", "protocols: unknown section, "),
        ("OMNIREDUCE_PROTOCOLS_SLOTS", "(did you mean protocol?)"),
        ("OMNIREDUCE_CONFIGS", "configs: unknown section, "),
        ("OMNIREDUCE_protocol_slots", "unknown variable, did you mean OMNIREDUCE_PROTOCOL_SLOTS?"),
        ("OMNIREDUCE_", "'': unknown section"),
    ],
)
def test_message_about_an_unknown_variable(variable: str, expected: str) -> None:
    text = message(None, **{variable: "8"})
    assert text.startswith(f"{variable}: ")
    assert expected in text


@pytest.mark.parametrize("override", ["", "slots", "slots=8", "=", "protocol.slots"])
def test_message_about_an_override_without_key_or_value(override: str) -> None:
    assert message(None, override) == f'--set: got "{override}", expected section.key=value'


def test_a_block_that_does_not_fit_a_slot_names_the_source_that_came_last(tmp_path: Path) -> None:
    why = "(a slot holds 8 bytes per element of a block and 2048 more)"
    file = write(tmp_path, "[protocol]\nblock_size = 65536\n")
    text = message(file, OMNIREDUCE_PROTOCOL_SLOT_BYTES="65536")
    name = "OMNIREDUCE_PROTOCOL_SLOT_BYTES: protocol.slot_bytes"
    assert text == f"{name}: got 65536, expected at least 526336 because protocol.block_size is 65536 {why}"
    text = message(None, "bench.block_size=[8, 7944]", OMNIREDUCE_PROTOCOL_SLOT_BYTES="65536")
    name = "--set: bench.block_size"
    assert text == f"{name}: got [8, 7944], expected at most 7936 because protocol.slot_bytes is 65536 {why}"
    assert load_config(
        file, overrides=["protocol.slot_bytes=65536", "protocol.block_size=7936"], environ={}
    )  # only the outcome has to fit


def test_ports_of_all_shards_must_exist() -> None:
    text = message(None, "aggregator.listen=h:65535", "aggregator.shards=2")
    assert text.startswith("--set: aggregator.shards: got 2, expected at most 1 because shard i listens on")
    text = message(None, "aggregator.shards=2", "aggregator.listen=h:65535")
    assert text == '--set: aggregator.listen: got "h:65535", expected a port up to 65534 for 2 shards'


def test_one_job_may_have_no_more_memory_than_all() -> None:
    text = message(None, "aggregator.max_job_bytes=8589934592")
    expected = "at most 4294967296 because that is aggregator.max_bytes"
    assert text == f"--set: aggregator.max_job_bytes: got 8589934592, expected {expected}"


def test_a_job_settles_before_the_time_to_join_is_over() -> None:
    late = "elastic.last_call_s=60", "cluster.join_timeout_s=60"
    assert load_config(overrides=late).elastic.last_call_s == 60  # a job that is not elastic ignores it
    text = message(None, "elastic.enabled=true", *late)
    expected = "more than 60 because that is elastic.last_call_s"
    assert text == f"--set: cluster.join_timeout_s: got 60.0, expected {expected}"
    text = message(None, *late, "elastic.enabled=true")
    assert text.endswith("expected false because elastic.last_call_s is 60, not less than cluster.join_timeout_s")
    text = message(None, "elastic.enabled=true", "cluster.join_timeout_s=3", "elastic.last_call_s=3")
    assert text.endswith("expected less than 3 because that is cluster.join_timeout_s")


def test_integers_have_no_mean() -> None:
    text = message(None, 'bench.dtype=["float32", "int8"]', 'bench.op=["sum", "mean"]')
    assert text == '--set: bench.op: got ["sum", "mean"], expected an op other than mean because bench.dtype is int8'
    text = message(None, "bench.op=mean", "bench.dtype=int64")
    assert text == '--set: bench.dtype: got "int64", expected float types because bench.op is mean'


THREADS = """
import sys, threading
from omnireduce.support.config import load_config

def load():
    start.wait()
    load_config(environ={}, overrides=["transport.kind=tcp"])

sys.setswitchinterval(1e-6)
start = threading.Barrier(8)
threads = [threading.Thread(target=load) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.integration
def test_threads_may_be_the_first_to_load_it() -> None:
    """Not once in a few processes do they disturb each other."""
    for _ in range(4):
        result = subprocess.run([sys.executable, "-c", THREADS], cwd=ROOT, capture_output=True, check=False, timeout=60)
        assert result.returncode == 0, result.stderr.decode()


@pytest.mark.parametrize(
    ("aggregators", "expected"),
    [
        (["127.0.0.1:7400", "localhost:7401", "[::1]:7402", "127.9.9.9:1"], 5000),
        (["127.0.0.1:7400", "10.0.0.1:7400"], 0),
        (["node1:7400"], 0),
    ],
)
def test_tensors_stay_whole_only_where_all_shards_are_on_this_host(aggregators: list[str], expected: int) -> None:
    changes = {"cluster.aggregators": aggregators, "protocol.whole_bytes": 5000}
    assert whole_bytes(override_config(load_config(environ={}), changes, source="test")) == expected
