"""A rank's profile, and its part of the timeline."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from omnireduce.errors import UsageError
from omnireduce.runtime.rank.channels import Channel
from omnireduce.runtime.rank.traced_parts import ChannelCounters, Observer
from omnireduce.runtime.tracing.merged_timeline import merge
from omnireduce.runtime.tracing.profile import Profile
from omnireduce.runtime.tracing.timeline import OFF, PART_SUFFIX, NoTimeline, Timeline
from omnireduce.runtime.tracing.timeline_reader import is_written
from omnireduce.runtime.tracing.trace import DYNAMIC, PARTS, Origin, Recorder, profile_folder, trace_folder
from omnireduce.support.config import Trace
from omnireduce.support.files.output import check_writable, make_folder, write_file
from omnireduce.support.files.paths import whole_path
from omnireduce.support.logs import BoundLog

REFRESH_S = 5.0  # the least time between two writes of the timeline by rank 0 while the job runs
SHARE = 20  # they take at most a twentieth of the time
PROFILE = "omnireduce_profile"
_jobs: dict[str, str] = {}  # by folder for profiles, the first job of this process: its file has the short name


class Profiler:
    """Profile and timeline of one communicator, whose job is `job`. Does nothing if neither is wanted."""

    def __init__(self, settings: Trace, job: str, log: BoundLog) -> None:
        self._settings, self._job, self._log = settings, job, log
        self._profile_folder = profile_folder(settings)
        self._profile = Profile() if self._profile_folder else None
        self.timeline: NoTimeline = OFF
        self._rank = self._size = 0
        self._channels: Sequence[Channel] = ()
        self._observers: list[Observer] = []
        self._recorders: list[Recorder] = []
        self._output, self._folder = Path(), Path()
        self._refresher: _Refresher | None = None
        self._followers: weakref.WeakSet[Profiler] = weakref.WeakSet()
        self._has_leader = False

    def follow(self, leader: Profiler) -> None:
        """Let `leader` make profile and timeline of both from now on. Its communicator has made the communicator of
        this profiler as a group, and does not end earlier."""
        self._has_leader = True
        leader._followers.add(self)
        self._profile = leader._profile if self._profile is not None else None
        for observer in self._observers:
            observer.profile = self._profile
        self._stop_refreshing()
        if leader.timeline.is_on and not self.timeline.is_on:
            self.start(leader._output, leader.timeline.marks_cycles)

    def opened(self, rank: int, size: int, channels: Sequence[Channel]) -> None:
        """The rank is in its job, or in a new formation of it."""
        self._rank, self._size, self._channels = rank, size, channels
        self._observers = []
        if self._profile is not None:
            self._observe()
        if self._settings.timeline not in ("", DYNAMIC):
            try:
                self._start(Path(self._settings.timeline), self._settings.timeline_cycles)
            except (OSError, UsageError) as error:
                self._log.warning("no timeline: %s", error)

    def start(self, path: str | Path, mark_cycles: bool) -> None:
        """Begin a timeline. Raises UsageError."""
        if self.timeline.is_on:
            raise UsageError(f"the timeline {self._output} is being recorded; call stop_timeline first")
        if not self._channels:
            raise UsageError("this rank is in no job now; a timeline begins once it has joined one")
        path = whole_path(path)  # the program may change the current folder meanwhile
        check_writable(path)
        try:
            self._start(path, mark_cycles)
        except OSError as error:
            raise UsageError(f"{path}: no timeline: {error.strerror or error}") from None
        for follower in list(self._followers):
            if follower._channels and not follower.timeline.is_on:
                follower.start(path, mark_cycles)

    def stop(self) -> None:
        """End the timeline. Does nothing if there is none."""
        for follower in list(self._followers):
            follower.stop()
        timeline, self.timeline = self.timeline, OFF
        if not isinstance(timeline, Timeline):
            return
        for observer in self._observers:
            observer.timeline = observer.recorder = None
        self._unobserve()
        for recorder in self._recorders:
            recorder.write()
        self._recorders = []
        timeline.close()
        self._stop_refreshing()
        if self._has_leader:
            return
        others = (path for path in self._folder.glob(f"*{PART_SUFFIX}") if path != timeline.path)
        if self._rank == 0 or not any(is_written(path) for path in others):
            self._merge()

    def closed(self) -> None:
        """The rank has left. Raises nothing."""
        if not self._channels:
            return
        self.stop()
        for channel in self._channels:
            channel.engine.observer = None  # the observer refers to the channel
        self._channels, self._observers = (), []
        if self._profile is not None and not self._has_leader:
            self._write_profile(self._profile)

    def abandon(self) -> None:
        """In a forked child: profile and timeline belong to the parent."""
        timeline, self.timeline = self.timeline, OFF
        if isinstance(timeline, Timeline):
            timeline.abandon()
        if self._profile is not None:
            self._profile.abandon()
        self._channels = ()

    def _start(self, path: Path, mark_cycles: bool) -> None:
        folder = make_folder(trace_folder(self._settings) or f"{path}{PARTS}")
        shards = len(self._channels[0].links)
        origin = Origin(job=self._job, kind="rank", number=self._rank, ranks=self._size, shards=shards)
        timeline = Timeline(folder, origin, self._settings.events, marks_cycles=mark_cycles)
        self._output, self._folder = path, folder
        self._observe()
        for channel, observer in zip(self._channels, self._observers, strict=True):
            if not trace_folder(self._settings):  # otherwise the rank records from its beginning
                channel_origin = Origin(
                    job=channel.job, kind="rank", number=self._rank, ranks=self._size, shards=shards
                )
                settings = Trace(folder=str(folder), events=self._settings.events)
                self._recorders.append(Recorder(settings, channel_origin))
                observer.recorder = self._recorders[-1]
            observer.timeline = timeline
        self.timeline = timeline
        if self._rank == 0 and not self._has_leader:
            for stale in path.parent.glob(f".{path.name}.*.partial"):  # files of processes that were killed
                with contextlib.suppress(OSError):
                    stale.unlink()
            self._merge()
            self._refresher = _Refresher(self._merge)

    def _observe(self) -> None:
        if not self._observers:
            self._observers = [Observer(_counters_of(channel), self._profile) for channel in self._channels]
        for channel, observer in zip(self._channels, self._observers, strict=True):
            channel.engine.observer = observer

    def _unobserve(self) -> None:
        if self._profile is None:
            for channel in self._channels:
                channel.engine.observer = None

    def _stop_refreshing(self) -> None:
        if self._refresher is not None:
            self._refresher.stop()
            self._refresher = None

    def _merge(self) -> None:
        """Write the timeline of all ranks. Raises nothing: a failure is logged."""
        job = self._job if self._settings.folder else None  # other jobs may write to a configured folder
        try:
            merge(self._folder, self._output, job)
        except (UsageError, OSError) as error:
            self._log.warning("the timeline cannot be written: %s", error)

    def _write_profile(self, profile: Profile) -> None:
        folder = self._profile_folder
        is_first_job = _jobs.setdefault(folder, self._job) == self._job
        path = Path(folder) / f"{PROFILE}.{'' if is_first_job else f'{self._job}.'}{self._rank}"
        try:
            write_file(profile.text().encode(), path)
        except UsageError as error:
            self._log.warning("the profile cannot be written: %s", error)


def _counters_of(channel: Channel) -> Callable[[], ChannelCounters]:
    host = channel.machine.host

    def counters() -> ChannelCounters:
        return ChannelCounters(channel.sent_bytes, None if host is None else host.own_blocks)

    return counters


class _Refresher:
    """A thread that calls `refresh` now and then, until it is stopped."""

    def __init__(self, refresh: Callable[[], None]) -> None:
        self._refresh, self._over = refresh, threading.Event()
        self._thread = threading.Thread(target=self._run, name="omnireduce-timeline", daemon=True)
        with contextlib.suppress(RuntimeError):  # no room for a thread
            self._thread.start()

    def _run(self) -> None:
        pause_s = REFRESH_S
        while not self._over.wait(pause_s):
            began = time.monotonic()
            self._refresh()
            pause_s = max(REFRESH_S, SHARE * (time.monotonic() - began))

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
