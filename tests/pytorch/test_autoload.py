"""`import torch` alone brings the name of the back end. Nothing here imports omnireduce in the ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from local_cluster import MPIRUN, WAIT_S, Process

from omnireduce.torch_backend import BACKEND, register

PROGRAM = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from torch.distributed import monitored_barrier
assert not [name for name in sys.modules if name.startswith("omnireduce.torch.")]
dist.init_process_group("omnireduce", timeout=timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()

from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
assert dist.group.WORLD._device_types == [torch.device("cpu")]
model = torch.nn.Linear(8, 8)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (size,)))
states = {"weight": torch.ones(8, 8), "bias": torch.zeros(8)} if rank == 0 else {}
set_model_state_dict(model, states, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
weight = model.weight.full_tensor().sum().item()

import torch.distributed.checkpoint as checkpoint
folder = f"{sys.argv[1]}/saved"
checkpoint.async_save({"x": model.weight}, checkpoint_id=folder).result()
dist.barrier()
loaded = {"x": torch.zeros(8, 8)}
checkpoint.load(loaded, checkpoint_id=folder)

part = dist.new_group([1])
for group in (None, part):  # rank 0 is not in the second one
    monitored_barrier(group, timeout=timedelta(seconds=60), wait_all_ranks=True)
said = "none"
try:
    if rank == 0:  # which asks all others
        dist.monitored_barrier(timeout=timedelta(seconds=0.1))
except RuntimeError as error:
    said = str(error)
print(f"{dist.get_backend()} {rank} {weight} {loaded['x'].sum().item()} {said}\\n", end="")
dist.barrier()
dist.destroy_process_group()
"""


def test_torch_finds_the_name_by_itself() -> None:
    [result] = [entry_point for entry_point in entry_points(group="torch.backends") if entry_point.name == BACKEND]
    assert result.load() is register


def test_the_name_costs_an_import_of_torch_little() -> None:
    """Only the module that registers it is loaded, and nothing that torch has not."""
    code = "import sys, torch; print(*[name for name in sys.modules if name.startswith('omnireduce')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert set(result.stdout.split()) == {
        "omnireduce",
        "omnireduce.torch_backend",
        "omnireduce.support",
        "omnireduce.support.version",
    }


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_program_needs_no_import(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    command = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    if launcher == "mpirun":
        assert MPIRUN is not None
        command = [MPIRUN, "-n", "2", sys.executable]
    with Process(*command, str(script), str(tmp_path), environ={"OMP_NUM_THREADS": "1"}) as process:
        printed = [str(process._lines.next(time.monotonic() + 4 * WAIT_S)) for _ in range(2)]
        assert process.wait(4 * WAIT_S) == 0, process.log
    first, second = sorted(printed)
    assert first == ("omnireduce 0 64.0 64.0 omnireduce: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 100 ms")
    assert second == "omnireduce 1 64.0 64.0 none"


def test_what_torch_says_of_other_groups_stays(tmp_path: Path) -> None:
    """`dist.monitored_barrier` without a group, and with one of torch's own."""
    code = f"""
import torch.distributed as dist
try:
    dist.monitored_barrier()
except ValueError as error:
    print(error)
dist.init_process_group("gloo", init_method="file://{tmp_path}/init", rank=0, world_size=1)
dist.monitored_barrier()
print(dist.get_backend())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    first, last = result.stdout.splitlines()
    assert first.startswith("Default process group has not been initialized")
    assert last == "gloo"


def test_registering_twice_is_as_once() -> None:
    before = torch.distributed.monitored_barrier
    register()
    assert torch.distributed.monitored_barrier is before
    assert torch.distributed.Backend.backend_list.count(BACKEND) == 1
