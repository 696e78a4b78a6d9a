"""Observation of a daemon under attack: the memory of its shard ten times a second, /healthz once a second."""

from __future__ import annotations

import http.client
import threading
import time
from types import TracebackType
from typing import Self

from faults.site import held
from local_cluster import WAIT_S

from omnireduce.support.addresses import parse_address

SAMPLE_S, PROBE_S = 0.1, 1.0  # between two samples of the memory, between two probes


class Watch:
    """Peak memory of a shard and answers of /healthz, from the begin of the `with` block to its end."""

    def __init__(self, shard: int, http_address: str) -> None:
        self._shard, self._http = shard, parse_address(http_address)
        self._over = threading.Event()
        self._threads = [threading.Thread(target=loop) for loop in (self._sample_memory, self._probe)]
        self.peak_bytes = 0
        self.probes = 0
        self.slowest_probe_s = 0.0
        self.troubles: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _sample_memory(self) -> None:
        while not self._over.wait(SAMPLE_S):
            try:
                self.peak_bytes = max(self.peak_bytes, held(self._shard).memory)
            except (FileNotFoundError, ProcessLookupError, IndexError):  # a process that has ended has no figures
                self.troubles.append("the shard died")
                return

    def _probe(self) -> None:
        while not self._over.wait(PROBE_S):
            self.probes, began = self.probes + 1, time.monotonic()
            connection = http.client.HTTPConnection(*self._http, timeout=WAIT_S)
            try:
                connection.request("GET", "/healthz")
                status = connection.getresponse().status
                if status != http.HTTPStatus.OK:
                    self.troubles.append(f"/healthz: status {status}")
            except (OSError, http.client.HTTPException) as error:
                self.troubles.append(f"/healthz: {error!r}")
            finally:
                connection.close()
            self.slowest_probe_s = max(self.slowest_probe_s, time.monotonic() - began)
