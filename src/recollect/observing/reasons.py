"""Says why a unit is not covered, as far as it can be seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from recollect.applying import applied_to
from recollect.observing.step_watch import Seen
from recollect.plans.paths import paths_above
from recollect.recording.find_units import Unit, class_of

_WORDS = ("checkpoint", "recompute")


@dataclass(frozen=True)
class Reasons:
    """Knows what there is in a model that asks for recompute, and which classes of layers are covered."""

    model: nn.Module
    """The model."""
    covered: Sequence[str]
    """Classes of which a layer is covered."""
    is_on_cpu: bool
    """Whether the step ran on the CPU."""

    def of(self, unit: Unit, seen: Seen) -> str:
        """Return why a unit that nothing covers is not covered; read right after the step, with its gradients."""
        if not seen.calls:
            return "it was not called in the step, other than by its forward itself"
        trained = [parameter for parameter in unit.module.parameters() if parameter.requires_grad]
        if trained and seen.calls == seen.calls_without_gradients:
            if all(parameter.grad is None for parameter in trained):
                return (
                    "NO GRADIENTS: it ran under torch.no_grad() and never again, and its trained parameters get none. A "
                    "reentrant checkpoint does this if none of its inputs requires grad: pass use_reentrant=False, or call "
                    "model.enable_input_require_grads()"
                )
        elif not trained and not seen.kept_bytes:
            return "it keeps nothing: no gradient goes through it"
        return self._by_plan(unit.path) or self._by_hooks(seen) or self._by_switch(unit) or self._by_class(unit)

    def _by_plan(self, path: str) -> str:
        plans = [applied.plan for applied in applied_to(self.model) if applied.plan is not None]
        if not plans:
            return ""
        is_named = any(path in plan.units for plan in plans)
        return "the plan keeps all of it" if is_named else "the plan does not name it, so it keeps all"

    def _by_hooks(self, seen: Seen) -> str:
        if not (seen.is_under_save_on_cpu and self.is_on_cpu):
            return ""
        return "save_on_cpu copies nothing in a step on the CPU: what it saves is there already"

    def _by_switch(self, unit: Unit) -> str:
        found = list(_switches(self.model, unit))
        if not found:
            return ""
        name, is_on, is_training = next((one for one in found if one[1]), found[0])
        if not is_on:
            return f"{name} is False"
        if not is_training:
            return f"{name} is True, but the module is in eval mode, where such switches do nothing: call model.train()"
        return f"{name} is True, but nothing of it ran again{self._others(unit)}"

    def _by_class(self, unit: Unit) -> str:
        if self.covered:
            return f"nothing of it ran again{self._others(unit)}"
        return "nothing of it ran again, and nothing in the model asks for that"

    def _others(self, unit: Unit) -> str:
        own = class_of(unit.module).__name__
        if not self.covered or own in self.covered:
            return ""
        return f"; it is a {own}, those that are covered are {' and '.join(self.covered)}"


def _switches(model: nn.Module, unit: Unit) -> Iterator[tuple[str, bool, bool]]:
    """Yield the switches of a unit, its parts and what is around it: name, whether it is on, whether its module is training."""
    above = reversed(["", *paths_above(unit.path)]) if unit.path else ()
    around = [(f"{path}." if path else "the model's ", model.get_submodule(path)) for path in above]
    inside = [(f"its {path}." if path else "its ", module) for path, module in unit.module.named_modules()]
    for label, module in (*inside, *around):
        scopes: list[Mapping[str, Any]] = [vars(module), *map(vars, type(module).__mro__)]
        names = dict.fromkeys(name for scope in scopes for name in scope if any(word in name for word in _WORDS))
        for name in names:
            value = next(scope[name] for scope in scopes if name in scope)
            if isinstance(value, bool) and "support" not in name:
                yield f"{label}{name}", value, module.training
