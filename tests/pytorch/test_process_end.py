"""The end of a process while threads of the library work in functions of torch.

Each script lets a thread begin something that lasts until the main thread waits for it, and then ends. A process that
does not wait ends while C++ functions are in progress in the thread: with "terminate called without an active
exception".
"""

from __future__ import annotations

import sys
import textwrap

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

def start_group():
    dist.init_process_group("omnireduce", store=dist.HashStore(), rank=0, world_size=1)
"""

CALLBACK = """
start_group()
dist.all_reduce(torch.ones(4), async_op=True).get_future().add_done_callback(last_until_awaited)
begun.wait()
"""

MOVEMENT = """
start_group()
work = dist.all_gather([torch.zeros(4)], torch.ones(4), async_op=True)
work.get_future().add_done_callback(last_until_awaited)
begun.wait()
"""

DESTROYED = """
dist.destroy_process_group()
"""

TWO_GROUPS = """
from datetime import timedelta
from omnireduce.torch.backend.process_group import ProcessGroup

store, groups = dist.HashStore(), {}

def start(rank):
    groups[rank] = ProcessGroup(store, rank, 2, timedelta(minutes=1))

other = threading.Thread(target=start, args=(1,))
other.start()
start(0)
other.join()
"""

# The other rank submits nothing, so the collective fails at the end. Its callback begins then.
UNDER_WAY = (
    TWO_GROUPS
    + """
options = dist.AllreduceOptions()
options.asyncOp = True
groups[0].allreduce([torch.ones(4)], options).get_future().add_done_callback(last_until_awaited)
"""
)

# Rank 1 agrees to the collective, but begins it only while the interpreter ends.
GLOO = (
    TWO_GROUPS
    + """
import os
ours, theirs = groups[0], groups[1]

class Late:
    def __init__(self, gloo):
        self._gloo, self.rank, self.size = gloo, gloo.rank, gloo.size
    def allgather(self, *words):
        self.begin = lambda gloo=self._gloo: gloo.allgather(*words)
        raise RuntimeError("begins later")

class AtTheEnd:
    def __init__(self, *calls):
        self._calls, self._write = calls, os.write
    def __del__(self):
        begin, wait = self._calls
        begin().wait()
        wait()
        self._write(1, b"over\\n")

def tensors():
    return [[torch.zeros(4), torch.zeros(4)]], [torch.ones(4)]

theirs._gloo = late = Late(theirs._gloo)
works = [group.allgather(*tensors()) for group in (ours, theirs)]
own = works[0]._await_start(timedelta(0))
try:
    works[1].wait()
except RuntimeError:
    threading.at_the_end = AtTheEnd(late.begin, own.wait)  # modules are taken apart when threads cannot run any more
"""
)

QUEUE = """
queue = omni.Queue(omni.connect(rank=0, size=1, job=job))
queue.allreduce_async(slow_array(), name="x")
begun.wait()
"""


def process(script: str, daemon: Daemon) -> Process:
    environ = {"OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(daemon.addresses)}
    words = (sys.executable, "-c", START + textwrap.dedent(script), unique_job())
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
    script = f"""
    from omnireduce.support import exit_gate

    assert exit_gate.LONGEST_WAIT_S == {exit_gate.LONGEST_WAIT_S}
    exit_gate.LONGEST_WAIT_S = 0.1
    start_group()

    def wait_for_ever(_):
        begun.set()
        threading.Event().wait()

    dist.all_reduce(torch.ones(4), async_op=True).get_future().add_done_callback(wait_for_ever)
    begun.wait()
    """
    with process(script, daemon) as ended:
        assert (ended.rest(WAIT_S), ended.wait()) == ("", 0), ended.log
        assert "a callback of a future, still runs 0.1 s after the program" in ended.log


def test_no_thread_of_gloo_needs_the_interpreter_when_it_ends(daemon: Daemon) -> None:
    with process(GLOO, daemon) as ended:
        assert (ended.rest(WAIT_S), ended.wait()) == ("over\n", 0), ended.log
