"""A rank of three whose optimizers keep their state on the shards. Arguments: rank, size, job, scenarios."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import omnireduce.torch as hvd
from omnireduce import AbortedError, UsageError
from omnireduce.optimizers import Adagrad, Adam, AdamW, RowAdagrad, Sgd, SparseAdam


class Model(nn.Module):
    """An embedding whose gradients are sparse, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=True)
        self.hidden = nn.Linear(8, 300)
        self.last = nn.Linear(300, 1)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(torch.tanh(self.hidden(self.table(words)))).mean()  # type: ignore[no-any-return]


def made(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def words(step: int) -> Tensor:
    return torch.randint(0, 50, (4,), generator=torch.Generator().manual_seed(100 * hvd.rank() + step))


def backward(model: Model, step: int) -> None:
    model.zero_grad()
    model(words(step)).backward()


def all_alike(model: Model) -> bool:
    """The weights of all ranks, bit for bit."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    lowest, highest = (hvd.allreduce(flat.view(torch.int32), op=op) for op in (hvd.Min, hvd.Max))
    return bool(torch.equal(lowest, highest))


def groups_of(model: Model) -> list[dict[str, Any]]:
    dense = [*model.hidden.parameters(), *model.last.parameters()]
    return [
        {"params": [model.table.weight], "rows": True, "rule": SparseAdam(lr=0.1)},
        {"params": dense, "lr": 0.01, "weight_decay": 0.1},
    ]


def groups_with_rules_of_their_own() -> None:
    """Against SparseAdam and AdamW with the mean of all gradients; at first only rank 0 has the right weights."""
    model, expected = made(7 if hvd.rank() == 0 else 99 + hvd.rank()), made(7)
    optimizer = hvd.ShardedOptimizer(groups_of(model), AdamW())
    sparse = torch.optim.SparseAdam([expected.table.weight], lr=0.1)
    dense = torch.optim.AdamW([*expected.hidden.parameters(), *expected.last.parameters()], lr=0.01, weight_decay=0.1)
    model.load_state_dict(expected.state_dict())  # so that gradients of the first step are alike
    for step in range(6):
        backward(model, step)
        backward(expected, step)
        for each in expected.parameters():
            assert each.grad is not None
            mean = hvd.allreduce(each.grad.to_dense() if each.grad.is_sparse else each.grad)
            each.grad = mean.to_sparse(1) if each.grad.is_sparse else mean
        optimizer.step()
        sparse.step()
        dense.step()
    assert all_alike(model)
    for name, each in model.state_dict().items():
        torch.testing.assert_close(each, expected.state_dict()[name], rtol=0, atol=2e-5, msg=name)
    optimizer.close()


def groups_that_are_clipped_together() -> None:
    """Against torch's own functions on the mean of all gradients, rows among them."""
    clips: list[tuple[dict[str, float], Callable[[Any], Any]]] = [
        ({"clip_norm": 0.02}, lambda p: torch.nn.utils.clip_grad_norm_(p, 0.02)),
        ({"clip_value": 0.001}, lambda p: torch.nn.utils.clip_grad_value_(p, 0.001)),
        ({"clip_norm": 1e6}, lambda p: torch.nn.utils.clip_grad_norm_(p, 1e6)),
    ]
    for clip, of_torch in clips:
        model, expected = made(7), made(7)
        optimizer = hvd.ShardedOptimizer(groups_of(model), AdamW(), **clip)
        sparse = torch.optim.SparseAdam([expected.table.weight], lr=0.1)
        rest = [*expected.hidden.parameters(), *expected.last.parameters()]
        dense = torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1)
        for step in range(4):
            backward(model, step)
            backward(expected, step)
            for each in expected.parameters():
                assert each.grad is not None
                each.grad = hvd.allreduce(each.grad.to_dense() if each.grad.is_sparse else each.grad)
            norm = of_torch(expected.parameters())
            assert expected.table.weight.grad is not None
            expected.table.weight.grad = expected.table.weight.grad.to_sparse(1)
            optimizer.step()
            sparse.step()
            dense.step()
            if "clip_norm" in clip:
                assert optimizer.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
        assert all_alike(model)
        for name, each in model.state_dict().items():
            torch.testing.assert_close(each, expected.state_dict()[name], rtol=0, atol=2e-5, msg=name)
        optimizer.close()


