"""Compilation of a rank's kernels before it joins, so that no collective waits for them.

It can take minutes. Meanwhile a thread meets the other ranks of the host, and tells the aggregators that this rank will
come: then nobody's time to join goes by. It sends them the hello that the rank will say later, on a connection of its
own, which lasts as long as the compilation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress

from msgspec.structs import replace

from omnireduce.config import Config
from omnireduce.errors import OmniReduceError
from omnireduce.kernels.claims import are_kept
from omnireduce.kernels.warm import COMPILING, Progress, make_ready, take_trouble, worker_kernels
from omnireduce.logs import BoundLog, tagged
from omnireduce.progress import Seldom
from omnireduce.runtime.asking.observe import reach
from omnireduce.runtime.asking.prove import read_message
from omnireduce.secret import Secret, load_secret
from omnireduce.transport.stream import StreamLink
from omnireduce.wire.control import Hello, encode_control

CONNECT_S = 3.0  # for one attempt to reach an aggregator
AGAIN_S = 1.0  # between two attempts
LOOK_S = 0.1  # between two looks whether the kernels are ready


def progress_of(rank: int, log: BoundLog) -> Progress:
    """The function that reports, on rank 0, how many kernels are compiled. It warns, because a program that sets up no
    logs shows nothing less severe."""

    def say(ready: int, total: int) -> None:
        if rank == 0:
            log.warning(COMPILING, ready, total, extra=tagged("compiling", kernels=ready, total=total))

    return Seldom(say)


def make_kernels_ready(
    config: Config, progress: Progress, meet: Callable[[], None], tell: Callable[[threading.Event], None]
) -> None:
    """Compile, or load, what this rank needs, and `meet` the other ranks of its host. Where there is something to
    compile, both go on at the same time, and then `tell` tells the aggregators, until the event is set. Raises what
    `meet` raises."""
    kernels = worker_kernels(in_memory=config.transport.host_exchange != "off")
    if are_kept(kernels):
        make_ready([kernels], progress)
        meet()
        return
    over, has_met = threading.Event(), Future[None]()

    def meet_and_tell() -> None:
        try:
            meet()
        except BaseException as error:
            has_met.set_exception(error)
            return
        has_met.set_result(None)
        with suppress(OmniReduceError):  # whoever joins will say what is wrong
            tell(over)

    def progress_or_end(ready: int, total: int) -> None:
        progress(ready, total)
        if has_met.done():
            has_met.result()

    threading.Thread(target=meet_and_tell, name="omnireduce-meet", daemon=True).start()
    try:
        make_ready([kernels], progress_or_end)
    finally:
        over.set()
    has_met.result()


def say_trouble(log: BoundLog, *, is_first: bool) -> None:
    """Log once what was wrong with the files of kernels, on the rank that is first on its host."""
    if (trouble := take_trouble()) and is_first:
        log.warning("%s", trouble, extra=tagged("kernels_not_kept"))


def tell_aggregators(config: Config, hello: Hello, secret: Secret | None, over: threading.Event) -> None:
    """Let the aggregators know, until it is `over`, that the worker of `hello` compiles. `secret`: in place of the
    configured one. Aggregators that cannot be reached may start later. Raises ConfigError."""
    secret = load_secret(config.security) if secret is None else secret
    first = 1 if hello.smallest else None  # the first aggregator of an elastic job gives the ranks, also to the others
    wanted = {shard: 0.0 for shard, _ in enumerate(config.cluster.aggregators[:first])}  # when to try
    links = dict[int, StreamLink]()
    with ExitStack() as stack:
        while not over.wait(LOOK_S):
            now = time.monotonic()
            for shard in [shard for shard, at in wanted.items() if at <= now]:
                with suppress(OmniReduceError, OSError):
                    link = reach(config.cluster.aggregators[shard], config, secret, now + CONNECT_S)
                    stack.callback(link.close)
                    link.send_control(encode_control(replace(hello, shard=shard, compiling=True)))
                    links[shard] = link
                wanted[shard] = float("inf") if shard in links else now + AGAIN_S
            for shard, link in list(links.items()):
                if not _is_heard(link):
                    del links[shard]
                    wanted[shard] = now + AGAIN_S


def _is_heard(link: StreamLink) -> bool:
    """Whether the aggregator still knows of this worker."""
    try:
        for event in link.poll():
            read_message(link, event)
    except (OmniReduceError, OSError):
        return False
    return True
