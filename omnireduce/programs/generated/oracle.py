"""Oracle of a generated program: Python on whole tensors. A Local value is a list with one tensor for each rank."""

from __future__ import annotations

from omnireduce.programs.communication import AllGather, AllReduce, Broadcast, Recv, ReduceScatter, Send
from omnireduce.programs.expressions import Dropout, Expression, Float32, Input, is_narrow
from omnireduce.programs.generated.statements import (
    MARGIN,
    WHOLE,
    WIDTH,
    Names,
    Statements,
    Text,
    break_line,
    shape_text,
    ufunc,
)
from omnireduce.programs.layouts import Layout
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.whole_tensor_operations import MatMul, Norm, Update, WholeReduction


class Oracle(Statements):
    """Writes the body of a function of all inputs. `used`: keys of the helper functions that
    the file must define for it."""

    def __init__(self, pipeline: Pipeline, names: Names) -> None:
        super().__init__(names)
        self._pipeline = pipeline
        self.used: set[str] = set()

    def value(self, node: Expression) -> Text:
        text = super().value(node)
        is_listed = node in self.names and _is_local(node)
        return Text(f"{text.within(WHOLE)}[rank]") if is_listed else text

    def operand(self, user: Expression, node: Expression) -> Text:
        text = self.value(node)
        if isinstance(user, MatMul) and _is_local(user) and node.type.layout.is_sliced:
            axis = node.type.layout.axis(len(node.type.shape))
            self.used.add("part function")
            return Text(f"part({text.text}, rank, ranks, {axis})")
        return text

    def region(self, node: Dropout) -> str:
        shape = shape_text(node.type.shape, self.names)
        origin = ", ".join("0" for _ in node.type.shape)
        starts = f"({origin},)" if len(node.type.shape) == 1 else f"({origin})"
        return f"({shape}, {starts}, {'rank + 1' if _is_local(node) else 0})"

    def render(self, node: Expression) -> Text:
        if isinstance(node, Update):
            copied = ".copy()" if isinstance(node.value, Input) else ""
            value = self.value(node.value)
            return Text(f"{value.within(WHOLE)}{copied}") if copied else value
        if isinstance(node, WholeReduction):
            self.used.add("norm function" if isinstance(node, Norm) else "combined")
            return self.reduced(node, self.value(node.operands[0]))
        if isinstance(node, AllGather | Send | Recv):
            return self.value(node.operands[0])
        return super().render(node)

    def _statement(self, node: Expression) -> list[str]:
        name = self.names[node]
        if isinstance(node, AllReduce | ReduceScatter | Broadcast):
            lines, values = [], node.operands[0]
            rank_list = self.names[values] if values in self.names else self._new_name(f"{name}_of_ranks")
            if values not in self.names:
                lines = self._lines_of_all_ranks(rank_list, values)
            value = f"{rank_list}[{node.root}]" if isinstance(node, Broadcast) else self._combined(node, rank_list)
            return [*lines, *break_line(f"{name} = {value}", 1)]
        return self._lines_of_all_ranks(name, node) if _is_local(node) else self.assigned(name, node)

    def _lines_of_all_ranks(self, name: str, node: Expression) -> list[str]:
        """Lines that make `name` the list of the values of all ranks."""
        line = f"{MARGIN}{name} = [{self.render(node).text} for rank in range(ranks)]"
        if len(line) <= WIDTH:
            return [line]
        own_name = self._new_name(f"own_{name}")
        lines = [f"{MARGIN}{name} = []", f"{MARGIN}for rank in range(ranks):", *self.assigned(own_name, node, 2)]
        return [*lines, f"{MARGIN * 2}{name}.append({own_name})"]

    def _combined(self, node: AllReduce | ReduceScatter, values: str) -> str:
        """The values of all ranks together, in their order."""
        self.used.add("reduce")
        how = ufunc(node.reduction)
        if not is_narrow(node.type.dtype):
            return f"reduce({how}, {values})"
        wide, dtype = self.names.dtype(Float32), self.names.dtype(node.type.dtype)
        return f"reduce({how}, [each.astype({wide}) for each in {values}]).astype({dtype})"

    def body(self) -> list[str]:
        """The lines of the function."""
        lines: list[str] = []
        for node in self._pipeline.nodes:
            if node in self.names and not isinstance(node, Input):
                lines += self._statement(node)
        for update in self._pipeline.nodes:
            if isinstance(update, Update):
                tensor, name = self.names[update.tensor], self.names[update]
                if _is_local(update):
                    lines.append(f"{MARGIN}for rank in range(ranks):")
                    lines.append(f"{MARGIN * 2}{tensor}[rank][...] = {name}[rank]")
                else:
                    lines.append(f"{MARGIN}{tensor}[...] = {name}")
        return lines


def _is_local(node: Expression) -> bool:
    return node.type.layout is Layout.LOCAL
