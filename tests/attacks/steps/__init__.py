"""Attacks. An attack is a generator, made from the target and a source of random numbers. It does one step for each
word that it yields; the word says how the step ended. OSError and AssertionError end a step, not the attack."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from ..target import Target

Attack = Callable[[Target, random.Random], Iterator[str]]
