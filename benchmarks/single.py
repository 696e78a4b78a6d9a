"""Benchmarks that compare the service with itself, or with one other way: each has one measurement and one aim."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click
from rich.console import Console

from benchmarks.codecs import measure as measure_codecs
from benchmarks.elements import RATE as SLOW
from benchmarks.elements import measure as measure_elements
from benchmarks.frameworks import measure as measure_frameworks
from benchmarks.inputs import measure as measure_inputs
from benchmarks.overlap import RATE as AS_LONG
from benchmarks.overlap import measure as measure_overlap
from benchmarks.queues import measure as measure_queues
from benchmarks.replays import measure as measure_replays
from benchmarks.selectors import measure as measure_selectors
from benchmarks.shaped import RATE
from benchmarks.testbed import TestbedError
from benchmarks.threads import measure as measure_threads
from benchmarks.updates import measure as measure_updates
from benchmarks.urgent import measure as measure_urgent


@click.command(help="Time a small all-reduce beside a large one, with a channel for urgent tensors and without.")
@click.option("--turns", type=click.IntRange(1), default=30, show_default=True)
def urgent(turns: int) -> None:
    _expect_met(measure_urgent, turns)


@click.command(help="Time the all-reduce of a rank of one thread, and of two, with shards that share a processor.")
@click.option("--turns", type=click.IntRange(1), default=30, show_default=True)
def threads(turns: int) -> None:
    _expect_met(measure_threads, turns)


@click.command(help="Time an all-reduce with each codec, between shaped links (needs root) and over shared memory.")
@click.option("--turns", type=click.IntRange(1), default=7, show_default=True)
@click.option("--rate", default=RATE, show_default=True, help="What each link carries, as tc writes it.")
def codecs(turns: int, rate: str) -> None:
    _expect_met(lambda console, turns: measure_codecs(console, turns, rate), turns)


@click.command(help="Time the selection of a part of a tensor, against torch.topk and against a bare scan.")
@click.option("--turns", type=click.IntRange(1), default=30, show_default=True)
def selectors(turns: int) -> None:
    _expect_met(measure_selectors, turns)


@click.command(help="Time the sum of selected elements between shaped links (needs root), against an all-gather.")
@click.option("--turns", type=click.IntRange(1), default=9, show_default=True)
@click.option("--rate", default=SLOW, show_default=True, help="What each link carries, as tc writes it.")
def elements(turns: int, rate: str) -> None:
    _expect_met(lambda console, turns: measure_elements(console, turns, rate), turns)


@click.command(help="Time a model that exchanges gradients after, beside and across passes (needs root).")
@click.option("--turns", type=click.IntRange(1), default=5, show_default=True)
@click.option("--rate", default=RATE, show_default=True, help="What each link carries, as tc writes it.")
def replay(turns: int, rate: str) -> None:
    _expect_met(lambda console, turns: measure_replays(console, turns, rate), turns)


@click.command(help="Time small tensors by name, the hook of a gradient, and rows of an embedding (needs root).")
@click.option("--turns", type=click.IntRange(1), default=9, show_default=True)
@click.option("--rate", default=RATE, show_default=True, help="What each link carries, as tc writes it.")
def queue(turns: int, rate: str) -> None:
    _expect_met(lambda console, turns: measure_queues(console, turns, rate), turns)


@click.command(help="Time updates on the shards against an all-reduce and an update on each rank.")
@click.option("--turns", type=click.IntRange(1), default=9, show_default=True)
def updates(turns: int) -> None:
    _expect_met(measure_updates, turns)


@click.command(help="Time a matrix product and its all-reduce, one after the other and overlapped (needs root).")
@click.option("--turns", type=click.IntRange(1), default=9, show_default=True)
@click.option("--rate", default=AS_LONG, show_default=True, help="What each link carries, as tc writes it.")
def overlap(turns: int, rate: str) -> None:
    _expect_met(lambda console, turns: measure_overlap(console, turns, rate), turns)


@click.command(help="Time runs of a program whose ranks compare what they give it, against runs that do not.")
@click.option("--turns", type=click.IntRange(1), default=15, show_default=True)
def inputs(turns: int) -> None:
    _expect_met(measure_inputs, turns)


@click.command(help="Time the averages of a step of Needle, against Needle's own way: by parameter, over MPI.")
@click.option("--turns", type=click.IntRange(1), default=15, show_default=True)
def frameworks(turns: int) -> None:
    _expect_met(measure_frameworks, turns)


def _expect_met(measure: Callable[[Console, int], bool], turns: int) -> None:
    """Measure; end the program if an aim is missed."""
    try:
        is_met = measure(Console(width=120), turns)
    except TestbedError as error:
        raise click.ClickException(str(error)) from error
    except ImportError as error:
        raise click.ClickException(f"{error}; `make torch` installs it") from error
    if not is_met:
        sys.exit(3)


SINGLE = (urgent, threads, codecs, selectors, elements, replay, queue, updates, overlap, inputs, frameworks)
