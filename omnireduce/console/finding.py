"""One line of the doctor: what was looked at, how it is, and what to do if it is not well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from rich.console import Console
from rich.text import Text

State = Literal["ok", "info", "warn", "fail"]
_STYLES: dict[State, str] = {"ok": "green", "info": "", "warn": "yellow", "fail": "bold red"}


class Finding(NamedTuple):
    """`fail`: what the configuration asks for cannot work. `warn`: it works, but not as well as it could."""

    state: State
    what: str
    text: str
    advice: str = ""


def show(console: Console, findings: Sequence[Finding]) -> None:
    """Print one line for each finding. A long line is not cut."""
    for state, what, text, advice in findings:
        line = Text.assemble((f"{state:<5}", _STYLES[state]), (f"{what}: ", "bold"), text)
        console.print(line + Text(f"; {advice}" if advice else ""), soft_wrap=True)