def a_clip_before_the_step_is_warned_of() -> None:
    """Once, on rank 0; gradients that stay as backward has made them, and those that are thrown away, are not."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("omnireduce").addHandler(handler)
    weights = nn.Parameter(torch.zeros(4))
    optimizer = hvd.ShardedOptimizer([weights], Sgd(lr=1.0))
    for to_none in (True, False):
        for _ in range(2):
            weights.sum().backward()
            weights.sum().backward()
            optimizer.step()
            optimizer.zero_grad(to_none)
    assert warnings == []
    for _ in range(2):
        weights.sum().backward()
        torch.nn.utils.clip_grad_norm_([weights], 1.0)
        optimizer.step()
    assert len(warnings) == (hvd.rank() == 0)
    assert all(
        "each rank has clipped its own ones, not their mean: give the optimizer clip_norm=" in x for x in warnings
    )
    optimizer.close()
    logging.getLogger("omnireduce").removeHandler(handler)


def two_without_names() -> None:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizers = [hvd.ShardedOptimizer([parameter], Sgd(lr=1.0)) for parameter in parameters]
    for _ in range(2):
        (parameters[0].sum() + 2 * parameters[1].sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert [parameter.tolist() for parameter in parameters] == [[-2] * 3, [-4] * 3]
    for optimizer in optimizers:
        optimizer.close()


def a_schedule_and_a_closure() -> None:
    weights = nn.Parameter(torch.zeros(1000))
    optimizer = hvd.ShardedOptimizer([weights], Sgd(lr=1.0))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure() -> float:
        optimizer.zero_grad()
        weights.sum().backward()
        return 3.5

    for _ in range(3):
        assert optimizer.step(closure) == 3.5
        schedule.step()
    assert torch.equal(weights.detach(), torch.full((1000,), -1.75))
    optimizer.close()


def states_like_those_of_torch() -> None:
    """A training that begins on the shards goes on in torch, and the other way round."""
    model, other = made(1), made(1)
    optimizer = hvd.ShardedOptimizer([*model.hidden.parameters()], Adam(lr=0.1))
    plain = torch.optim.Adam([*other.hidden.parameters()], lr=0.1)
    assert optimizer.state_dict()["state"] == {}
    gradients = [torch.full_like(parameter, 0.5) for parameter in model.hidden.parameters()]

    def steps(model: Model, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            for parameter, gradient in zip(model.hidden.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()

    steps(model, optimizer)
    result = optimizer.state_dict()
    assert sorted(result["state"][0]) == ["exp_avg", "exp_avg_sq", "step"]
    other.load_state_dict(model.state_dict())
    kept = io.BytesIO()
    torch.save(result, kept)
    kept.seek(0)
    result = torch.load(kept)  # it loads plain data only
    plain.load_state_dict({"state": result["state"], "param_groups": plain.state_dict()["param_groups"]})
    steps(model, optimizer)
    steps(other, plain)
    again = hvd.ShardedOptimizer([*model.hidden.parameters()], Adam(lr=0.1), name="again")
    again.load_state_dict(plain.state_dict())
    steps(model, again)
    steps(other, plain)
    for one, two in zip(model.hidden.parameters(), other.hidden.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6)
    assert float(again.state_dict()["state"][1]["step"]) == 6
    optimizer.close()
    again.close()


def a_state_without_some_parameters() -> None:
    """A parameter without a gradient has no state in torch's SGD, and an empty one in its Adagrad."""
    for name, rule, make in (
        ("momentum", Sgd(lr=0.5, momentum=0.5), lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5)),
        ("sums", Adagrad(lr=0.5, initial_accumulator_value=4.0, eps=0.0),
         lambda p: torch.optim.Adagrad(p, lr=0.5, initial_accumulator_value=4.0, eps=0.0)),
    ):  # fmt: skip
        parameters, expected = ([nn.Parameter(torch.zeros(3)) for _ in range(2)] for _ in range(2))
        plain = make(expected)
        expected[0].grad = torch.full((3,), 2.0)
        plain.step()
        optimizer = hvd.ShardedOptimizer(parameters, rule, name=name)
        state = plain.state_dict()
        state["state"].pop(1, None) if name == "sums" else None
        optimizer.load_state_dict(state)
        parameters[0].data.copy_(expected[0].data)
        for mine, other in zip(parameters, expected, strict=True):
            mine.grad, other.grad = torch.full((3,), 2.0), torch.full((3,), 2.0)
        optimizer.step()
        plain.step()
        for mine, other in zip(parameters, expected, strict=True):
            torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-6, atol=0)
        optimizer.close()


