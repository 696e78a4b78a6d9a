"""Launchers: the variables that each one sets, and what is wrong when they do not fit."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_cluster import MPIRUN, ROOT

from omnireduce.core.names import JOB_PATTERN
from omnireduce.errors import ConfigError, UsageError
from omnireduce.runtime.rank import launcher_detection
from omnireduce.runtime.rank.launcher_detection import (
    Launch,
    check_told_apart,
    detect_launch,
    find_launcher_sign,
    job_name,
    launch_id,
    own_launch,
    this_host,
)
from omnireduce.support.config import Cluster, Config, Security
from omnireduce.support.config.validation import KEYS
from omnireduce.support.launcher_variables import HINTS, LAUNCHERS
from omnireduce.support.teams import Team

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-42@1",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {"RANK": "6", "WORLD_SIZE": "7", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "run"}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1,2(x4)",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}

JSRUN = {
    "JSM_NAMESPACE_RANK": "1",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "LSB_JOBID": "5",
    "PMIX_NAMESPACE": "ns",
}
HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "node1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4000",
}
FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_ID": "f42"}
PALS = {"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "1", "PALS_APID": "a-b"}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, Launch(0, 1, 0, None, "none", 1)),
        (OPEN_MPI, Launch(5, 8, 1, "prterun-host-42@1", "Open MPI", 4)),
        (MPICH, Launch(3, 4, 1, None, "MPICH", 2)),
        (TORCHRUN, Launch(6, 7, 2, "run", "torchrun", 3)),
        (SLURM, Launch(2, 9, 1, "77.0", "Slurm", 2)),
        (JSRUN, Launch(1, 4, 1, "5.ns", "jsrun", 2)),
        (HOROVODRUN, Launch(1, 4, 0, None, "horovodrun", 2)),
        (FLUX, Launch(1, 2, 1, "f42", "Flux")),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, Launch(1, 2, None, None, "MVAPICH2")),
        (
            {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "lws-0.lws"},
            Launch(1, 2, None, "lws-0.lws", "LeaderWorkerSet"),
        ),
        (
            {"AWS_BATCH_JOB_NODE_INDEX": "1", "AWS_BATCH_JOB_NUM_NODES": "3", "AWS_BATCH_JOB_ID": "4f#1"},
            Launch(1, 3, 0, "4f", "AWS Batch", 1),
        ),
        (
            {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_TASK_ID": "sky-1"},
            Launch(0, 2, 0, "sky-1", "SkyPilot", 1),
        ),
    ],
    ids=lambda value: value.launcher if isinstance(value, Launch) else "",
)
def test_each_launcher(environ: dict[str, str], launch: Launch) -> None:
    assert detect_launch(environ) == launch


def test_the_inner_launcher_counts() -> None:
    assert detect_launch(SLURM | TORCHRUN | MPICH | OPEN_MPI).launcher == "Open MPI"
    assert detect_launch(SLURM | TORCHRUN | MPICH).launcher == "MPICH"
    assert detect_launch(SLURM | TORCHRUN).launcher == "torchrun"


def test_who_only_repeats_another_launcher_takes_from_it_what_it_does_not_say() -> None:
    assert detect_launch(PMI | PALS) == Launch(1, 2, 0, "a-b", "MPICH", 1)
    assert detect_launch(PMI | FLUX) == Launch(1, 2, 1, "f42", "MPICH")
    assert launch_id(1, 2, PMI | FLUX) == "f42"
    assert launch_id(1, 2, PMI | FLUX | {"FLUX_TASK_RANK": "0"}) == ""  # an mpirun in a task of Flux


def test_open_mpi_4_has_a_job_id_of_its_own() -> None:
    environ = {name: value for name, value in OPEN_MPI.items() if name != "PMIX_NAMESPACE"}
    assert detect_launch(environ | {"OMPI_MCA_ess_base_jobid": "1234"}).job == "1234"
    assert detect_launch(environ).job is None


def test_slurm_counts_only_inside_a_step() -> None:
    batch_script = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert detect_launch(batch_script).launcher == "none"
    assert detect_launch(batch_script | {"SLURM_STEP_ID": "3"}) == Launch(2, 16, 1, "77.3", "Slurm")


@pytest.mark.parametrize(("tasks", "node", "found"), [("3", 0, 3), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("1,5", 1, 5)])
def test_tasks_of_a_slurm_node(tasks: str, node: int, found: int) -> None:
    environ = SLURM | {"SLURM_LOCALID": "0", "SLURM_NODEID": str(node), "SLURM_STEP_TASKS_PER_NODE": tasks}
    assert detect_launch(environ).local_size == found


def test_a_launcher_that_does_not_say_how_many_are_on_this_host() -> None:
    for environ, name in ((OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), (SLURM, "SLURM_NODEID")):
        assert detect_launch({key: value for key, value in environ.items() if key != name}).local_size is None


def test_a_launcher_that_does_not_say_the_local_rank() -> None:
    for environ, name in ((OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"), (TORCHRUN, "LOCAL_RANK")):
        assert detect_launch({key: value for key, value in environ.items() if key != name}).local_rank is None


def test_srun_with_pmi2_takes_the_local_rank_from_slurm() -> None:
    pmi2 = {"PMI_RANK": "2", "PMI_SIZE": "9", "PMI_JOBID": "77.0"}
    assert detect_launch(SLURM | pmi2) == Launch(2, 9, 1, "77.0", "MPICH", 2)


def test_torchrun_without_an_id_has_no_job() -> None:
    assert detect_launch(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}).job is None


def test_arguments_win() -> None:
    assert detect_launch(OPEN_MPI, rank=1, size=2) == Launch(1, 2, None, None, "arguments")


def test_the_launcher_knows_the_host_of_the_arguments() -> None:
    launch = detect_launch(OPEN_MPI)
    assert launch.local_size is not None
    assert detect_launch(OPEN_MPI, rank=launch.rank, size=launch.size) == replace(
        launch, job=None, launcher="arguments"
    )


@pytest.mark.parametrize(
    ("rank", "size", "got"),
    [
        (None, 1, "size 1 and no rank, expected both or neither"),
        (0, None, "rank 0 and no size, expected both or neither"),
        (2, 2, "rank 2 and size 2, expected 0 <= rank < size"),
        (-1, 2, "rank -1 and size 2, expected 0 <= rank < size"),
        (0, 0, "rank 0 and size 0, expected 0 <= rank < size"),
    ],
)
def test_arguments_that_are_no_rank_of_a_size(rank: int | None, size: int | None, got: str) -> None:
    with pytest.raises(UsageError, match=f"^got {got}$"):
        detect_launch({}, rank=rank, size=size)


@pytest.mark.parametrize(("rank", "size"), [(0.0, 2), (0, 2.0), (True, 2), (0, True), ("0", 2)])
def test_arguments_that_are_no_integers(rank: Any, size: Any) -> None:
    with pytest.raises(UsageError, match=r"(rank|size) is .*, a (float|bool|str); expected an int"):
        detect_launch({}, rank=rank, size=size)


def test_arguments_may_be_integers_of_numpy() -> None:
    launch = detect_launch({}, rank=np.int64(1), size=np.int32(2))  # type: ignore[arg-type]
    assert launch == Launch(1, 2, None, None, "arguments")
    assert type(launch.rank) is type(launch.size) is int


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PMI_RANK": "0"}, "MPICH: got PMI_RANK but not PMI_SIZE, expected both or neither"),
        ({"WORLD_SIZE": "2"}, "torchrun: got WORLD_SIZE but not RANK, expected both or neither"),
        (
            {"FLUX_TASK_RANK": "1"},
            "Flux: got FLUX_TASK_RANK but not FLUX_JOB_SIZE, expected both or neither; or set RANK and WORLD_SIZE",
        ),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"},
            "Slurm: got SLURM_PROCID but not SLURM_NTASKS, expected both or neither",
        ),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "one"}, "OMPI_COMM_WORLD_RANK: got 'one', expected an int"),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": ""},
            "OMPI_COMM_WORLD_LOCAL_RANK: got '', expected an int",
        ),
        (MPICH | {"PMI_RANK": "-1"}, "PMI_RANK: got '-1', expected an int that is not negative"),
        (MPICH | {"PMI_RANK": "4"}, "MPICH: got PMI_RANK=4 and PMI_SIZE=4, expected 0 <= rank < size"),
        (MPICH | {"PMI_SIZE": "0"}, "expected 0 <= rank < size"),
        (MPICH | {"MPI_LOCALNRANKS": "1"}, "MPICH: got local rank 1 of 1 on this host and 4 in all, expected"),
        (MPICH | {"MPI_LOCALNRANKS": "5"}, "MPICH: got local rank 1 of 5 on this host and 4 in all, expected"),
        (SLURM | {"SLURM_NODEID": "5"}, "SLURM_STEP_TASKS_PER_NODE: got '1,2(x4)', expected a number of tasks for"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "SLURM_STEP_TASKS_PER_NODE: got '2(x', expected a number"),
    ],
)
def test_variables_that_do_not_fit_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        detect_launch(environ)
    assert message in str(caught.value)


def test_job_name() -> None:
    config = Config()
    assert job_name(Config(cluster=Cluster(job="mine")), detect_launch(SLURM).job) == "mine"
    assert job_name(config, detect_launch(SLURM).job) == "77.0"
    assert job_name(config, detect_launch(MPICH).job) == "default"
    assert job_name(config, detect_launch(TORCHRUN | {"TORCHELASTIC_RUN_ID": "my run/1"}).job) == "my_run_1"


def test_the_job_of_a_team_is_called_after_it() -> None:
    """Without a word in its configuration it has a name that its aggregator lets it use."""
    config, team = Config(security=Security(team="vision")), Team("vision")
    for job in (None, "77.0"):
        assert job_name(config, job) == f"vision.{job or 'default'}"
        assert team.may_use(job_name(config, job))
    assert job_name(Config(cluster=Cluster(job="mine"), security=Security(team="vision")), "77.0") == "mine"


@given(job=st.none() | st.text(), team=st.sampled_from(["", "vision", "v" * 64]))
def test_every_job_name_is_one_that_the_configuration_allows(job: str | None, team: str) -> None:
    name = job_name(Config(security=Security(team=team)), job)
    assert KEYS["cluster.job"].read(name) == name


SPEAKS_OF_SEVERAL = [
    ({"PET_NNODES": "2"}, True),
    ({"PET_NNODES": "1:4", "PET_NPROC_PER_NODE": "1"}, True),
    ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "gpu"}, True),
    ({"PMIX_RANK": "1"}, True),
    ({"PMIX_RANK": "0"}, False),
    ({"ALPS_APP_PE": "3"}, True),
    (PALS, True),
    ({"TF_CONFIG": '{"cluster": {"chief": ["a"], "worker": ["b"]}, "task": {"type": "chief", "index": 0}}'}, True),
    ({"SM_HOSTS": '["algo-1", "algo-2"]'}, True),
    ({name: text for name, text in SLURM.items() if "STEP" not in name}, False),
    ({"PBS_NP": "4"}, False),
    ({"LSB_MCPU_HOSTS": "host1 4 host2 4"}, False),
    ({"NHOSTS": "2"}, False),
    ({"COBALT_JOBSIZE": "2"}, False),
    ({"JOB_COMPLETION_INDEX": "0"}, False),
    ({"NNODES": "2"}, False),
]


@pytest.mark.parametrize(("environ", "is_certain"), SPEAKS_OF_SEVERAL)
def test_nobody_is_alone_in_silence(
    environ: dict[str, str], is_certain: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_detection, "_logged_signs", set[str]())
    if is_certain:
        with pytest.raises(UsageError, match="but does not give this process a rank and a size"):
            own_launch(environ)
    else:
        for _ in range(2):
            assert own_launch(environ) == Launch(0, 1, 0, None, "none", 1)
        [record] = caplog.records
        assert "this process is rank 0 of 1 though" in record.getMessage()
    caplog.clear()
    assert own_launch(environ, rank=0, size=1).launcher == "arguments"
    assert own_launch(environ | {"RANK": "0", "WORLD_SIZE": "1"}).launcher == "torchrun"
    assert not caplog.records


def test_hosts_of_pbs_are_in_a_file(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("node1\n")
    assert find_launcher_sign({"PBS_NODEFILE": str(nodes)}) is None
    nodes.write_text("node1\nnode1\nnode2\n")
    result = find_launcher_sign({"PBS_NODEFILE": str(nodes)})
    assert result is not None
    assert "PBS (PBS_NODEFILE) speaks of 3 processes or more" in result.text
    assert find_launcher_sign({"PBS_NODEFILE": str(tmp_path / "none")}) is None


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"},
        {"SLURM_NTASKS": "1"},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": "[" * 9999},
        {"TF_CONFIG": '{"cluster": 1}'},
        {"SM_HOSTS": '["algo-1"]'},
        {"LSB_MCPU_HOSTS": "host1 8"},
        {"PMIX_RANK": "1" * 5000},
    ],
)
def test_who_is_alone_is_told_nothing(environ: dict[str, str]) -> None:
    assert find_launcher_sign(environ) is None


def test_the_page_for_users_has_all_variables() -> None:
    page = (ROOT / "docs" / "launching.md").read_text()
    named = {name for launcher in LAUNCHERS for name in (launcher.rank, *launcher.size, *(launcher.meets or ()))}
    named |= {name for launcher in LAUNCHERS for names in launcher.job for name in names}
    hints = [re.findall(r"[A-Z_]+", hint.source.partition("(")[2]) for hint in HINTS]
    assert all(hints)
    named |= {name for names in hints for name in names}
    assert not [name for name in sorted(named) if f"`{name}`" not in page]


@pytest.mark.skipif(not MPIRUN, reason="no mpirun: pip install mpich")
def test_real_mpirun() -> None:
    program = (
        "from omnireduce.runtime.rank.launcher_detection import detect_launch as d\n"
        "import sys\n"
        "l = d()\n"
        "sys.stdout.write(f'{l.rank} {l.size} {l.local_rank} {l.local_size} {l.launcher}\\n')"  # in one piece
    )
    result = subprocess.run(
        [str(MPIRUN), "-n", "2", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = sorted(result.stdout.splitlines())
    assert lines in (["0 2 0 2 MPICH", "1 2 1 2 MPICH"], ["0 2 0 2 Open MPI", "1 2 1 2 Open MPI"])


WITHOUT_ID = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}
MEETS = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
INTERACTIVE = {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}


@pytest.mark.parametrize(
    ("rank_and_size", "environ", "expected"),
    [
        ((0, 1), {}, ""),
        ((5, 8), OPEN_MPI, "prterun-host-42@1"),
        ((6, 7), TORCHRUN, "run"),
        ((6, 7), TORCHRUN | MEETS, "run@node1:29500"),  # the id may be the same for all launches
        ((2, 9), SLURM, "77.0"),
        ((2, 9), SLURM | MEETS, "77.0"),
        ((6, 7), WITHOUT_ID, ""),
        ((6, 7), WITHOUT_ID | MEETS, "node1:29500"),
        ((6, 7), SLURM | WITHOUT_ID | MEETS, "node1:29500"),  # a step of Slurm may have several launches
        ((6, 7), SLURM | INTERACTIVE | WITHOUT_ID, ""),
        ((0, 2), MEETS, "node1:29500"),  # ranks that were given by hand
        ((0, 2), {"MASTER_ADDR": "node1"}, ""),
        ((0, 2), SLURM | INTERACTIVE, ""),
        ((0, 2), SLURM | INTERACTIVE | MEETS, "node1:29500"),
        ((0, 2), OPEN_MPI, ""),
        ((1, 4), HOROVODRUN, "node1:4000"),
    ],
)
def test_what_tells_launches_apart(rank_and_size: tuple[int, int], environ: dict[str, str], expected: str) -> None:
    assert launch_id(*rank_and_size, environ) == expected


def test_a_launch_that_nothing_tells_from_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MEETS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="nothing tells this launch of 2 workers from another one: set another"):
        check_told_apart(Config(), 0, 2, is_named=False)
    check_told_apart(Config(), 0, 1, is_named=False)
    check_told_apart(Config(), 0, 2, is_named=True)
    for launch in ("mine", ""):
        check_told_apart(Config(cluster=Cluster(launch=launch)), 0, 2, is_named=False)
    for name, text in MEETS.items():
        monkeypatch.setenv(name, text)
    check_told_apart(Config(), 0, 2, is_named=False)


HOSTS = [("first", "namespace"), ("second", "namespace"), ("first", "container")]
LOOPBACK = ["127.0.0.1", "127.1.2.3", "localhost", "LocalHost.", "::1", "[::1]", "::ffff:127.0.0.1", "0.0.0.0"]


def ids_of_hosts(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> list[str]:
    """The id of the same launch on each of HOSTS."""
    results = []
    for parts in HOSTS:
        monkeypatch.setattr(launcher_detection, "this_host", lambda parts=parts: ".".join(parts))
        results.append(launch_id(6, 7, environ))
    return results


@pytest.mark.parametrize("address", LOOPBACK)
@pytest.mark.parametrize("environ", [WITHOUT_ID, TORCHRUN, {}], ids=["torchrun", "torchrun with id", "by hand"])
def test_launches_of_two_hosts_are_two_where_each_meets_on_loopback(
    address: str, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain torchrun meets at 127.0.0.1:29500 on every host."""
    results = ids_of_hosts(monkeypatch, environ | {"MASTER_ADDR": address, "MASTER_PORT": "29500"})
    assert len(set(results)) == len(HOSTS)
    assert all(re.match(JOB_PATTERN, result) for result in results)


