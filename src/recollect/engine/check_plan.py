"""Detects plans made for a different number of layers, or on a different PyTorch or device."""

from collections.abc import Collection

import torch
from torch import nn

from recollect.errors import PlanMismatchWarning, ProfileMismatchWarning, UnknownNameError
from recollect.plans.paths import compress_paths
from recollect.plans.plan import Plan
from recollect.warning import warn_user

_REMEDY = "Make a plan for this model: recollect.fit, or recollect.record and recollect.plan."


def check_depth(model: nn.Module, plan: Plan) -> None:
    """Raise if a plan names all layers up to a number beyond the model's last one; warn if only up to one before it."""
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
                f"keep everything, so the step needs more memory than predicted for a shallower model. {_REMEDY}",
                PlanMismatchWarning,
            )


def _path(stack: str, number: int) -> str:
    return f"{stack}.{number}" if stack else str(number)


def _words(stack: str, numbers: Collection[int]) -> str:
    paths = compress_paths([_path(stack, number) for number in sorted(numbers)])
    return f"{len(numbers)} layer{'' if len(numbers) == 1 else 's'} ({' '.join(paths)})"


def device_name(device: torch.device, model: nn.Module | None = None) -> str:
    """Return a device's model name, such as "NVIDIA H100 80GB HBM3", or "cpu"; "meta" if that is where the model is."""
    if model is not None and any(parameter.is_meta for parameter in model.parameters()):
        return "meta"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def warn_if_recorded_elsewhere(model: nn.Module, plan: Plan) -> None:
    """Warn if the plan's profile was recorded with a different PyTorch, or on a device other than the model's.

    Builds of one version ("2.13.0+cpu") count as equal: they only differ in the device.
    """
    differences = []
    recorded, here = (version.partition("+")[0] for version in (plan.torch_version, torch.__version__))
    if recorded and recorded != here:
        differences.append(f"with torch {recorded}, and this is torch {here}")
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type != "meta"}
    names = sorted({device_name(device) for device in devices})
    if plan.device_name and names and names != [plan.device_name]:
        differences.append(f"on {plan.device_name}, and this model is on {' and '.join(names)}")
    if differences:
        warn_user(
            f"the plan's profile was recorded {', and '.join(differences)}: ops, their times and the bytes that they work in "
            "can differ, so the step, though exact, may need more memory or time than predicted. Record it here and "
            "make a new plan.",
            ProfileMismatchWarning,
        )
