"""Programs that are written already, and the schedules in which each can run.

    sgd, adam, lamb     parameter updates: ar-c, rs-c-ag, fuse-rs-c-ag
    model-parallel      a layer whose weights are cut: mm-ar-c, mm-rs-c-ag, ol-mm-fuse-rs-c-ag
    pipeline-parallel   a layer of which the next group of ranks does a part: ar-p2p-c, rs-p2p-c-ag

The names of schedules are CoCoNet's: ar is AllReduce, rs ReduceScatter, c what is computed, ag AllGather, mm MatMul,
p2p Send and Recv; fuse puts what follows into one AllReduce, ol overlaps.
"""

from omnireduce.programs.library.layers import model_parallel, pipeline_parallel
from omnireduce.programs.library.optimizers import adam, lamb, sgd
from omnireduce.programs.library.schedules import PROGRAMS, schedules

__all__ = ["PROGRAMS", "adam", "lamb", "model_parallel", "pipeline_parallel", "schedules", "sgd"]
