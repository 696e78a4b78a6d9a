"""Rewrites of programs: the result of each, and its reason if it is not possible."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from omnireduce import UsageError
from omnireduce.programs import (
    AllGather,
    AllReduce,
    Broadcast,
    Float32,
    Int32,
    Local,
    MatMul,
    Norm,
    Pipeline,
    ReduceScatter,
    Replicated,
    Sliced,
    Sqrt,
    Summation,
    Tensor,
    Update,
    Variable,
)
from omnireduce.programs.stages import Fused, FusedAllReduce, Overlapped

N, M = Variable(Int32, "N"), Variable(Int32, "M")
lr = Variable(Float32, "lr")
g, w, m = (Tensor(Float32, N, each, name) for each, name in ((Local, "g"), (Replicated, "w"), (Replicated, "m")))


def momentum() -> Pipeline:
    g1 = AllReduce(Summation, g)
    m1 = Update(m, 0.5 * m + 0.5 * g1)
    w1 = Update(w, w - lr * m1)
    return Pipeline("momentum", [g, w, m, lr], [w1, m1])


def layer() -> Pipeline:
    x, weight = Tensor(Float32, (N, M), Local, "x"), Tensor(Float32, (M, M), Replicated, "weight")
    product = MatMul(x, weight)
    total = AllReduce(Summation, product)
    root = Sqrt(total)
    back = MatMul(root, weight)
    return Pipeline("layer", [x, weight], [root, back])


REORDERED = """\
momentum(g, w, m, lr) -> w1, m1
  g                                      float32[N] Local
  w                                      float32[N] Replicated
  m                                      float32[N] Sliced
  lr                                     float32

  fused all-reduce {
    g1_rs = ReduceScatter(Summation, g)  float32[N] Sliced
    t1 = 0.5 * m + 0.5 * g1_rs           float32[N] Sliced
    w1_ag = AllGather(w - lr * t1)       float32[N] Replicated
    w1 = Update(w, w1_ag)                float32[N] Replicated
    m1 = Update(m, t1)                   float32[N] Sliced
  }"""


def test_an_optimizer_in_one_all_reduce() -> None:
    pipeline = momentum().split("g1")
    assert isinstance(pipeline["g1"], AllGather)
    assert isinstance(pipeline["g1_rs"], ReduceScatter)
    pipeline = pipeline.reorder(["w1", "m1"], "g1")
    assert [isinstance(node, AllGather) for node in pipeline.nodes].count(True) == 2
    pipeline = pipeline.as_slice(["m"])
    assert [isinstance(node, AllGather) for node in pipeline.nodes].count(True) == 1
    pipeline = pipeline.fuse_into(["g1_rs", "m1", "w1"], AllReduce)
    assert str(pipeline) == REORDERED
    [fused] = pipeline.stages
    assert isinstance(fused, FusedAllReduce)
    assert fused.input is g
    assert [each.name for each in fused.state] == ["m"]
    assert [pipeline.names[update] for update in fused.updates] == ["w1", "m1"]
    assert [pipeline.names[each] for each in fused.gathers] == ["w1_ag"]
    assert len(fused.nodes) == 9  # ReduceScatter, five computations, AllGather, two updates


def test_a_rewrite_leaves_its_pipeline_alone() -> None:
    pipeline = momentum()
    before = str(pipeline)
    pipeline.split("g1")
    pipeline.fuse(["m1", "w1"])
    assert str(pipeline) == before


def test_stages_are_found_by_what_the_user_wrote() -> None:
    g1 = AllReduce(Summation, g)
    scaled = lr * g1
    w1 = Update(w, w - scaled)
    pipeline = Pipeline("sgd", [g, w, lr], [w1]).split(g1).reorder([w1], g1)
    assert pipeline.names[pipeline[scaled]] == "scaled"
    assert pipeline[scaled].type.layout is Sliced
    assert pipeline[w1] is pipeline["w1"]


def test_what_others_need_whole_is_gathered_once() -> None:
    g1 = AllReduce(Summation, g)
    step = lr * g1
    w1, m1 = Update(w, w - step), Update(m, step)
    pipeline = Pipeline("p", [g, w, m, lr], [w1, m1, step]).split(g1).reorder([step], g1)
    gathers = [node for node in pipeline.nodes if isinstance(node, AllGather)]
    assert [pipeline.names[each] for each in gathers] == ["step_ag"]


def test_a_norm_of_parts_is_that_of_the_whole() -> None:
    g1 = AllReduce(Summation, g)
    size = Norm(g1)
    w1 = Update(w, w - g1 / size)
    pipeline = Pipeline("p", [g, w], [w1, size]).split(g1).reorder([w1, size], g1)
    assert pipeline["size"].operands[0].type.layout is Sliced
    assert pipeline["size"].type.layout is Replicated


def test_fused_stages_are_one() -> None:
    pipeline = momentum().fuse(["m1", "w1"])
    assert [type(stage) for stage in pipeline.stages] == [AllReduce, Fused]


def test_an_overlapped_stage_may_be_a_fused_all_reduce() -> None:
    pipeline = layer().split("total").reorder(["root"], "total").fuse_into(["total_rs", "root_ag"])
    pipeline = pipeline.overlap(["product", "total_rs"], chunks=3)
    first = pipeline.stages[0]
    assert isinstance(first, Overlapped)
    assert isinstance(first.reducer, FusedAllReduce)
    assert "overlapped in 3 chunks {" in str(pipeline)


def test_a_local_tensor_takes_what_is_gathered() -> None:
    own = Tensor(Float32, N, Local, "own")
    g1 = AllReduce(Summation, g)
    own1 = Update(own, g1 * 2)
    pipeline = Pipeline("p", [g, own], [own1]).split(g1).reorder([own1], g1)
    assert isinstance(pipeline["own1"].operands[1], AllGather)


def scalar() -> Pipeline:
    loss = Tensor(Float32, (), Local, "loss")
    total = AllReduce(Summation, loss)
    return Pipeline("p", [loss], [total])


def in_a_circle() -> Pipeline:
    """c needs b, which needs a; b is no element-wise stage."""
    a = w + m
    b = Norm(a)
    c = a / b
    return Pipeline("p", [w, m], [c])


def through_a_broadcast() -> Pipeline:
    g1 = AllReduce(Summation, g)
    far = Broadcast(g + g1, root=0)
    near = far + g1
    return Pipeline("p", [g], [near])


def kept_whole() -> Pipeline:
    g1 = AllReduce(Summation, g)
    m1 = Update(m, m + g1)
    double = m * 2
    return Pipeline("p", [g, m], [m1, double])


def shapes() -> Pipeline:
    x = Tensor(Float32, (N, M), Replicated, "x")
    one, two = w + m, x + x
    return Pipeline("p", [w, m, x], [one, two])


def split_layer() -> Pipeline:
    return layer().split("total")


def two_products() -> Pipeline:
    x, weight = Tensor(Float32, (N, M), Local, "x"), Tensor(Float32, (M, M), Replicated, "weight")
    one, two = MatMul(x, weight), MatMul(x * 2, weight)
    total = AllReduce(Summation, one)
    other = AllReduce(Summation, two)
    rest = one + 1
    return Pipeline("p", [x, weight], [total, other, rest])


def sliced_momentum() -> Pipeline:
    return momentum().split("g1").reorder(["w1", "m1"], "g1").as_slice(["m"])


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "split what is no AllReduce": (lambda: momentum().split("w1"), r"split w1 = Update.*: expected an AllReduce"),
    "split of a number": (lambda: scalar().split("total"), "cannot split total = .* no dimension along which it could"),
    "split in a compound": (
        lambda: layer().overlap(["product", "total"]).split("total"),
        "cannot split total = .*: it is overlapped in 4 chunks already; do this before",
    ),
    "reorder over what is no AllGather": (lambda: momentum().reorder(["w1"], "g1"), "expected an AllGather"),
    "reorder of what does not depend on it": (
        lambda: split_layer().reorder(["product"], "total"),
        "cannot reorder product = .*: it does not need total = AllGather",
    ),
    "reorder of a product over rows that are summed": (
        lambda: split_layer().reorder(["back"], "total_x"),
        "layer has no stage 'total_x'; its stages are product, total_rs, total, root, back",
    ),
    "reorder of a factor": (
        lambda: transposed().reorder(["out"], "total"),
        r"cannot reorder out = MatMul\(w2, total\) .* over total = .*: on parts, .*: Replicated times Sliced: the "
        "dimension that is summed is cut on one side only",
    ),
    "reorder over communication": (
        lambda: through_a_broadcast().split("g1").reorder(["near"], "g1"),
        r"cannot reorder g \+ g1 .* over g1 = .*: on parts, .*: g is Local, .* is Sliced: a Local value",
    ),
    "reorder of nothing": (lambda: momentum().split("g1").reorder([], "g1"), r"cannot reorder \[\]: expected a list"),
    "slice what is no tensor": (lambda: momentum().as_slice(["g1"]), "cannot slice g1 = .*: expected a Replicated"),
    "slice what is Local": (lambda: momentum().as_slice(["g"]), "cannot slice g .* is Local: expected a Replicated"),
    "slice what is used whole": (
        lambda: momentum().as_slice(["m"]),
        r"cannot slice m: w1 = Update\(w, w - lr \* m1\) .* needs the whole: .*write AllGather around the value",
    ),
    "slice what is an output": (lambda: kept_whole().as_slice(["m"]), r"the output double = m \* 2 .* would come"),
    "fuse in a circle": (
        lambda: in_a_circle().fuse(["a", "c"]),
        "cannot fuse a, c: together they would form a cycle, a -> b -> c: b needs a, c needs b. Take b along, or "
        "leave a or c out",
    ),
    "fuse what is not element-wise": (lambda: in_a_circle().fuse(["a", "b"]), "b = Norm.*: it is not done element by"),
    "fuse two shapes": (lambda: shapes().fuse(["one", "two"]), r"one is float32\[N\] .*, the other float32\[N, M\]"),
    "fuse one": (lambda: shapes().fuse(["one"]), "expected two operations on tensors at least"),
    "fuse twice": (lambda: momentum().fuse(["m1", "w1"]).fuse(["w1"]), "it is fused already"),
    "fuse into another": (
        lambda: sliced_momentum().fuse_into(["g1_rs", "w1"], Broadcast),  # type: ignore[arg-type]
        "cannot fuse into Broadcast: expected AllReduce",
    ),
    "fuse into without a sum": (lambda: momentum().fuse_into(["w1"]), "cannot fuse 0 ReduceScatters"),
    "fuse into without a gather": (
        lambda: sliced_momentum().fuse_into(["g1_rs", "m1"]),
        "cannot fuse .* into an AllReduce: it is needed outside, and not gathered",
    ),
    "fuse into what is whole": (
        lambda: split_layer().fuse_into(["total_rs", "total", "root"]),
        "cannot fuse root = Sqrt.* into an AllReduce: it is (Replicated|needed outside)",
    ),
    "fuse into a product": (
        lambda: split_layer().fuse_into(["product", "total"]),
        "cannot fuse product = MatMul.* into an AllReduce: (expected element-wise stages|it is needed outside)",
    ),
    "overlap of two sums": (lambda: two_products().overlap(["total", "other"]), "expected a MatMul and the AllReduce"),
    "overlap of strangers": (
        lambda: two_products().overlap(["one", "other"]),
        "cannot overlap one = .* and other = .*: a chunk of the one is not made of a chunk of the other",
    ),
    "overlap of what is needed whole": (
        lambda: two_products().overlap(["one", "total"]),
        r"cannot overlap one = .*: rest = one \+ 1 .* needs all of it",
    ),
    "overlap in one chunk": (lambda: layer().overlap(["product", "total"], chunks=1), "chunks is 1: expected an int"),
}  # fmt: skip


def transposed() -> Pipeline:
    """The gathered rows are those that the product sums over."""
    w2, part = Tensor(Float32, (M, N), Replicated, "w2"), Tensor(Float32, (N, M), Local, "part")
    total = AllReduce(Summation, part)
    out = MatMul(w2, total)
    return Pipeline("p", [w2, part], [out]).split("total")


@pytest.mark.parametrize("what", REFUSED)
def test_a_rewrite_says_why_not(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(UsageError, match=message):
        make()
