"""Every exception of the library, sorted by whose fault it is; `OmniReduceError` is the base of all.

    ConfigError             the configuration is wrong
    UsageError              the caller is wrong
    TransportError          a connection cannot be made
    RefusedError            an aggregator refused a request to join
    AbortedError            a peer, the network or a protocol violation ended a collective
    CollectiveTimeoutError  a collective took too long
    ClosedError             our own code closed the communicator
    NewcomersError          other workers wait to join an elastic job
    CodecError              a codec of the user's own has failed
    RankFailedError         a function that `omnireduce.run` has sent to ranks failed on one of them

`ProtocolError` stays inside: it reaches the caller as an `AbortedError` that names the peer. Messages say what was
expected, what came and what to do.
"""

from __future__ import annotations

import json
import traceback

LONGEST_TEXT = 200  # characters of an exception that other ranks read


class OmniReduceError(RuntimeError):
    """Base of every exception that this library raises on purpose.

    It is a RuntimeError, since programs of torch and of Horovod catch that.
    """


class ConfigError(OmniReduceError):
    """The configuration is wrong: an unknown key, a wrong type or a value out of range."""


class UsageError(OmniReduceError, ValueError):
    """A call got an argument that it cannot work with, such as a non-contiguous array."""


class ClosedError(OmniReduceError):
    """The communicator was shut down by this process; make a new one."""


class NewcomersError(OmniReduceError):
    """Other workers wait to join: every rank gets this from the same commit, and should form the job anew."""


class RefusedError(OmniReduceError):
    """An aggregator did not admit this worker (full, shutting down, or its job disagrees).

    `temporary`: the aggregator may admit the worker later.
    """

    def __init__(self, message: str, *, temporary: bool = False) -> None:
        super().__init__(message)
        self.temporary = temporary


class CodecError(OmniReduceError):
    """A codec of the user's own has raised an error, or gives what no codec may give."""


class RankFailedError(OmniReduceError):
    """A function that `omnireduce.run` has sent to ranks raised an exception on one of them, or that rank died.

    `rank` is which one, `text` the traceback of its exception, empty where it died. The exception itself is the
    `__cause__`, where it can be sent.
    """

    def __init__(self, message: str, rank: int, text: str = "") -> None:
        super().__init__(f"{message}\n{text}".rstrip())
        self.rank, self.text = rank, text


class ProtocolError(OmniReduceError):
    """A peer sent bytes that the protocol does not allow."""


class TransportError(OmniReduceError):
    """A connection could not be made, or the wanted transport does not exist here."""


class AbortedError(OmniReduceError):
    """A collective was ended before its result was complete; every rank of the job gets this.

    `culprit` names who caused it ("rank 1 (host a, pid 7)", "aggregator 10.0.0.1:7400"), `reason` says what happened.
    No result was returned; the contents of the collective's output arrays are undefined.
    """

    def __init__(self, culprit: str = "", reason: str = "") -> None:
        super().__init__(": ".join(filter(None, (culprit, reason))))
        self.culprit = culprit
        self.reason = reason


class CollectiveTimeoutError(AbortedError):
    """A collective took longer than `cluster.timeout_s`, and the job is over.

    `culprit` names the ranks that the others waited for, or the aggregators that hang. It is not a TimeoutError:
    `Handle.wait` raises that when its own limit has passed, and then waiting again makes sense.
    """


def left_because(error: BaseException) -> str:
    """The reason that the other ranks get when `error` ends a rank."""
    return f"left because of {in_a_line(error)}"


def in_a_line(error: BaseException) -> str:
    """The type of an error and the beginning of its text, in one line that can be sent."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())[:LONGEST_TEXT]
    return text.encode(errors="backslashreplace").decode()  # a file's name in it may not be UTF-8


def fault_of_codec(error: BaseException) -> str:
    """The reason that the other ranks get when `error` is that of a codec; empty for any other error."""
    return left_because(error) if isinstance(error, CodecError) else ""


def show(value: object) -> str:
    """A value as TOML would write it, more or less: always one line of ASCII, cut after 80 characters."""
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list of thousands of levels
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def a_type(value: object) -> str:
    """The type of a value, for a message: "an int", "a list"."""
    name = type(value).__name__
    begins_with_vowel = name.lower().startswith(("a", "e", "i", "o", "nd"))  # not u, as in uint8
    return f"{'an' if begins_with_vowel else 'a'} {name}"
