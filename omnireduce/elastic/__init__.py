"""Training that goes on when ranks fail or come: a state as of the last commit, and a loop around a function.

    state = ElasticState(comm, {"weights": weights})
    run_elastic(comm, state, train)

The words are Horovod's ("Elastic Horovod", documentation): commit, restore, sync. `ElasticState` is for arrays. A state
for torch is in `omnireduce.torch.elastic`, one for Keras in `omnireduce.keras.elastic`.
"""

from omnireduce.elastic.array_state import ElasticState, run_elastic
from omnireduce.elastic.loop import State
from omnireduce.elastic.object_state import ObjectState, run

__all__ = ["ElasticState", "ObjectState", "State", "run", "run_elastic"]
