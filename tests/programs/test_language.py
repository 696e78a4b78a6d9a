"""The language of programs: types, errors at the user's line, and the text of a program."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable

import numpy as np
import pytest

from omnireduce import UsageError
from omnireduce.programs import (
    AllReduce,
    Broadcast,
    Cast,
    Dropout,
    Expression,
    Float16,
    Float32,
    Float64,
    Int8,
    Int32,
    Ite,
    Local,
    MatMul,
    Norm,
    Pipeline,
    Recv,
    ReduceScatter,
    ReduceTensor,
    Replicated,
    Send,
    Sliced,
    Sqrt,
    Summation,
    Tensor,
    Update,
    Variable,
)
from omnireduce.programs.expressions import formula
from omnireduce.programs.stages import in_order

N, M = Variable(Int32, "N"), Variable(Int32, "M")
lr, half = Variable(Float32, "lr"), Variable(Float16, "half")
g, w = Tensor(Float32, N, Local, "g"), Tensor(Float32, N, Replicated, "w")
x, y = Tensor(Float32, (N, M), Replicated, "x"), Tensor(Float32, (N, M), Replicated, "y")
n, b = Tensor(Int32, N, Replicated, "n"), x > y
far = Tensor(Float32, N, Replicated, "far", group=1)

SGD = """\
sgd(g, w, lr) -> w1
  g                             float32[N] Local
  w                             float32[N] Replicated
  lr                            float32

  g1 = AllReduce(Summation, g)  float32[N] Replicated
  w1 = Update(w, w - lr * g1)   float32[N] Replicated
