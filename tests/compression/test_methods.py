"""Methods by a short text."""

from __future__ import annotations

import pytest

from omnireduce import UsageError
from omnireduce.compression import (
    BlockTopK,
    Compression,
    Everything,
    GuardedThreshold,
    NoMemory,
    PowerSgd,
    Residual,
    TopK,
)
from omnireduce.compression.methods import ALL, method_of


@pytest.mark.parametrize("text", ALL)
def test_all_methods_can_be_made(text: str) -> None:
    assert method_of(text) is not method_of(text)


def test_what_a_text_means() -> None:
    method = method_of("topk, 0.02 + bf16")
    assert isinstance(method, Compression)
    assert isinstance(method.selector, TopK)
    assert (method.selector.ratio, method.codec, type(method.memory)) == (0.02, "bf16", Residual)
    method = method_of("block_topk,0.5,64+int8")
    assert isinstance(method, Compression)
    assert isinstance(method.selector, BlockTopK)
    assert (method.selector.ratio, method.selector.block_size, method.codec) == (0.5, 64, "int8")
    method = method_of("guarded_threshold,1e-3,0.1")
    assert isinstance(method, Compression)
    assert isinstance(method.selector, GuardedThreshold)
    assert (method.selector.threshold, method.selector.ratio, method.codec) == (1e-3, 0.1, None)
    method = method_of("int8")
    assert isinstance(method, Compression)
    assert (type(method.selector), type(method.memory), method.codec) == (Everything, NoMemory, "int8")
    factors = method_of("powersgd,3")
    assert isinstance(factors, PowerSgd)
    assert factors.rank == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "method '': expected a name with numbers, such as topk,0.01 or topk,0.01\\+bf16; topk, block_topk"),
        ("topkk,0.1", "method 'topkk,0.1': expected a name"),
        ("topk,x", "method 'topk,x': expected up to 1 numbers behind the name, with commas between"),
        ("topk,0.1,3", "expected up to 1 numbers"),
        ("topk,2", "ratio 2: expected more than 0 and at most 1"),
        ("topk,nan", "expected up to 1 numbers|ratio nan"),
        ("topk,0.1+int8", "single elements travel as float32, bf16 or fp16"),
        ("topk,0.1+int9", "codec 'int9'"),
        ("int8,3", "method 'int8,3': expected a name"),
        ("int8+int8", "method 'int8\\+int8': expected a name"),
        ("powersgd,2+int8", "method 'powersgd,2\\+int8': expected a name"),
        ("powersgd,0", "rank 0: expected a whole number from 1 on"),
        ("nowhere:Codec", "the codec 'nowhere:Codec' cannot be loaded"),
    ],
)
def test_texts_that_name_no_method(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        method_of(text)
