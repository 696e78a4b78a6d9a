"""Optimizers of torch whose state lives on the aggregator shards.

import omnireduce.torch as hvd
from omnireduce.optimizers import Adam

hvd.init()
optimizer = hvd.ShardedOptimizer(model.parameters(), Adam(lr=1e-3))
...
loss.backward()
optimizer.step()  # instead of an all-reduce of gradients and a step on each rank
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from omnireduce.core.dtypes import Array
from omnireduce.data_parallel.session import communicator
from omnireduce.errors import UsageError, a_type
from omnireduce.optimizers.rules import Rule, check_rule
from omnireduce.optimizers.sharded import ShardedOptimizer as ArrayOptimizer
from omnireduce.runtime.rank.reported_errors import report_errors_to
from omnireduce.support.logs import tagged
from omnireduce.torch.gradient_hooks import call_on_gradient
from omnireduce.torch.tensors import array_of, staged

log = logging.getLogger("omnireduce")


class ShardedOptimizer(torch.optim.Optimizer):
    """Update parameters on the aggregators, with the mean of the gradients of all ranks.

    `params`: tensors of float32, or groups of them as torch.optim takes them. A group may have a `rule` of its own,
    other numbers for its rule (as `lr`, which schedulers may change), and `rows`: True for parameters whose gradients
    are sparse (`nn.Embedding(..., sparse=True)`), which are updated row by row. A parameter without a gradient counts
    as one whose gradient is zero.

    `clip_norm`: the mean of the gradients of all ranks is made no longer than this, the parameters of all groups taken
    together, as by `torch.nn.utils.clip_grad_norm_`. `clip_value`: no element of the mean is larger than this, or less
    than minus this. Clipping before `step` would clip the gradients of each rank, and not their mean.

    At the first step all ranks get the weights of rank 0. If theirs may differ, all call `restore` before they compute
    the first gradients. All ranks call all methods in the same order, `state_dict` too: it has the form of torch's
    optimizers, and is the same on all ranks. Raises what `omnireduce.ShardedOptimizer` raises, and UsageError before
    `init`.
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], rule: Rule,
        *, clip_norm: float | None = None, clip_value: float | None = None, name: str = "optimizer",
    ) -> None:  # fmt: skip
        check_rule(rule)
        self._name, self._parts = name, list[_Group]()
        self._clip_norm, self._clip_value = clip_norm, clip_value
        self._pending: dict[str, Any] | None = None  # a state that was loaded, and is not on the shards yet
        super().__init__(params, {**_numbers_of(rule), "rule": rule, "rows": False})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as in torch. Raises UsageError for invalid parameters, and adds none then."""
        if not isinstance(param_group, dict):
            raise UsageError(f"a group of parameters is {a_type(param_group)}; expected a dict")
        rule = param_group.get("rule", self.defaults["rule"])
        check_rule(rule)
        super().add_param_group({**_numbers_of(rule), **param_group})
        try:
            clipping = {"clip_norm": self._clip_norm, "clip_value": self._clip_value}
            self._parts.append(_Group(self.param_groups[-1], f"{self._name}.{len(self._parts)}", **clipping))
        except UsageError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; returns what `closure` returns, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._pending is not None:
            self.restore()
        changed = [part.has_changed_gradients() for part in self._parts]
        if any(changed):
            _warn_of_changed_gradients()
        with report_errors_to(self._parts[0]):
            prepared = [(part, part.prepared()) for part in self._parts]  # before anything is sent
        norm = None if self._clip_norm is None else _norm_of(prepared)
        for end in [part.begin_update(gradients, norm) for part, gradients in prepared]:
            end()
        return loss

    @property
    def gradient_norm(self) -> float | None:
        """With `clip_norm`, how long the mean of the gradients was in the last step, before it was clipped."""
        return self._parts[0].optimizer.gradient_norm

    def state_dict(self) -> dict[str, Any]:
        """The state on the shards, on all ranks, in the form of torch's optimizers."""
        saved: dict[str, Any] = super().state_dict()
        for group in saved["param_groups"]:
            del group["rule"]  # a state is plain data; who loads it has the rule
        shard_states = [] if self._pending is not None else [part.state() for part in self._parts]
        numbers = (number for group in saved["param_groups"] for number in group["params"])
        states = (state for group in shard_states for state in group)
        saved["state"] = {number: state for number, state in zip(numbers, states, strict=False) if state}
        saved["state"] = saved["state"] if self._pending is None else self._pending["state"]
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`, also one of torch's optimizers: numbers that it does not have stay as they are,
        and a parameter without a state there, as one that has had no gradient, begins anew. The shards get that of rank
        0 at the next step, or at `restore`. Raises UsageError for a state of other groups."""
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
            raise UsageError("the state has no 'state' or no 'param_groups'; expected what state_dict has returned")
        own_groups, loaded_groups = self.param_groups, state_dict["param_groups"]
        if len(own_groups) != len(loaded_groups):
            raise UsageError(f"a state of {len(loaded_groups)} groups; expected {len(own_groups)}")
        groups = [
            {
                **{name: x for name, x in own_group.items() if name != "params"},
                **loaded_group,
                "rule": own_group["rule"],
            }
            for own_group, loaded_group in zip(own_groups, loaded_groups, strict=True)
        ]
        super().load_state_dict({**state_dict, "param_groups": groups, "state": {}})
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.group = group
        self._pending = {"state": dict(state_dict["state"])}

    @torch.no_grad()
    def restore(self, root: int = 0) -> None:
        """Give all ranks and the shards the weights of rank `root`, and the shards the state that it has loaded; where
        it has loaded none, the optimizer begins anew. All ranks call this. Elastic training does, after the job was
        formed anew."""
        pending, first = self._pending, 0
        for part in self._parts:
            last = first + len(part.params)
            part.restore([pending["state"].get(at, {}) for at in range(first, last)] if pending else [], root)
            first = last
        self._pending = None

    def close(self) -> None:
        """Give back what the shards keep."""
        for part in self._parts:
            part.close()


def _norm_of(prepared: Sequence[tuple[_Group, dict[str, Any]]]) -> float:
    """The norm of the means of all gradients together."""
    ends = [part.optimizer.begin_squares(gradients) for part, gradients in prepared]
    return math.sqrt(sum(end() for end in ends))


@cache
def _warn_of_changed_gradients() -> None:
    """On rank 0, once."""
    if communicator().rank == 0:
        log.warning(
            "gradients were changed between backward and the step of a ShardedOptimizer. A division is all right. If "
            "they were clipped, each rank has clipped its own ones, not their mean: give the optimizer clip_norm= or "
            "clip_value= instead", extra=tagged("changed_gradients"),
        )  # fmt: skip


def _numbers_of(rule: Rule) -> dict[str, Any]:
    return {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule) if field.init}


class _Group:
    """A group of parameters, and its optimizer of arrays."""

    def __init__(self, group: dict[str, Any], name: str, **clipping: Any) -> None:
        self.group, self.params = group, list[Tensor](group["params"])
        self._copies = [param.detach() if _is_plain(param) else staged(param).clone() for param in self.params]
        weights = {str(at): array_of(copy) for at, copy in enumerate(self._copies)}
        tables = weights if group["rows"] else ()
        self._versions = dict[int, int]()  # how often gradients were changed, as torch counts, until backward ended
        for at, param in enumerate(self.params):
            if param.requires_grad:
                call_on_gradient(param, self.note_gradient, at)
        self.optimizer = ArrayOptimizer(
            weights, self._rule(), tables=tables, comm=communicator(), name=name, **clipping
        )

    def _rule(self) -> Rule:
        rule: Rule = self.group["rule"]
        return dataclasses.replace(rule, **{name: self.group[name] for name in _numbers_of(rule)})

    def note_gradient(self, at: int) -> None:
        """Backward has made a gradient."""
        self._versions[at] = cast(Tensor, self.params[at].grad)._version

    def has_changed_gradients(self) -> bool:
        """Whether the program has changed some since backward made them."""
        versions, self._versions = self._versions, {}
        gradients = ((self.params[at].grad, version) for at, version in versions.items())
        return any(gradient is not None and gradient._version != version for gradient, version in gradients)

    def prepared(self) -> dict[str, Any]:
        """The gradients that this rank has, ready for a step. Raises UsageError for a sparse one that should be dense,
        or the other way round."""
        self.optimizer.rule = self._rule()
        if not self.optimizer.steps:
            self._take_copies()  # weights that are on a GPU
        return self.optimizer.check_gradients({str(at): self._gradient(at) for at in range(len(self.params))})

    def begin_update(self, gradients: Mapping[str, Any], norm: float | None) -> Callable[[], None]:
        """Start an update; what this returns ends it."""
        end = self.optimizer.begin_update(gradients, norm)

        def end_step() -> None:
            end()
            self._put_back()

        return end_step

    def refuse(self, error: Exception) -> None:
        """See `omnireduce.ShardedOptimizer`."""
        self.optimizer.refuse(error)

    def _take_copies(self) -> None:
        for param, copy in zip(self.params, self._copies, strict=True):
            if param.data_ptr() != copy.data_ptr():
                copy.copy_(param)

    def _put_back(self) -> None:
        for param, copy in zip(self.params, self._copies, strict=True):
            if param.data_ptr() != copy.data_ptr():
                param.copy_(copy)

    def _gradient(self, at: int) -> Array | tuple[Array, Array] | None:
        grad = self.params[at].grad
        if grad is None:
            return None
        if grad.is_sparse != bool(self.group["rows"]):
            kind = "sparse" if grad.is_sparse else "dense"
            raise UsageError(f"parameter {at} has a {kind} gradient; `rows` of its group is {self.group['rows']}")
        if grad.is_sparse:
            return array_of(staged(grad._indices()[0])), array_of(staged(grad._values()))  # a row may be there twice
        return array_of(staged(grad))

    def state(self) -> list[dict[str, Any]]:
        """The state of each parameter, in the form of torch's optimizers; empty before the first step."""
        if not self.optimizer.steps:
            return [{} for _ in self.params]
        saved = self.optimizer.state_dict(None)
        return [
            {name: torch.from_numpy(values) for name, values in saved["state"][str(at)].items()}
            | {"step": torch.tensor(float(saved["step"]))}
            for at in range(len(self.params))
        ]

    def restore(self, states: Sequence[Mapping[str, Any]], root: int) -> None:
        steps = int(max((float(state.get("step", 1)) for state in states if state), default=0))
        arrays = {
            str(at): _arrays_of(state) or self.optimizer.initial_state(str(at)) for at, state in enumerate(states)
        }
        self.close()  # a rank that has loaded nothing, and makes a step meanwhile, is told
        self._take_copies()
        self.optimizer.load_state_dict({"step": steps, "state": arrays} if steps else None, root)
        self._put_back()

    def close(self) -> None:
        self.optimizer.close()


def _arrays_of(state: Mapping[str, Any]) -> dict[str, Array]:
    """Arrays that an optimizer of torch keeps of a parameter, without the number of its steps."""
    return {name: array_of(staged(x)) for name, x in state.items() if name != "step" and x is not None}


def _is_plain(tensor: Tensor) -> bool:
    """Whether the shards' results can go into its own memory."""
    return bool(tensor.device.type == "cpu" and tensor.is_contiguous())
