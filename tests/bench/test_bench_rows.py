"""The rows of the benchmark as JSON and as a table."""

from __future__ import annotations

import io
import json
from typing import Any

import msgspec
import pytest
from rich.console import Console

from omnireduce.console.bench.cases import Row, RowTable
from omnireduce.support.printing import TABLE_WIDTH, density_text, make_console, short_count, short_time, times_text

KEYS = [
    *("transport", "world_size", "shards", "op", "dtype", "elements", "bytes", "block_size", "density"),
    *("union_density", "time_ms", "time_ms_p90", "time_ms_min", "algbw_gbps"),
    *("wire_up_bytes", "wire_down_bytes", "wrong"),
]


def make_row(**changes: Any) -> Row:
    row = Row(
        transport="shm",
        world_size=2,
        shards=2,
        op="sum",
        dtype="float32",
        elements=26_214_400,
        bytes=104_857_600,
        block_size=256,
        density=0.01,
        union_density=0.0199,
        time_ms=6.71234,
        time_ms_p90=7.1,
        time_ms_min=0.65321,
        algbw_gbps=15.63,
        wire_up_bytes=1_057_000,
        wire_down_bytes=2_104_000,
        wrong=0,
    )
    return msgspec.structs.replace(row, **changes)


def printed(*rows: Row, against_mpi: bool = False) -> list[str]:
    out = io.StringIO()
    table = RowTable(Console(file=out, width=TABLE_WIDTH), against_mpi=against_mpi)
    for row in rows:
        table.add(row, "random overlap")
    return out.getvalue().splitlines()


def test_json_has_exactly_the_documented_keys() -> None:
    plain, compared = json.loads(msgspec.json.encode([make_row(), make_row(mpi_time_ms=45.0, speedup=6.7)]))
    assert list(plain) == KEYS
    assert list(compared) == [*KEYS, "mpi_time_ms", "speedup"]
    assert plain["time_ms"] == 6.71234


def test_table_fits_and_lines_up() -> None:
    worst = make_row(dtype="bfloat16", bytes=999_900_000, elements=499_950_000, time_ms=12345.6, density=0.00004)
    lines = printed(make_row(), worst, make_row(mpi_time_ms=44.95, speedup=123.4), against_mpi=True)
    assert lines[0] == "2 workers, 2 shards, shm; sum, blocks of 256, random overlap"
    assert "median" in lines[1]
    assert len(lines) == 6, "one heading, two lines of titles, one line for each row"
    assert all(len(line.rstrip()) <= TABLE_WIDTH for line in lines)
    assert "…" not in "".join(lines)
    cells = lines[3].split()
    assert cells[:5] == ["104.9M", "26214400", "float32", "0.0100", "0.0199"]
    assert cells[5:] == ["6.712", "7.100", "0.6532", "15.63", "1.057M", "2.104M", "0"]
    assert lines[4].split()[:4] == ["999.9M", "499.9M", "bfloat16", "4e-05"]
    assert lines[5].split()[-2:] == ["44.95", "123.4x"]
    ends = [len(lines[at][: lines[at].index("float")]) for at in (3, 5)]
    assert ends[0] == ends[1]


def test_table_starts_a_new_heading_when_what_the_rows_share_changes() -> None:
    lines = printed(make_row(), make_row(op="max"), make_row(op="max"))
    assert len(lines) == 2 + 2 + 3, "the titles come once"
    assert [line for line in lines if "overlap" in line] == [
        "2 workers, 2 shards, shm; sum, blocks of 256, random overlap",
        "2 workers, 2 shards, shm; max, blocks of 256, random overlap",
    ]


def test_console_is_wide_enough_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert make_console().width == TABLE_WIDTH


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (999.6, "1000"), (1234, "1.234k"), (104_857_600, "104.9M"), (2.1e15, "2.1P")],
)
def test_short_count(value: float, text: str) -> None:
    assert short_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (6.71234, "6.712"), (99.996, "100.00"), (12345.6, "12346")]
)
def test_short_time(value: float, text: str) -> None:
    assert short_time(value) == text


def test_densities_and_factors() -> None:
    assert [density_text(number) for number in (0, 1, 0.01, 0.999, 1e-5)] == [
        "0",
        "1",
        "0.0100",
        "0.9990",
        "1e-05",
    ]
    assert [times_text(number) for number in (0.951, 12.34, 999, 1e9)] == ["0.95x", "12.3x", "999.0x", ">1000x"]


def test_no_text_is_markup(capsys: pytest.CaptureFixture[str]) -> None:
    text = "no comparison with MPI: pip install 'omnireduce[mpi]' [red] :warning:"
    make_console().print(text)
    assert capsys.readouterr().out == text + "\n"
