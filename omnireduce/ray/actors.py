"""Ranks and aggregators as actors of a Ray cluster.

Each rank is an actor in a placement group. Ranks of one node follow each other, as with other launchers. If all ranks
are on one node, rank 0 starts the aggregator. Otherwise one more actor, on the node of rank 0, starts the aggregators
of the job, which end with that actor. omnireduce has to be installed on the nodes.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from omnireduce.errors import AbortedError, RankFailedError, TransportError, UsageError, in_a_line
from omnireduce.launch.connection import STDERR, STDOUT, Connection, supervisor_command
from omnireduce.launch.hosts import place_ranks_on
from omnireduce.launch.launched_job import READY_S, LaunchedJob
from omnireduce.launch.output import PrefixedOutput, TextSink
from omnireduce.launch.plan import LaunchRequest, Plan
from omnireduce.launch.rank_variables import new_job_name, variables_of_rank
from omnireduce.launch.supervisor import free_port
from omnireduce.protocol.wait_notices import WaitNotices
from omnireduce.support.addresses import loopback
from omnireduce.support.config import load_config
from omnireduce.support.logs import tagged

R = TypeVar("R")
log = logging.getLogger("omnireduce")
GRACE_S = 10.0
START_S = 60.0  # time for a supervisor to start on a busy node
ACTORS_S = READY_S + 2 * START_S  # time for actors to start: Ray installs packages, aggregators compile kernels


class _Worker:
    """The actor of a rank."""

    def node_info(self) -> tuple[str, str, int]:
        """The node, its address, and a port that is free there."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), free_port()

    def call(
        self, environ: Mapping[str, str], func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, Any, str]:
        """Whether `func` returned, its result or exception, and the traceback of the exception."""
        os.environ.update(environ)
        try:
            return True, func(*args, **kwargs), ""
        except BaseException as error:
            return False, error if _is_picklable(error) else None, "".join(traceback.format_exception(error))


class _Service:
    """The actor of the aggregators of a job. They end when it does, because their supervisor reads what it writes."""

    def start(self, shards: int, address: str, is_wide: bool) -> dict[str, str]:
        """The variables by which ranks find them, their secret included."""
        command = supervisor_command("localhost", "ssh", GRACE_S, is_remote=False)
        output = PrefixedOutput({STDOUT: TextSink(sys.stdout.write), STDERR: TextSink(sys.stderr.write)})
        self._job = LaunchedJob([Connection("localhost", command, is_remote=False)], output, grace_s=GRACE_S)
        self._job.greet(START_S)
        request = LaunchRequest(words=[], ranks=1, config=load_config(), aggregators=str(shards))
        plan = Plan(request, ["localhost"], may_grow=is_wide)
        plan.address = address
        plan.serve(self._job, self._job.connections[0])
        threading.Thread(target=self._job.wait_for, args=(lambda: False,), daemon=True).start()
        return plan.aggregator_variables


def run(
    func: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_workers: int = 1,
    *,
    cpus_per_worker: float = 1,
    gpus_per_worker: float = 0,
    aggregators: int | None = None,
    env: Mapping[str, str] | None = None,
    placement_timeout_s: float = 100.0,
) -> list[R]:
    """Call `func(*args, **kwargs)` on `num_workers` ranks of the Ray cluster, and return what each returned, in the
    order of ranks.

    `func` calls `omnireduce.init` itself. `aggregators`: shards to start for this job; None: 1 where ranks are on
    several nodes and cluster.aggregators names none. `env`: variables of ranks. Call `ray.init` before, or a local
    cluster is started.

    Raises RankFailedError with the traceback of the first rank that raised, and TransportError when the cluster has no
    room for the ranks after `placement_timeout_s` seconds. No actor is left in any case.
    """
    if num_workers < 1 or not (aggregators is None or aggregators >= 1):
        raise UsageError(f"num_workers {num_workers}, aggregators {aggregators}: expected at least 1")
    bundle = {name: count for name, count in (("CPU", cpus_per_worker), ("GPU", gpus_per_worker)) if count}
    group = placement_group([bundle] * num_workers)
    actors: list[Any] = []
    try:
        if not _await_room(group, placement_timeout_s):
            raise TransportError(
                f"Ray has no room for {num_workers} ranks with {bundle} each after {placement_timeout_s:g} s: "
                "expected fewer ranks or more nodes"
            )
        environs = _start(actors, group, num_workers, bundle, aggregators)
        calls = [
            actor.call.remote({**environ, **(env or {})}, func, tuple(args), dict(kwargs or {}))
            for actor, environ in zip(actors[:num_workers], environs, strict=True)
        ]
        return _results(calls)
    finally:
        for actor in actors:
            with suppress(Exception):  # it may be gone
                ray.kill(actor)
        remove_placement_group(group)


