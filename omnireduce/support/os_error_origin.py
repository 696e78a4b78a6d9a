"""Origin of an OSError: a call of the system, which reports about a peer, or a signal handler, which does not."""

from __future__ import annotations

NETWORK_MODULES = ("socket", "ssl", "selectors", "omnireduce.support.addresses")  # modules between us and the system
TRANSPORT_PREFIX = "omnireduce.transport."  # what its modules begin with, which are there as well


def raised_by_signal_handler(error: OSError) -> bool:
    """Whether `error`, from a call to the system, was raised by a signal handler.

    A handler runs in the middle of such a call, and TimeoutError, ConnectionError and BlockingIOError are OSErrors. The
    error numbers do not tell the two apart: a handler that writes to a broken pipe gets the same numbers. But the
    traceback of its error leads through code outside the modules OURS.
    """
    assert error.__traceback__ is not None  # its first entry is the caller, which has caught it
    traceback = error.__traceback__.tb_next
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__"))
        if module not in NETWORK_MODULES and not module.startswith(TRANSPORT_PREFIX):
            return True
        traceback = traceback.tb_next
    return False
