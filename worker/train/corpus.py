"""Real text that every machine has: the source files of the running Python's own standard library.

Names in code, comments and strings are split at underscores and capitals ("readLine" is "read", "line") and
lower-cased. Every tenth file is held out. Frequent words are thinned out and the noise distribution is the unigram
distribution to the power 3/4, both as in Mikolov et al., "Distributed Representations of Words and Phrases and their
Compositionality", NeurIPS 2013, https://arxiv.org/abs/1310.4546.
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.errors import ConfigError

HELD_OUT_EVERY = 10
SUBSAMPLE = 1e-3  # the word frequency above which occurrences are dropped; word2vec's default
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_NAME = re.compile(r"[A-Za-z_]{2,}")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@dataclass(frozen=True)
class Text:
    """Word numbers of several files in a row: file i is `tokens[starts[i]:starts[i + 1]]`."""

    tokens: Array
    starts: Array


@dataclass(frozen=True)
class Corpus:
    """`words[i]` is word number i, the most frequent first; `counts[i]` its occurrences in the training files."""

    words: list[str]
    counts: Array
    train: Text
    held_out: Text
    files: int

    def digest(self) -> bytes:
        """SHA-256 of everything that training depends on: two ranks with equal digests see the same data."""
        sha = hashlib.sha256("\n".join(self.words).encode())
        for array in (
            self.counts,
            *(part for text in (self.train, self.held_out) for part in (text.tokens, text.starts)),
        ):
            sha.update(array.tobytes())
        return sha.digest()


def source_files(max_files: int, root: Path | None = None) -> list[Path]:
    """Return the first `max_files` `.py` files below `root` (default: the standard library), in order of their paths.

    Installed packages and tests are left out.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    return sorted(_python_files(root))[:max_files]


def _python_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def load_corpus(files: Sequence[Path], *, vocabulary: int, window: int, seed: int) -> Corpus:
    """Read `files` and keep their `vocabulary` most frequent words; files of at most `2 * window` words are left out.

    Unreadable files are skipped. Raises ConfigError when too little text is left to train and to evaluate on.
    """
    names, name_starts = _names(files)
    spelling, tokens, starts = _split_names(names, name_starts)
    is_held_out = np.repeat(np.arange(starts.size - 1) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1, np.diff(starts))
    counts = np.bincount(tokens[~is_held_out], minlength=len(spelling))
    # stable: words of one frequency stay in alphabetical order
    frequent = np.argsort(-counts, kind="stable")[:vocabulary]
    frequent = frequent[counts[frequent] > 0]
    number_of_word = np.full(len(spelling), -1, np.int32)
    number_of_word[frequent] = np.arange(frequent.size, dtype=np.int32)
    counts = counts[frequent]
    tokens = number_of_word[tokens]
    is_kept = _subsample(tokens, counts, seed)
    train, held_out = (_select(tokens, starts, is_kept & part, 2 * window) for part in (~is_held_out, is_held_out))
    if not train.tokens.size or not held_out.tokens.size:
        raise ConfigError(
            f"too little text to train on: got {starts.size - 1} readable source files, of which every"
            f" {HELD_OUT_EVERY}th is held out and each needs more than {2 * window} words; raise train.max_files"
            " or lower train.window"
        )
    return Corpus([spelling[i] for i in frequent], counts, train, held_out, starts.size - 1)


def _names(files: Sequence[Path]) -> tuple[list[str], Array]:
    """Return the names in all readable files, and where each file's begin."""
    names: list[str] = []
    starts = [0]
    for path in files:
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        names += _NAME.findall(source)
        starts.append(len(names))
    return names, np.array(starts, np.int64)


def _split_names(names: Sequence[str], name_starts: Array) -> tuple[list[str], Array, Array]:
    """Split names into words; return the words in alphabetical order, all tokens as numbers of words, and file starts.

    Every distinct name is split once; the rest is index arithmetic.
    """
    name_number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    parts = [[word.lower() for word in _WORD.findall(name) if len(word) > 1] for name in name_number]
    spelling = sorted({word for words in parts for word in words})
    word_number = {word: i for i, word in enumerate(spelling)}
    flat = np.array([word_number[word] for words in parts for word in words], np.int64)
    lengths = np.array([len(words) for words in parts], np.int64)
    firsts = np.cumsum(lengths) - lengths

    occurrences = np.fromiter(map(name_number.__getitem__, names), np.int64, len(names))
    ends = np.concatenate(([0], np.cumsum(lengths[occurrences])))
    shift = np.repeat(firsts[occurrences] - ends[:-1], lengths[occurrences])
    return spelling, flat[shift + np.arange(shift.size)], ends[name_starts]


def _subsample(tokens: Array, counts: Array, seed: int) -> Array:
    """Mark the tokens that subsampling keeps: with probability sqrt(SUBSAMPLE / frequency); never -1, which is no
    word."""
    probability = np.sqrt(SUBSAMPLE * counts.sum() / counts)
    is_kept: Array = np.random.default_rng(seed).random(tokens.size) < np.append(probability, 0)[tokens]
    return is_kept


def _select(tokens: Array, starts: Array, is_kept: Array, shortest: int) -> Text:
    """Keep the marked tokens, and of the files only those that have more than `shortest` of them left."""
    lengths = np.diff(np.concatenate(([0], np.cumsum(is_kept)))[starts])
    long_enough = lengths > shortest
    is_kept &= np.repeat(long_enough, np.diff(starts))
    return Text(tokens[is_kept], np.concatenate(([0], np.cumsum(lengths[long_enough]))))
