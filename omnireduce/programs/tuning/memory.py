"""Earlier results of autotuning, one file for each question: the programs, ranks, hosts, sizes and version.

The files lie in the folder `programs` of this user's cache: `omnireduce.files.cache`. A file that cannot be read, or
does not answer this question, is ignored with a warning. If a file cannot be written, there is only a warning.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from omnireduce.errors import UsageError
from omnireduce.files.cache import CACHE_VARIABLE, cache_folders
from omnireduce.files.output import make_folder, write_json
from omnireduce.logs import tagged

log = logging.getLogger("omnireduce")


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that the answer depends on. `programs`: label and text of each candidate."""

    version: str
    programs: list[tuple[str, str]]
    sizes: list[dict[str, int]]
    hosts: list[str]
    transport: str


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Median milliseconds of each candidate, in order, for each of the sizes; None for one that cannot run."""

    question: Question
    ms: list[list[float | None]]


def path_of(question: Question, folder: Path) -> Path:
    """The file of a question."""
    return folder / "programs" / f"{hashlib.sha256(msgspec.json.encode(question)).hexdigest()[:32]}.json"


def recalled(question: Question) -> list[list[float | None]] | None:
    """The answer, if it is known."""
    for folder in cache_folders():
        path = path_of(question, folder)
        try:
            answer = msgspec.json.decode(path.read_bytes(), type=Answer)
        except FileNotFoundError:
            continue
        except (OSError, msgspec.DecodeError) as error:
            _warn(f"{path}: not used: {error}")
            continue
        if answer.question == question and _fits(answer.ms, question):
            return answer.ms
        _warn(f"{path}: not used: it answers another question")
    return None


def _fits(ms: Sequence[Sequence[float | None]], question: Question) -> bool:
    return len(ms) == len(question.sizes) and all(
        len(row) == len(question.programs) and any(median is not None for median in row) for row in ms
    )


def remember(question: Question, ms: list[list[float | None]]) -> None:
    """Write an answer to its file."""
    why = [f"this user has no home folder: set {CACHE_VARIABLE}"]
    for folder in cache_folders():
        path = path_of(question, folder)
        try:
            make_folder(path.parent)
            write_json(msgspec.json.encode(Answer(question, ms)), path)
        except UsageError as error:
            why.append(str(error))
        else:
            return
    _warn(f"what was measured is not kept: {why[-1]}")


def _warn(message: str) -> None:
    log.warning(message, extra=tagged("autotune_cache"))