@pytest.mark.parametrize("address", ["10.0.0.1", "node1", "localhost-7", "2001:db8::1"])
def test_a_launch_on_several_hosts_is_one(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = ids_of_hosts(monkeypatch, WITHOUT_ID | {"MASTER_ADDR": address, "MASTER_PORT": "29500"})
    assert set(result) == {f"{address}:29500"}


def test_what_tells_hosts_apart(tmp_path: Path) -> None:
    """The kernel's start, and the network namespace: containers of one host have each a loopback address."""
    boot, namespace = tmp_path / "sys/kernel/random/boot_id", tmp_path / "self/ns/net"
    assert this_host(tmp_path) == socket.gethostname()
    boot.parent.mkdir(parents=True)
    boot.write_text("1234-56\n")
    assert this_host(tmp_path) == "1234-56"
    namespace.parent.mkdir(parents=True)
    namespace.touch()
    assert this_host(tmp_path) == f"1234-56.{namespace.stat().st_ino}"


def test_all_processes_of_a_host_say_the_same() -> None:
    program = (
        "import sys; from omnireduce.runtime.rank.launcher_detection import this_host; sys.stdout.write(this_host())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == this_host()


@given(job=st.text(min_size=1))
def test_every_launch_id_is_one_that_a_hello_may_say_and_different_ones_stay_different(job: str) -> None:
    result = launch_id(6, 7, TORCHRUN | {"TORCHELASTIC_RUN_ID": job})
    assert KEYS["cluster.launch"].read(result) == result
    assert result != launch_id(6, 7, TORCHRUN | {"TORCHELASTIC_RUN_ID": f"{job}x"})


@pytest.mark.slow
@pytest.mark.skipif(not MPIRUN, reason="no mpirun: pip install mpich")
def test_real_launches_have_ids_of_their_own() -> None:
    program = (
        "import sys; from omnireduce.runtime.rank.launcher_detection import detect_launch, launch_id; "
        "launch = detect_launch(); "
        "sys.stdout.write(launch_id(launch.rank, launch.size) + '\\n')"
    )
    command = [str(MPIRUN), "-n", "2", sys.executable, "-c", program]
    launches = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    results = [launch.communicate(timeout=60)[0].split() for launch in launches]
    assert [len(set(ids)) for ids in results] == [1, 1]
    assert all(len(ids) == 2 for ids in results)
    assert results[0][0] != results[1][0]
