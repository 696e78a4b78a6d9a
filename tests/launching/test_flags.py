"""The command line of `omnireduce run`: what is wrong is said in one line, with exit status 2."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from local_cluster import ROOT

from omnireduce import ConfigError, UsageError
from omnireduce.__main__ import main
from omnireduce.launch.command import parse_command_line
from omnireduce.launch.command import run as command
from omnireduce.launch.flags import MAPPED, REFUSED, RefusedFlag, read_yaml
from omnireduce.launch.functions import read_keywords
from omnireduce.launch.hosts import report_available
from omnireduce.launch.plan import LaunchRequest, shards_to_start
from omnireduce.support.config import horovod
from omnireduce.support.config.horovod import ROWS


def complaint(*words: str) -> str:
    """The one line that these words give."""
    result = CliRunner().invoke(main, ["run", *words])
    assert result.exit_code == 2, result.output
    [line] = result.output.splitlines()
    return line.removeprefix("Error: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-np", "2"], "no command: expected one behind the options"),
        (["true"], "-np: got no number of ranks; expected -np 4"),
        (["-np", "2", "no-such-program"], "no-such-program: command not found"),
        (["-np", "2", "-H", "a b", "true"], "-H: got 'a b', expected HOST:SLOTS"),
        (["-np", "3", "-H", "localhost:2", "true"], "-np 3: the hosts localhost:2 have 2 slots: give more"),
        (["-np", "1", "-H", "a", "-hostfile", "b", "true"], "--hosts and --hostfile: expected one of them"),
        (["-np", "1", "-H", "", "true"], "--hosts: got nothing; leave it out for ranks on this host alone"),
        (["-np", "1", "--hostfile", "", "true"], "--hostfile: got nothing; leave it out"),
        (["-np", "1", "--host-discovery-script", "", "true"], "--host-discovery-script: got nothing; leave it out"),
        (["-np", "1", "-hostfile", "/none", "true"], "--hostfile /none: no such file"),
        (["-np", "1", "-H", "other", "--launcher", "local", "true"], "--launcher local, and -H names other"),
        (["-np", "1", "-H", "other", "--ssh", "no-such-ssh", "true"], "ssh: 'no-such-ssh' was not found"),
        (["-np", "1", "-H", "other", "-i", "/none", "true"], "--ssh-identity-file /none: no such file"),
        (["-np", "1", "--launcher", "ssh", "--mpi", "true"], "--launcher, --mpi and --gloo say different things"),
        (["-np", "1", "--gloo", "--mpi", "true"], "--launcher, --mpi and --gloo say different things"),
        (["-np", "2", "--set", "a.b=1", "true"], "--set: a: unknown section"),
        (["-np", "2", "-x", "NO_SUCH_VARIABLE", "true"], "-x NO_SUCH_VARIABLE: expected NAME=VALUE"),
        (["-np", "2", "--network-interfaces", "a,b", "true"], "--network-interfaces a,b: expected one, at which other"),
        (["-np", "2", "--network-interface", "a", "--network-interface", "b", "true"], "--network-interfaces a,b: exp"),
        (["-np", "2", "--reset-limit", "3", "true"], "--reset-limit: expected it with --min-np"),
        (["--min-np", "3", "--max-np", "2", "true"], "--min-np 3, -np 2, --max-np 2: expected numbers that do not"),
        (["--min-np", "1", "--mpi", "true"], "--min-np: an elastic job is started by this program"),
        (["--host-discovery-script", "x", "true"], "--host-discovery-script: got no number of ranks"),
        (["-np", "1", "--config-file", "/none", "true"], "--config-file /none: no such file"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(words: list[str], message: str) -> None:
    assert complaint(*words).startswith(message)


@pytest.mark.integration  # the launcher starts the process of a host, or the script, before it knows
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-np", "1", "--aggregators", "many", "true"], "--aggregators: got 'many', expected 1 to 64, or embedded"),
        (["-np", "1", "--aggregators", "9" * 5000, "true"], "--aggregators: got '99999999999999999999"),
        (["-np", "2", "--network-interfaces", "none0", "true"], "--network-interfaces: none0: "),
        (["--min-np", "1", "--host-discovery-script", "/none", "true"], "--host-discovery-script /none: No such file"),
    ],
)
def test_what_a_started_process_finds_wrong_is_said_in_a_line(words: list[str], message: str) -> None:
    assert complaint(*words).startswith(message)


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("-np", "9" * 5000, "is not a valid integer"),
        ("--start-timeout", "nan", "nan is not a number in the range 0.1<=x<=86400"),
        ("--grace-period", "inf", "inf is not in the range"),
        ("--fusion-threshold-mb", "nan", "nan is not a number in the range"),
    ],
)
def test_what_is_no_number_is_said(flag: str, value: str, reason: str) -> None:
    result = CliRunner().invoke(main, ["run", "-np", "1", flag, value, "true"])
    assert result.exit_code == 2
    assert reason in result.output


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.flags)
def test_a_flag_without_meaning_says_what_does_its_work(refused: RefusedFlag) -> None:
    value = ["1"] if refused.has_value else []
    assert complaint("-np", "1", refused.flags, *value, "true") == f"{refused.flags}: {refused.reason}"


def test_flags_of_horovod_set_its_variables() -> None:
    result = parse_command_line([
        "-np", "2", "--fusion-threshold-mb", "32", "--cycle-time-ms", "2.5", "--timeline-filename", "/t.json",
        "--no-stall-check", "--stall-check-warning-time-seconds", "9", "--stall-check-shutdown-time-seconds", "0",
        "--gloo-timeout-seconds", "45", "--log-level", "WARNING", "true",
    ])  # fmt: skip
    given = {name: text for name, text in result.environ.items() if name in {each.variable for each in MAPPED}}
    assert given == {
        "HOROVOD_FUSION_THRESHOLD": "33554432",
        "HOROVOD_CYCLE_TIME": "2.5",
        "HOROVOD_TIMELINE": "/t.json",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "9",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "45",
        "HOROVOD_LOG_LEVEL": "warning",
    }
    assert result.config.log.level == "warning"
    assert result.config.cluster.join_timeout_s == 45
    assert parse_command_line(["-np", "2", "--timeline", "/t.json", "true"]).environ["HOROVOD_TIMELINE"] == "/t.json"


def test_a_timeline_may_be_begun_later() -> None:
    """Horovod's word for that is no file."""
    result = parse_command_line(["-np", "2", "--timeline-filename", "DYNAMIC", "true"])
    assert result.environ["HOROVOD_TIMELINE"] == result.config.trace.timeline == "DYNAMIC"
    named = parse_command_line(["-np", "2", "--timeline-filename", "dynamic.json", "true"])
    assert named.environ["HOROVOD_TIMELINE"] == os.path.abspath("dynamic.json")


