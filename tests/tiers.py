"""Tiers of tests. Each test has one: `unit`, `integration` or `slow`, a marker that follows from the path of its file.

`make test-unit` runs the first tier, `make test` the first two, `make test-all` all three. A test that takes much
longer than the others of its file has a marker of its own. Such a marker only moves a test to a later tier, so that a
file of a later tier can be left out unread.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

TESTS = Path(__file__).resolve().parent
TIERS = ("unit", "integration", "slow")
CHOICES = {"unit": ("integration", "slow"), "not slow": ("slow",)}  # `-m` of pytest, and the tiers that it leaves out

# Pure parts: no processes, no connections, no ranks. conftest.py fails a unit test that starts a process or connects a
# socket. A file that is named neither here nor below is `integration`: it starts real daemons and real ranks.
UNIT = {
    *("planning", "protocol"),
    *(f"bench/test_bench_{part}.py" for part in ("cases", "data", "rows")),
    *(f"compression/test_{part}.py" for part in ("grace_compressors", "memories", "methods", "selectors")),
    *(f"console/test_{part}.py" for part in ("estimate", "exit_status_of_wrong_use", "plan_command", "status_table")),
    *("data_parallel/test_agreement.py", "files/test_output.py", "files/test_tensor_files.py"),
    *(f"kernels/test_{part}_kernels.py" for part in ("codec", "merge", "reduce", "run", "scan", "step")),
    *("kernels/test_checksum.py", "kernels/test_interpret.py"),
    *(f"launching/test_{part}.py" for part in ("flags", "horovod_variables", "host_lists", "hosts", "rank_output")),
    *(f"programs/test_{part}.py" for part in ("drawing", "language", "layers", "layout_rules", "long_texts")),
    *("programs/test_optimizers.py", "programs/test_rewrites.py"),
    *("runtime/test_driver.py", "runtime/test_pool.py", "runtime/test_timeline_part.py"),
    *("simulator/test_every_event.py", "simulator/test_scenarios.py"),
    *("train/test_train_corpus.py", "train/test_train_model.py", "tuning/test_space.py"),
    *(f"test_config{part}.py" for part in ("", "_lists", "_properties")),
    *(f"test_{part}.py" for part in ("addresses", "descriptor", "dtypes", "exit_gate", "layout", "loading", "logs")),
    *(f"test_{part}.py" for part in ("pairwise", "processors", "progress", "rounding", "teams", "tidy", "tiers")),
    *("test_types.py", "test_wire.py"),
}
# Long: launches of whole programs, frameworks, deployments, campaigns, compilations.
SLOW = {
    *("attacks", "deploy", "faults", "frameworks", "fuzz", "keras3", "tuning"),
    *(f"bench/test_{part}.py" for part in ("bench_runs", "bench_training", "benchmark_runs", "carriers", "lab")),
    *(f"bench/test_{part}.py" for part in ("profile", "replays", "testbed", "worker_program")),
    *(f"cluster/test_{part}.py" for part in ("cold_kernels", "examples", "frozen_shard", "live_browser", "watchdog")),
    *("cluster/test_many_jobs.py", "cluster/test_many_teams.py", "cluster/test_separate_daemons.py"),
    *("console/test_coconet_command.py", "console/test_compression_command.py", "console/test_without_docstrings.py"),
    *(f"kernels/test_{part}.py" for part in ("cache", "claims", "jit_off", "warm")),
    *(f"launching/test_{part}.py" for part in ("calls", "control_groups", "discovery", "elastic_runs")),
    *(
        f"launching/test_{part}.py"
        for part in ("hosts_that_fail", "local_runs", "other_launchers", "ray_runs", "separate_hosts")
    ),
    *("launching/test_ssh_runs.py", "launching/test_supervisors.py"),
    *(f"programs/test_{part}.py" for part in ("autotune", "generated_files", "program_experiments", "random_programs")),
    *(f"pytorch/test_{part}.py" for part in ("autoload", "grace_torch", "horovod_names", "interfaces")),
    *(
        f"pytorch/test_{part}.py"
        for part in ("sharded_rules", "sharded_torch", "torch_elastic", "torch_launch", "torch_suite")
    ),
    *("simulator/test_command.py", "simulator/test_mutations.py", "simulator/test_seeds.py"),
    *("switchml/test_replay.py", "switchml/test_switchml_benchmark.py"),
}


def tier_of_file(path: str) -> str:
    """The tier of a file or folder, relative to `tests/`: from its own entry, else from the nearest folder's."""
    for name in (path, *map(str, Path(path).parents)):
        if name in UNIT:
            return "unit"
        if name in SLOW:
            return "slow"
    return "integration"


def tier_of_test(path: str, markers: Collection[str]) -> str:
    """The tier of a test with these tiers as markers of its own. Raises ValueError unless they name one later tier."""
    tier = tier_of_file(path)
    if not markers:
        return tier
    if len(markers) > 1:
        raise ValueError(f"tests/{path}: a test is marked {' and '.join(sorted(markers))}; expected one tier")
    [marked] = markers
    if TIERS.index(marked) <= TIERS.index(tier):
        raise ValueError(f"tests/{path}: a test is marked {marked}, and its file is {tier}; expected a later tier")
    return marked


def left_out(path: Path, choice: str) -> bool:
    """Whether this choice of `-m` leaves out all tests of a file or folder."""
    skipped = CHOICES.get(choice, ())
    files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    tests = [file.relative_to(TESTS).as_posix() for file in files if file.name.startswith("test_")]
    return bool(tests) and all(tier_of_file(file) in skipped for file in tests)
