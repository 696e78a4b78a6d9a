"""Pictures of programs."""

from __future__ import annotations

import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest

from omnireduce import UsageError
from omnireduce.programs.library import PROGRAMS, schedules

ALL = [(name, schedule) for name in PROGRAMS for schedule in schedules(name)]


@pytest.mark.parametrize(("name", "schedule"), ALL)
def test_every_stage_has_a_box_of_its_own(name: str, schedule: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib here; the extra `plot` brings it")
    from omnireduce.programs.drawing import find_spots

    pipeline = schedules(name)[schedule]
    pipeline.draw(tmp_path / "program.svg")
    assert ElementTree.parse(tmp_path / "program.svg").getroot().tag.endswith("svg")
    text = (tmp_path / "program.svg").read_text()
    spots = find_spots(pipeline)
    assert {pipeline.names[each] for each in spots} == set(pipeline.names.values()) - {"N", "T", "K", "H"}
    for one, other in itertools.combinations(spots.values(), 2):
        assert abs(one[0] - other[0]) >= 0.5 or abs(one[1] - other[1]) >= 0.5
    for node, (_, y) in spots.items():
        for operand in node.operands:
            assert operand not in spots or not operand.operands or spots[operand][1] > y, (
                "a stage is below its operands"
            )
    assert all(f"<!-- {pipeline.names[each]}" in text for each in spots)  # matplotlib's comment beside each text


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib here; the extra `plot` brings it")
    with pytest.raises(UsageError, match=r"program\.svg: cannot be written: No such file or directory"):
        schedules("sgd")["ar-c"].draw(tmp_path / "none" / "program.svg")
