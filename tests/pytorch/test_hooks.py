"""Hooks of DistributedDataParallel: what they keep, send and average."""

from __future__ import annotations

import pytest
import torch
from groups import run_group
from torch import nn

from omnireduce import UsageError
from omnireduce.torch import ProcessGroup
from omnireduce.torch.ddp_hooks import State, keep_largest


@pytest.mark.parametrize(
    ("length", "density", "kept"),
    [(0, 0.5, []), (3, 0.01, [0, 1, 2]), (16, 0.5, [8, 9, 10, 11, 12, 13, 14, 15]), (10, 0.34, [8, 9])],
)
def test_the_blocks_with_the_largest_norms_are_kept(length: int, density: float, kept: list[int]) -> None:
    """Blocks of four; a short last one counts as one."""
    x = torch.arange(1.0, length + 1)
    x[8:] *= 10
    before = x.clone()
    keep_largest(x, density, 4)
    assert x.nonzero().flatten().tolist() == kept
    assert torch.equal(x[kept], before[kept])


def test_infinities_are_kept() -> None:
    x = torch.ones(12)
    x[5] = float("inf")
    keep_largest(x, 0.3, 4)
    assert x.tolist() == [0] * 4 + [1, float("inf"), 1, 1] + [0] * 4


@pytest.mark.parametrize("wrong", [{"density": 0}, {"density": 1.5}, {"block_size": 0}])
def test_impossible_numbers_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} .*: expected"):
        State(nn.Linear(2, 2), **wrong)


def test_what_was_kept_of_another_model_is_refused() -> None:
    kept = object.__new__(State)  # without a group
    kept.names = {each: name for name, each in nn.Linear(2, 3).named_parameters()}
    kept.load_state_dict({"residuals": {"weight": torch.ones(3, 2)}})
    assert kept.state_dict()["residuals"]["weight"].tolist() == [[1, 1]] * 3
    with pytest.raises(UsageError, match=r"'module.weight' of shape \(3, 2\) was saved; in this model it is not there"):
        kept.load_state_dict({"residuals": {"module.weight": torch.ones(3, 2)}})
    with pytest.raises(UsageError, match=r"'bias' of shape \(2,\) was saved; in this model it has shape \(3,\)"):
        kept.load_state_dict({"residuals": {"bias": torch.ones(2)}})


@pytest.mark.usefixtures("aggregators")
def test_what_was_kept_goes_to_the_device_of_its_parameter() -> None:
    def run(group: ProcessGroup, rank: int) -> str:
        state = State(nn.Linear(3, 2, device="meta"), process_group=group)
        state.load_state_dict({"residuals": {"weight": torch.ones(2, 3)}})
        return state.residuals["weight"].device.type

    assert run_group(1, run) == ["meta"]
