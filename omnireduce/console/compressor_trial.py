"""`omnireduce compression test`: a compressor or selector of the user's own, tried on many gradients."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import click
import numpy as np

from omnireduce.compression import Selector
from omnireduce.compression.grace import Compressor
from omnireduce.compression.grace.base import class_text
from omnireduce.compression.grace.trial import SelectorCompressor, try_compressor
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError, in_a_line
from omnireduce.support.load_by_name import add_current_folder_to_path, load_class


def report_trial(name: str, settings: Sequence[str]) -> bool:
    """Try the class, print what failed; return whether nothing has."""
    make = _maker(name, _arguments(settings))
    kinds: dict[str, Callable[[Array], Any]] = {"NumPy": np.copy}
    generators = {}
    if find_spec("torch") is not None:
        import torch

        kinds["torch"] = lambda x: torch.from_numpy(x.copy())
        generators["torch"] = lambda: torch.get_rng_state().numpy()
    trial = try_compressor(make, kinds, generators)
    if sys.stdout.closed:
        raise UsageError(f"{name} has closed standard output: what came of it cannot be printed")
    for kind, error in trial.not_taken.items():
        click.echo(f"Not tried with {kind}: {error}", err=True)
    for label, checks in (("Checked", trial.checked), ("Not checked", trial.unchecked)):
        if checks:
            click.echo(f"{label}: {', '.join(checks)}")
    for failure in trial.failures:
        click.echo(failure)
    click.echo(f"{len(trial.failures)} failed" if trial.failures else "Test passed!")
    return not trial.failures


def _maker(name: str, arguments: dict[str, Any]) -> Callable[[], Compressor]:
    """A function that makes the compressor. Raises UsageError for what cannot be loaded or made."""
    add_current_folder_to_path()
    named_class = load_class(name, {class_text(base): base for base in (Compressor, Selector)})

    def make() -> Compressor:
        compressor = named_class(**arguments)
        return SelectorCompressor(compressor) if isinstance(compressor, Selector) else compressor

    try:
        make()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        argument_text = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise UsageError(f"{name}({argument_text}) cannot be made: {in_a_line(error)}") from error
    return make


def _arguments(settings: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE as arguments; a value that is none of Python's is a text. Raises UsageError for what is no such."""
    arguments: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not (equals and key.isidentifier()):
            raise UsageError(f"{setting}: expected KEY=VALUE, an argument of the class, such as compress_ratio=0.01")
        try:
            arguments[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # of Python's, all of literal_eval
            arguments[key] = value
    return arguments
