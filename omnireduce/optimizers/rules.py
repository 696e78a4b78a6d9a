"""Update rules, which compute new weights from gradients, written as block programs.

Unless said otherwise, the formulas are those of torch.optim, and results agree up to rounding. `lr` is the learning
rate. If a block, or a row, is zero in the sum of all ranks, and the rule leaves it as it is, it is skipped. If the rule
would change it all the same, as momentum does, it is updated, unless the rule is `lazy`: then its state stays as it
was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from omnireduce.core.block_program import FIRST_COLUMN, SUM, Assembly, BlockProgram, Operation
from omnireduce.core.hyperparameters import (
    ADAM_EPS,
    BETAS,
    LAMB_EPS,
    WEIGHT_DECAY,
    bias_correction,
    check_betas,
    number_in_range,
)
from omnireduce.errors import UsageError

SCRATCH, SECOND_SCRATCH = 1, 2  # registers
WEIGHTS, FIRST, SECOND = FIRST_COLUMN, FIRST_COLUMN + 1, FIRST_COLUMN + 2  # columns


def check_flag(name: str, value: object) -> None:
    """Raises UsageError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}; expected True or False")


@dataclass(frozen=True)
class Step:
    """One step: its `number`, counted from 1, and its `state`; blocks have `width` elements. The gradient is the sum of
    all ranks times `scale`. If there is a `limit`, its elements are clipped to between -limit and limit."""

    number: int
    scale: float
    state: int
    width: int
    limit: float | None = None

    def gradient(self, code: Assembly) -> float:
        """Write the code that makes SUM the gradient. Returns the factor by which SUM is to be scaled afterwards."""
        if self.limit is None:
            return self.scale
        code.add(Operation.SCALE, SUM, 0, self.scale)
        code.add(Operation.FILL, SCRATCH, 0, self.limit)
        code.add(Operation.MINIMUM, SUM, SCRATCH)
        code.add(Operation.NEGATE, SCRATCH)
        code.add(Operation.MAXIMUM, SUM, SCRATCH)
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Base of all rules. Raises UsageError for numbers out of range.

    `columns`: the state that a rule keeps for each weight; `cells`: for each block or row. `initial`: its first value.
    """

    cells: ClassVar[tuple[str, ...]] = ()
    needs_rows: ClassVar[bool] = False
    lr: float
    weight_decay: float = 0.0
    lazy: bool = False

    def __post_init__(self) -> None:
        for name, minimum, bound in self._limits():
            setting = number_in_range(name, getattr(self, name), minimum, bound)
            object.__setattr__(self, name, setting)  # all ranks have the same bits, however it was given
        check_flag("lazy", self.lazy)

    def _limits(self) -> list[tuple[str, float, float]]:
        """The fields that have limits: the name, the least value, and the bound that it stays below."""
        return [("lr", 0, math.inf), ("weight_decay", 0, math.inf)]

    @property
    def columns(self) -> tuple[str, ...]:
        return ()

    @property
    def initial(self) -> float:
        return 0.0

    @property
    def changes_absent(self) -> bool:
        """Whether it changes weights whose gradient is zero."""
        return self.weight_decay > 0

    def write(self, step: Step, code: Assembly) -> None:
        """Write the code for a block, whose sum over the ranks is in SUM. `program` adds what all ranks get."""
        raise NotImplementedError

    def program(self, step: Step) -> BlockProgram:
        """The program of a step."""
        code = Assembly()
        self.write(step, code)
        code.fetch(WEIGHTS)
        every = self.changes_absent and not self.lazy
        return code.program(step.state, 1 + len(self.columns), len(self.cells), every_block=every)

    def _add_decay(self, code: Assembly, scale: float) -> float:
        """Add the weights to the gradient, as a penalty does. Returns the factor by which SUM is to be scaled then."""
        if not self.weight_decay:
            return scale
        code.add(Operation.MIX, SUM, WEIGHTS, scale, self.weight_decay)
        return 1.0


def check_rule(rule: object) -> None:
    """Raises UsageError unless `rule` is a Rule."""
    if not isinstance(rule, Rule):
        raise UsageError(f"rule is {rule!r}; expected one of omnireduce.optimizers, such as Adam()")


@dataclass(frozen=True, kw_only=True)
class Sgd(Rule):
    """Gradient descent, with momentum if `momentum` is not 0, Nesterov's if `nesterov`. See torch.optim.SGD."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("nesterov", self.nesterov)
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise UsageError("nesterov needs a momentum, and no dampening")

    def _limits(self) -> list[tuple[str, float, float]]:
        return [*super()._limits(), ("momentum", 0, math.inf), ("dampening", 0, math.inf)]

    @property
    def columns(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def changes_absent(self) -> bool:
        return super().changes_absent or self.momentum > 0

    def write(self, step: Step, code: Assembly) -> None:
        scale = self._add_decay(code, step.gradient(code))
        if not self.momentum:
            code.add(Operation.ADD_SCALED, WEIGHTS, SUM, -self.lr * scale)
            return
        part = 1.0 if step.number == 1 else 1 - self.dampening
        code.add(Operation.MIX, FIRST, SUM, self.momentum, part * scale)
        if self.nesterov:
            code.add(Operation.MIX, SUM, FIRST, scale, self.momentum)
        code.add(Operation.ADD_SCALED, WEIGHTS, SUM if self.nesterov else FIRST, -self.lr)


@dataclass(frozen=True, kw_only=True)
class Adagrad(Rule):
    """See torch.optim.Adagrad."""

    lr: float = 1e-2
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def _limits(self) -> list[tuple[str, float, float]]:
        return [*super()._limits(), *((name, 0, math.inf) for name in ("lr_decay", "initial_accumulator_value", "eps"))]

    @property
    def columns(self) -> tuple[str, ...]:
        return ("sum",)

    @property
    def initial(self) -> float:
        return self.initial_accumulator_value

    def write(self, step: Step, code: Assembly) -> None:
        scale = self._add_decay(code, step.gradient(code))
        rate = self.lr / (1 + (step.number - 1) * self.lr_decay)
        code.add(Operation.MIX_SQUARE, FIRST, SUM, 1.0, scale * scale)
        code.add(Operation.ROOT, SCRATCH, FIRST, 1.0, self.eps)
        code.add(Operation.DIVIDE_INTO, SCRATCH, SUM)
        code.add(Operation.ADD_SCALED, WEIGHTS, SCRATCH, -rate * scale)


@dataclass(frozen=True, kw_only=True)
class RowAdagrad(Rule):
    """Adagrad with one number for each row of a table: the mean of the squares of its elements is added to it.

    For rows of embeddings. Source: "exact row-wise Adagrad" of FBGEMM (Naumov et al., arXiv:1906.00091, use it).
    """

    cells: ClassVar[tuple[str, ...]] = ("sum",)
    needs_rows: ClassVar[bool] = True
    lr: float = 1e-2
    eps: float = 1e-10

    def _limits(self) -> list[tuple[str, float, float]]:
        return [*super()._limits(), ("eps", 0, math.inf)]

    def write(self, step: Step, code: Assembly) -> None:
        scale = self._add_decay(code, step.gradient(code))
        code.add(Operation.COPY, SCRATCH, SUM)
        code.add(Operation.SQUARE, SCRATCH)
        code.add(Operation.BLOCK_SUM, SCRATCH)
        code.add(Operation.LOAD_CELL, SECOND_SCRATCH)
        code.add(Operation.ADD_SCALED, SECOND_SCRATCH, SCRATCH, scale * scale / step.width)
        code.add(Operation.STORE_CELL, SECOND_SCRATCH)
        code.add(Operation.ROOT, SCRATCH, SECOND_SCRATCH, 1.0, self.eps)
        code.add(Operation.DIVIDE_INTO, SCRATCH, SUM)
        code.add(Operation.ADD_SCALED, WEIGHTS, SCRATCH, -self.lr * scale)


@dataclass(frozen=True, kw_only=True)
class Adam(Rule):
    """See torch.optim.Adam."""

    lr: float = 1e-3
    betas: tuple[float, float] = BETAS
    eps: float = ADAM_EPS
    beta1: float = field(init=False, repr=False)
    beta2: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        betas = check_betas(self.betas)
        for name, setting in (("betas", betas), ("beta1", betas[0]), ("beta2", betas[1])):
            object.__setattr__(self, name, setting)
        super().__post_init__()

    def _limits(self) -> list[tuple[str, float, float]]:
        return [*super()._limits(), ("eps", 0, math.inf)]

    @property
    def columns(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    @property
    def changes_absent(self) -> bool:
        return True

    def _moments(self, code: Assembly, scale: float) -> None:
        scalars = self.beta1, (1 - self.beta1) * scale, self.beta2, (1 - self.beta2) * scale * scale
        code.add(Operation.MOMENTS, FIRST, SUM, *scalars)

    def _corrections(self, step: Step) -> tuple[float, float]:
        """The factor for the root of the second moment, before eps is added, and the factor for the first moment over
        that."""
        first, second = (bias_correction(beta, step.number) for beta in self.betas)
        return 1 / math.sqrt(second), 1 / first

    def _advance(self, step: Step, code: Assembly) -> None:
        root, rate = self._corrections(step)
        code.add(Operation.ROOT_STEP, WEIGHTS, FIRST, root, self.eps, -self.lr * rate)

    def write(self, step: Step, code: Assembly) -> None:
        self._moments(code, self._add_decay(code, step.gradient(code)))
        self._advance(step, code)


@dataclass(frozen=True, kw_only=True)
class SparseAdam(Adam):
    """Adam that is lazy, and adds eps before it corrects the second moment. See torch.optim.SparseAdam."""

    lazy: bool = True

    def _corrections(self, step: Step) -> tuple[float, float]:
        first, second = (bias_correction(beta, step.number) for beta in self.betas)
        return 1.0, math.sqrt(second) / first


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay. See torch.optim.AdamW."""

    weight_decay: float = WEIGHT_DECAY

    def write(self, step: Step, code: Assembly) -> None:
        if self.weight_decay:
            code.add(Operation.SCALE, WEIGHTS, 0, 1 - self.lr * self.weight_decay)
        self._moments(code, step.gradient(code))
        self._advance(step, code)


@dataclass(frozen=True, kw_only=True)
class Lamb(Adam):
    """Adam whose step is in proportion to the tensor's norm (You et al., arXiv:1904.00962, algorithm 2).

    The shards add up the squares of the weights and of the step in a first exchange. The second one needs no gradient.
    It has no lazy form.
    """

    eps: float = LAMB_EPS
    weight_decay: float = WEIGHT_DECAY

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lazy:
            raise UsageError("Lamb has no lazy form: norms are those of whole tensors")

    def norms(self, step: Step) -> BlockProgram:
        """The program of the first exchange. Its totals are the squares of the norms of the weights and of the step."""
        code = Assembly()
        self._moments(code, step.gradient(code))
        self._step(step, code)
        code.add(Operation.COPY, SECOND_SCRATCH, WEIGHTS)
        for at, register in enumerate((SECOND_SCRATCH, SCRATCH)):
            code.add(Operation.SQUARE, register)
            code.add(Operation.ADD_TO_TOTAL, register, third=at)
        return code.program(step.state, 3, 0, every_block=True, totals=2, returns=False)

    def _step(self, step: Step, code: Assembly) -> None:
        root, rate = self._corrections(step)
        code.add(Operation.ROOT, SCRATCH, SECOND, root, self.eps)
        code.add(Operation.DIVIDE_INTO, SCRATCH, FIRST)
        code.add(Operation.MIX, SCRATCH, WEIGHTS, rate, self.weight_decay)

    def apply(self, step: Step, weights: float, length: float) -> BlockProgram:
        """The program of the second exchange, for weights and a step of these norms."""
        code, ratio = Assembly(), weights / length if weights > 0 and length > 0 else 1.0
        self._step(step, code)
        code.add(Operation.ADD_SCALED, WEIGHTS, SCRATCH, -self.lr * ratio)
        code.fetch(WEIGHTS)
        return code.program(step.state, 3, 0, every_block=True)
