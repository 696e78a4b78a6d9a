"""SwitchML's client over the service: a context that takes jobs, and jobs to wait for.

    from omnireduce.switchml import Context

    with Context.instance() as context:
        job = context.allreduce_async(gradient)
        job.wait()

context     starts, takes jobs in order, stops
job         one all-reduce: its state, how to wait for it
packets     jobs in packets, through a pre- and postprocessor
prepostprocessor    what loads tensors into packets and unloads sums: for a class of your own
dummy       the backend that exchanges nothing
settings    `switchml.cfg`, and which of its keys mean something here
stats       how many jobs, of which sizes

docs/switchml.md says how the names of SwitchML's C++ client map to these.
"""

from omnireduce.switchml.context import Context, ContextState
from omnireduce.switchml.job import Distribution, Job, JobState, Stats
from omnireduce.switchml.prepostprocessor import CpuExponentQuantizer, JobSlice, PrePostProcessor
from omnireduce.switchml.settings import Settings, load_settings

__all__ = [
    "Context",
    "ContextState",
    "CpuExponentQuantizer",
    "Distribution",
    "Job",
    "JobSlice",
    "JobState",
    "PrePostProcessor",
    "Settings",
    "Stats",
    "load_settings",
]
