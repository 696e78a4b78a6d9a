"""Timing of the layers of a torch model, for `replay`.

A layer is a module that itself has trainable parameters with a gradient. Its forward pass ends when the module returns,
its backward pass when its last gradient is ready. Each pass begins when the pass of the layer before ends, so the time
of a module that is no layer counts for the next layer, or else for the last one. In each step all layers together take
as long as the model.
"""

from __future__ import annotations

import csv
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omnireduce.errors import UsageError, a_type, in_a_line
from omnireduce.support.extras import install
from omnireduce.support.files.output import write_file
from omnireduce.support.files.paths import read_text
from omnireduce.support.load_by_name import add_current_folder_to_path, load_named

LARGEST = 2**40


class Layer(NamedTuple):
    """A line of the file. `numel`: elements of the gradient. The passes are in nanoseconds."""

    layer_index: int
    numel: int
    forward_pass_ns: int
    backward_pass_ns: int


MAX_LAYERS = 10_000

HEADER = ", ".join(Layer._fields)


def read_layers(path: str | Path) -> list[Layer]:
    """The layers in a file. Raises UsageError with the number of the line that is wrong."""
    text = read_text(path, expected="a CSV file", error=UsageError)
    try:
        rows = list(csv.reader(text.split("\n"), skipinitialspace=True))
    except csv.Error as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    layers = list[Layer]()
    for number, row in enumerate(rows, 1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or (number == 1 and tuple(cells) == Layer._fields):
            continue
        layer = _layer(f"{path}:{number}", cells)
        if layers and layer.layer_index != layers[-1].layer_index + 1:
            expected = f"expected {layers[-1].layer_index + 1}: one after the other, as the forward pass has them"
            raise UsageError(f"{path}:{number}: layer_index: got {layer.layer_index}, {expected}")
        layers.append(layer)
        if len(layers) > MAX_LAYERS:
            raise UsageError(f"{path}:{number}: more than {MAX_LAYERS} layers, expected a model that can be trained")
    if not layers:
        raise UsageError(f"{path}: has no layers, expected lines of {HEADER}")
    return layers


def _layer(position: str, cells: Sequence[str]) -> Layer:
    if len(cells) != len(Layer._fields):
        raise UsageError(f"{position}: got {len(cells)} values, expected {len(Layer._fields)}: {HEADER}")
    values = []
    for name, cell, minimum in zip(Layer._fields, cells, (0, 1, 0, 0), strict=True):
        if not (re.fullmatch("[0-9]{1,13}", cell) and minimum <= int(cell) <= LARGEST):
            raise UsageError(f"{position}: {name}: got {cell!r}, expected a whole number from {minimum} to 2^40")
        values.append(int(cell))
    return Layer(*values)


def write_layers(layers: Sequence[Layer], path: str | Path) -> None:
    """Write a file that `read_layers` reads. Raises UsageError where that is not possible."""
    lines = [HEADER, *(", ".join(map(str, layer)) for layer in layers)]
    write_file("\n".join([*lines, ""]).encode(), path)


EXPECTED = "(model, input) or (model, input, loss)"


def record_layers(name: str, steps: int, warmup: int) -> list[Layer]:
    """Time the layers of the model that the function `name`, MODULE:FUNCTION, returns: medians of `steps` forward and
    backward passes, after `warmup` others. Its parameters stay what they are.

    The function returns the model, its input, and perhaps a function that makes a loss of the output; else the loss is
    the sum of the output. The input is a tensor, a tuple of arguments or a dict of named ones. Raises UsageError when
    torch is not installed, and for a function or a model with which this does not work.
    """
    try:
        import torch
    except ImportError:
        raise UsageError(f"torch is not installed here; `make torch`, or {install('torch', 'torch')}") from None
    model, model_input, loss = _load_model(name, torch)
    try:
        stopwatch = _Stopwatch(model)
        for step in range(warmup + steps):
            if step == warmup:
                stopwatch.discard()
            model.zero_grad(set_to_none=True)
            stopwatch.begin_forward()
            if isinstance(model_input, Mapping):
                output = model(**model_input)
            else:
                output = model(*(model_input if isinstance(model_input, tuple) else (model_input,)))
            total = loss(output)
            stopwatch.begin_backward()
            total.backward()
            stopwatch.end_backward()
        return stopwatch.layers()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # of the user's own model
        raise UsageError(f"--record {name}: the model cannot be trained: {in_a_line(error)}") from error


def _load_model(name: str, torch: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Model, input and loss. Raises UsageError."""
    add_current_folder_to_path()
    function = load_named(name, f"--record {name}", "MODULE:FUNCTION, such as models:digits")
    try:
        returned = function()
    except (Exception, SystemExit) as error:  # of the user's own function
        raise UsageError(f"--record {name}: {in_a_line(error)}") from error
    is_valid = isinstance(returned, tuple) and len(returned) in (2, 3) and isinstance(returned[0], torch.nn.Module)
    if not is_valid or not callable(returned[-1] if len(returned) == 3 else _sum):
        raise UsageError(f"--record {name}: it returned {a_type(returned)}, expected {EXPECTED}")
    if any(parameter.device.type != "cpu" for parameter in returned[0].parameters()):
        raise UsageError(f"--record {name}: expected a model on the processor; a GPU would compute beside the clock")
    return returned[0], returned[1], returned[2] if len(returned) == 3 else _sum


def _sum(output: Any) -> Any:
    if not hasattr(output, "sum"):
        raise UsageError(f"--record: the output is {a_type(output)}, no tensor: return a loss, too: {EXPECTED}")
    return output.sum()


class _Stopwatch:
    """Times the layers of a model, in every step."""

    def __init__(self, model: Any) -> None:
        self._numels: dict[Any, int] = {}
        self._last_time = 0
        self.discard()
        seen_ids = set[int]()  # a parameter of several modules counts once
        for module in model.modules():
            parameters = [
                parameter
                for parameter in module.parameters(recurse=False)
                if parameter.requires_grad and id(parameter) not in seen_ids
            ]
            seen_ids |= {id(parameter) for parameter in parameters}
            if parameters:
                self._numels[module] = sum(parameter.numel() for parameter in parameters)
                module.register_forward_hook(lambda module, *_: self._add_time(self._forward, module))
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, module=module: self._add_time(self._backward, module)
                )

    def discard(self) -> None:
        """Discard the times so far."""
        self._step = -1
        # of each module, in the order of the pass: nanoseconds of each step
        self._forward = defaultdict[Any, Counter[int]](Counter)
        self._backward = defaultdict[Any, Counter[int]](Counter)

    def begin_forward(self) -> None:
        """A forward pass begins."""
        self._step += 1
        self._last_time = time.perf_counter_ns()

    def begin_backward(self) -> None:
        """A backward pass begins. The time since the last module counts for that module."""
        self._add_remaining_time(self._forward)

    def end_backward(self) -> None:
        """The backward pass has ended."""
        self._add_remaining_time(self._backward)

    def _add_remaining_time(self, times: dict[Any, Counter[int]]) -> None:
        if times:
            self._add_time(times, next(reversed(times)))
        self._last_time = time.perf_counter_ns()

    def _add_time(self, times: dict[Any, Counter[int]], module: Any) -> None:
        """The time since the last note is that of `module`."""
        now = time.perf_counter_ns()
        times[module][self._step] += now - self._last_time
        self._last_time = now

    def layers(self) -> list[Layer]:
        """The layers, in the reverse order of the backward pass."""
        if not self._backward:
            raise UsageError("--record: no parameter of the model got a gradient")
        forward = self._forward_of_layers()
        return [
            Layer(number, self._numels[module], self._median(forward[module]), self._median(times))
            for number, (module, times) in enumerate(reversed(self._backward.items()))
        ]

    def _forward_of_layers(self) -> dict[Any, Counter[int]]:
        """The forward times of layers. The time of a module without a gradient counts for the next layer, or else for
        the last one."""
        by_layer, pending = defaultdict[Any, Counter[int]](Counter), Counter[int]()
        for module, times in self._forward.items():
            pending += times
            if module in self._backward:
                by_layer[module], pending = pending, Counter()
        by_layer[next(reversed(by_layer), next(iter(self._backward)))] += pending
        return by_layer

    def _median(self, times: Counter[int]) -> int:
        return round(statistics.median(times[step] for step in range(self._step + 1)))
