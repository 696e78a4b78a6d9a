"""`omnireduce doctor`: looks at this host and its aggregators, and says what to do about what it finds wrong."""

from __future__ import annotations

from collections import Counter

from rich.console import Console

from omnireduce.config import Config
from omnireduce.console.finding import Finding, show
from omnireduce.console.host_checks import (
    check_launch,
    check_limits,
    check_processor,
    check_versions,
)
from omnireduce.console.kernels import check_kernels
from omnireduce.console.link_checks import (
    check_aggregators,
    check_rdma,
    check_secret,
    check_transports,
    find_ports,
)
from omnireduce.printing import make_console


def examine(config: Config) -> bool:
    """Print what is found; return whether everything that `config` asks for can work."""
    console, seen = make_console(), Counter[str]()

    def report(*findings: Finding) -> None:
        seen.update(finding.state for finding in findings)
        show(console, findings)

    report(*check_versions(), *check_processor())
    report(check_kernels(console))
    ports, why_none = find_ports()
    report(*check_limits(config, has_devices=bool(ports)))
    report(*check_transports(config), *check_rdma(config, ports, why_none))
    report(*check_launch(config))
    report(*check_secret(config), *check_aggregators(config))
    _sum_up(console, seen)
    return not seen["fail"]


def _sum_up(console: Console, seen: Counter[str]) -> None:
    if seen["fail"]:
        console.print(f"{seen['fail']} of these cannot work as configured", style="bold red")
    elif seen["warn"]:
        console.print(f"all can work, {seen['warn']} not as well as it could", style="yellow")
    else:
        console.print("all is well", style="green")
