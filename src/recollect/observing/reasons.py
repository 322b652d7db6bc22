"""Says why a layer is not covered, as far as it can be seen."""

from collections.abc import Collection, Iterator

from torch import nn

from recollect._torch_private import without_wrapper
from recollect.applying import applied_to
from recollect.observing.step_watch import StepWatch
from recollect.plans.paths import paths_above
from recollect.recording.find_units import Unit

_NO_GRADIENTS = (
    "NO GRADIENTS: it ran under torch.no_grad() and never again, and its trained parameters get none. A reentrant checkpoint "
    "does this if none of its inputs requires grad: pass use_reentrant=False, or call model.enable_input_require_grads()"
)


def reason_of(model: nn.Module, unit: Unit, watch: StepWatch, covered: Collection[str], *, is_on_cpu: bool) -> str:
    """Return why a layer is not covered; to be called right after the step, with its gradients.

    `covered`: the classes of the layers that are.
    """
    seen = watch.counts[unit.path]
    if not seen["calls"]:
        return "it was not called in the step, other than by its forward itself"
    trained = [parameter for parameter in unit.module.parameters() if parameter.requires_grad]
    is_blind = seen["calls"] == watch.without_gradients[unit.path]
    if trained and is_blind and all(parameter.grad is None for parameter in trained):
        return _NO_GRADIENTS
    if not trained and not seen["kept_bytes"]:
        return "it keeps nothing: no gradient goes through it"
    plans = [applied.plan for applied in applied_to(model) if applied.plan is not None]
    if plans:
        is_named = any(unit.path in plan.units for plan in plans)
        return "the plan keeps all of it" if is_named else "the plan does not name it, so it keeps all"
    if is_on_cpu and unit.path in watch.under_save_on_cpu:
        return "save_on_cpu copies nothing in a step on the CPU: what it saves is there already"
    found = list(_switches(model, unit))
    name, is_on, is_training = next((one for one in found if one[1]), (*found, ("", False, True))[0])
    if name and not is_on:
        return f"{name} is False"
    if name and not is_training:
        return f"{name} is True, but it is in eval mode, where such switches do nothing: call model.train()"
    text = f"{name} is True, but nothing of it ran again" if name else "nothing of it ran again"
    own = type(without_wrapper(unit.module)).__name__
    if covered and own not in covered:
        return f"{text}; its class is {own}, that of covered layers is {' or '.join(covered)}"
    return text if name or covered else f"{text}, and nothing in the model asks for that"


def _switches(model: nn.Module, unit: Unit) -> Iterator[tuple[str, bool, bool]]:
    """Yield the switches of a unit, its parts and what is around it: name, whether it is on, whether its module is training."""
    above = reversed(["", *paths_above(unit.path)]) if unit.path else ()
    around = [(f"{path}." if path else "the model's ", model.get_submodule(path)) for path in above]
    inside = [(f"its {path}." if path else "its ", module) for path, module in unit.module.named_modules()]
    for label, module in (*inside, *around):
        values = {name: value for scope in reversed(type(module).__mro__) for name, value in vars(scope).items()}
        for name, value in {**values, **vars(module)}.items():
            if isinstance(value, bool) and ("checkpoint" in name or "recompute" in name) and "support" not in name:
                yield f"{label}{name}", value, module.training
