"""Optimizers whose state lives on the aggregator shards, divided among them, once for all ranks.

from omnireduce.optimizers import Adam, ShardedOptimizer

optimizer = ShardedOptimizer({"weights": weights}, Adam(lr=1e-3))
optimizer.step({"weights": gradient})  # the same new weights on all ranks
"""

from omnireduce.optimizers.rules import Adagrad, Adam, AdamW, Lamb, RowAdagrad, Rule, Sgd, SparseAdam
from omnireduce.optimizers.sharded import ShardedOptimizer

__all__ = ["Adagrad", "Adam", "AdamW", "Lamb", "RowAdagrad", "Rule", "Sgd", "ShardedOptimizer", "SparseAdam"]
