"""The other end of `benchmarks.harness.group`: a process that does what the controller says, one JSON object a line."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import omnireduce as omni
from benchmarks.harness.carriers import CommunicatorWatch
from omnireduce.data_parallel import session

Order = Callable[..., dict[str, Any]]


def serve(path: str, start: Callable[[], tuple[int, Mapping[str, Order]]]) -> None:
    """Follow the controller at the Unix socket `path` until it closes the connection.

    `start` gets ready, and returns this process's rank and the orders that it takes, by name. Each answer also says
    which bytes were carried meanwhile, by what: those of omnireduce, unless the order says it itself. An exception, of
    `start` too, is told to the controller and then ends the process.
    """
    with socket.socket(socket.AF_UNIX) as controller:
        controller.connect(path)
        lines = controller.makefile("rw", encoding="ascii")

        watch = CommunicatorWatch()

        def send_answer(**answer: object) -> None:
            lines.write(json.dumps(answer) + "\n")
            lines.flush()

        try:
            rank, orders = start()
            send_answer(rank=rank)
            for line in lines:
                order, before = json.loads(line), watch.carried()
                answer = orders[order.pop("do")](**order)
                send_answer(**{"carried": watch.carried() - before} | answer)
        except Exception as error:
            send_answer(error=f"{type(error).__name__}: {error}")
            raise


def connect(options: dict[str, Any]) -> Any:
    """The communicator of the rank that has these options, as `service_group` writes them."""
    config = omni.load_config(overrides=options["set"], environ={})
    return omni.connect(config, job=options["job"], rank=options["rank"], size=options["size"])


def join(options: dict[str, Any]) -> None:
    """The same for the functions of `data_parallel` that name no communicator."""
    config = omni.load_config(overrides=options["set"], environ={})
    session.init(config=config, job=options["job"], rank=options["rank"], size=options["size"])


class TurnTaker(Protocol):
    """A rank that knows one order."""

    def turn(self, *arguments: Any, **options: Any) -> dict[str, Any]: ...


def serve_turns(make: Callable[[dict[str, Any]], TurnTaker]) -> None:
    """Be the rank that `make` makes of the options. The program's arguments are the controller's socket and these."""
    path, text = sys.argv[1:]
    options = json.loads(text)
    serve(path, lambda: (options["rank"], {"turn": make(options).turn}))
