"""The corpus: which files, which words, and a slow oracle for the index arithmetic."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnireduce.errors import ConfigError
from omnireduce.worker.train import corpus as module
from omnireduce.worker.train.corpus import Corpus, Text, load_corpus, source_files

LOREM = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda_ mu_nu xiOmicron PiRhoSigma HTTPTau " * 20


def write(folder: Path, texts: list[str | bytes]) -> list[Path]:
    paths = [folder / f"m{i:03}.py" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return paths


def load(paths: list[Path], vocabulary: int = 1000, window: int = 2, seed: int = 1) -> Corpus:
    return load_corpus(paths, vocabulary=vocabulary, window=window, seed=seed)


@pytest.fixture
def keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a text of few words all are frequent; without subsampling nothing is lost."""
    monkeypatch.setattr(module, "SUBSAMPLE", 1e9)


def slow_words(text: str) -> list[str]:
    """Split one character at a time: a word begins at a capital after a small letter, and before the last of several
    capitals that a small letter follows.
    """
    results = []
    for name in re.findall(r"[A-Za-z_]{2,}", text):
        word = ""
        for i, letter in enumerate(name):
            after = name[i + 1 : i + 2]
            begins = letter.isupper() and ((word and word[-1].islower()) or (after.isalpha() and after.islower()))
            if letter == "_" or begins:
                results.append(word)
                word = ""
            word += letter.replace("_", "")
        results.append(word)
    return [word.lower() for word in results if len(word) > 1]


def texts_of(corpus: Corpus, text: Text) -> list[list[str]]:
    pieces = np.split(text.tokens, text.starts[1:-1])
    return [[corpus.words[token] for token in piece] for piece in pieces]


def test_source_files_are_sorted_bounded_and_no_tests_or_packages(tmp_path: Path) -> None:
    names = ["b.py", "a.py", "data.txt", "json/tool.py", "test/x.py", "json/tests/x.py", "site-packages/x.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    expected = [tmp_path / name for name in ("a.py", "b.py", "json/tool.py")]
    assert source_files(100, tmp_path) == expected
    assert source_files(2, tmp_path) == expected[:2]


def test_the_standard_library_is_enough_text() -> None:
    files = source_files(60)
    corpus = load(files, vocabulary=500, window=4)
    assert len(corpus.words) == 500
    assert "self" in corpus.words[:20]
    assert corpus.digest() == load(source_files(60), vocabulary=500, window=4).digest()


@pytest.mark.usefixtures("keep_all")
def test_names_become_words(tmp_path: Path) -> None:
    text = "snake_case CamelCase readLine HTTPServer __init__ x1y2 URL a_b getX " * 2
    words = ["snake", "case", "camel", "case", "read", "line", "http", "server", "init", "url", "get"] * 2
    corpus = load(write(tmp_path, [text] * 10))
    assert texts_of(corpus, corpus.train) == [words] * 9
    assert texts_of(corpus, corpus.held_out) == [words]


@pytest.mark.usefixtures("keep_all")
def test_every_tenth_file_is_held_out_and_gives_no_words(tmp_path: Path) -> None:
    texts = [f"{LOREM} only{'abcdefghijklmnopqrst'[i] * 3}" for i in range(20)]
    corpus = load(write(tmp_path, texts))
    assert corpus.files == 20
    assert len(texts_of(corpus, corpus.train)) == 18
    assert len(texts_of(corpus, corpus.held_out)) == 2
    assert "onlyiii" in corpus.words
    assert not {"onlyjjj", "onlyttt"} & set(corpus.words)


def test_files_that_cannot_be_read_are_skipped(tmp_path: Path) -> None:
    paths = write(tmp_path, [LOREM] * 12)
    paths[3].write_bytes(b"caf\xe9 " * 50)
    paths[5].unlink()
    assert load(paths).files == 10


@pytest.mark.parametrize("texts", [[], [LOREM] * 9, ["too short"] * 30, ["1 2 3"] * 30, [LOREM] * 9 + ["unknown"] * 9])
def test_too_little_text_is_a_configuration_error(tmp_path: Path, texts: list[str | bytes]) -> None:
    with pytest.raises(ConfigError, match=r"too little text .* train\.max_files"):
        load(write(tmp_path, texts))


def test_the_digest_tells_any_difference(tmp_path: Path) -> None:
    paths = write(tmp_path, [LOREM] * 20)
    same = load(paths).digest()
    assert load(paths).digest() == same
    assert load(paths, seed=2).digest() != same
    assert load(paths, vocabulary=5).digest() != same
    paths[-1].write_text(LOREM + " alpha" * 200)
    assert load(paths).digest() != same


def test_frequent_words_are_thinned_out_as_in_word2vec(tmp_path: Path) -> None:
    rare = [a + b + c for a in "bcdfghjkl" for b in "aeiou" for c in "mnprst"]
    corpus = load(write(tmp_path, [" ".join(["often " + word for word in rare] * 10)] * 20))
    tokens = Counter(corpus.words[token] for token in corpus.train.tokens)
    assert corpus.words[0] == "often"
    expected = np.sqrt(module.SUBSAMPLE / 0.5)
    assert tokens["often"] / corpus.counts[0] == pytest.approx(expected, rel=0.1)
    share_of_rare = sum(tokens[word] for word in rare) / (corpus.counts.sum() / 2)
    assert share_of_rare == pytest.approx(np.sqrt(module.SUBSAMPLE / (0.5 / len(rare))), rel=0.1)


WORDS = st.text(alphabet="abAB_ 1", max_size=60)


@given(texts=st.lists(WORDS, min_size=10, max_size=25), vocabulary=st.integers(1, 20))
def test_words_and_counts_equal_a_slow_oracle(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], vocabulary: int
) -> None:
    window = 1
    split = [slow_words(text) for text in texts]
    counts = Counter(word for i, words in enumerate(split) if i % 10 != 9 for word in words)
    words = sorted(counts, key=lambda word: (-counts[word], word))[:vocabulary]
    kept = [[word for word in text if word in words] for text in split]
    long_enough = [(i, text) for i, text in enumerate(kept) if len(text) > 2 * window]
    train = [text for i, text in long_enough if i % 10 != 9]
    held_out = [text for i, text in long_enough if i % 10 == 9]

    paths = write(tmp_path_factory.mktemp("texts"), list(texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SUBSAMPLE", 1e9)
        if not train or not held_out:
            with pytest.raises(ConfigError):
                load(paths, vocabulary, window)
            return
        corpus = load(paths, vocabulary, window)
    assert corpus.words == words
    assert corpus.counts.tolist() == [counts[word] for word in words]
    assert texts_of(corpus, corpus.train) == train
    assert texts_of(corpus, corpus.held_out) == held_out
