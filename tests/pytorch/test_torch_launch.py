"""Unchanged programs under each launcher: torch finds its rank and the other ranks."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from free_ports import free_ports
from local_cluster import MPIRUN, WAIT_S, Process

from omnireduce.runtime.rank.launcher_detection import detect_launch, launch_id
from omnireduce.torch.backend.launch_variables import set_torch_variables
from omnireduce.torch.backend.rendezvous import FIRST_PORT, PORTS

PROGRAM = """
import pathlib, torch, torch.distributed as dist
import omnireduce.torch
dist.init_process_group("omnireduce")
x = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(x)
with omnireduce.torch.local_first() as first:
    prepared = pathlib.Path(__file__).parent / "prepared"
    prepared.touch(exist_ok=False) if first else None
    assert prepared.exists()
line = f"{dist.get_backend()} {dist.get_rank()} {dist.get_world_size()} {x.tolist()}\\n"
print(line, end="")  # one write, for torchrun gives both ranks one pipe and no buffer
dist.destroy_process_group()
"""
RESTARTED = """
import os, torch, torch.distributed as dist
import omnireduce.torch
dist.init_process_group("omnireduce")
x = torch.ones(3)
for _ in range(4):
    dist.all_reduce(x)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        os._exit(3)
print(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {dist.get_rank()} {x.tolist()}\\n", end="")
dist.destroy_process_group()
"""
AGAIN = """
import os, socket, sys, torch, torch.distributed as dist
from datetime import timedelta
import omnireduce.torch
rank, fifo = int(os.environ["RANK"]), sys.argv[1]
os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)  # each torchrun has its own
taken = socket.create_server(("", int(os.environ["MASTER_PORT"]))) if rank == 0 and sys.argv[2] == "taken" else None
for number in range(3):
    dist.init_process_group("omnireduce", timeout=timedelta(seconds=60))
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.all_reduce(x, group=dist.new_group([0, 1]))
    if number < 2:  # rank 0 destroys its group when rank 1 is about to make the next one
        with open(fifo, "wb" if rank else "rb") as stream:
            dist.destroy_process_group() if rank else stream.read()
    if dist.is_initialized():
        dist.destroy_process_group()
print(rank, x.tolist(), flush=True)
"""
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_program_needs_no_change(launcher: str, tmp_path: Path) -> None:
    """No address, no port, no aggregator: rank 0 starts what is missing."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    command = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    if launcher == "mpirun":
        assert MPIRUN is not None
        command = [MPIRUN, "-n", "2", sys.executable]
    with Process(*command, str(script), environ={"OMP_NUM_THREADS": "1"}) as process:
        printed = [process._lines.next(time.monotonic() + 4 * WAIT_S) for _ in range(2)]
        assert process.wait(4 * WAIT_S) == 0, process.log
    assert sorted(str(line) for line in printed) == [f"omnireduce {rank} 2 [3.0, 3.0, 3.0]" for rank in range(2)]


def test_torchrun_starts_failed_ranks_anew(tmp_path: Path) -> None:
    """All of them, as it does: the ranks of the second try form a job of their own."""
    script = tmp_path / "train.py"
    script.write_text(RESTARTED)
    torchrun = str(Path(sys.executable).parent / "torchrun")
    command = [torchrun, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(script)]
    with Process(*command, environ={"OMP_NUM_THREADS": "1"}) as process:
        printed = [process._lines.next(time.monotonic() + 4 * WAIT_S) for _ in range(2)]
        assert process.wait(4 * WAIT_S) == 0, process.log
    assert sorted(str(line) for line in printed) == [f"1 {rank} [16.0, 16.0, 16.0]" for rank in range(2)]


