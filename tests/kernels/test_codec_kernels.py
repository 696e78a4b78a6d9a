"""Codecs against their oracle, bit by bit; their errors; what is right on average; what any bytes may do."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from coded_blocks import ORACLES
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same_values
from samples import Array, sparse_tensor

from omnireduce.errors import UsageError
from omnireduce.kernels.codecs.draws import SUM, block_keys, stream_key
from omnireduce.kernels.codecs.table import BUILT_IN, codec_named, with_own
from omnireduce.support.config.schema import CODECS

NAMES = tuple(BUILT_IN)
SIZES = st.sampled_from([8, 16, 24, 256])
LARGEST = np.float32(np.finfo(np.float32).max)


def encoded(name: str, values: Array, keys: Array | None = None) -> Array:
    codec = BUILT_IN[name]
    out = np.full((len(values), codec.block_bytes(values.shape[1])), 0xA5, np.uint8)
    keys = block_keys(stream_key(1, 2, 3), np.arange(len(values))) if keys is None else keys
    codec.encode(values.copy(), out, keys)
    return out


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32 - 1), size=SIZES, blocks=st.integers(1, 12), key=st.integers(0, 2**64 - 1))
def test_blocks_are_encoded_where_they_lie(name: str, seed: int, size: int, blocks: int, key: int) -> None:
    rng = np.random.default_rng(seed)
    source = sparse_tensor(rng, "float32", blocks * size, size, 0.7, awkward=0.5).reshape(blocks, size)
    before, where, codec = source.copy(), np.flatnonzero(rng.random(blocks) < 0.5), BUILT_IN[name]
    out, keys = np.full((where.size, codec.block_bytes(size)), 0xA5, np.uint8), block_keys(key, where)
    codec.encode_at(source, where, out, keys)
    assert (source.view(np.uint32) == before.view(np.uint32)).all()
    assert (out == encoded(name, before[where], keys)).all()


def decoded(name: str, coded: Array, block_size: int) -> Array:
    out = np.full((len(coded), block_size), 7, np.float32)
    BUILT_IN[name].decode(coded, out)
    return out


def through(name: str, values: Array, keys: Array | None = None) -> Array:
    return decoded(name, encoded(name, values, keys), values.shape[1])


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32 - 1), size=SIZES, blocks=st.integers(0, 3), key=st.integers(0, 2**64 - 1))
def test_each_codec_is_what_its_oracle_says(name: str, seed: int, size: int, blocks: int, key: int) -> None:
    values = sparse_tensor(np.random.default_rng(seed), "float32", blocks * size, size, 0.9, awkward=0.5)
    values = values.reshape(blocks, size)
    keys = block_keys(key, np.arange(blocks))
    result = through(name, values, keys)
    for k in range(blocks):
        assert_same_values(result[k], ORACLES[name](values[k], int(keys[k])))


@pytest.mark.parametrize("name", NAMES)
def test_all_exponents(name: str) -> None:
    """Elements far apart, around every power of two."""
    keys = block_keys(stream_key(1, 2, 3), np.arange(3))
    for exponent in range(-149, 128):
        with np.errstate(over="ignore", under="ignore"):
            ones = np.array([1, 1.0000001, 1.5, 1.984375, 1.99, 1.9999999, -1.25, -1.999]) * np.exp2(float(exponent))
            values = np.stack([ones, ones * np.exp2(-np.arange(8.0) * 20), -ones / 3]).astype(np.float32)
        values = np.clip(values, -LARGEST, LARGEST)
        result = through(name, values, keys)
        for k in range(3):
            assert_same_values(result[k], ORACLES[name](values[k], int(keys[k])))


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32 - 1), size=SIZES)
def test_what_was_encoded_once_stays_as_it_is(name: str, seed: int, size: int) -> None:
    """So the sum of a block that one rank alone has sent is what this rank has sent."""
    values = sparse_tensor(np.random.default_rng(seed), "float32", 4 * size, size, 0.9, awkward=0.3).reshape(4, size)
    once = through(name, values)
    assert_same_values(through(name, once, block_keys(99, np.arange(4))).reshape(-1), once.reshape(-1))


@given(seed=st.integers(0, 2**32 - 1), size=SIZES, spread=st.integers(0, 30))
def test_the_error_of_int8_is_half_a_step_of_each_block(seed: int, size: int, spread: int) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((5, size)) * np.exp2(rng.integers(-spread, spread + 1, (5, 1)))).astype(np.float32)
    largest = np.abs(values).max(axis=1, keepdims=True)
    assert (np.abs(through("int8", values) - values) <= np.maximum(largest / 127, 2.0**-133)).all()


@given(seed=st.integers(0, 2**32 - 1), size=SIZES)
def test_the_error_of_qsgd_is_less_than_a_step(seed: int, size: int) -> None:
    values = np.random.default_rng(seed).standard_normal((5, size)).astype(np.float32)
    assert (np.abs(through("qsgd", values) - values) < np.abs(values).max(axis=1, keepdims=True) / 63).all()


@given(seed=st.integers(0, 2**32 - 1), size=SIZES)
def test_signs_with_means_keep_the_sums(seed: int, size: int) -> None:
    """onebit that of the elements, scaled_sign that of their magnitudes; no other number is nearer to them."""
    values = np.random.default_rng(seed).standard_normal((5, size)).astype(np.float32)
    assert np.allclose(through("onebit", values).sum(axis=1), values.sum(axis=1), atol=1e-3)
    result = through("scaled_sign", values)
    assert np.allclose(np.abs(result).sum(axis=1), np.abs(values).sum(axis=1), rtol=1e-5)
    assert (np.signbit(result) == np.signbit(values)).all()


@given(seed=st.integers(0, 2**32 - 1))
def test_the_error_of_natural_is_less_than_the_element(seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((4, 64)).astype(np.float32)
    result = through("natural", values)
    assert (np.abs(result - values) < np.abs(values)).all()
    assert np.isin(np.abs(result), np.exp2(np.arange(-60.0, 10))).all()


@pytest.mark.parametrize(("name", "deviation"), [("natural", 0.5), ("qsgd", 0.05), ("ternary", 2.0)])
def test_what_is_rounded_at_random_is_right_on_average(name: str, deviation: float) -> None:
    """The seed is fixed: this always draws the same numbers. `deviation`: more than that of an element of 0.7 or
    less, beside one of 4."""
    times = 4096
    values = np.zeros((times, 8), np.float32)
    values[:] = [4, 3, 0.7, -0.3, 0.01, 0, -3.5, 1.0]
    mean = through(name, values, block_keys(stream_key(5, 6, 7), np.arange(times))).mean(axis=0, dtype=np.float64)
    assert (np.abs(mean - values[0]) <= 6 * deviation / times**0.5).all(), mean


@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_none(name: str) -> None:
    values = np.array([[np.nan, np.inf, -np.inf, 1, -2, 0, -0.0, 3]], np.float32)
    assert_same_values(
        through(name, values)[0], ORACLES[name](values[0], int(block_keys(stream_key(1, 2, 3), np.arange(1))[0]))
    )
    if name != "sign":  # it has one bit, and says what that means
        assert np.isnan(through(name, values)[0, 0])
    zeros = np.zeros((2, 16), np.float32)
    assert (through(name, zeros) == (1 if name == "sign" else 0)).all()


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32 - 1), size=SIZES)
def test_any_bytes_stand_for_numbers(name: str, seed: int, size: int) -> None:
    rng, room = np.random.default_rng(seed), BUILT_IN[name].block_bytes(size)
    coded = np.frombuffer(rng.bytes(3 * room), np.uint8).reshape(3, room).copy()
    coded[0] = 255
    assert decoded(name, coded, size).shape == (3, size)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_added_where_they_belong(name: str) -> None:
    values = np.arange(1, 33, dtype=np.float32).reshape(4, 8)
    coded, totals = encoded(name, values), np.full((6, 8), 2, np.float32)
    BUILT_IN[name].add(coded[1:3], np.array([0, 5]), totals)
    plain = decoded(name, coded, 8)
    assert (totals[[0, 5]] == 2 + plain[1:3]).all()
    assert (totals[1:5] == 2).all()


def test_the_configuration_names_all_codecs() -> None:
    assert {*CODECS} == {"none", *BUILT_IN}, "'A codec' in CONTRIBUTING.md says where its name stands"


def test_sizes() -> None:
    """Sizes of an encoded tensor of 1 Mi elements, in blocks of 256."""
    elements, sizes = 1 << 20, {name: codec.block_bytes(256) * 4096 for name, codec in BUILT_IN.items()}
    assert sizes["bf16"] == sizes["fp16"] == 2 * elements
    assert sizes["int8"] == sizes["natural"] == elements + 4096
    assert sizes["qsgd"] == elements + 4096
    assert sizes["sign"] == elements / 8
    assert sizes["onebit"] == sizes["scaled_sign"] == elements / 8 + 8 * 4096
    assert sizes["ternary"] <= elements / 4


def test_streams_differ_and_are_the_same_again() -> None:
    keys = {stream_key(seed, collective, sender) for seed in (0, 1) for collective in (0, 1) for sender in (0, 1, SUM)}
    assert len(keys) == 12
    state = np.random.get_state()[1].copy()
    values = np.linspace(-3, 3, 64, dtype=np.float32).reshape(4, 16)
    first = encoded("natural", values)
    assert (first == encoded("natural", values)).all()
    assert (first != encoded("natural", values, block_keys(stream_key(1, 2, 4), np.arange(4)))).any()
    assert (np.random.get_state()[1] == state).all()


OWN = """
from omnireduce.kernels.codecs.base import Codec
class Thirds(Codec):
    def block_bytes(self, block_size): return 2 * block_size
    def encode(self, values, encoded, keys): encoded.view('<f2')[:] = values
    def add(self, encoded, where, totals): totals[where] += encoded.view('<f2')
class Failing(Thirds):
    def encode(self, values, encoded, keys): raise ArithmeticError("no")
class Shapeless: pass
number = 3
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int9", "expected none, bf16"),
        ("nowhere:Codec", "ModuleNotFoundError"),
        ("mine:Nothing", "AttributeError"),
        ("mine:Shapeless", "derives from omnireduce.Codec"),
        ("mine:number", "derives from omnireduce.Codec"),
        ("mine:Failing", "ArithmeticError: no"),
    ],
)
def test_codecs_that_cannot_be(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=message):
        codec_named(name)
    assert set(with_own(["mine:Thirds"])) == {*NAMES, "mine:Thirds"}
    sys.modules.pop("mine")
    codec_named.cache_clear()
