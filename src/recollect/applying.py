"""Put a plan onto a model, and take it off again.

Nothing of the model is replaced but the `forward` attribute of the modules inside the planned units, on the instance:
parameters, buffers, hooks, state dict, class and `repr` stay what they are. Hooks of a unit (FSDP2's gathering, for one)
run outside of the tape, as they run outside of `forward`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recollect._torch_private import is_checkpoint_wrapper, is_compiled_module
from recollect.engine.placed_forward import Applied, PlacedForward
from recollect.engine.plan_policy import PlanPolicy
from recollect.engine.policy import Policy
from recollect.engine.recorded_on import warn_if_recorded_elsewhere
from recollect.engine.region import run_region
from recollect.engine.tape import Tape
from recollect.errors import AlreadyAppliedError, UnknownNameError
from recollect.loss.intercept import loss_forwards
from recollect.plans.action import Action
from recollect.plans.value_names import module_of

if TYPE_CHECKING:
    from recollect.plans.plan import Plan


class _ScopeForward(PlacedForward):
    """Tells the tape which module inside a unit is running, so that values have the names that the plan knows."""

    def __init__(self, module: nn.Module, tape: Tape, scope: str) -> None:
        super().__init__(module)
        self.tape = tape
        self.scope = scope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode = self.tape.mode
        if mode is None:
            return self.forward(*args, **kwargs)
        return mode.run_module(self.scope, self.forward, args, kwargs)


class _UnitForward(PlacedForward):
    """Runs a unit on the tape."""

    def __init__(self, module: nn.Module, tape: Tape, path: str) -> None:
        super().__init__(module)
        self.tape = tape
        self.path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return self.tape.run(self.path, self.forward, args, kwargs)


class _RegionForward(PlacedForward):
    """Runs a unit as one region that is re-run as a whole in backward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return run_region(self.forward, args, kwargs)


def apply(model: nn.Module, plan: Plan) -> Applied:
    """Have the model's units keep, drop and recompute what the plan says, from the next forward on.

    Args:
        model: the model that the plan was made for, or one with the same modules. It is not copied.
        plan: units that it does not name, or that recompute nothing, run exactly as before.

    Returns:
        A handle that takes the plan off again; also a context manager.

    Raises:
        UnknownNameError: the plan names a unit, or a module in a unit, that the model does not have.
        AlreadyAppliedError: a plan, `CheckpointWrapper` or Hugging Face's gradient checkpointing is on this model.
        ChunkedLossError: the plan's loss is in chunks, which this model cannot do.

    Warns:
        PlanMismatchWarning: once, if the ops that a unit runs are not those of the plan; what the plan does not name is kept.
        ProfileMismatchWarning: the plan's profile was recorded with another version of PyTorch, or on another device.

    Example:
        >>> import recollect
        >>> from recollect.lab.models.architectures import llama_config
        >>> from recollect.lab.models.gpt import GPTModel
        >>> model = GPTModel(llama_config(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64))
        >>> plan = recollect.Plan({"decoder.layers.0": recollect.UnitPlan({"mlp.activation_func.silu": "recompute"})})
        >>> applied = recollect.apply(model, plan)
        >>> applied.remove()
    """
    warn_if_recorded_elsewhere(model, plan)
    # A unit that keeps everything still has to be on the tape where what it gets may have been dropped by another one.
    drops_outputs = any(unit.output == Action.RECOMPUTE for unit in plan.units.values())
    active = {path: unit for path, unit in plan.units.items() if unit.recomputes_anything or drops_outputs}
    modules = {path: _find_unit(model, path) for path in plan.units}
    for path, unit in plan.units.items():
        _check_value_names(modules[path], path, unit.actions)
    tape_paths = [path for path, unit in active.items() if unit.engine == "tape"]
    region_paths = [path for path, unit in active.items() if unit.engine == "region"]
    _check_not_applied(model, [modules[path] for path in active])
    forwards = _tape_forwards(model, tape_paths, Tape(PlanPolicy(plan)))
    forwards += [_RegionForward(modules[path]) for path in region_paths]
    return Applied(model, [*forwards, *loss_forwards(model, plan.loss_chunks)], plan)