"""


def test_sgd_is_five_lines() -> None:
    N = Variable(Int32, "N")  # noqa: N806  as in the tutorial
    lr = Variable(Float32, "lr")
    g = Tensor(Float32, N, Local, "g")
    w = Tensor(Float32, N, Replicated, "w")
    g1 = AllReduce(Summation, g)
    w1 = Update(w, w - lr * g1)
    pipeline = Pipeline("sgd", [g, w, lr], [w1])
    text = io.StringIO()
    pipeline.print(text)
    assert text.getvalue() == SGD
    gradients = [np.array([1, 2, 3], np.float32), np.array([1, 0, 1], np.float32)]
    result = pipeline.interpret({"g": gradients, "w": np.ones(3, np.float32), "lr": 0.5}, 2)
    np.testing.assert_array_equal(result["w1"], [[0, 0, -1]] * 2)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "types": (lambda: w + n, r"w \+ n: w is float32 and n is int32: Cast one of them"),
    "a scalar of another type": (lambda: w * half, "half is float16: Cast one of them"),
    "shapes": (
        lambda: x + Tensor(Float32, (M, N), Replicated, "z"),
        r"shapes \['N', 'M'\] and \['M', 'N'\] do not fit",
    ),
    "a float for integers": (lambda: n + 0.5, "0.5 meets int32: expected an integer"),
    "a number out of range": (lambda: Cast(Int8, n) + 300, "300 is out of the range of int8"),
    "division of integers": (lambda: n / n, "the operands are int32: expected a float type"),
    "arithmetic of conditions": (lambda: b + b, "the operands are bool: expected numbers"),
    "a text": (lambda: w + "1", "got '1', a str; expected an expression or a number"),
    "a root of integers": (lambda: Sqrt(n), "the operand is int32: expected a float type; Cast it"),
    "a norm of integers": (lambda: Norm(n), "the operand is int32: expected a float type; Cast it"),
    "a condition that is none": (lambda: Ite(x, x, y), "the condition is float32: expected a comparison"),
    "a truth value": (lambda: 1 if w > 0 else 0, "a value is not known while a program is written: use Ite"),
    "factors": (lambda: MatMul(x, y), r"expected shapes \(..., K\) and \(K, M\)"),
    "factors of two types": (lambda: MatMul(x, Tensor(Float64, (M, N), Replicated, "z")), "numbers of one type"),
    "an update of no tensor": (lambda: Update(w + w, w), r"w \+ w is no Tensor: only those can be updated"),
    "an update of another shape": (lambda: Update(x, x * 0 + w * 0), "do not fit"),
    "an update of another type": (lambda: Update(n, Cast(Float32, n)), "expected the same type and shape"),
    "an update with a part": (lambda: Update(w, ReduceScatter(Summation, g)), "write AllGather around the value"),
    "no reduction": (lambda: AllReduce("sum", g), "'sum': expected Summation, Multiplication, Maximum or Minimum"),
    "a sum of conditions": (lambda: ReduceTensor(Summation, b), "the operand is bool: expected numbers; Cast it"),
    "a number in parts": (lambda: ReduceScatter(Summation, Norm(g)), "has no dimension along which it could be cut"),
    "a probability": (lambda: Dropout(x, 1.0, seed=1), "p is 1.0: expected from 0 up to but not including 1"),
    "a seed": (lambda: Dropout(x, 0.1, seed=-1), "seed is -1: expected an int from 0"),
    "a step": (lambda: Dropout(x, 0.1, seed=1, step=lr), r"step is float32\[\] Replicated: expected one integer"),
    "a root": (lambda: Broadcast(g, root=-1), "root is -1: expected a rank"),
    "groups": (lambda: w + far, "far is in group 1, other operands in group 0: Send it there"),
    "sent to itself": (lambda: Send(far, to=1), "far is in group 1 already"),
    "not received": (lambda: Send(w, to=1) + far, "an operand is under way between two groups: Recv it first"),
    "not sent": (lambda: Recv(w), r"w has not been sent: expected Recv\(Send\(x, to=1\)\)"),
    "a dtype": (lambda: Tensor("float32", N, Local, "z"), "type 'float32': expected one such as Float32"),
    "a cast to a text": (lambda: Cast("float32", w), "type 'float32': expected one such as Float32"),
    "a cast the other way round": (lambda: Cast(w, Float32), r"type <w: float32\[N\] Replicated>: expected one such"),
    "a cast to complex numbers": (lambda: Cast(np.dtype("c8"), w), r"type dtype\('complex64'\): expected one such"),
    "a float out of range": (lambda: w * 1e300, r"1e\+300 is out of the range of float32"),
    "a choice of numbers": (lambda: Ite(b, 1, 0), "1 or 0: expected an expression as one of them, for the type"),
    "a shape that is none": (lambda: Tensor(Float32, 2.5, Local, "z"), "a dimension of z is 2.5: expected an int or"),
    "a tensor as a shape": (lambda: Tensor(Float32, w, Local, "z"), "a dimension of z is <w: .*>: expected an int or"),
    "inputs without a list": (lambda: Pipeline("p", w, [w + w]), r"inputs is <w: .*>: expected a list, such as \[g, w"),
    "outputs without a list": (lambda: Pipeline("p", [w], w + w), r"outputs is <w \+ w: .*>: expected a list, such as"),
    "an input twice": (lambda: Pipeline("p", [w, w], [w + w]), "w is an input twice; expected once"),
    "a size": (lambda: Tensor(Float32, 0, Local, "z"), "a dimension of z is 0: expected at least 1"),
    "a size of a float type": (lambda: Tensor(Float32, lr, Local, "z"), "dimension lr is float32: expected an integer"),
    "a layout": (lambda: Tensor(Float32, N, "Local", "z"), "layout 'Local': expected Local, Replicated, Sliced"),
    "a name": (lambda: Variable(Float32, "the rate"), "name 'the rate': expected a word"),
    "a number that is cut": (lambda: Tensor(Float32, (), Sliced, "z"), "z has no dimension along which it could be"),
    "a change": (lambda: setattr(w, "source_line", None), "an expression does not change; source_line cannot be set"),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_point_at_the_line(what: str) -> None:
    make, message = WRONG[what]
    with pytest.raises((UsageError, AttributeError), match=message) as caught:
        make()
    if isinstance(caught.value, UsageError):
        line = inspect.getsourcelines(make)[1]
        where, source = str(caught.value).split("\n")
        assert where.startswith(f"{__file__}:{line}: ")
        assert source.strip() in inspect.getsource(make)


def test_a_program_wants_what_it_uses() -> None:
    w1 = Update(w, w - lr * AllReduce(Summation, g))
    with pytest.raises(UsageError, match="lr is used, but is not among the inputs of sgd"):
        Pipeline("sgd", [g, w], [w1])
    with pytest.raises(UsageError, match="half is an input, but the outputs do not need it: leave it out"):
        Pipeline("sgd", [g, w, lr, half], [w1])
    with pytest.raises(UsageError, match="an output is w: expected what a stage computes"):
        Pipeline("sgd", [w], [w])
    with pytest.raises(UsageError, match="no outputs"):
        Pipeline("sgd", [w], [])
    other, z = Tensor(Float32, N, Local, "g"), Tensor(Float32, Variable(Int32, "N"), Local, "z")
    with pytest.raises(UsageError, match="there is another g: expected one name for each input and size"):
        Pipeline("sgd", [g, w, lr, other], [w1, other * 2])
    with pytest.raises(UsageError, match="there is another N: expected one name for each input and size"):
        Pipeline("p", [w, z], [w + w, z + z])
    with pytest.raises(UsageError, match=r"an input is <w \+ w: .*>: expected Tensors and Variables"):
        Pipeline("p", [w + w], [w + w])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="w is updated twice; expected once in a program"):
        Pipeline("sgd", [g, w, lr], [w1, Update(w, w + w)])
    with pytest.raises(UsageError, match="3 is an int; expected expressions as outputs"):
        Pipeline("sgd", [g, w, lr], [w1, 3])  # type: ignore[list-item]


def test_a_tensor_stands_for_its_value_at_the_start() -> None:
    w1 = Update(w, w + 1)
    later = w * 2 + w1
    result = Pipeline("p", [w], [w1, later]).interpret({"w": np.ones(2, np.float32)}, 1)
    np.testing.assert_array_equal(result["later"], [[4, 4]])


def test_a_size_may_be_a_number_too() -> None:
    mean = ReduceTensor(Summation, w) / Cast(Float32, N)
    result = Pipeline("p", [w, N], [mean]).interpret({"w": np.array([1, 2, 6], np.float32)}, 2)
    np.testing.assert_array_equal(result["mean"], [3, 3])


def text_of(expression: Expression) -> str:
    pipeline = Pipeline("p", [each for each in (x, y) if each in in_order([expression])], [expression])
    return formula(pipeline.outputs[0], pipeline.names)


def test_the_text_has_the_brackets_that_it_needs() -> None:
    assert text_of(x - (y - x) * (x + y) / x) == "x - (y - x) * (x + y) / x"
    assert text_of((x**2.0) ** (y * 2)) == "(x ** 2.0) ** (y * 2)"
    assert text_of(x / (y * x)) == "x / (y * x)"
    assert text_of(Ite(x + 1 > y, -x, Sqrt(y))) == "Ite(x + 1 > y, 0 - x, Sqrt(y))"


def test_stages_are_known_by_name_and_by_expression() -> None:
    g1 = AllReduce(Summation, g)
    w1 = Update(w, w - lr * g1)
    pipeline = Pipeline("sgd", [g, w, lr], [w1])
    assert pipeline["g1"] is pipeline[g1] is g1
    with pytest.raises(UsageError, match="sgd has no stage 'g2'; its stages are g1, w1"):
        pipeline["g2"]
    with pytest.raises(UsageError, match="sgd has no such stage"):
        pipeline[AllReduce(Summation, g)]
    with pytest.raises(UsageError, match="got 3, an int; expected a stage of sgd, or its name"):
        pipeline.split(3)  # type: ignore[arg-type]
    assert repr(w1) == "<Update(w, w - lr * AllReduce(Summation, g)): float32[N] Replicated>"


def test_numbers_of_numpy_are_numbers() -> None:
    assert text_of(np.float32(2) * x) == "2.0 * x"
    assert text_of(x + np.int64(1)) == "x + 1"
    assert text_of(x * float("inf")) == "x * inf"


def test_a_name_is_as_python_reads_it() -> None:
    """A generated file would have another one otherwise."""
    assert Variable(Int32, "é").name == "é"
    with pytest.raises(UsageError, match="name '\ufb01': Python reads it as 'fi'; expected that"):
        Variable(Int32, "\ufb01")
