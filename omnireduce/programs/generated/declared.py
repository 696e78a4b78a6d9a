"""A program in its own language, as a function that makes it: for a file whose fused AllReduce runs on the shards."""

from __future__ import annotations

from omnireduce.programs.communication import ReduceScatter
from omnireduce.programs.expressions import Constant, Expression, Input, Tensor, Variable
from omnireduce.programs.generated.statements import (
    MARGIN,
    Names,
    Statements,
    Text,
    broken,
    quoted,
    shape_text,
)
from omnireduce.programs.operations import ReduceTensor
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.placement import sizes_in
from omnireduce.programs.pointwise import Arithmetic, Cast
from omnireduce.programs.stages import FusedAllReduce


class Declared(Statements):
    """Writes the language. `words`: what it takes from there."""

    def __init__(self, pipeline: Pipeline, names: Names) -> None:
        super().__init__(names)
        self._pipeline = pipeline
        self.words: set[str] = {"AllReduce", "Pipeline"}

    def _constant(self, node: Constant) -> str:
        return node.text(())

    def _type(self, node: Expression) -> str:
        word = str(node.type.dtype)
        word = word[0].upper() + word[1:]
        word = {"Bfloat16": "BFloat16", "Uint8": "UInt8", "Uint16": "UInt16", "Uint32": "UInt32"}.get(word, word)
        self.words.add(word)
        return word

    def made(self, node: Expression) -> Text:
        operands = [self.value(each) for each in node.operands]
        if isinstance(node, Arithmetic):
            one, other = (each.within(node.least_precedence(at)) for at, each in enumerate(operands))
            return Text(f"{one} {node.symbol} {other}", node.precedence)
        self.words.add(type(node).__name__)
        if isinstance(node, Cast):
            return Text(f"Cast({self._type(node)}, {operands[0].text})")
        if isinstance(node, ReduceScatter | ReduceTensor):
            self.words.add(repr(node.reduction))
        return Text(node.text([each.text for each in operands]))

    def function(self) -> list[str]:
        """The lines of a function that makes the pipeline."""
        pipeline, names = self._pipeline, self.names
        lines = ["def program():", f'{MARGIN}"""The program in its own language."""']
        sizes = [each for each in sizes_in(pipeline.inputs) if each not in pipeline.inputs]
        for each in [*sizes, *pipeline.inputs]:
            lines += self._declaration(each)
        for node in pipeline.nodes:
            if node in names and not isinstance(node, Input):
                lines += self.assigned(names[node], node)
        inputs = ", ".join(names[each] for each in pipeline.inputs)
        outputs = ", ".join(names[each] for each in pipeline.outputs)
        lines += broken(f"pipeline = Pipeline({quoted(pipeline.name)}, [{inputs}], [{outputs}])", 1)
        fused = next(each for each in pipeline.compounds if isinstance(each, FusedAllReduce))
        stages = ", ".join(names[each] for each in fused.nodes if each in names)
        return [*lines, *broken(f"return pipeline.fuse_into([{stages}], AllReduce)", 1)]

    def _declaration(self, node: Input) -> list[str]:
        name, kind = self.names[node], self._type(node)
        if isinstance(node, Variable):
            self.words.add("Variable")
            return broken(f'{name} = Variable({kind}, "{name}")', 1)
        assert isinstance(node, Tensor)
        self.words |= {"Tensor", node.type.layout.value}
        shape = shape_text(node.type.shape, self.names)
        shape = shape[1:-2] if len(node.type.shape) == 1 else shape
        return broken(f'{name} = Tensor({kind}, {shape}, {node.type.layout.value}, "{name}")', 1)
