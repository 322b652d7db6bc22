"""Compare a plan's gradients unit by unit, for steps that do not fit into memory without the plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recollect._torch_private import tree_map
from recollect.applying import apply
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.progress.stage import stage
from recollect.recording.model_step import device_of
from recollect.recording.restored_state import restored_buffers
from recollect.tensors import tensors_in
from recollect.verification.compare import Computed, Findings, compare_runs, state_after


def compare_units(
    model: nn.Module, plan: Plan, forward: Callable[[], object], in_any: Callable[[bool], bool] = bool
) -> Findings:
    """Run the model forward without gradients, and compare each planned unit alone, on the inputs that it gets.

    The comparison covers the unit's outputs, the gradients of its parameters and inputs for an all-ones gradient of its
    outputs, and the buffers and random generators after its backward. Only one unit's values are held at a time. If the plan
    drops a unit's output, the comparison keeps it, because the unit that would recompute it is not running.

    Args:
        model: without a plan.
        plan: the plan to check.
        forward: runs the model once.
        in_any: see `compare_runs`.

    Returns:
        The first differences, as ("unit: parameter", largest absolute difference); the plain one is of two runs of the first
        unit that differs.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    active = [path for path, unit in plan.units.items() if unit.recomputes_anything]
    with stage("comparing units", total=len(active)) as done:
        comparison = _Comparison(plan, done, in_any)
        handles = [modules[path].register_forward_pre_hook(comparison.hook(path), with_kwargs=True) for path in active]
        try:
            with torch.no_grad():
                forward()
        finally:
            for handle in handles:
                handle.remove()
    return comparison.findings


class _Comparison:
    def __init__(self, plan: Plan, done: Callable[[], None], in_any: Callable[[bool], bool]) -> None:
        self.plan = plan
        self._in_any = in_any
        self._done = done
        self._compared: set[str] = set()
        self.findings = Findings()
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
        expected = _computed(module, args, kwargs)
        with apply(module, alone):
            got = _computed(module, args, kwargs)
        found = compare_runs(expected, got, again=lambda: _computed(module, args, kwargs), in_any=self._in_any)
        self.findings = self.findings.followed_by(found.within(path))
        if path not in self._compared:
            self._compared.add(path)
            self._done()


def _computed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Computed:
    """Run a unit forward and backward on private copies of its inputs; leave no gradients behind."""
    args, kwargs = tree_map(_private, (args, kwargs))
    tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    devices = sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), restored_buffers(module):
        gradients = _run(module, args, kwargs, tensors)
        return Computed(gradients=gradients, state=state_after(module, device_of(module, (args, kwargs))))


def _run(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    outputs = tensors_in(module(*args, **kwargs))
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
