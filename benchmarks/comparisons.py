"""Comparisons: benchmarks of the service with itself, or with one other way. Each has one measurement and its targets.

A new one is a module with `measure(console, turns)`, or `measure(console, turns, rate)` if it needs hosts with shaped
links, and a line here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import click
from rich.console import Console

from benchmarks.contest.shaped import RATE
from benchmarks.frameworks import needle
from benchmarks.harness.testbed import TestbedError
from benchmarks.parts import codecs, elements, queues, replays, selectors, threads, updates, urgent
from benchmarks.programs import inputs, overlap


class Comparison(NamedTuple):
    """A command. `measure` returns whether all targets are met; `rate`: what each link carries by default, as tc writes
    it, and empty where there are no such links."""

    name: str
    measure: Callable[..., bool]
    turns: int
    help: str
    rate: str = ""

    def command(self) -> click.Command:
        """The command of this name. It ends with status 3 if a target is missed."""
        options: list[click.Parameter] = [
            click.Option(["--turns"], type=click.IntRange(1), default=self.turns, show_default=True)
        ]
        if self.rate:
            help_text = "What each link carries, as tc writes it."
            options.append(click.Option(["--rate"], default=self.rate, show_default=True, help=help_text))
        return click.Command(self.name, params=options, callback=self._run, help=self.help)

    def _run(self, **options: object) -> None:
        try:
            is_met = self.measure(Console(width=120), **options)
        except TestbedError as error:
            raise click.ClickException(str(error)) from error
        except ImportError as error:
            raise click.ClickException(f"{error}; `make torch` installs it") from error
        if not is_met:
            sys.exit(3)


COMPARISONS = (
    Comparison(
        "urgent",
        urgent.measure,
        30,
        "Time a small all-reduce beside a large one, with a channel for urgent tensors and without.",
    ),
    Comparison(
        "threads",
        threads.measure,
        30,
        "Time the all-reduce of a rank of one thread, and of two, with shards that share a processor.",
    ),
    Comparison(
        "codecs",
        codecs.measure,
        7,
        "Time an all-reduce with each codec, between shaped links (needs root) and over shared memory.",
        rate=RATE,
    ),
    Comparison(
        "selectors",
        selectors.measure,
        30,
        "Time the selection of a part of a tensor, against torch.topk and against a bare scan.",
    ),
    Comparison(
        "elements",
        elements.measure,
        9,
        "Time the sum of selected elements between shaped links (needs root), against an all-gather.",
        rate=elements.RATE,
    ),
    Comparison(
        "replay",
        replays.measure,
        5,
        "Time a model that exchanges gradients after, beside and across passes (needs root).",
        rate=RATE,
    ),
    Comparison(
        "queue",
        queues.measure,
        9,
        "Time small tensors by name, the hook of a gradient, and rows of an embedding (needs root).",
        rate=RATE,
    ),
    Comparison(
        "updates", updates.measure, 9, "Time updates on the shards against an all-reduce and an update on each rank."
    ),
    Comparison(
        "overlap",
        overlap.measure,
        9,
        "Time a matrix product and its all-reduce, one after the other and overlapped (needs root).",
        rate=overlap.RATE,
    ),
    Comparison(
        "inputs",
        inputs.measure,
        15,
        "Time runs of a program whose ranks compare what they give it, against runs that do not.",
    ),
    Comparison(
        "frameworks",
        needle.measure,
        15,
        "Time the averages of a step of Needle, against Needle's own way: by parameter, over MPI.",
    ),
)
