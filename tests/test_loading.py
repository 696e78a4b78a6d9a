"""Objects that users name as MODULE:NAME."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from omnireduce import UsageError
from omnireduce.support.load_by_name import add_current_folder_to_path, load_named


def test_it_is_found_in_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is looked into from then on, and named once."""
    (tmp_path / "mine_to_load.py").write_text("def found():\n    return 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    with pytest.raises(
        UsageError, match=r"^this cannot be loaded: ModuleNotFoundError: No module named 'mine_to_load'"
    ):
        load_named("mine_to_load:found", "this", "that")
    for _ in range(2):
        add_current_folder_to_path()
    assert sys.path.count(str(tmp_path)) == 1
    assert load_named("mine_to_load:found", "this", "that")() == 3
    del sys.modules["mine_to_load"]


@pytest.mark.parametrize("name", ["", "json", "json:", ":dumps"])
def test_another_form_is_said(name: str) -> None:
    with pytest.raises(UsageError, match=r"^this: expected that$"):
        load_named(name, "this", "that")


def test_whatever_a_module_raises_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_to_load.py").write_text("raise SystemError('no\\nmore')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"^this cannot be loaded: SystemError: no more$"):
        load_named("broken_to_load:any", "this", "that")
