"""The page of a daemon that a browser shows: whole without a script, and nothing in it but text is from workers."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from local_cluster import WAIT_S, Daemon, configured, start_job
from test_metrics import LISTEN, base, get

from omnireduce import Communicator
from omnireduce.aggregator.live.history import KEPT_S, MAX_SAMPLED_JOBS, MAX_SAMPLES, History, Rate
from omnireduce.aggregator.live.page import HEIGHT, MAX_JOBS_SHOWN, WIDTH, LivePage, timeline
from omnireduce.core.status_messages import JobRelay, JobStatus, LateRank, Status, Stragglers, Traffic
from omnireduce.errors import TransportError
from omnireduce.support.job_summary import Answers, JobSummary, summarize_jobs

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7 * 7 }}"


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_endtag(self, tag: str) -> None:
        self.text += " "

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for each, attributes in self.elements if each == tag]


def job(name: str = "train", generation: int = 1, received: int = 0, **changes: Any) -> JobStatus:
    fields: dict[str, Any] = {"world_size": 2, "joined": 2, "age_s": 30.0, "carried": {"shm": 8}, "slots": 6}
    traffic = Traffic(received_bytes=received, sent_bytes=2 * received)
    return JobStatus(name=name, generation=generation, traffic=traffic, missing=[], **fields | changes)


def answer(*jobs: JobStatus, **changes: Any) -> Status:
    fields: dict[str, Any] = {
        "shard": "a:1", "pid": 1, "version": "0", "uptime_s": 7200.0, "connections": 3, "running": 1, "gathering": 0,
        "traffic": Traffic(), "jobs_started": 1, "jobs_ended": 0, "aborts": {"lost": 0}, "refused": 0,
    }  # fmt: skip
    return Status(**fields | changes, jobs=list(jobs))


def shown(answers: Answers) -> Page:
    live = LivePage()
    live.add_samples(answers)
    return Page(live.make(answers))


def test_shards_and_jobs_are_in_tables() -> None:
    wait = Stragglers("collective 4 ('w' float32[3])", [1], 1, "rank 1 (host a, pid 7)", 5.0)
    gathering = JobStatus(name="next", generation=0, world_size=30, joined=2, age_s=1.0, missing=[5, 6])
    first = job(waiting=wait, late=[LateRank(1, 9.0)], slots_in_use=2, team="t")
    page = shown({
        "a:1": answer(first, gathering, aborts={"lost": 2}),
        "b:1": TransportError("cannot reach b:1"),
    })  # fmt: skip
    words = " ".join(page.text.split())
    assert "a:1 2 h 1 0 3 0 0 0 2 lost" in words
    assert "b:1 cannot reach b:1" in words
    assert "train t 2/2 shm 30 s 0" in words
    assert "rank 1 9.0 s rank 1 5.0 s" in words
    assert "train: collective 4 ('w' float32[3]) waits for rank 1 (host a, pid 7) since 5.0 s" in words
    assert "next 2/30 1.0 s rank 5, 6 … must still join" in words
    assert page.of("meter") == [{"min": "0", "max": "6", "value": "2"}]


def test_no_jobs() -> None:
    assert "no jobs" in shown({"a:1": answer()}).text


def test_what_peers_say_is_text() -> None:
    plain = shown({"a:1": answer(job()), "b:1": TransportError("x")})
    wait = Stragglers(EVIL, [1], 1, EVIL, 5.0)
    evil = shown({
        EVIL: answer(job(EVIL, carried={EVIL: 1}, team=EVIL, waiting=wait), aborts={EVIL: 1}),
        "b:1": TransportError(EVIL),
    })  # fmt: skip
    tags = [{tag for tag, _ in page.elements} for page in (plain, evil)]
    assert tags[0] == tags[1]
    assert evil.of("script") == [{"src": "live.js", "defer": None}]
    assert evil.text.count(EVIL) == 9
    assert not [name for _, attributes in evil.elements for name in attributes if name.startswith("on")]


def looks(history: History, *received: int, name: str = "train", every_s: float = 1.0) -> JobSummary:
    for number, total in enumerate(received):
        [result] = summarize_jobs({"a:1": answer(job(name, received=total))})
        history.add_samples([result], number * every_s)
    return result


def test_rates_are_those_between_two_looks() -> None:
    history = History()
    result = looks(history, 0, 1000, 4000, every_s=2.0)
    assert history.rates(result) == [Rate(2.0, 500.0, 1000.0), Rate(4.0, 1500.0, 3000.0)]


def test_a_shard_that_misses_a_look_is_no_peak() -> None:
    live = LivePage()
    whole = {"a:1": answer(job(received=10**9)), "b:1": answer(job(received=10**9))}
    for answers in (whole, {**whole, "b:1": TransportError("no answer in time")}, whole):
        live.add_samples(answers)
    [result] = summarize_jobs(whole)
    assert all(rate.received == 0 for rate in live._history.rates(result))


def test_the_page_has_room_for_some_jobs() -> None:
    page = shown({"a:1": answer(*(job(f"job{number:03}") for number in range(MAX_JOBS_SHOWN + 7)))})
    assert f"job{MAX_JOBS_SHOWN - 1:03}" in page.text
    assert f"job{MAX_JOBS_SHOWN:03}" not in page.text
    assert "and 7 more jobs" in page.text


def test_requests_that_share_answers_share_a_page() -> None:
    live, answers = LivePage(), {"a:1": answer(job())}
    assert live.make(answers) is live.make(answers)
    assert live.make(dict(answers)) is not live.make(answers)


def test_another_job_of_the_same_name_begins_anew() -> None:
    history = History()
    assert history.rates(looks(history, 0, 1000, 10)) == []


def test_looks_are_few_enough() -> None:
    history = History()
    result = looks(history, *range(2 * MAX_SAMPLES), every_s=0.1)
    assert len(history.rates(result)) < 2 * MAX_SAMPLES / 4
    result = looks(history, *range(1000), every_s=10.0)
    assert len(history.rates(result)) == KEPT_S / 10
    many = summarize_jobs({"a:1": answer(*(job(f"job {number}") for number in range(2 * MAX_SAMPLED_JOBS)))})
    history.add_samples(many, 1e6)
    history.add_samples(many, 1e6 + 1)
    assert sum(bool(history.rates(each)) for each in many) == MAX_SAMPLED_JOBS
    history.add_samples([], 1e6 + 2)
    assert not any(history.rates(each) for each in many)


def test_a_timeline_ends_now_and_fits() -> None:
    line = timeline([Rate(400.0, 0.0, 50.0), Rate(700.0, 100.0, 25.0), Rate(1000.0, 50.0, 0.0)], 1000.0)
    assert line is not None
    assert line.received == f"0.0,{HEIGHT:.1f} {WIDTH / 2:.1f},0.0 {WIDTH:.1f},{HEIGHT / 2:.1f}"
    assert line.top == "100"
    assert timeline([Rate(1.0, 1.0, 1.0)], 1.0) is None
    idle = timeline([Rate(1.0, 0.0, 0.0), Rate(2.0, 0.0, 0.0)], 2.0)
    assert idle is not None
    assert idle.received.split()[1] == f"{WIDTH:.1f},{HEIGHT:.1f}"


@pytest.fixture(scope="module")
def watched() -> Iterator[Daemon]:
    with Daemon(2, LISTEN) as daemon:
        yield daemon


def test_a_real_job_is_on_the_page(watched: Daemon) -> None:
    def work(comm: Communicator) -> str:
        comm.barrier()
        return get(f"{base(watched)}/")[1] if comm.rank == 0 else ""

    def run(comm: Communicator) -> str:
        result = work(comm)
        comm.barrier()
        return result

    text = start_job(configured(watched.addresses), 2, run, job="on-the-page").results()[0]
    page = Page(text)
    assert all(address in page.text for address in watched.addresses)
    assert "on-the-page" in page.text
    assert "2/2" in page.text


def test_the_page_allows_nothing_but_its_own_parts(watched: Daemon) -> None:
    for path, kind in (("/", "text/html"), ("/live.css", "text/css"), ("/live.js", "text/javascript")):
        with urllib.request.urlopen(base(watched) + path, timeout=WAIT_S) as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert answer.headers["Content-Type"] == f"{kind}; charset=utf-8"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            text = answer.read().decode()
        assert policy.startswith("default-src 'none';")
        assert "unsafe" not in policy
        assert not re.search(r"https?://", text), path  # nothing from elsewhere
        assert "style=" not in text


def test_levels_are_a_tree() -> None:
    traffic = Traffic(up_sent_bytes=5_000_000, up_received_bytes=7_000_000)
    relay = JobStatus(
        name="train", generation=1, world_size=8, joined=4, age_s=9.0, traffic=traffic,
        upstream="top:1", relays=[JobRelay("low:1", 1), JobRelay("low:2", 2)],
    )  # fmt: skip
    page = shown({"a:1": answer(relay)})
    words = " ".join(page.text.split())
    assert "train: levels aggregator top:1, 5M up, 7M down this aggregator, 4 ranks relay low:1, ranks: 1" in words
    assert len(page.of("ul")) == 3
    assert not shown({"a:1": answer(job())}).of("ul")
