"""Notices a plan that was made for a model with more or fewer layers than the one that it is applied to."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from recollect.errors import PlanMismatchWarning, UnknownNameError
from recollect.plans.paths import compress_paths
from recollect.plans.plan import Plan
from recollect.warning import warn_user

__all__ = ["check_depth"]

_REMEDY = "Make a plan for this model: recollect.fit, or recollect.record and recollect.plan."


def check_depth(model: nn.Module, plan: Plan) -> None:
    """Compare the layers that the plan names, by number, with those of the model.

    Raises:
        UnknownNameError: the plan names all layers up to a number beyond the model's last one.

    Warns:
        PlanMismatchWarning: a plan with a predicted peak names several layers, all up to a number, and leaves out the rest.
    """
    stacks: dict[str, list[int]] = {}
    for path in plan.units:
        stack, _, number = path.rpartition(".")
        if number.isdecimal():
            stacks.setdefault(stack, []).append(int(number))
    modules = dict(model.named_modules(remove_duplicate=False))
    for stack, planned in stacks.items():
        layers = {
            int(name): layer for name, layer in modules.get(stack, nn.Module()).named_children() if name.isdecimal()
        }
        beyond = sorted(set(planned) - layers.keys())
        is_whole = len(planned) == max(planned) + 1 > 1
        if is_whole and beyond and len(beyond) < len(planned) and min(beyond) > max(layers):
            raise UnknownNameError(
                kind="unit",
                name=_path(stack, beyond[0]),
                where=type(model).__name__,
                known=modules,
                reason=f"The plan is for {_words(stack, planned)}, and this model has {_words(stack, layers)}. {_REMEDY}",
            )
        kinds = {type(layers[number]) for number in planned if number in layers}
        above = [number for number, layer in layers.items() if number > max(planned) and type(layer) in kinds]
        if is_whole and above and plan.predicted_peak_bytes is not None:
            warn_user(
                f"the plan is for {_words(stack, planned)}, and {type(model).__name__} has {_words(stack, layers)}: the others "
                f"keep everything, so that the step needs more memory than predicted for a shallower model. {_REMEDY}",
                PlanMismatchWarning,
            )


def _path(stack: str, number: int) -> str:
    return f"{stack}.{number}" if stack else str(number)


def _words(stack: str, numbers: Collection[int]) -> str:
    paths = compress_paths([_path(stack, number) for number in sorted(numbers)])
    return f"{len(numbers)} layer{'' if len(numbers) == 1 else 's'} ({' '.join(paths)})"
