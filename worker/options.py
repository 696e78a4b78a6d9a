"""Options that the commands of the worker share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from omnireduce.support.cli import whole_numbers

LARGEST_NUMBER = 1 << 40  # of elements, or of jobs
_F = TypeVar("_F", bound=Callable[..., Any])


def launch_options(command: _F) -> _F:
    """Add `--rank R` and `--size N`, for workers that no launcher started."""
    rank = click.option("--rank", type=int, help="This worker's rank. [default: from mpirun, Slurm or torchrun]")
    size = click.option("--size", type=int, help="Number of workers; goes with --rank.")
    return rank(size(command))


def numbers(text: str, option: str) -> list[int]:
    """The numbers in `1,4,8`, all 1 or more. Raises BadParameter."""
    values = whole_numbers(text, 1, LARGEST_NUMBER)
    if not values:
        raise click.BadParameter(f"got {text[:80]!r}, expected numbers like 1,1000, up to 2^40", param_hint=option)
    return values