def _start(
    actors: list[Any], group: Any, size: int, bundle: Mapping[str, float], aggregators: int | None
) -> list[dict[str, str]]:
    """Start the actors of the ranks, in their order, then the actor of the aggregators, if needed. Returns the
    environment variables of each rank."""
    options = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
    strategies = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=at) for at in range(size)]
    actors += [ray.remote(_Worker).options(scheduling_strategy=strategy, **options).remote() for strategy in strategies]
    node_infos = _answers([actor.node_info.remote() for actor in actors], "the ranks")
    nodes = list(dict.fromkeys(node for node, _, _ in node_infos))
    order = sorted(range(size), key=lambda at: nodes.index(node_infos[at][0]))
    actors[:] = [actors[at] for at in order]
    node, address, port = node_infos[order[0]]
    is_wide, service = len(nodes) > 1, {}
    if aggregators or (is_wide and not load_config().cluster.aggregators):
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        actors.append(ray.remote(_Service).options(num_cpus=0, scheduling_strategy=strategy).remote())
        call = actors[-1].start.remote(aggregators or 1, address if is_wide else loopback(), is_wide)
        [service] = _answers([call], "the aggregators")
    job = new_job_name()
    slots = place_ranks_on([node_infos[at][0] for at in order])
    return [variables_of_rank(slot, size, job, (address, port)) | service for slot in slots]


def _await_room(group: Any, limit_s: float) -> bool:
    """Wait for the placement group, with a log message after 1, 2, 4, ... seconds. Returns whether it came in time."""
    started = time.monotonic()
    reminders = WaitNotices(started)
    while (now := time.monotonic()) < started + limit_s:
        if waited_s := reminders.due(now):
            log.warning("waiting for room in the Ray cluster since %.0f s", waited_s, extra=tagged("waiting_for_hosts"))
        if group.wait(max(0.0, min(started + limit_s, reminders.at) - now)):
            return True
    return False


def _answers(calls: Sequence[Any], subject: str) -> list[Any]:
    """The answers of actors at their start. Raises TransportError if one does not answer."""
    try:
        answers: list[Any] = ray.get(list(calls), timeout=ACTORS_S)
    except ray.exceptions.GetTimeoutError:
        raise TransportError(f"{subject} have not started on the Ray cluster after {ACTORS_S:g} s") from None
    except ray.exceptions.RayError as error:
        raise TransportError(f"{subject} cannot start on the Ray cluster: {in_a_line(error)}") from error
    return answers


def _results(calls: Sequence[Any]) -> list[Any]:
    """The results of the calls. When a call has failed, the others are waited for only for a moment: a rank that fails
    because of another one is often the first to say so."""
    waiting: list[Any] = list(calls)
    failed: list[tuple[int, tuple[bool, Any, str]]] = []
    while waiting:
        done, waiting = ray.wait(waiting, timeout=GRACE_S if failed else None)
        if not done:
            break
        for call in done:
            outcome = _outcome(call)
            if not outcome[0]:
                failed.append((calls.index(call), outcome))
                if not isinstance(outcome[1], AbortedError):
                    waiting = []
    if failed:
        rank, (_, error, text) = failed[-1] if not isinstance(failed[-1][1][1], AbortedError) else failed[0]
        event = "raised an exception:" if text else "died"
        raise RankFailedError(f"rank {rank} {event}", rank, text) from error
    return [_outcome(call)[1] for call in calls]


def _outcome(call: Any) -> tuple[bool, Any, str]:
    try:
        outcome: tuple[bool, Any, str] = ray.get(call)
    except ray.exceptions.RayError as error:
        return False, error, ""
    return outcome


def _is_picklable(error: BaseException) -> bool:
    try:
        ray.cloudpickle.loads(ray.cloudpickle.dumps(error))
    except Exception:
        return False
    return True
