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
        operands = [self.value(operand) for operand in node.operands]
        if isinstance(node, Arithmetic):
            one, other = (operand.within(node.least_precedence(at)) for at, operand in enumerate(operands))
            return Text(f"{one} {node.symbol} {other}", node.precedence)
        self.words.add(type(node).__name__)
        if isinstance(node, Cast):
            return Text(f"Cast({self._type(node)}, {operands[0].text})")
        if isinstance(node, ReduceScatter | ReduceTensor):
            self.words.add(repr(node.reduction))
        return Text(node.text([operand.text for operand in operands]))

    def function(self) -> list[str]:
        """The lines of a function that makes the pipeline."""
        pipeline, names = self._pipeline, self.names
        lines = ["def program():", f'{MARGIN}"""The program in its own language."""']
        sizes = [size for size in sizes_in(pipeline.inputs) if size not in pipeline.inputs]
        for input_node in [*sizes, *pipeline.inputs]:
            lines += self._declaration(input_node)
        for node in pipeline.nodes:
            if node in names and not isinstance(node, Input):
                lines += self.assigned(names[node], node)
        inputs = ", ".join(names[input_node] for input_node in pipeline.inputs)
        outputs = ", ".join(names[output] for output in pipeline.outputs)
        lines += broken(f"pipeline = Pipeline({quoted(pipeline.name)}, [{inputs}], [{outputs}])", 1)
        fused = next(compound for compound in pipeline.compounds if isinstance(compound, FusedAllReduce))
        stages = ", ".join(names[node] for node in fused.nodes if node in names)
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
