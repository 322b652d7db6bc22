"""Compare two runs bit for bit: results with their gradients, and the state that they leave behind.

Steps that do not fit into memory without the plan are compared unit by unit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from recollect._torch_private import tree_map
from recollect.applying import apply
from recollect.engine.content import has_same_bits
from recollect.plans.action import Action, EngineChoice
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.progress import stage
from recollect.recording.model_step import device_of
from recollect.recording.restored_state import restored_buffers, restored_generators
from recollect.tensors import inner_tensors, tensors_in

Difference = tuple[str, float]


@dataclass(frozen=True, kw_only=True)
class Computed:
    """The results and side effects of a run, by name."""

    gradients: Mapping[str, torch.Tensor]
    """The loss (or outputs), and each gradient."""
    state: Mapping[str, torch.Tensor]
    """Copies of buffers and of random generators, after the run."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of comparing runs."""

    num_compared: int = 0
    """Number of gradients, losses and outputs compared."""
    difference: Difference | None = None
    """The first gradient (or loss, or output) that differs, and the largest absolute difference; None if all are equal."""
    state_difference: Difference | None = None
    """The same for buffers and random generators."""
    plain_difference: Difference | None = None
    """The first difference between two runs without a plan, if they were needed and differ."""

    def followed_by(self, later: Findings) -> Findings:
        """Add the findings of a later comparison; of differences, the first counts."""
        return Findings(
            num_compared=self.num_compared + later.num_compared,
            difference=self.difference or later.difference,
            state_difference=self.state_difference or later.state_difference,
            plain_difference=self.plain_difference or later.plain_difference,
        )

    def within(self, path: str) -> Findings:
        """Put a unit's path before the names."""
        differences = {name: found for name, found in vars(self).items() if isinstance(found, tuple)}
        named: dict[str, Any] = {name: (f"{path}: {what}", by) for name, (what, by) in differences.items()}
        return replace(self, **named)


def state_after(module: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Copy the state that a run may change: buffers, and the random generators of the CPU and the device."""
    state = {f"buffer {name}": buffer.detach().clone() for name, buffer in module.named_buffers()}
    state["random generator"] = torch.random.get_rng_state()
    if device.type == "cuda":
        state[f"random generator of {device}"] = torch.cuda.get_rng_state(device)
    return state


def compare_runs(
    expected: Computed, got: Computed, again: Callable[[], Computed], in_any: Callable[[bool], bool] = bool
) -> Findings:
    """Compare two runs.

    `again` repeats the expected run where something differs; all processes that compare call `in_any` together.
    """
    difference = first_difference(expected.gradients, got.gradients)
    state_difference = first_difference(expected.state, got.state)
    plain_difference = None
    if in_any(bool(difference or state_difference)):
        repeated = again()
        plain_difference = first_difference(expected.gradients, repeated.gradients)
        plain_difference = plain_difference or first_difference(expected.state, repeated.state)
    return Findings(
        num_compared=len(expected.gradients),
        difference=difference,
        state_difference=state_difference,
        plain_difference=plain_difference,
    )


def first_difference(expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]) -> Difference | None:
    """Return the first name with different bits, or that only one side has, and the largest absolute difference.

    None if all are equal.
    """
    for name, tensor in expected.items():
        other = got.get(name)
        if other is None:
            return name, float("inf")
        if not has_same_bits(tensor, other):
            return name, largest_difference(tensor, other)
    return next(((name, float("inf")) for name in got if name not in expected), None)


def largest_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest absolute difference of two tensors; infinity if their shapes differ."""
    if left.shape != right.shape:
        return float("inf")
    inner, others = inner_tensors(left), inner_tensors(right)
    if (inner or others) and type(left) is not type(right):
        return float("inf")
    if inner:
        return max(largest_difference(one, other) for one, other in zip(inner, others, strict=True))
    difference = _widened(left) - _widened(right)
    return float(difference.abs().max()) if difference.numel() else 0.0


def furthest(expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]) -> Difference:
    """Return the name of the most different tensor, and the norm of the difference over the norm."""
    far = {}
    for name, tensor in expected.items():
        exact, other = _widened(tensor), _widened(got[name])
        norm = float(exact.norm())
        far[name] = float((exact - other).norm()) / norm if norm else float(other.norm())
    name = max(far, key=lambda name: far[name])
    return name, far[name]


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach()
    if dense.layout is not torch.strided:
        dense = dense.to_dense()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def compare_units(
    model: nn.Module, plan: Plan, forward: Callable[[], object], in_any: Callable[[bool], bool] = bool
) -> Findings:
    """Run the model forward without gradients, and compare each planned unit on its own, on the inputs that it gets.

    The comparison covers the unit's outputs, the gradients of its parameters and inputs for an all-ones gradient of its
    outputs, and the buffers and random generators after its backward. Only one unit's values are held at a time. If the plan
    drops a unit's output, the comparison keeps it, because the unit that would recompute it is not running.

    Of differences, named "unit: parameter", the first counts; the plain one is of two runs of the first unit that differs.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    active = [path for path, unit in plan.units.items() if unit.recomputes_anything]
    findings, compared, is_busy = Findings(), set[str](), False

    def compare(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal findings, is_busy
        if is_busy:  # It is being compared, or a unit that it is in.
            return
        is_busy = True
        try:
            with torch.enable_grad():
                found = _compared_alone(plan.units[path], module, args, kwargs, in_any)
        finally:
            is_busy = False
        findings = findings.followed_by(found.within(path))
        if path not in compared:
            compared.add(path)
            done()

    with stage("comparing units", total=len(active)) as done, ExitStack() as stack, torch.no_grad():
        for path in active:
            hook = modules[path].register_forward_pre_hook(partial(compare, path), with_kwargs=True)
            stack.callback(hook.remove)
        forward()
    return findings


@contextmanager
def without_choices(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Run compiled units compiled, with PyTorch's choice of values to keep; all others unchanged.

    Beside compiled units, those on the tape stay there, and keep everything: their user may have compiled them, too.
    """
    by_pytorch = UnitPlan({}, engine=EngineChoice.COMPILE)
    units = {
        path: by_pytorch if unit.engine is EngineChoice.COMPILE else UnitPlan(dict.fromkeys(unit.actions, Action.KEEP))
        for path, unit in plan.units.items()
        if unit.engine is EngineChoice.COMPILE or unit.actions
    }
    with apply(model, Plan(units)) if by_pytorch in units.values() else nullcontext():
        yield


