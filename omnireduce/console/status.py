"""`omnireduce status`: asks aggregators and shows the answers once, again and again, or as JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click
import msgspec
from rich.console import Console
from rich.live import Live

from omnireduce.addresses import Address, parse_listen, seen_from_here
from omnireduce.config import Config, override_config
from omnireduce.console.status_table import View
from omnireduce.runtime.asking.observe import ask_all
from omnireduce.secret import load_secret
from omnireduce.status import Status

WIDTH = 140  # characters, where no terminal says otherwise


class Look:
    """Asks the aggregators at `addresses`, as often as wanted; each answer takes `timeout_s` at most.

    Raises ConfigError for a malformed address, and when the secret cannot be used.
    """

    def __init__(self, addresses: Sequence[str], config: Config, timeout_s: float) -> None:
        wanted = {"cluster.aggregators": list(addresses), "transport.kind": "auto"}
        self._config, self._timeout_s = override_config(config, wanted, source="HOST:PORT"), timeout_s
        self._secret = load_secret(config.security)

    def now(self) -> dict[str, Status | Exception]:
        """The status of each aggregator, or why it does not answer."""
        addresses = self._config.cluster.aggregators
        answers = ask_all(addresses, self._config, self._timeout_s, secret=self._secret)
        return dict(zip(addresses, answers, strict=True))


def default_addresses(config: Config) -> Sequence[str]:
    """The configured aggregators or, where there are none, the shards of the daemon that this configuration would start
    here."""
    if config.cluster.aggregators:
        return config.cluster.aggregators
    host, port = seen_from_here(parse_listen(config.aggregator.listen))
    return [str(Address(host, port + shard)) for shard in range(config.aggregator.shards)]


def print_json(look: Look) -> bool:
    """Print one list; return whether all aggregators answered."""
    answers = look.now()
    entries = [
        {"address": address, "error": str(answer)}
        if isinstance(answer, Exception)
        else {"address": address, "status": answer}
        for address, answer in answers.items()
    ]
    click.echo(msgspec.json.format(msgspec.json.encode(entries)))
    return _all_answered(answers)


def print_once(look: Look) -> bool:
    """Print the tables; return whether all aggregators answered."""
    answers = look.now()
    _console().print(View().show(answers, time.monotonic()))
    return _all_answered(answers)


def watch_status(look: Look, every_s: float) -> None:
    """Show the tables until Ctrl-C: in place on a terminal, else one after another."""
    console, view = _console(), View()
    try:
        with Live(console=console, auto_refresh=False, transient=False) as live:
            while True:
                tables = view.show(look.now(), time.monotonic())
                if console.is_terminal:
                    live.update(tables, refresh=True)
                else:
                    console.print(tables)
                time.sleep(every_s)
    except KeyboardInterrupt:
        pass  # Ctrl-C is the way to end it


def _console() -> Console:
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def _all_answered(answers: dict[str, Status | Exception]) -> bool:
    return not any(isinstance(answer, Exception) for answer in answers.values())
