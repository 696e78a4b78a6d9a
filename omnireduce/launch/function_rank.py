"""The rank's side of `omnireduce.run`: reads a call from standard input, and writes its result to a pipe.

The result is a pickle of three values: whether the call returned; the pickle of its value or exception, or None if that
cannot be pickled; the traceback.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback

from omnireduce.launch.connection import RESULT_FD

FAILED = 1  # exit status


def main() -> None:
    """Make the call. The exit status is 1 if it raises."""
    descriptor = int(os.environ.pop(RESULT_FD))
    os.set_inheritable(descriptor, False)
    paths, call = pickle.loads(sys.stdin.buffer.read())
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.path[:] = paths
    answer, status = _answer(call)
    with open(descriptor, "wb") as file:
        file.write(answer)
    sys.exit(status)


def _answer(call: bytes) -> tuple[bytes, int]:
    import cloudpickle

    try:
        func, args, kwargs = pickle.loads(call)
        value = func(*args, **kwargs)
        return pickle.dumps((True, cloudpickle.dumps(value), "")), 0
    except SystemExit as error:
        if error.code in (None, 0):
            return pickle.dumps((True, pickle.dumps(None), "")), 0
        return _failure(error)
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> tuple[bytes, int]:
    import cloudpickle

    text = "".join(traceback.format_exception(error))
    try:
        sent = cloudpickle.dumps(error)
        pickle.loads(sent)  # some exceptions can be pickled, but not read again
    except Exception:
        sent = None
    return pickle.dumps((False, sent, text)), FAILED
