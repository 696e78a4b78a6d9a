"""RDMA links on pyverbs: `devices` finds ports to send from, `queue` owns the verbs objects, `link` is the transport,
and `connect` negotiates it between two ends.

Nothing here is imported unless a verbs link may be wanted. Only `devices` and `queue` import pyverbs itself.
"""

from __future__ import annotations

import threading

_importing = threading.Lock()


def import_rdma() -> None:
    """Import the modules that need pyverbs. Raises TransportError if it is missing or does not load.

    Only one thread imports at a time: an import that fails in one thread can fail in another thread in other ways.
    """
    with _importing:
        import omnireduce.transport.verbs.connect  # noqa: F401
