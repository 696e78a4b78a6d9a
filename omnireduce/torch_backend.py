"""Registration of the backend at `import torch`, so that programs and frameworks need no other import.

Torch calls `register`, the entry point of the group `torch.backends`, at the end of its own import. Nothing else of
omnireduce is loaded then; the first process group loads it. TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns that off.

Torch has no hook for some features of a backend. For these, functions of torch are wrapped. All other backends see no
change.
"""

from __future__ import annotations

import os
import sys
from functools import wraps
from importlib import import_module
from typing import Any

BACKEND = "omnireduce"
DEVICES = ["cpu", "cuda"]
PACKAGE, GROUPS = "omnireduce.torch", "omnireduce.torch.backend.process_group"


def register() -> None:
    """Let `torch.distributed.init_process_group` know the name "omnireduce"."""
    import torch.distributed as dist

    if dist.is_available() and BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _process_group, devices=DEVICES)
        _wrap_monitored_barrier()
        _wrap_rendezvous()


def _process_group(*args: Any) -> Any:
    return import_module(GROUPS).ProcessGroup(*args)


def _wrap_monitored_barrier() -> None:
    """`dist.monitored_barrier` asks for the name "gloo" and no other. Let groups of omnireduce do it, too."""
    import torch.distributed as dist

    torch_barrier = dist.monitored_barrier

    @wraps(torch_barrier)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        process_group = dist.group.WORLD if group is None else group
        if GROUPS in sys.modules and isinstance(process_group, sys.modules[GROUPS].ProcessGroup):
            return process_group.monitored_barrier(timeout, wait_all_ranks)
        return torch_barrier(group, timeout, wait_all_ranks)

    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier


def _wrap_rendezvous() -> None:
    """Load the rendezvous that knows the other launchers, under `omnireduce run`, and if `init_process_group` would
    miss RANK."""
    from torch.distributed.rendezvous import _rendezvous_handlers

    torch_handler = _rendezvous_handlers["env"]

    def handler(url: str, **options: Any) -> Any:
        is_rank_known = "?" in url or "RANK" in os.environ or "WORLD_SIZE" in os.environ
        if PACKAGE in sys.modules or (is_rank_known and "OMNIRUN_JOB" not in os.environ):
            return torch_handler(url, **options)
        import_module(PACKAGE)  # may put another way before this one
        return _rendezvous_handlers["env"](url, **options)

    _rendezvous_handlers["env"] = handler
