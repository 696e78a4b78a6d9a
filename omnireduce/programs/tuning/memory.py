"""What was found out before, in a file for each question: which program, ranks, hosts, sizes and version.

It lies in `$XDG_CACHE_HOME/omnireduce/programs`, by default in `~/.cache`. A file that cannot be read, or does not
answer this question, counts as none, with a warning. One that cannot be written costs a warning, and nothing else.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from omnireduce.errors import UsageError
from omnireduce.files.output import make_folder, write_json
from omnireduce.logs import tagged

log = logging.getLogger("omnireduce")


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the answer depends on. `programs`: of each candidate its label and its text."""

    version: str
    programs: list[tuple[str, str]]
    sizes: list[dict[str, int]]
    hosts: list[str]
    transport: str


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For each of the sizes the median milliseconds of each candidate, in their order; None where it cannot run."""

    question: Question
    ms: list[list[float | None]]


def folder() -> Path:
    """Where answers are kept. Raises UsageError where this user has no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        raise UsageError("this user has no home folder: set XDG_CACHE_HOME") from None
    return cache / "omnireduce" / "programs"


def path_of(question: Question) -> Path:
    """The file of a question."""
    return folder() / f"{hashlib.sha256(msgspec.json.encode(question)).hexdigest()[:32]}.json"


def recalled(question: Question) -> list[list[float | None]] | None:
    """The answer, if it is known."""
    try:
        path = path_of(question)
    except UsageError:
        return None  # `remember` says why
    try:
        answer = msgspec.json.decode(path.read_bytes(), type=Answer)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        _warn(f"{path}: not used: {error}")
        return None
    if answer.question != question or not _fits(answer.ms, question):
        _warn(f"{path}: not used: it answers another question")
        return None
    return answer.ms


def _fits(ms: Sequence[Sequence[float | None]], question: Question) -> bool:
    return len(ms) == len(question.sizes) and all(
        len(each) == len(question.programs) and any(x is not None for x in each) for each in ms
    )


def remember(question: Question, ms: list[list[float | None]]) -> None:
    """Keep an answer."""
    try:
        make_folder(folder())
        write_json(msgspec.json.encode(Answer(question, ms)), path_of(question))
    except UsageError as error:
        _warn(f"what was measured is not kept: {error}")


def _warn(message: str) -> None:
    log.warning(message, extra=tagged("autotune_cache"))
