"""Tensors as parts of plain data."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from msgspec.msgpack import Ext, encode
from torch import Tensor, nn

import omnireduce.torch  # noqa: F401  so that objects may have tensors
from omnireduce import UsageError
from omnireduce.runtime.rank.calls.objects import CODECS, FrontObject, from_bytes, to_bytes

TENSORS = [
    torch.arange(6.0).reshape(2, 3).T,
    torch.ones(0, 5),
    torch.tensor(3, dtype=torch.uint16),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j, -1j]).conj(),
    torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
    torch.ones(2, requires_grad=True),
    nn.Parameter(torch.ones(2, 2)),
    nn.Parameter(torch.ones(2), requires_grad=False),
]


def back(x: object) -> Any:
    return from_bytes(to_bytes(x, trust=False), trust=False, sender="rank 1")


@pytest.mark.parametrize("x", TENSORS, ids=lambda x: f"{x.dtype}{list(x.shape)}")
def test_tensors_read_back(x: Tensor) -> None:
    [result] = back([x])
    assert type(result) is type(x)
    assert (result.dtype, result.requires_grad) == (x.dtype, x.requires_grad)
    assert torch.equal(result, x.detach())
    assert result.signbit().tolist() == x.signbit().tolist() if not x.is_complex() else True


def test_the_state_of_a_training_reads_back() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(net.parameters())
    rates = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 2])
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    model, state, milestones = back([net.state_dict(), optimizer.state_dict(), rates.state_dict()["milestones"]])
    assert type(model) is OrderedDict
    assert list(model) == list(net.state_dict())
    assert torch.equal(state["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert milestones == Counter({1: 2, 2: 1})
    assert type(milestones) is Counter
    net.load_state_dict(model)
    optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    "x", [torch.eye(2).to_sparse(), torch.ones(2, device="meta"), torch.ones(2).to(torch.float8_e5m2)], ids=str
)
def test_what_is_no_plain_tensor_is_refused(x: Tensor) -> None:
    with pytest.raises(UsageError, match=r"a tensor of torch\.float.* is no plain data; pass trust=True"):
        to_bytes([x], trust=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("torch.Tensor", ["float32", [2], bytes(7), False]), ("torch.Tensor", ["float32", [-2], bytes(8), False]),
        ("torch.Tensor", ["system", [1], bytes(4), False]), ("torch.Tensor", ["float32", [1], bytes(4), 1]),
        ("torch.Tensor", ["float32", [2**40, 2**40, 0], b"", False]), ("torch.Tensor", ["int8", [1] * 65, b"1", False]),
        ("torch.Tensor", ["int8", [1], b"1", True]), ("torch.nn.Parameter", ["int8", [1], b"1", True]),
        ("torch.Tensor", 3), ("os.system", ["true"]), ("x" * 41, []), (3, []),
    ],
)  # fmt: skip
def test_what_a_liar_says_is_refused(name: object, content: object) -> None:
    data = encode(Ext([*CODECS].index(FrontObject), encode([name, encode(content)])))
    with pytest.raises(UsageError, match="the object of rank 1 cannot be read"):
        from_bytes(data, trust=False, sender="rank 1")


def test_a_bool_of_a_peer_is_one() -> None:
    encoded = encode(["torch.Tensor", encode(["bool", [3], b"\x00\x01\x07", False])])
    result = from_bytes(encode(Ext([*CODECS].index(FrontObject), encoded)), trust=False, sender="rank 1")
    assert isinstance(result, Tensor)
    assert result.view(torch.uint8).tolist() == [0, 1, 1]
