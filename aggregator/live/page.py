"""The live page: the status of the daemon, as `omnireduce status` shows it, and the traffic of the last minutes.

It is complete without a script. The script only fetches it again and again. Text from workers is escaped by the
template, and the page allows no script, style or image except those of the daemon.
"""

from __future__ import annotations

import threading
import time
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined

from omnireduce.aggregator.live.history import KEPT_S, History, Rate
from omnireduce.core.status_messages import Status
from omnireduce.core.wire.safe_text import shown
from omnireduce.support.job_summary import Answers, summarize_jobs, waits_for
from omnireduce.support.printing import density_text, duration, short_count
from omnireduce.support.version import __version__

WIDTH, HEIGHT = 600, 60  # size of a timeline, in its own units
MAX_JOBS_SHOWN, MAX_TIMELINES = 100, 32  # jobs in the table, by name; of these, jobs with a timeline, by traffic
HEADERS = [
    ("Content-Security-Policy", "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
     "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
]  # fmt: skip
ASSETS = {"/live.css": ("live.css", "text/css"), "/live.js": ("live.js", "text/javascript")}


class Timeline(NamedTuple):
    """The traffic of a job as points of two lines, "x,y x,y …", newest to the right; `top`: the value at the top."""

    received: str
    sent: str
    top: str


class LivePage:
    """Makes the page of the latest answers. Threads may share it."""

    def __init__(self) -> None:
        self._history, self._lock = History(), threading.Lock()
        self._last_page: tuple[Answers, str] | None = None
        self._render_lock = threading.Lock()
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        environment.filters.update(count=short_count, duration=duration, density=_density, shown=shown, waits=waits_for)
        self._template = environment.from_string(asset("live.html"))

    def add_samples(self, answers: Answers) -> None:
        """Add a sample of these answers, if all shards have answered: otherwise the totals would be too low."""
        if all(isinstance(answer, Status) for answer in answers.values()):
            with self._lock:
                self._history.add_samples(summarize_jobs(answers), time.monotonic())

    def make(self, answers: Answers) -> str:
        """The page, HTML. Requests that share answers share a page."""
        with self._render_lock:
            if self._last_page is None or self._last_page[0] is not answers:
                self._last_page = answers, self._render(answers)
            return self._last_page[1]

    def _render(self, answers: Answers) -> str:
        now, jobs = time.monotonic(), summarize_jobs(answers)
        jobs, left_out = jobs[:MAX_JOBS_SHOWN], len(jobs[MAX_JOBS_SHOWN:])
        with self._lock:
            rates = [self._history.rates(job) for job in jobs]
        shown_indices = sorted(range(len(jobs)), key=lambda index: -rates[index][-1].received if rates[index] else 0.0)[
            :MAX_TIMELINES
        ]
        lines = [timeline(job_rates, now) if index in shown_indices else None for index, job_rates in enumerate(rates)]
        return self._template.render(
            at=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            version=__version__,
            shards=[
                (address, answer if isinstance(answer, Status) else None, answer) for address, answer in answers.items()
            ],
            jobs=[
                (job, job_rates[-1] if job_rates else None, line)
                for job, job_rates, line in zip(jobs, rates, lines, strict=True)
            ],
            width=WIDTH, height=HEIGHT, minutes=round(KEPT_S / 60), left_out=left_out,
        )  # fmt: skip


def timeline(rates: list[Rate], now: float) -> Timeline | None:
    """The timeline of these rates; None if there is nothing to draw."""
    if len(rates) < 2:
        return None
    top = max(max(rate.received, rate.sent) for rate in rates) or 1.0

    def points(values: list[float]) -> str:
        xs = [WIDTH * (1 - (now - rate.at) / KEPT_S) for rate in rates]
        return " ".join(f"{x:.1f},{HEIGHT * (1 - y / top):.1f}" for x, y in zip(xs, values, strict=True))

    return Timeline(points([rate.received for rate in rates]), points([rate.sent for rate in rates]), short_count(top))


def asset(name: str) -> str:
    """A file beside this one."""
    return files("aggregator.live").joinpath(name).read_text("utf-8")


def _density(value: float | None) -> str:
    return "" if value is None else density_text(value)


def headers_of(kind: str) -> list[tuple[str, Any]]:
    """The headers of an answer of this kind."""
    return [("Content-Type", f"{kind}; charset=utf-8"), *HEADERS]