def test_a_check_may_be_turned_on_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    path = tmp_path / "run.yaml"
    path.write_text("stall_check: {enabled: true}\n")
    assert parse_command_line(["-np", "2", "true"]).config.stall.warn_s == 0
    for words in (["--stall-check"], ["--config-file", str(path)]):
        assert parse_command_line(["-np", "2", *words, "true"]).config.stall.warn_s > 0


def test_short_names_of_flags() -> None:
    assert parse_command_line(["-np", "2", "-prefix-timestamp", "true"]).timestamps
    output = CliRunner().invoke(main, ["--version"]).output
    assert [CliRunner().invoke(main, ["run", flag]).output for flag in ("-v", "--version")] == [output, output]


def test_an_interface_is_a_keyword_too() -> None:
    assert read_keywords({"np": 2, "network_interfaces": "lo"}).interface == "lo"
    assert read_keywords({"np": 2, "network_interfaces": ["lo"]}).interface == "lo"
    with pytest.raises(ConfigError, match="--network-interfaces lo,eth0: expected one"):
        read_keywords({"np": 2, "network_interfaces": ["lo", "eth0"]})
    with pytest.raises(UsageError, match="version: not an option"):
        read_keywords({"np": 2, "version": True})


def test_limits_of_time_may_be_variables(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "77")
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "88")
    monkeypatch.setattr(horovod, "_has_warned", False)
    result = parse_command_line(["-np", "2", "true"])
    assert (result.start_timeout_s, result.elastic_timeout_s) == (77, 88)
    result = parse_command_line(["-np", "2", "--start-timeout", "7", "--elastic-timeout", "8", "true"])
    assert (result.start_timeout_s, result.elastic_timeout_s) == (7, 8)
    assert not caplog.records
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "soon")
    with pytest.raises(click.BadParameter, match="'soon' is not"):
        parse_command_line(["-np", "2", "true"])


