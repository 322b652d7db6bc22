"""Compare a plan's gradients unit by unit, for steps that do not fit into memory without the plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recollect._torch_private import tree_leaves, tree_map
from recollect.applying import apply
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.recording.model_step import restored_buffers

Difference = tuple[str, float]


def compare_units(
    model: nn.Module, plan: Plan, forward: Callable[[], object]
) -> tuple[Difference | None, Difference | None, int]:
    """Run the model forward without gradients, and compare each planned unit alone, on the inputs that it gets.

    The comparison covers the unit's outputs, and the gradients of its parameters and inputs for an all-ones gradient of its
    outputs. Only one unit's values are held at a time. If the plan drops a unit's output, the comparison keeps it, because
    the unit that would recompute it is not running.

    Args:
        model: without a plan.
        plan: the plan to check.
        forward: runs the model once.

    Returns:
        The first difference, as ("unit: parameter", largest absolute difference), or None; the same for two runs of that unit
        without the plan, or None if they agree; and the number of gradients compared.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    comparison = _Comparison(plan)
    active = [path for path, unit in plan.units.items() if unit.recomputes_anything]
    handles = [modules[path].register_forward_pre_hook(comparison.hook(path), with_kwargs=True) for path in active]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return comparison.first_difference, comparison.plain_difference, comparison.num_compared


class _Comparison:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.first_difference: Difference | None = None
        self.plain_difference: Difference | None = None
        self.num_compared = 0
        self._is_busy = False

    def hook(self, path: str) -> Callable[..., None]:
        def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._is_busy:
                return
            self._is_busy = True
            try:
                with torch.enable_grad():
                    self._compare(path, module, args, kwargs)
            finally:
                self._is_busy = False

        return before_forward

    def _compare(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        unit = self.plan.units[path]
        alone = Plan({"": UnitPlan(unit.actions, output=Action.KEEP, engine=unit.engine)})
        expected = _gradients(module, args, kwargs)
        with apply(module, alone):
            got = _gradients(module, args, kwargs)
        self.num_compared += len(expected)
        difference = first_difference(expected, got)
        if difference is None or self.first_difference is not None:
            return
        self.first_difference = f"{path}: {difference[0]}", difference[1]
        plain = first_difference(expected, _gradients(module, args, kwargs))
        self.plain_difference = None if plain is None else (f"{path}: {plain[0]}", plain[1])


def first_difference(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> Difference | None:
    """Return the first name whose bits differ, or that only one side has, and the largest absolute difference.

    None if all are equal.
    """
    for name, tensor in expected.items():
        other = got.get(name)
        if other is None:
            return name, float("inf")
        if not has_same_bits(tensor, other):
            return name, largest_difference(tensor, other)
    return next(((name, float("inf")) for name in got if name not in expected), None)


def has_same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors agree in every bit: NaN equals itself, and -0.0 differs from 0.0.

    Sparse tensors are compared after their entries have been added up.

    Example:
        >>> import torch
        >>> has_same_bits(torch.tensor(float("nan")), torch.tensor(float("nan")))
        True
    """
    if left.dtype != right.dtype or left.shape != right.shape or left.layout != right.layout:
        return False
    if left.layout is torch.sparse_coo:
        left, right = left.detach().coalesce(), right.detach().coalesce()
        return has_same_bits(left.indices(), right.indices()) and has_same_bits(left.values(), right.values())
    bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(*bits)


def largest_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest absolute difference of two tensors of one shape."""
    difference = left.double() - right.double()
    return float((difference.to_dense() if difference.is_sparse else difference).abs().max())


def _gradients(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Run a unit forward and backward on private copies of its inputs; leave no gradients behind."""
    args, kwargs = tree_map(_private, (args, kwargs))
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    devices = sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), restored_buffers(module):
        return _run(module, args, kwargs, tensors)


def _run(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    outputs = [t for t in tree_leaves(module(*args, **kwargs)) if isinstance(t, torch.Tensor)]
    trained: dict[str, torch.Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
    trained |= {f"input {index}": tensor for index, tensor in enumerate(tensors)}
    differentiable = [t for t in outputs if t.requires_grad]
    gradients = torch.autograd.grad(
        differentiable, list(trained.values()), [torch.ones_like(t) for t in differentiable], allow_unused=True
    )
    result = {name: g for name, g in zip(trained, gradients, strict=True) if g is not None}
    return result | {f"output {index}": t.detach() for index, t in enumerate(outputs)}


def _private(item: Any) -> Any:
    """Copy what a unit might write to: tensors, and objects such as a key-value cache."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone().requires_grad_(item.is_floating_point())
    return copy.deepcopy(item)
