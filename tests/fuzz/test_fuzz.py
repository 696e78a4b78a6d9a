"""The corpus, and a budget of new inputs for every target."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from . import explore
from .inputs import corpus
from .seeds import SEEDS, folder

FEW, MANY = 15, 300  # inputs: where they are played to a process, and where not
SEED = 1 if "CI" in os.environ else random.SystemRandom().randrange(2**32)


@pytest.mark.parametrize("target", explore.names())
def test_corpus_and_changes_to_it(target: str) -> None:
    with explore.opened(target) as run:
        explore.play_corpus(target, run)
        outcomes = explore.explore(target, run, MANY if target in explore.LIGHT else FEW, SEED)
    assert outcomes.total() > 10


EXPECTED = {
    "control": {
        "valid-hello": "Hello",
        "valid-challenge": "Challenge",
        "deep": "ProtocolError",
        "not-text": "ProtocolError",
    },
    "descriptor": {
        "valid-0": "allreduce",
        "valid-1": "allreduce_rows",
        "valid-2": "reduce_scatter",
        "valid-3": "broadcast",
        "valid-4": "allgather",
        "valid-5": "reduce",
        "valid-6": "allgather_ragged",
        "valid-7": "broadcast_object",
        "valid-8": "scatter",
        "valid-10": "refusal",
        "many-dimensions": "ProtocolError",
        "large-dimensions": "ProtocolError",
    },
    "plain": {
        "valid-NoneType": "NoneType",
        "valid-dict": "dict",
        "valid-ndarray": "ndarray",
        "colliding": "UsageError",
        "pickle": "UsageError",
    },
    "packets": {
        "valid-small": "parts",
        "valid-large": "parts",
        "gap": "ProtocolError, ProtocolError of no bytes",
        "valid-refusal": "refusal",
        "refusal-of-no-reason": "ProtocolError, ProtocolError of no bytes",
        "refusal-of-two-packets": "ProtocolError, ProtocolError of no bytes",
        "many-items": "ProtocolError, ProtocolError of no bytes",
        "as-many-as-there-can-be": "ProtocolError, parts of no bytes",
    },
    "upward": {
        "valid-whole": "merged",
        "valid-part": "goes on",
        "valid-empty": "merged",
        "valid-refusal": "violation",
        "valid-run": "merged",
        "valid-runs": "merged",
        "valid-steps": "merged",
        "step-without-end": "violation",
        "runs-that-overlap": "violation",
    },
    "downward": {
        "valid-whole": "finished",
        "valid-own": "finished",
        "valid-part": "goes on",
        "valid-empty": "finished",
        "valid-run": "finished",
        "valid-own-run": "finished",
        "valid-steps": "finished",
        "step-of-two-bytes": "violation",
        "run-too-long": "violation",
    },
    "stranger": {
        "valid-session": "Goodbye",
        "valid-abort": "Aborted",
        "valid-elastic": "Goodbye",
        "valid-formation": "Pending",
        "valid-waits": "Pending",
        "valid-compiles": "Pending",
        "valid-shard-1-of-2": "Welcome",
        "valid-runs-of-shard-1-of-2": "Welcome",
        "another-version": "Refused",
        "ends-a-job": "Refused",
        "http": "Refused",
        "data-first": "Refused",
    },
    "proven": {
        "valid-session": "Goodbye",
        "valid-team": "Goodbye",
        "team-and-a-job-of-others": "Refused",
        "team-with-the-secret-of-all": "Refused",
        "greeting": "Challenge",
        "valid-ends-a-job": "AdminAnswer",
        "valid-team-ends-its-jobs": "AdminAnswer",
        "team-ends-jobs-of-others": "Refused",
        "hello-first": "Refused",
        "false-proof": "Refused",
        "hello-before-proof": "Refused",
    },
    "aggregator": {
        "valid-welcome": "Welcome",
        "refused": "RefusedError",
        "welcome-first": "TransportError",
        "refused-later": "RefusedError",
        "aborted": "CollectiveTimeoutError",
    },
    "delivery": {"valid-whole": "finished", "valid-two": "finished", "valid-waiting": "finished", "aborted": "ended"},
    "daemon": {"valid-session": "answered", "another-version": "answered", "http": "dropped"},
    "worker": {"valid-whole": "finished", "refused": "RefusedError", "aborted": "CollectiveTimeoutError"},
}


@pytest.mark.parametrize("target", EXPECTED)
def test_what_becomes_of_the_seeds(target: str) -> None:
    """Proper inputs get as far as they should: changes to them would not get there otherwise."""
    with explore.opened(target) as run:
        result = explore.play_corpus(target, run)
    assert EXPECTED[target].items() <= result.items(), result


def test_the_files_are_those_of_this_version() -> None:
    for target, seeds in SEEDS.items():
        files = corpus(target)
        assert files.items() >= seeds.items(), (
            f"in {folder(target)}; write them anew: python -m tests.fuzz --write-seeds"
        )
        assert all(name.startswith("found-") for name in files.keys() - seeds.keys())


def test_a_failure_is_kept_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input is written to a file that the error names."""
    monkeypatch.setattr(explore, "folder", lambda target: tmp_path)

    def fails(data: bytes) -> str:
        assert len(data) < 10
        return "short"

    with pytest.raises(AssertionError) as caught:
        explore.explore("control", fails, 100, SEED)
    [file] = tmp_path.iterdir()
    assert len(file.read_bytes()) >= 10
    assert f"target control, seed {SEED}: the input is kept in {file}" in caught.value.__notes__
