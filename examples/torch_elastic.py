"""A training that loses a rank and gets one, and takes each sample of each epoch exactly once.

    omnireduce aggregator --listen localhost:7400
    export OMNIREDUCE_CLUSTER_AGGREGATORS=localhost:7400 OMNIREDUCE_CLUSTER_JOB=demo OMNIREDUCE_ELASTIC_ENABLED=true
    RANK=0 WORLD_SIZE=2 python torch_elastic.py & RANK=1 WORLD_SIZE=2 python torch_elastic.py
    (kill one of them with kill -9, and start it again)

The weight of a sample becomes less by 1 when the sample is taken. So in the end all weights are -epochs.
"""

import argparse
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import omnireduce.torch as hvd


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState, data: TensorDataset, arguments: argparse.Namespace) -> None:
    say(f"rank {hvd.rank()} of {hvd.size()} goes on in epoch {state.epoch}")
    while state.epoch < arguments.epochs or hvd.size() < arguments.ranks or state.sampler.processed_indices:
        loader = DataLoader(data, arguments.batch_size, sampler=state.sampler)
        for batch_number, (numbers,) in enumerate(loader):
            state.optimizer.zero_grad()
            state.model.weight[numbers].sum().backward()
            state.optimizer.step()
            state.sampler.record_batch(batch_number, arguments.batch_size)
            state.commit()
            say(f"rank {hvd.rank()} of {hvd.size()}: epoch {state.epoch}, batch {batch_number}")
        last = hvd.join()  # a rank with fewer batches waits for the others, and gets what they have learned
        hvd.broadcast_parameters(state.model.state_dict(), root_rank=last)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A training that loses a rank and gets one, and takes each sample of each epoch exactly once."
    )
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="go on until there are so many")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    data = TensorDataset(torch.arange(arguments.samples))
    model = torch.nn.Linear(1, arguments.samples, bias=False)
    torch.nn.init.zeros_(model.weight)
    local_optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(local_optimizer, named_parameters=model.named_parameters(), op=hvd.Sum)
    sampler = hvd.elastic.ElasticSampler(data, pad=False)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    train(state, data, arguments)
    times_taken = (-model.weight.detach()).flatten().int()
    samples_text = f"each sample was taken {times_taken.min()} to {times_taken.max()} times in {state.epoch} epochs"
    say(f"rank {hvd.rank()} of {hvd.size()} is done; {samples_text}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