def test_a_yaml_file_names_the_controller(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    words = ["-np", "2", "--config-file", str(path)]
    path.write_text("controller: MPI\nlogging: {with_timestamp: true}\nlibrary_options: {ccl_bgt_affinity: null}\n")
    assert parse_command_line([*words, "true"]).launcher == "mpirun"
    assert parse_command_line([*words, "--gloo", "true"]).launcher == ""
    assert parse_command_line([*words, "--launcher", "ssh", "true"]).launcher == "ssh"
    path.write_text("controller: gloo\n")
    assert parse_command_line([*words, "true"]).launcher == ""
    assert parse_command_line([*words, "--mpi", "true"]).launcher == "mpirun"


def test_options_are_for_ranks_too(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text("[log]\nlevel = 'error'\n")
    result = parse_command_line(
        ["-np", "2", "--config", str(path), "--set", "protocol.slots=9", "--tcp", "-x", "A=b=c", "true", "-np"]
    )
    assert result.words == ("true", "-np")
    assert result.config.log.level == "error"
    assert result.environ["OMNIREDUCE_CONFIG"] == str(path)
    assert result.environ["OMNIREDUCE_PROTOCOL_SLOTS"] == "9"
    assert result.environ["OMNIREDUCE_TRANSPORT_KIND"] == "tcp"
    assert result.environ["A"] == "b=c"


YAML = """
np: 4
hosts: "localhost:4"
verbose: true
params: {fusion_threshold_mb: 8, cycle_time_ms: 3.5, cache_capacity: null, hierarchical_allreduce: false}
autotune: {enabled: false}
stall_check: {enabled: false, warning_time_seconds: 20}
logging: {level: ERROR}
"""


def test_a_yaml_file_gives_what_the_command_line_does_not(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    result = parse_command_line(["--config-file", str(path), "--cycle-time-ms", "1", "true"])
    assert (result.ranks, [host.slots for host in result.hosts], result.verbose) == (4, [4], True)
    assert result.environ["HOROVOD_FUSION_THRESHOLD"] == str(8 << 20)
    assert result.environ["HOROVOD_CYCLE_TIME"] == "1"
    assert result.environ["HOROVOD_STALL_CHECK_DISABLE"] == "1"
    assert result.environ["HOROVOD_LOG_LEVEL"] == "error"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params: {fusion: 1}", r"params.fusion: unknown key \(did you mean params.fusion_threshold_mb\?\)"),
        ("surprise: 1", "surprise: unknown key"),
        ("controller: jsrun", "controller: got 'jsrun', expected one of gloo, mpi"),
        ("library_options: {ccl_bgt_affinity: 3}", "library_options.ccl_bgt_affinity: CCL is not used; leave it out"),
        ("logging: {with_timestamp: false}", "logging.with_timestamp: each line of the log has its time; leave it out"),
        ("params: 3", "params: got 3, expected keys and values"),
        ("- a", "got a list, expected keys"),
        ("a: [", "line 1: "),
        (
            "autotune: {enabled: true}",
            "autotune.enabled: nothing is tuned during a training; run `omnireduce tune` first",
        ),
        ("!!python/object:os.system {}", "could not determine a constructor"),
    ],
)
def test_a_wrong_yaml_file_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"--config-file {path}") + f".*{message}"):
        read_yaml(str(path), ("np",))


def test_a_value_of_a_yaml_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("np: many\n")
    assert complaint("--config-file", str(path), "true").startswith(f"--config-file {path}: np: 'many' is not")


@pytest.mark.parametrize(
    ("hosts", "change", "shards"),
    [
        (1, {}, 0),
        (2, {}, 1),
        (1, {"min_ranks": 1}, 1),
        (1, {"aggregators": "3"}, 3),
        (1, {"aggregators": "embedded"}, 0),
        (2, {"configured": True}, 0),
        (2, {"configured": True, "aggregators": "2"}, 2),
    ],
)
def test_who_serves_a_job(hosts: int, change: dict[str, Any], shards: int) -> None:
    words = [
        "-np",
        "1",
        *(["--set", "cluster.aggregators=node:7400"] if change.pop("configured", False) else []),
        "true",
    ]
    result = parse_command_line(words)
    expected = LaunchRequest(words=result.words, ranks=1, config=result.config, **change)
    assert shards_to_start(expected, hosts) == shards


def test_an_aggregator_of_rank_0_serves_one_host() -> None:
    request = LaunchRequest(
        words=["true"], ranks=2, config=parse_command_line(["-np", "2", "true"]).config, aggregators="embedded"
    )
    with pytest.raises(ConfigError, match="--aggregators embedded: the ranks are on 2 hosts"):
        shards_to_start(request, 2)


def test_what_is_available_has_the_form_that_users_know() -> None:
    text = report_available()
    assert text == CliRunner().invoke(command, ["-cb"]).output
    assert re.match(r"omnireduce v\S+:\n\nAvailable Frameworks:\n    \[X\] NumPy\n", text)
    assert "\nAvailable Controllers:\n    [X] this program\n" in text
    assert "\nAvailable Tensor Operations:\n    [X] shared memory\n    [X] TCP\n    [" in text


def test_the_document_has_every_flag() -> None:
    text = (ROOT / "docs" / "launching.md").read_text()
    named = [each.flag for each in MAPPED] + [each.flags for each in REFUSED] + [each.variable for each in MAPPED]
    assert not [flag for flag in named if f"`{flag}`" not in text]
    options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
    assert not [option.opts for option in options if not any(re.search(rf"`{name}\b", text) for name in option.opts)]
    assert all(row.key in text for row in ROWS)
