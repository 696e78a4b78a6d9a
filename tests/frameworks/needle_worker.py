"""A rank that trains with Needle in several ways; it prints a line of JSON for each. Its values go to FOLDER.

But for `import omnireduce.needle`, the flow is that of Needle's tutorial.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import needle as ndl
import numpy as np
import telling

import omnireduce.needle as ddp
from omnireduce.errors import UsageError

rank, device = ddp.init()
SIZE = ddp.size()
tell = partial(telling.tell, rank)


def digest(tensors: Any) -> str:
    return telling.digest([tensor.numpy() for tensor in tensors])


def network(seed: int) -> Any:
    np.random.seed(seed)
    return ndl.nn.Sequential(
        ndl.nn.Linear(6, 8, device=device), ndl.nn.ReLU(), ndl.nn.Linear(8, 3, device=device)
    )  # fmt: skip


def dataset(samples: int) -> Any:
    chance = np.random.default_rng(7)
    inputs, labels = chance.standard_normal((samples, 6)).astype(np.float32), chance.integers(0, 3, samples)
    return ndl.data.NDArrayDataset(inputs, labels)


def train(model: Any, opt: Any, loader: Any, epochs: int = 3) -> None:
    loss_fn = ndl.nn.SoftmaxLoss()
    for _ in range(epochs):
        for batch in loader:
            opt.reset_grad()
            X, y = batch  # noqa: N806  as in the tutorial
            loss = loss_fn(model(X), y)
            loss.backward()
            opt.step()


def keep(way: str, model: Any) -> None:
    telling.keep(rank, SIZE, way, {f"p{at}": parameter.numpy() for at, parameter in enumerate(model.parameters())})


def as_in_the_tutorial() -> None:
    train_dataloader, bsz = ddp.partition_dataset(
        dataset=dataset(36), batch_size=12, device=device, dtype="float32")  # fmt: skip
    model = network(seed=rank)
    ddp.broadcast_parameters(model)
    model.train()
    opt = ndl.optim.Adam(model.parameters(), lr=0.001, weight_decay=0.001)
    opt = ddp.DistributedOptimizer(opt)
    train(model, opt, train_dataloader)
    assert (bsz, len(train_dataloader)) == (12 // SIZE, 3)
    keep("as in the tutorial", model)


def with_uneven_batches() -> None:
    """37 samples in batches of 8: no number of them can be divided by three."""
    loader, _ = ddp.partition_dataset(dataset(37), 8, device, "float32")
    model = network(seed=rank)
    ddp.broadcast_parameters(model)
    opt = ddp.DistributedOptimizer(ndl.optim.SGD(model.parameters(), lr=0.125), loader=loader)
    train(model, opt, loader)
    opt.lr = 0.5  # sets the rate of the wrapped optimizer
    assert opt.opt.lr == 0.5
    keep("with uneven batches", model)


def from_another_root() -> None:
    """Rank 1 has trained alone before; the others get all that it has."""
    model = network(seed=rank)
    model.norm = ndl.nn.BatchNorm1d(4, device=device)
    model.norm.running_mean = ndl.Tensor(np.full(4, rank + 1.0), device=device)
    opt = ndl.optim.Adam(model.parameters(), lr=0.125 * (rank + 1))
    if rank == 1:
        for parameter in model.parameters():
            parameter.grad = ndl.Tensor(np.ones(parameter.shape), device=device)
        opt.step()
    ddp.broadcast_parameters(model, root_rank=1, optimizer=opt)
    state = [opt.m[param] for param in opt.params if param in opt.m] + [
        opt.v[param] for param in opt.params if param in opt.v
    ]
    tell(
        "from another root",
        digest=digest(model.parameters()), mean=float(model.norm.running_mean.numpy()[0]),
        state=digest(state), states=len(state), parameters=len(opt.params), t=opt.t, lr=opt.lr,
    )  # fmt: skip


def sparse() -> None:
    """Each rank looks up some of many words: only their rows travel."""
    words = ndl.nn.Embedding(4000, 64, device=device)
    ddp.broadcast_parameters(words)
    before = words.weight.numpy().copy()
    opt = ddp.DistributedOptimizer(ndl.optim.SGD(words.parameters(), lr=SIZE))
    opt.reset_grad()
    opt.step()  # no rank has a gradient: nothing happens
    comm = ddp.training.communicator()
    sent = comm.statistics().sent_bytes
    looked_up = np.array([rank, 100 + rank, 3000])
    grad = np.zeros((4000, 64), np.float32)
    grad[looked_up] = 1
    words.weight.grad = ndl.Tensor(grad, device=device)
    opt.step()
    changed = (words.weight.numpy() - before).round(3)
    rows = np.flatnonzero(changed.any(1)).tolist()
    sent = comm.statistics().sent_bytes - sent
    tell("sparse", rows=rows, shared=float(changed[3000, 0]), share=sent / grad.nbytes)


def shared_gradients() -> None:
    """One tensor may be the gradient of two parameters, and a gradient may be a transpose."""
    shape = 600, 400  # too large to be copied
    first, second = (ndl.nn.Parameter(np.zeros(shape), device=device) for _ in range(2))
    first.grad = second.grad = ndl.Tensor(np.full(shape, rank + 1.0), device=device)
    opt = ddp.DistributedOptimizer(ndl.optim.SGD([first, second], lr=1.0))
    opt.average_gradients()
    tell("shared gradients", means=[float(each.grad.numpy()[0, 0]) for each in (first, second)])


def wrong() -> None:
    results = []
    model = network(seed=0)
    for call in (
        lambda: ddp.init(),
        lambda: ddp.partition_dataset(dataset(36), SIZE - 1, device),
        lambda: ddp.partition_dataset(dataset(0), 12, device),
        lambda: ddp.broadcast_parameters(ndl.nn.ReLU()),
        lambda: ddp.broadcast_parameters(model, root_rank=SIZE),
        lambda: ddp.broadcast_parameters(ndl.nn.Linear(2, 3 + rank)),
        lambda: ddp.DistributedOptimizer(model),
    ):
        try:
            call()
        except UsageError as error:
            results.append(str(error))
    tell("wrong", errors=results)


for way in (as_in_the_tutorial, with_uneven_batches):
    way()
if SIZE > 1:
    for way in (from_another_root, sparse, shared_gradients, wrong):
        way()
ddp.shutdown()
