"""An aggregator daemon whose first shard spins in its first life: `omnireduce aggregator` with that fault."""

from __future__ import annotations

from typing import Any

from omnireduce.aggregator import daemon
from omnireduce.aggregator.children import ChannelEnd
from omnireduce.aggregator.cli import main
from omnireduce.aggregator.heartbeats import Heartbeat
from omnireduce.aggregator.shard import run_shard


def turn_for_ever() -> None:
    while True:
        pass


def run_or_spin(listeners: Any, config: Any, access: Any, pulse: Heartbeat, line: ChannelEnd) -> None:
    if pulse.last == 0 and listeners.address == first[0]:
        turn_for_ever()
    run_shard(listeners, config, access, pulse, line)


first: list[str] = []
serve = daemon.Daemon._serve


def serve_and_spin(self: daemon.Daemon, bound: Any) -> int:
    first.append(bound[0].address)
    return serve(self, bound)


daemon.run_shard = run_or_spin  # type: ignore[attr-defined]
daemon.Daemon._serve = serve_and_spin  # type: ignore[method-assign]
main()
