"""Reloading of files at SIGHUP in the supervisor's children, while they serve.

A child blocks the signal from its start, and one thread waits for it. Signals that arrive while this thread reads count
as one. A shard reads no files in its turns, so a folder that hangs holds up only this thread.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable

from omnireduce.errors import ConfigError
from omnireduce.support.logs import tagged

log = logging.getLogger("omnireduce.aggregator")


def reload_on_hangup(reload: Callable[[], None]) -> None:
    """Call `reload` at each SIGHUP from now on, in a separate thread. When it raises, the old rules stay in force."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    threading.Thread(target=_wait_for_hangups, args=(reload,), daemon=True, name="reload").start()


def _wait_for_hangups(reload: Callable[[], None]) -> None:
    while True:
        signal.sigwait({signal.SIGHUP})
        if try_reload(reload):
            log.info("files were read again; their rules hold for new connections", extra=tagged("reloaded"))


def try_reload(reload: Callable[[], None]) -> bool:
    """Call `reload`; return whether it succeeded. An exception is logged."""
    try:
        reload()
    except ConfigError as error:
        log.error(
            "files could not be read again; the old rules stay in force: %s", error, extra=tagged("reload_failed")
        )
    except Exception:  # a bug; the files may be better the next time
        log.exception("internal error while files were read again; please report it", extra=tagged("reload_failed"))
    else:
        return True
    return False
