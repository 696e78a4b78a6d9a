"""Programs on many ranks: an embedded language for computation and communication together, after CoCoNet.

expressions, pointwise, operations, communication   what programs are made of
layouts          which layouts go together
pipeline         a program
rewrites/        the same program, done another way
interpreter      what a program means: slow and obvious, in one process
runner           a program on the ranks of a communicator
generated/       a program as a Python file that runs by itself
tuning/          which schedule is the fastest, and where
library/         programs that are written already, and their schedules

The names are those of the field and of CoCoNet, so a class is called as an operation there: AllReduce(Summation, g).
"""

from typing import TYPE_CHECKING, Any

from omnireduce.programs.communication import AllGather, AllReduce, Broadcast, Recv, ReduceScatter, Send
from omnireduce.programs.expressions import (
    BFloat16,
    Bool,
    Expression,
    Float16,
    Float32,
    Float64,
    Int8,
    Int16,
    Int32,
    Int64,
    Tensor,
    UInt8,
    UInt16,
    UInt32,
    UInt64,
    Variable,
)
from omnireduce.programs.layouts import Layout, Local, Replicated, Sliced, Sliced_2
from omnireduce.programs.operations import (
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
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.pointwise import Cast, Dropout, Ite, Sqrt

if TYPE_CHECKING:
    from omnireduce.programs.tuning.autotune import autotune


def __getattr__(name: str) -> Any:
    """`autotune` is loaded when it is used: it needs a communicator."""
    if name == "autotune":
        from omnireduce.programs.tuning.autotune import autotune

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
