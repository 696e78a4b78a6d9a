"""These tests need keras and one of its backends, which `make keras` installs. Without them one test says so, and the
others are left out."""

from __future__ import annotations

import os
from importlib.util import find_spec

BACKENDS = [name for name in ("torch", "jax", "tensorflow") if find_spec(name) is not None]
HAS_KERAS = find_spec("keras") is not None and BACKENDS != []
collect_ignore_glob = [] if HAS_KERAS else ["test_[!v]*.py"]  # test_versions_of_keras.py says so
if HAS_KERAS:
    os.environ.setdefault("KERAS_BACKEND", BACKENDS[0])  # backend of this process; ranks get theirs