def weights_of_another_rank() -> None:
    """Before the first gradients, and when a program has changed them: the state stays."""
    weights = nn.Parameter(torch.full((5,), float(hvd.rank())))
    optimizer = hvd.ShardedOptimizer([weights], Sgd(lr=1.0, momentum=0.5))
    optimizer.restore(1)
    assert torch.equal(weights.detach(), torch.ones(5))
    for expected in (0.0, 0.5):
        weights.grad = torch.ones(5)
        optimizer.step()
        assert torch.equal(weights.detach(), torch.full((5,), expected))
        weights.data.fill_(2.0)
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.close()


def one_that_loads_a_state() -> None:
    """The others make a step with what the shards have, which it has given back."""
    weights = nn.Parameter(torch.zeros(10))
    optimizer = hvd.ShardedOptimizer([weights], Sgd(lr=1.0, momentum=0.5), name="one")
    weights.grad = torch.ones(10)
    optimizer.step()
    state = optimizer.state_dict()
    if hvd.rank() == 0:
        optimizer.load_state_dict(state)
    with pytest.raises(AbortedError, match="had shut down when"):
        optimizer.step()


def rows_by_adagrad() -> None:
    model = made(3)
    optimizer = hvd.ShardedOptimizer([{"params": [model.table.weight], "rows": True}], RowAdagrad(lr=0.1))
    before = model.table.weight.detach().clone()
    backward(model, 0)
    optimizer.step()
    touched = {int(each) for rank in hvd.allgather(words(0)) for each in rank.reshape(-1)}
    changed = torch.any(model.table.weight.detach() != before, dim=1).nonzero().reshape(-1).tolist()
    assert set(changed) == touched
    assert optimizer.state_dict()["state"][0]["sum"].shape == (50,)
    optimizer.close()


def wrong_use() -> None:
    weights = nn.Parameter(torch.zeros(10))
    with pytest.raises(UsageError, match=r"rule is 0\.1; expected one of omnireduce\.optimizers"):
        hvd.ShardedOptimizer([weights], 0.1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="parameter 0 is float64"):
        hvd.ShardedOptimizer([nn.Parameter(torch.zeros(10, dtype=torch.float64))], Adam())
    with pytest.raises(UsageError, match="a state of 2 groups; expected 1"):
        hvd.ShardedOptimizer([weights], Adam(), name="groups").load_state_dict({"state": {}, "param_groups": [{}, {}]})
    with pytest.raises(UsageError, match="lr is -1"):
        hvd.ShardedOptimizer([{"params": [weights], "lr": -1}], Adam())
    with pytest.raises(UsageError, match="rule is 5; expected one of"):
        hvd.ShardedOptimizer([{"params": [weights], "rule": 5}], Adam())
    with pytest.raises(UsageError, match="a group of parameters is a Tensor; expected a dict"):
        hvd.ShardedOptimizer([{"params": [weights]}, torch.zeros(1)], Adam())
    optimizer = hvd.ShardedOptimizer([weights], Adam(), name="added")
    with pytest.raises(UsageError, match="parameter 0 is float64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(10, dtype=torch.float64))]})
    optimizer.load_state_dict(optimizer.state_dict())  # has one group
    model = made(1)
    optimizer = hvd.ShardedOptimizer(model.parameters(), Adam())
    with pytest.raises(UsageError, match="the state has no 'state' or no 'param_groups'"):
        optimizer.load_state_dict({})
    with pytest.raises(UsageError, match="the state of a ShardedOptimizer is on the shards"):
        hvd.broadcast_optimizer_state(optimizer)
    with pytest.raises(UsageError, match="a ShardedOptimizer combines gradients itself"):
        hvd.DistributedOptimizer(optimizer)
    backward(model, 0)
    with pytest.raises(UsageError, match="parameter 0 has a sparse gradient; `rows` of its group is False"):
        optimizer.step()
    optimizer.close()


def main() -> None:
    torch.set_num_threads(1)
    hvd.init(rank=int(sys.argv[1]), size=int(sys.argv[2]), job=sys.argv[3])
    scenarios: dict[str, Callable[[], None]] = globals()
    for scenario in sys.argv[4:]:
        sys.stderr.write(f"{scenario}\n")
        scenarios[scenario]()
    hvd.shutdown()


if __name__ == "__main__":
    main()