def applied_to(model: nn.Module) -> list[Applied]:
    """Find the plans that are on a model now; `fit` leaves one there.

    Args:
        model: any module.

    Returns:
        The handles, each with `remove()`; an empty list if there is none.

    Example:
        >>> import recollect
        >>> from recollect.lab.models.architectures import llama_config
        >>> from recollect.lab.models.gpt import GPTModel
        >>> model = GPTModel(llama_config(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64))
        >>> recollect.applied_to(model)
        []
    """
    forwards = (vars(module).get("forward") for module in model.modules())
    return list(dict.fromkeys(forward.applied for forward in forwards if isinstance(forward, PlacedForward)))


def apply_policy(model: nn.Module, unit_paths: Iterable[str], policy: Policy | Tape) -> Applied:
    """Put units on the tape under any policy; `apply` is this with a plan as the policy."""
    paths = list(unit_paths)
    _check_not_applied(model, [_find_unit(model, path) for path in paths])
    tape = policy if isinstance(policy, Tape) else Tape(policy)
    return Applied(model, _tape_forwards(model, paths, tape), None)


def _tape_forwards(model: nn.Module, unit_paths: list[str], tape: Tape) -> list[PlacedForward]:
    units = {id(_find_unit(model, path)) for path in unit_paths}
    forwards: list[PlacedForward] = []
    for path in unit_paths:
        unit = _find_unit(model, path)
        forwards.append(_UnitForward(unit, tape, path))
        forwards += [
            _ScopeForward(module, tape, name) for name, module in _plain_submodules(unit) if id(module) not in units
        ]
    return forwards


def _plain_submodules(unit: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Modules below a unit whose `forward` may be wrapped: not scripted, not compiled, nor what lies inside of those."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in unit.named_children():
        if isinstance(child, torch.jit.ScriptModule) or is_compiled_module(child):
            continue
        path = f"{prefix}.{name}" if prefix else name
        found += [(path, child), *_plain_submodules(child, path)]
    return found


def _find_unit(model: nn.Module, path: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if path not in modules:
        raise UnknownNameError(kind="unit", name=path, where=type(model).__name__, known=list(modules))
    return modules[path]


def _check_value_names(unit: nn.Module, path: str, actions: Mapping[str, str]) -> None:
    modules = {name for name, _ in unit.named_modules(remove_duplicate=False)}
    for value_name in actions:
        scope = module_of(value_name)
        if scope not in modules:
            close = difflib.get_close_matches(scope, modules, n=1)
            known = [value_name.replace(scope, match) for match in close] or sorted(modules)
            raise UnknownNameError(kind="value", name=value_name, where=f"unit {path!r}", known=known)


def _check_not_applied(model: nn.Module, units: list[nn.Module]) -> None:
    inside = {id(module) for unit in units for module in unit.modules()}
    for name, module in model.named_modules():
        if isinstance(vars(module).get("forward"), PlacedForward) and id(module) in inside:
            raise _already_applied(name, "a recollect plan", "call applied.remove() first")
        if is_checkpoint_wrapper(module):
            raise _already_applied(name, "torch's CheckpointWrapper", "build the model without checkpoint_wrapper")
        if getattr(module, "gradient_checkpointing", False) is True and id(module) in inside:
            remedy = "call model.gradient_checkpointing_disable() first"
            raise _already_applied(name, "Hugging Face's gradient checkpointing", remedy)


def _already_applied(path: str, by: str, remedy: str) -> AlreadyAppliedError:
    return AlreadyAppliedError(
        f"cannot apply a plan: module {path!r} recomputes already, by {by}; a value would be recomputed twice. "
        f"To have recollect decide, {remedy}."
    )
