"""Attacks. An attack takes the target and a source of random numbers; it is a generator that strikes once for
each word that it yields, and the word says what came of it. OSError and AssertionError end a stroke, not the attack."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from ..target import Target

Attack = Callable[[Target, random.Random], Iterator[str]]
