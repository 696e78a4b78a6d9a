"""Deliberate bugs of the product, each of which the simulator has to catch. One file for each part of the product."""

from __future__ import annotations

from . import admission, aggregator, coding, hosts, joining, kernels, programs, relays, runtime, worker
from .base import Mutation

__all__ = ["BY_NAME", "MUTATIONS", "Mutation"]
MUTATIONS: tuple[Mutation, ...] = (
    *worker.MUTATIONS,
    *aggregator.MUTATIONS,
    *coding.MUTATIONS,
    *kernels.MUTATIONS,
    *hosts.MUTATIONS,
    *admission.MUTATIONS,
    *runtime.MUTATIONS,
    *joining.MUTATIONS,
    *relays.MUTATIONS,
    *programs.MUTATIONS,
)
BY_NAME = {mutation.name: mutation for mutation in MUTATIONS}
