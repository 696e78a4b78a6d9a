"""The job of one process group: its ranks join it together, and start collectives in one order."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from omnireduce.core.descriptor import REFUSED_BYTES
from omnireduce.errors import ClosedError, OmniReduceError
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.error_agreement import run_agreed_by
from omnireduce.runtime.rank.global_communicator import connect
from omnireduce.support.config import Config, load_config, override_config
from omnireduce.torch.backend.work import as_torch_error

SHORTEST_S, LONGEST_S = 0.1, 86400.0  # that `cluster.timeout_s` may be
DRAWN_BYTES = 8
T = TypeVar("T")


class GroupJob:
    """The job of the ranks of `gloo`. A collective may take as long as `timeout`."""

    def __init__(self, gloo: dist.ProcessGroup, timeout: timedelta) -> None:
        self._gloo = gloo
        self._timeout_s = min(max(timeout.total_seconds(), SHORTEST_S), LONGEST_S)
        self._order = threading.RLock()  # a signal handler may come on top
        self._communicator: Communicator | None = None
        self._has_left = False

    def start(self, begin: Callable[[Communicator], T]) -> T:
        """Start a collective, or go through it; return what `begin` returns. All ranks start theirs in the same order,
        in any thread.

        Raises RuntimeError.
        """
        with self._order:
            communicator = self.join()
            try:
                communicator.take_over()
                return begin(communicator)
            except OmniReduceError as error:
                raise as_torch_error(error) from error

    def refuse(self, error: Exception) -> None:
        """Let the other ranks know that this one refuses the next collective: see `Communicator.refuse`."""
        with self._order, suppress(RuntimeError):  # the job is over
            communicator = self.join()
            communicator.take_over()
            communicator.refuse(error)

    def join(self) -> Communicator:
        """Join the job, unless this rank has. All ranks must do so. Raises RuntimeError, also after `leave`."""
        with self._order:
            self._check_not_left()
            if self._communicator is None:
                try:
                    communicator = self._connect(*self._agree())
                except OmniReduceError as error:
                    raise as_torch_error(error) from error
                self._communicator = communicator
                if self._has_left:  # by another thread, or a signal handler, that did not see it
                    communicator.shutdown()
                self._check_not_left()
            return self._communicator

    def _check_not_left(self) -> None:
        if self._has_left:
            raise as_torch_error(ClosedError("this process group was destroyed; make a new one to go on"))

    def _agree(self) -> tuple[str, Config]:
        """The id of this job, which rank 0 draws, and the configuration. Returns when all ranks are here; a rank that
        has died is noticed at once. Raises ConfigError, and UsageError if another rank has raised it."""
        own_id, texts = secrets.token_bytes(DRAWN_BYTES), list[bytes]()

        def exchange(_: Config | None, reason: str) -> list[str]:
            texts.extend(self._exchange_bytes((own_id + reason.encode()).ljust(DRAWN_BYTES + REFUSED_BYTES, b"\0")))
            return [text[DRAWN_BYTES:].rstrip(b"\0").decode() for text in texts]

        config = run_agreed_by(lambda: load_config(overrides=[f"cluster.timeout_s={self._timeout_s}"]), exchange)
        return texts[0][:DRAWN_BYTES].hex(), config

    def _exchange_bytes(self, data: bytes) -> list[bytes]:
        """Exchange bytes, equally many on all ranks; return those of each rank. Raises DistBackendError."""
        parts = [torch.empty(len(data), dtype=torch.uint8, device="cpu") for _ in range(self._gloo.size())]
        try:
            self._gloo.allgather([parts], [torch.frombuffer(bytearray(data), dtype=torch.uint8)]).wait()
        except RuntimeError as error:
            raise dist.DistBackendError(f"omnireduce: not all ranks came to join the job: {error}") from error
        return [part.numpy().tobytes() for part in parts]

    def _connect(self, launch: str, config: Config) -> Communicator:
        config = override_config(config, {"cluster.launch": launch}, source="process group")
        name = "torch" if config.cluster.job == "auto" else config.cluster.job
        communicator = connect(config, job=f"{name}-{launch}", rank=self._gloo.rank(), size=self._gloo.size())
        communicator.drives_in_background = False  # a thread waits for each collective: see `Completion`
        return communicator

    def leave(self) -> None:
        """Leave the job; collectives under way fail on all ranks."""
        self._has_left = True
        if self._communicator is not None:
            self._communicator.shutdown()
