"""The tables of `omnireduce status`, from answers made up for them."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from omnireduce.console.status import StatusView
from omnireduce.core.status_messages import JobRelay, JobStatus, LateRank, Status, Stragglers, Traffic
from omnireduce.errors import RefusedError, TransportError
from omnireduce.protocol.collective.effects import ABORT_KINDS
from omnireduce.support.printing import duration


def answer(*jobs: JobStatus, **changes: Any) -> Status:
    fields: dict[str, Any] = {
        "shard": "a:1", "pid": 1, "version": "0", "uptime_s": 7200.0, "connections": 3, "running": 1, "gathering": 0,
        "traffic": Traffic(), "jobs_started": 1, "jobs_ended": 0, "aborts": dict.fromkeys(ABORT_KINDS, 0), "refused": 0,
    }  # fmt: skip
    return Status(**fields | changes, jobs=list(jobs))


def job(name: str = "train", generation: int = 1, **changes: Any) -> JobStatus:
    fields = {"world_size": 2, "joined": 2, "age_s": 30.0, "carried": {"shm": 8}, "slots": 6, "slots_in_use": 1}
    return JobStatus(name=name, generation=generation, **fields | changes)  # type: ignore[arg-type]


def text(
    view: StatusView, answers: dict[str, Status | Exception], now: float = 0.0, width: int = 140
) -> list[list[str]]:
    """The words of each line."""
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(view.show(answers, now))
    return [line.split() for line in capture.get().splitlines() if line.strip()]


def test_shards_of_a_job_are_added_up_whatever_generation_each_gave_it() -> None:
    first = Traffic(
        collectives=10, received_bytes=1_000_000, sent_bytes=2_000_000,
        blocks=100, rank_blocks=200, own_blocks=20, union_blocks=30,
    )  # fmt: skip
    second = Traffic(
        collectives=11, received_bytes=3_000_000, sent_bytes=4_000_000,
        blocks=300, rank_blocks=600, own_blocks=20, union_blocks=50,
    )  # fmt: skip
    one = job(generation=4, traffic=first, late=[LateRank(0, 1.0)])
    other = job(generation=9, traffic=second, late=[LateRank(1, 2.0)], age_s=31.0, carried={"tcp": 8, "shm": 0})
    lines = text(StatusView(), {"a:1": answer(one), "b:1": answer(other)})
    assert " ".join(lines[1][:7]) == "a:1 2 h 1 0 3 0"
    assert " ".join(lines[3]) == "job ranks by age done in out density union slots late waits for"
    assert " ".join(lines[4]) == "train 2/2 shm+tcp 31 s 11 4M 6M 0.0500 0.2000 2/12 rank 1 2.0 s"
    assert len(lines) == 5


def test_who_is_waited_for_stands_in_the_row_and_in_full_below() -> None:
    short, long = (
        Stragglers("c 1", [0], 1, "rank 0 (host a, pid 1)", 0.05),
        Stragglers("c 2", [1], 1, "rank 1 (h)", 65.0),
    )
    lines = text(StatusView(), {"a:1": answer(job(waiting=short)), "b:1": answer(job(waiting=long))})
    assert lines[4][-4:] == ["rank", "1", "65", "s"]
    assert " ".join(lines[5]) == "train: c 2 waits for rank 1 (h) since 65 s"
    many = Stragglers("c 3", [0, 1], 20, "rank 0, rank 1 and 18 more", 5.0)
    assert text(StatusView(), {"a:1": answer(job(waiting=many))})[3][-4:] == ["20", "ranks", "5.0", "s"]
    assert "waits" not in str(text(StatusView(), {"a:1": answer(job(waiting=short))})[3:])


def test_a_job_that_gathers_beside_one_of_its_name_that_runs() -> None:
    gathering = job(generation=0, world_size=30, joined=2, missing=list(range(2, 18)), carried={}, slots=0)
    lines = text(StatusView(), {"a:1": answer(gathering, job())})
    assert lines[3][:2] == ["train", "2/30"]
    assert lines[4][:2] == ["train", "2/2"]
    assert " ".join(lines[5]) == f"train: rank {', '.join(map(str, range(2, 18)))} … must still join"


def test_teams_have_a_column_where_there_are_any() -> None:
    assert "team" not in str(text(StatusView(), {"a:1": answer(job())}))
    rows = text(StatusView(), {"a:1": answer(job("x.train", team="x"), job("other"))})
    [titles] = [row for row in rows if row[:1] == ["job"]]
    assert titles[:3] == ["job", "team", "ranks"]
    assert [row[:2] for row in rows if row[:1] == ["x.train"]] == [["x.train", "x"]]
    assert [row[:2] for row in rows if row[:1] == ["other"]] == [["other", "2/2"]]


def test_the_second_look_has_rates() -> None:
    view = StatusView()
    text(view, {"a:1": answer(job(traffic=Traffic(received_bytes=1000, sent_bytes=0)))}, now=10.0)
    after = Traffic(received_bytes=5000, sent_bytes=8_000_000)
    lines = text(view, {"a:1": answer(job(traffic=after), job("new", traffic=after))}, now=12.0)
    assert "in/s" in lines[2]
    assert lines[4][:10] == ["train", "2/2", "shm", "30", "s", "0", "5k", "8M", "2k", "4M"]
    assert lines[3][:8] == ["new", "2/2", "shm", "30", "s", "0", "5k", "8M"]
    again = text(view, {"a:1": answer(job(traffic=Traffic()))}, now=13.0)  # a new job of the same name
    assert again[3][5:10] == ["0", "0", "0", "0", "0"]


def test_a_shard_that_does_not_answer() -> None:
    """The table says whether nobody is there, or somebody who refuses, or who says nothing."""
    unreachable = TransportError("cannot reach a:1\x1b[2J")
    unreachable.__cause__ = ConnectionRefusedError()
    answers = {"a:1": unreachable, "b:1": answer(aborts={"lost": 2})}
    lines = text(StatusView(), answers | {"c:1": RefusedError("no"), "d:1": TransportError("late")})
    assert lines[1] == ["a:1", "down"]
    assert lines[2][-2:] == ["2", "lost"]
    assert lines[3:5] == [["c:1", "refused"], ["d:1", "no", "answer"]]
    assert lines[5:] == [["no", "jobs"], ["'cannot", "reach", "a:1\\x1b[2J'"], ["no"], ["late"]]
    lines = text(StatusView(), {"a:1": unreachable, "c:1": RefusedError("no")})
    assert " ".join(lines[3]) == "nothing is known of jobs"


def test_a_shard_that_drains() -> None:
    lines = text(StatusView(), {"a:1": answer(draining=True), "b:1": answer()})
    assert lines[-1] == ["a:1", "drains,", "and", "takes", "no", "new", "jobs"]


def test_nothing_is_markup() -> None:
    assert "[red]c" in str(text(StatusView(), {"a:1": answer(job(waiting=Stragglers("[red]c", [0], 1, "[b]", 1.0)))}))
    for state in (answer(job("a[/foo]"), job("[b]", generation=0, missing=[1])), TransportError("[/a]")):
        lines = text(StatusView(), {"[fd00::1]:7400": state})
        assert lines[1][0] == "[fd00::1]:7400"
    first, second, note = text(StatusView(), {"a:1": answer(job("a[/foo]"), job("[b]", generation=0, missing=[1]))})[3:]
    assert (first[0], second[0], note[0]) == ("[b]", "a[/foo]", "[b]:")


def test_nothing_is_a_command_to_the_terminal() -> None:
    """Text from an aggregator, or from an impostor, is escaped."""
    clear = "\x1b[2J"
    wait = Stragglers(clear, [0], 1, clear, 1.0)
    rows = [job(clear, carried={clear: 1}, waiting=wait), job(clear, generation=0, missing=[1])]
    for state in (answer(*rows, aborts={clear: 1}), TransportError(clear)):
        console = Console(width=140, color_system=None, highlight=False)
        with console.capture() as capture:
            console.print(StatusView().show({clear: state}, 0.0))
        assert "\x1b" not in capture.get()
        assert "\\x1b[2J" in capture.get()


BUSY = Traffic(
    collectives=123_456, received_bytes=104_857_600, sent_bytes=204_857_600,
    blocks=100, rank_blocks=2000, own_blocks=3, union_blocks=7,
)  # fmt: skip


@pytest.mark.parametrize("width", [64, 80, 100, 120, 140, 300])
def test_a_narrow_terminal_shows_fewer_columns_and_cuts_none(width: int) -> None:
    waiting = Stragglers("c 1", [1], 1, "rank 1 (h)", 65.0)
    name = "a-job-of-27-characters-long"
    answers = {"gpu-node-12.cluster:7400": answer(job(name, traffic=BUSY, late=[LateRank(1, 12.0)], waiting=waiting))}
    lines, wide = text(StatusView(), answers, width=width), text(StatusView(), answers, width=1000)
    assert len(lines) == 5  # each row on one line, and the note
    for line, whole in zip(lines, wide, strict=True):
        assert set(line) <= set(whole)  # no word, no unit is cut
    assert lines[1][:3] == ["gpu-node-12.cluster:7400", "2", "h"]
    assert (lines[3][:2], lines[3][-4:]) == ([name, "2/2"], ["rank", "1", "65", "s"])
    assert ("union" in lines[2]) == (width >= 120)


@pytest.mark.parametrize("width", [20, 80, 300])
def test_a_name_longer_than_the_terminal_goes_on_below(width: int) -> None:
    lines = text(StatusView(), {"a:1": answer(job(), job("x" * 128))}, width=width)
    assert sum(word.count("x") for line in lines for word in line if set(word) == {"x"}) == 128


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0.0 s"), (9.94, "9.9 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h"), (1e7, "116 d")],
)
def test_durations(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


def test_the_levels_of_a_job_with_relays_stand_below() -> None:
    traffic = Traffic(up_sent_bytes=5_000_000, up_received_bytes=7_000_000)
    relay = job(traffic=traffic, upstream="top:1", relays=[JobRelay("low:1", 1), JobRelay("low:2", 2)])
    lines = [" ".join(line) for line in text(StatusView(), {"a:1": answer(relay)})]
    assert (
        lines[-1]
        == "train: relay of aggregator top:1, 5M up and 7M down; relays below: low:1 (1 rank), low:2 (2 ranks)"
    )


def test_a_relay_that_waits_for_its_upstream_waits_for_no_rank() -> None:
    wait = Stragglers("collective 3", [], 0, "aggregator top:1", 5.0)
    lines = [" ".join(line) for line in text(StatusView(), {"a:1": answer(job(waiting=wait, upstream="top:1"))})]
    assert lines[3].endswith("an aggregator 5.0 s")
    assert lines[-1] == "train: collective 3 waits for aggregator top:1 since 5.0 s"
