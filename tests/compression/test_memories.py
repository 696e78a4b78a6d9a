"""Memories: nothing is lost, what is saved can be gone on with, an overflow does not come back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import Array

from omnireduce import UsageError
from omnireduce.compression import BlockTopK, DgcMomentum, Memory, NoMemory, RandomK, Residual, Selector, TopK
from omnireduce.kernels.codecs.table import BUILT_IN, codec_named
from omnireduce.protocol.collective.codecs import BlockCoder

SEEDS = st.integers(0, 2**32 - 1)
SELECTORS = [TopK(0.1), BlockTopK(0.1, 8), RandomK(0.2)]


def gradients(seed: int, steps: int, size: int) -> Array:
    """Whole numbers, so that float32 adds them exactly."""
    return np.random.default_rng(seed).integers(-1000, 1001, (steps, size)).astype(np.float32)


def sent_of(x: Array, selector: Selector, step: int) -> tuple[Array, Array]:
    places = selector.select(x, "w", step)
    sent = np.zeros_like(x)
    for place in places * selector.block_size:
        sent[place : place + selector.block_size] = x[place : place + selector.block_size]
    return places, sent


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda each: type(each).__name__)
@given(seed=SEEDS, size=st.integers(1, 200))
def test_what_was_sent_and_what_is_left_are_all_gradients(selector: Selector, seed: int, size: int) -> None:
    memory, total = Residual(), np.zeros(size, np.float32)
    given_ = gradients(seed, 12, size)
    for step, gradient in enumerate(given_):
        before = gradient.copy()
        places, sent = sent_of(memory.compensate(gradient, "w"), selector, step)
        memory.keep_selected("w", places, selector)
        total += sent
        assert (gradient == before).all()
    assert (total + memory.state_dict()["residuals"]["w"] == given_.sum(axis=0)).all()


@pytest.mark.parametrize("codec", sorted(BUILT_IN))
@given(seed=SEEDS, size=st.integers(1, 200))
def test_the_error_of_a_codec_is_kept(codec: str, seed: int, size: int) -> None:
    memory, total = Residual(), np.zeros(size)
    given_ = gradients(seed, 5, size)
    for gradient in given_:
        coder = BlockCoder(codec, codec_named(codec), 16)
        sent = coder.round_trip(memory.compensate(gradient, "w"), np.zeros(-(-size // 16), np.uint64))
        memory.keep_rest("w", sent)
        total += sent
    left = memory.state_dict()["residuals"]["w"].astype(np.float64)
    difference = total + left - given_.sum(axis=0, dtype=np.float64)
    exact = codec in ("bf16", "fp16", "int8", "qsgd")  # the rest after these codecs is a multiple of the same unit
    assert (np.abs(difference) <= (0 if exact else 1e-2)).all()


def test_beta_and_gamma() -> None:
    memory, selector = Residual(beta=0.5, gamma=2.0), TopK(1 / 4)
    x = memory.compensate(np.array([1, 2, 3, 4], np.float32), "w")
    assert x.tolist() == [2, 4, 6, 8]
    memory.keep_selected("w", selector.select(x), selector)
    assert memory.compensate(np.ones(4, np.float32), "w").tolist() == [3, 4, 5, 2]


def test_momentum_is_kept_until_it_is_sent() -> None:
    memory, selector = DgcMomentum(0.5), TopK(1 / 4)
    x = memory.compensate(np.array([1, 2, 3, 4], np.float32), "w")
    assert x.tolist() == [1, 2, 3, 4]
    memory.keep_selected("w", selector.select(x), selector)
    state = memory.state_dict()
    assert state["momenta"]["w"].tolist() == state["sums"]["w"].tolist() == [1, 2, 3, 0]
    assert memory.compensate(np.ones(4, np.float32), "w").tolist() == [2.5, 4, 5.5, 1]


def test_a_long_gradient_is_clipped() -> None:
    memory = DgcMomentum(0.9, clip=5.0)
    assert memory.compensate(np.array([6, 8], np.float32), "w").tolist() == [3, 4]
    assert memory.compensate(np.array([3, 4], np.float32), "v").tolist() == [3, 4]


def test_what_is_not_finite_has_no_part_in_the_norm() -> None:
    x = DgcMomentum(0.9, clip=5.0).compensate(np.array([6, np.nan, 8, np.inf], np.float32), "w")
    assert x[[0, 2]].tolist() == [3, 4]
    assert not np.isfinite(x[[1, 3]]).any()
    large = DgcMomentum(0.9, clip=1.0).compensate(np.array([1e20, 1e18], np.float32), "w")
    assert large[0] == pytest.approx(1.0, rel=1e-3)
    assert large[1] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("make", [Residual, DgcMomentum])
def test_a_step_that_was_not_sent_can_be_made_again(make: type[Memory]) -> None:
    once, twice, selector = make(), make(), TopK(0.3)
    for step, gradient in enumerate(gradients(3, 5, 40)):
        if step % 2:
            twice.compensate(gradient, "w")
        for memory in (once, twice):
            memory.keep_selected("w", selector.select(memory.compensate(gradient, "w")), selector)
    assert all((once.state_dict()[sort]["w"] == twice.state_dict()[sort]["w"]).all() for sort in once.sorts)


@pytest.mark.parametrize("memory", [Residual(), DgcMomentum()], ids=["Residual", "DgcMomentum"])
@pytest.mark.parametrize("awkward", [np.nan, np.inf, 3e38])
def test_an_overflow_does_not_come_back(memory: Memory, awkward: float) -> None:
    selector, name = TopK(1 / 4), str(awkward)
    gradient = np.full(8, awkward, np.float32)
    memory.keep_selected(name, selector.select(memory.compensate(gradient, name)), selector)
    assert all(np.isfinite(kept[name]).all() for kept in memory.state_dict().values())
    memory.compensate(gradient, name)
    memory.keep_rest(name, gradient)
    assert all(np.isfinite(kept[name]).all() for kept in memory.state_dict().values())


def test_a_state_goes_on_elsewhere() -> None:
    memory, other, selector = DgcMomentum(), DgcMomentum(), TopK(0.3)
    for step, gradient in enumerate(gradients(1, 6, 50)):
        if step == 3:
            saved = memory.state_dict()
            other.load_state_dict(saved)
        x = memory.compensate(gradient, "w")
        places = selector.select(x)
        memory.keep_selected("w", places, selector)
        if step >= 3:
            assert (other.compensate(gradient, "w")[places] != 0).all()
            other.keep_selected("w", places, selector)
    assert all((memory.state_dict()[sort]["w"] == other.state_dict()[sort]["w"]).all() for sort in saved)
    memory.forget(["w"])
    assert memory.state_dict() == {"momenta": {}, "sums": {}}


def test_a_state_of_another_memory_and_a_gradient_of_another_size() -> None:
    with pytest.raises(UsageError, match="a state of residuals; expected a state of momenta, sums"):
        DgcMomentum().load_state_dict(Residual().state_dict())
    memory = Residual()
    memory.compensate(np.ones(4, np.float32), "w")
    with pytest.raises(UsageError, match="gradient 'w' has 5 elements; it had 4 before"):
        memory.compensate(np.ones(5, np.float32), "w")
    assert NoMemory().state_dict() == {}


@pytest.mark.parametrize("wrong", [np.nan, np.inf, True, "1"])
def test_factors_are_finite_numbers(wrong: object) -> None:
    for make in (lambda: Residual(beta=wrong), lambda: DgcMomentum(wrong), lambda: DgcMomentum(clip=wrong)):  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="expected a finite number"):
            make()
    with pytest.raises(UsageError, match="expected a norm above 0"):
        DgcMomentum(clip=-1.0)
