"""Programs on many ranks: an embedded language for computation and communication together, after CoCoNet.

expressions      values and element-wise operations
operations       operations on whole tensors; communication: those among ranks
layouts          which layouts go together
pipeline         a program
stages           its stages, single expressions or several in one
rewrites         the same program, done another way
interpreter      the meaning of a program: slow and obvious, in one process
runner           a program on the ranks of a communicator
lowering         a fused AllReduce as instructions for shards; on_shards runs it there
generated/       a program as a Python file that runs by itself
tuning           the fastest schedule for each size
library/         programs that are written already, and their schedules

The names are those of the field and of CoCoNet, so a class is called as an operation there: AllReduce(Summation, g).
"""

from typing import TYPE_CHECKING, Any

from omnireduce.programs.communication import AllGather, AllReduce, Broadcast, Recv, ReduceScatter, Send
from omnireduce.programs.expressions import (
    BFloat16,
    Bool,
    Cast,
    Dropout,
    Expression,
    Float16,
    Float32,
    Float64,
    Int8,
    Int16,
    Int32,
    Int64,
    Ite,
    Sqrt,
    Tensor,
    UInt8,
    UInt16,
    UInt32,
    UInt64,
    Variable,
)
from omnireduce.programs.layouts import Layout, Local, Replicated, Sliced, Sliced_2
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.whole_tensor_operations import (
    MatMul,
    Maximum,
    Minimum,
    Multiplication,
    Norm,
    ReduceTensor,
    Reduction,
    Summation,
    Update,
)

if TYPE_CHECKING:
    from omnireduce.programs.tuning import autotune


def __getattr__(name: str) -> Any:
    """`autotune` is loaded when it is used: it needs a communicator."""
    if name == "autotune":
        from omnireduce.programs.tuning import autotune

        return autotune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AllGather",
    "AllReduce",
    "BFloat16",
    "Bool",
    "Broadcast",
    "Cast",
    "Dropout",
    "Expression",
    "Float16",
    "Float32",
    "Float64",
    "Int8",
    "Int16",
    "Int32",
    "Int64",
    "Ite",
    "Layout",
    "Local",
    "MatMul",
    "Maximum",
    "Minimum",
    "Multiplication",
    "Norm",
    "Pipeline",
    "Recv",
    "ReduceScatter",
    "ReduceTensor",
    "Reduction",
    "Replicated",
    "Send",
    "Sliced",
    "Sliced_2",
    "Sqrt",
    "Summation",
    "Tensor",
    "UInt8",
    "UInt16",
    "UInt32",
    "UInt64",
    "Update",
    "Variable",
    "autotune",
]
