"""The end of a process while threads of the library work in functions of torch.

Each script lets a thread begin something that lasts until the main thread waits for it, and then ends. A process that
does not wait ends while C++ functions are in progress in the thread: with "terminate called without an active
exception".
"""

from __future__ import annotations

import sys

import pytest
from local_cluster import WAIT_S, Daemon, Process, unique_job
from nursery import TORCH

from omnireduce.support import exit_gate

START = """
import sys, threading
import numpy as np
import torch
import torch.distributed as dist
import omnireduce as omni
import omnireduce.torch

begun, job = threading.Event(), sys.argv[1]

def is_awaited():
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None and not frame.f_code.co_filename.endswith("exit_gate.py"):
        frame = frame.f_back
    return frame is not None

def last_until_awaited(*_):
    begun.set()
    while not is_awaited():
        pass
    print("awaited", flush=True)

class Slow:
    "Memory of 4 float32. To free it lasts until it is awaited."
    def __init__(self):
        self._memory = np.ones(4, np.float32)
        self.__array_interface__ = self._memory.__array_interface__
    __del__ = last_until_awaited

def slow_array():
    return torch.from_numpy(np.asarray(Slow())).numpy()

def on_both(function):
    "What the function returns for ranks 0 and 1, which call it at the same time."
    results = {}
    other = threading.Thread(target=lambda: results.update({1: function(1)}))
    other.start()
    results[0] = function(0)
    other.join()
    return results[0], results[1]
"""

TWO_GROUPS = """
from datetime import timedelta
from omnireduce.torch.backend.process_group import ProcessGroup

store = dist.HashStore()
ours, theirs = on_both(lambda rank: ProcessGroup(store, rank, 2, timedelta(minutes=1)))

def allreduce(group):
    options = dist.AllreduceOptions()
    options.asyncOp = True
    return group.allreduce([torch.ones(4)], options)

def allgather(group):
    return group.allgather([[torch.zeros(4), torch.zeros(4)]], [torch.ones(4)])
"""

# The other rank comes when there is a callback: a callback of a complete future would run in the main thread.
CALLBACK = (
    TWO_GROUPS
    + """
allreduce(ours).get_future().add_done_callback(last_until_awaited)
their_work = allreduce(theirs)
begun.wait()
"""
)

MOVEMENT = (
    TWO_GROUPS
    + """
allgather(ours).get_future().add_done_callback(last_until_awaited)
their_work = allgather(theirs)
begun.wait()
"""
)

DESTROYED = """
ours.shutdown()
theirs.shutdown()
"""

# The other rank submits nothing, so the collective fails at the end. Its callback begins then.
UNDER_WAY = (
    TWO_GROUPS
    + """
allreduce(ours).get_future().add_done_callback(last_until_awaited)
"""
)

QUEUE = """
queues = on_both(lambda rank: omni.Queue(omni.connect(rank=rank, size=2, job=job)))
queues[0].allreduce_async(slow_array(), name="x")
queues[1].allreduce_async(np.ones(4, np.float32), name="x")
begun.wait()
"""


def process(script: str, daemon: Daemon) -> Process:
    environ = {"OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(daemon.addresses)}
    words = (sys.executable, "-c", START + script, unique_job())
    return Process(*words, environ=environ, preloaded=TORCH)


@pytest.mark.parametrize(
    "script",
    [CALLBACK, CALLBACK + DESTROYED, MOVEMENT, MOVEMENT + DESTROYED, UNDER_WAY, QUEUE],
    ids=["callback", "callback, group destroyed", "movement", "movement, group destroyed", "under way", "queue"],
)
def test_the_end_waits_for_a_thread_in_torch(script: str, daemon: Daemon) -> None:
    with process(script, daemon) as ended:
        assert (ended.rest(WAIT_S), ended.wait()) == ("awaited\n", 0), ended.log


def test_the_end_does_not_wait_for_ever(daemon: Daemon) -> None:
    """For a function of the user that never returns."""
    script = CALLBACK.replace("last_until_awaited", "wait_for_ever")
    start = f"""
from omnireduce.support import exit_gate

assert exit_gate.LONGEST_WAIT_S == {exit_gate.LONGEST_WAIT_S}
exit_gate.LONGEST_WAIT_S = 0.1

def wait_for_ever(_):
    begun.set()
    threading.Event().wait()
"""
    with process(start + script, daemon) as ended:
        assert (ended.rest(WAIT_S), ended.wait()) == ("", 0), ended.log
        assert "a callback of a future, still runs 0.1 s after the program" in ended.log