@pytest.mark.parametrize("launcher", ["mpirun", "by hand"])
def test_a_group_can_be_destroyed_and_made_again(launcher: str, tmp_path: Path) -> None:
    """At once, on each rank by itself; whatever a launcher counts; and where the drawn port is taken."""
    script, fifo = tmp_path / "train.py", tmp_path / "fifo"
    script.write_text(AGAIN)
    os.mkfifo(fifo)
    assert MPIRUN is not None
    words = [sys.executable, str(script), str(fifo), "taken" if launcher == "mpirun" else "free"]
    with ExitStack() as stack:
        if launcher == "mpirun":
            processes = [stack.enter_context(Process(MPIRUN, "-n", "2", *words))]
        else:
            rendezvous_environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports())}
            ranks = ({**rendezvous_environ, "RANK": rank, "LOCAL_RANK": rank} for rank in "01")
            processes = [stack.enter_context(Process(*words, environ=environ)) for environ in ranks]
        for process in processes:
            assert process.wait(2 * WAIT_S) == 0, process.log


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("alpha,beta", "alpha"), ("node[03-04]", "node03"), ("node[7,9]-ib,other", "node7-ib"), ("", "")],
)
def test_under_slurm_ranks_meet_at_the_first_host(hosts: str, first: str) -> None:
    environ = {**SLURM, "SLURM_STEP_NODELIST": hosts}
    set_torch_variables(environ)
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["LOCAL_RANK"]) == ("3", "4", "1")
    assert environ.get("MASTER_ADDR", "") == first
    assert not first or FIRST_PORT <= int(environ["MASTER_PORT"]) < FIRST_PORT + PORTS


def test_ranks_of_a_launch_draw_one_port_and_other_launches_other_ones() -> None:
    ports = []
    for job, rank in (("17", "0"), ("17", "3"), ("18", "0")):
        environ = {**SLURM, "SLURM_STEP_NODELIST": "alpha,beta", "SLURM_JOB_ID": job, "SLURM_PROCID": rank}
        set_torch_variables(environ)
        ports.append(environ["MASTER_PORT"])
    assert ports[0] == ports[1] != ports[2]


def test_the_launcher_stays_who_it_is() -> None:
    """The name of the job, the id of the launch and the local numbers come from Slurm, as before."""
    environ = {**SLURM, "SLURM_STEP_NODELIST": "alpha,beta"}
    before = detect_launch(environ), launch_id(3, 4, environ)
    set_torch_variables(environ)
    assert (detect_launch(environ), launch_id(3, 4, environ)) == before
    assert before[0].launcher == "Slurm"
    torchrun = {**environ, "RANK": "7", "WORLD_SIZE": "8"}  # in each task of a step
    assert detect_launch(torchrun).launcher == "torchrun"


def test_torchrun_in_a_step_counts_also_where_its_numbers_are_those_of_slurm() -> None:
    """By chance: the numbers of other ranks of the same launch differ, and all must see one launcher."""
    numbers = {"RANK": SLURM["SLURM_PROCID"], "WORLD_SIZE": SLURM["SLURM_NTASKS"], "MASTER_ADDR": "a"}
    environ = {**SLURM, **numbers, "TORCHELASTIC_RUN_ID": "abc", "MASTER_PORT": "29500"}
    assert detect_launch(environ).launcher == "torchrun"
    assert launch_id(3, 4, environ) == launch_id(2, 4, {**environ, "RANK": "2"})


def test_what_the_user_has_set_counts() -> None:
    environ = {**SLURM, "SLURM_STEP_NODELIST": "alpha", "MASTER_ADDR": "gamma", "MASTER_PORT": "29500"}
    set_torch_variables(environ)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"], environ["RANK"]) == ("gamma", "29500", "3")
    torchrun = {**SLURM, "RANK": "0"}
    set_torch_variables(torchrun)
    assert torchrun == {**SLURM, "RANK": "0"}
    size_alone = {**SLURM, "WORLD_SIZE": "4"}  # the script hands the rank to `init_process_group`
    set_torch_variables(size_alone)
    assert size_alone == {**SLURM, "WORLD_SIZE": "4"}
