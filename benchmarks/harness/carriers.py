"""The transports that carried the bytes of a benchmark, as its ranks counted them, not as configured.

    python -m benchmarks.harness.carriers FILE ARGUMENTS...

runs a Python file, and says on standard error what carried its bytes: those of omnireduce or, if it made no
communicator, those of torch's process group.

A transport that is configured may carry nothing: ranks of one host exchange in memory, unless that is turned off. So
each row says what carried its bytes. A benchmark that names a transport fails if another one carried them.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import socket
import stat
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omnireduce.runtime.rank import engine
from omnireduce.support.printing import carriers_text

CARRIED_BY = re.compile(r"^carried by (\S+)$", re.MULTILINE)
NOTHING = carriers_text({})
NO_SOCKET = "no socket"
BYTES_RECEIVED = struct.Struct("128xQ")  # in the kernel's struct tcp_info
Carried = Mapping[str, int]  # bytes, by transport


class CommunicatorWatch:
    """The communicators that this process makes from now on."""

    def __init__(self) -> None:
        self._communicators: list[Any] = []
        self._opened = engine.opened
        engine.opened = self._remember  # which each communicator calls when it has joined

    def _remember(self, communicator: Any) -> None:
        if communicator not in self._communicators:
            self._communicators.append(communicator)
        self._opened(communicator)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._communicators)

    def carried(self) -> Counter[str]:
        """The bytes that they have carried so far."""
        return sum_carried(comm.statistics().carried for comm in self._communicators)


@contextlib.contextmanager
def count_socket_bytes() -> Iterator[Counter[str]]:
    """For a library that does not count its bytes, such as MPI or gloo: what TCP has carried meanwhile to this process,
    or that no socket has carried anything. The counter is filled at the end."""
    carried, before = Counter[str](), tcp_bytes()
    yield carried
    received = tcp_bytes() - before
    carried.update({"tcp": received} if received else {NO_SOCKET: 1})


def tcp_bytes() -> int:
    """The bytes that this process's open TCP connections have received so far, as the kernel counts them."""
    total = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile, as that of the folder is
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED.size)
                    total += BYTES_RECEIVED.unpack(info)[0]
    return total


def sum_carried(parts: Iterable[Carried]) -> Counter[str]:
    """The sum of all."""
    return sum(map(Counter, parts), Counter[str]())


def wrong_carrier(expected: str, actual: str) -> str:
    """The error, if another carrier than `expected`, such as "tcp" or "memory+tcp", was found; empty if there is
    none."""
    return "" if actual == expected else f"{actual} carried the tensors, and not {expected}, as the benchmark says"


def main() -> None:
    watch, counted = CommunicatorWatch(), list[Carried]()
    del sys.argv[0]

    def print_carriers() -> None:
        sys.stderr.write(f"\ncarried by {carriers_text(watch.carried() if watch else sum_carried(counted))}\n")

    with contextlib.ExitStack() as stack:
        stack.callback(print_carriers)
        if "torch" in Path(sys.argv[0]).read_text(encoding="utf-8"):
            _count_process_group(stack, counted)
        runpy.run_path(sys.argv[0], run_name="__main__")


def _count_process_group(stack: contextlib.ExitStack, counted: list[Carried]) -> None:
    """Count from when torch's ranks have met until they part, which closes their connections. Then close the stack."""
    import torch.distributed as dist

    init, destroy = dist.init_process_group, dist.destroy_process_group

    def counted_init(*arguments: Any, **options: Any) -> None:
        init(*arguments, **options)
        counted.append(stack.enter_context(count_socket_bytes()))

    def counted_destroy(*arguments: Any, **options: Any) -> None:
        stack.close()
        destroy(*arguments, **options)

    dist.init_process_group, dist.destroy_process_group = counted_init, counted_destroy


if __name__ == "__main__":
    main()
