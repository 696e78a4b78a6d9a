"""Bugs of the links, the driver and the shard's server."""

from __future__ import annotations

from .base import Mutation

_LINK = "omnireduce.transport.base"
_DRIVER = "omnireduce.runtime.driver"
_SERVER = "omnireduce.runtime.shard.server"
_PENDING = "omnireduce.runtime.shard.pending_connections"
_DEPARTURES = "omnireduce.runtime.shard.teardown"
_JOB = "omnireduce.runtime.shard.job"

MUTATIONS = (
    Mutation(
        "a link takes any credit",
        _LINK,
        "a credit that nobody gave makes a slot free",
        "            if event.slot not in self._in_flight:\n",
        "            if event.slot < 0:\n",
    ),
    Mutation(
        "a link takes messages for any slot",
        _LINK,
        "a message without credit is taken",
        "            if event.slot >= len(self.receive_slots) or event.slot in self._held:\n",
        "            if event.slot in self._held:\n",
    ),
    Mutation(
        "a link keeps slots that went back",
        _LINK,
        "the link takes the next message in a slot for one without credit",
        "        self._held.remove(slot)\n",
        "        assert slot in self._held\n",
    ),
    Mutation(
        "events in the wrong order",
        _DRIVER,
        "what a peer sent first is dealt with last",
        "            for event in events:\n",
        "            for event in reversed(events):\n",
    ),
    Mutation(
        "output is not flushed",
        _DRIVER,
        "results wait for the next thing that happens",
        "        for link in self.links:\n            link.flush(self.flush_bytes)\n",
        "",
    ),
    Mutation(
        "deadlines are not kept",
        _DRIVER,
        "nobody is warned and nothing times out",
        "        if deadline is not None and now >= deadline:\n",
        "        if deadline is not None and now >= deadline + 1e9:\n",
    ),
    Mutation(
        "broken rules are taken for a lost link",
        _DRIVER,
        "a job's end names a peer, but not what it did",
        "        end_event = machine.violated if event.violation else machine.lost\n",
        "        end_event = machine.lost\n",
    ),
    Mutation(
        "unidentified may stay",
        _PENDING,
        "who says nothing keeps a connection",
        "        for connection in unidentified.expired(now):\n",
        "        for connection in unidentified.expired(now - 1e9):\n",
    ),
    Mutation(
        "closing may stay",
        _SERVER,
        "who does not hang up keeps a connection",
        "        for connection in self._connections.closing.expired(now):\n",
        "        for connection in self._connections.closing.expired(now - 1e9):\n",
    ),
    Mutation(
        "no moment for last words",
        _DEPARTURES,
        "a slow reader does not learn why its job ended",
        "            self._status_requests.withdraw(connection)\n            self._connections.let_leave(connection)\n",
        "            self.drop(connection)\n",
        within=4000,
    ),
    Mutation(
        "the memory of a job is kept",
        _DEPARTURES,
        "slots stay mapped after the last rank went",
        "                connection.job.close()\n",
        "                connection.job.generation += 0\n",
    ),
    Mutation(
        "a job's file is kept open",
        _JOB,
        "a descriptor and its memory are lost with each job",
        "        self._results.close()\n        if self._upstream",
        "        if self._upstream",
    ),
    Mutation(
        "full pipes stay full",
        _SERVER,
        "output that did not fit is not sent later",
        "            connection.link.flush(EVERYTHING if job is None else job.driver.flush_bytes)\n"
        "            self._connections.update",
        "            self._connections.update",
        within=2000,
    ),
    Mutation(
        "shards sleep through their deadlines",
        _SERVER,
        "a shard warns only when something else happens",
        "            if job.machine.deadline is not None and job.machine.deadline <= now:\n",
        "            if job.machine.deadline is not None and job.machine.deadline <= now - 1e9:\n",
    ),
    Mutation(
        "what comes with the hello is lost",
        _PENDING,
        "a rank that dies at once is waited for",
        "                return events[number + 1 :]\n",
        "                return ()\n",
        within=4000,
    ),
    Mutation(
        "a newcomer that goes is kept",
        _DEPARTURES,
        "a job begins with a rank that is gone",
        "        self.drop(connection)\n        self._admission.connection_ended(connection, self._clock(), cause)\n",
        "        self.drop(connection)\n",
    ),
    Mutation(
        "a departed rank is unknown to the books",
        _SERVER,
        "a rank cannot join again while others still leave",
        "            self._admission.departed(job.generation, connection.rank)\n",
        "",
    ),
    Mutation(
        "stopping has no end",
        _SERVER,
        "a shard that is told to stop waits for a frozen rank",
        "            self._finish(now >= self._stop_by)\n",
        "            self._finish(False)\n",
        within=4000,
    ),
    Mutation(
        "jobs with more to do are forgotten",
        _SERVER,
        "what a turn has left waits for the next thing that happens",
        "            if machine.more and job",
        "            if machine.spent < 0 and job",
        within=1000,
    ),
    Mutation(
        "every host is one",
        "omnireduce.runtime.rank.launcher_detection",
        "launches of two hosts that meet on loopback sum each other's tensors",
        '    return f"{address}@{this_host()}" if is_loopback(',
        "    return address if is_loopback(",
        test="tests/runtime/test_launcher.py::test_launches_of_two_hosts_are_two_where_each_meets_on_loopback",
    ),
    Mutation(
        "closing with a task are kept",
        _SERVER,
        "a stranger makes a shard spin with a TLS handshake that comes too late",
        "(connection.link.over or connection.link.task is not None)",
        "connection.link.over",
        test="tests/runtime/test_handshake_thread.py::test_who_leaves_has_no_task_done_any_more",
    ),
    Mutation(
        "a name belongs to nobody",
        "omnireduce.runtime.rank.handles",
        "two threads that use one name in turn get each other's sums",
        "            names.claim(handle.name, handle.thread)\n",
        "            pass\n",
        test="tests/runtime/test_threads.py::test_a_name_belongs_to_the_thread_that_used_it_first",
    ),
)