def _compared_alone(
    unit: UnitPlan,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_any: Callable[[bool], bool],
) -> Findings:
    """Compare a unit that keeps its output, as the unit that would recompute it is not running."""
    own = Plan({"": UnitPlan(unit.actions, output=Action.KEEP, engine=unit.engine)})

    def plain() -> Computed:
        """Run the unit without the plan's choices."""
        with without_choices(module, own):
            return _computed(module, args, kwargs)

    expected = plain()
    with apply(module, own):
        got = _computed(module, args, kwargs)
    return compare_runs(expected, got, again=plain, in_any=in_any)


def _computed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Computed:
    """Run a unit forward and backward on private copies of its inputs; leave no gradients behind."""
    leaves: list[torch.Tensor] = []
    args, kwargs = tree_map(partial(_private, leaves), (args, kwargs))
    with restored_generators(module), restored_buffers(module):
        gradients = _run(module, args, kwargs, leaves)
        return Computed(gradients=gradients, state=state_after(module, device_of(module, (args, kwargs))))


def _run(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    outputs = tensors_in(module(*args, **kwargs))
    trained: dict[str, torch.Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
    trained |= {f"input {index}": tensor for index, tensor in enumerate(tensors)}
    differentiable = [t for t in outputs if t.requires_grad]
    result: dict[str, torch.Tensor] = {}
    # A frozen embedding has neither.
    if differentiable and trained:
        ones = [torch.ones_like(t) for t in differentiable]
        gradients = torch.autograd.grad(differentiable, list(trained.values()), ones, allow_unused=True)
        result = {name: g for name, g in zip(trained, gradients, strict=True) if g is not None}
    return result | {f"output {index}": t.detach() for index, t in enumerate(outputs)}


def _private(leaves: list[torch.Tensor], item: Any) -> Any:
    """Copy the arguments that a unit might write to: tensors, whose leaves are added to a list, and objects such as a cache."""
    if not isinstance(item, torch.Tensor):
        return copy.deepcopy(item)
    copied = item.detach().clone()
    if not copied.is_floating_point():
        return copied
    leaves.append(copied.requires_grad_())
    return copied.clone()  # No leaf: the unit may write to it.
