"""An aggregator daemon whose first shard spins in its first life: `python -m aggregator` with that fault."""

from __future__ import annotations

from typing import Any

import aggregator.daemon
from aggregator.cli import main
from aggregator.shard import run_shard
from aggregator.watchdog import Pulse


def turn_for_ever() -> None:
    while True:
        pass


def run_or_spin(listeners: Any, config: Any, access: Any, monitor: Any, pulse: Pulse, stop_pipe: int) -> None:
    if pulse.last == 0 and listeners.address == first[0]:
        turn_for_ever()
    run_shard(listeners, config, access, monitor, pulse, stop_pipe)


first: list[str] = []
serve = aggregator.daemon.Daemon._serve


def serve_and_spin(self: aggregator.daemon.Daemon, bound: Any) -> int:
    first.append(bound[0].address)
    return serve(self, bound)


aggregator.daemon.run_shard = run_or_spin  # type: ignore[attr-defined]
aggregator.daemon.Daemon._serve = serve_and_spin  # type: ignore[method-assign]
main()
