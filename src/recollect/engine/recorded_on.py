"""Warns if a plan is used with another PyTorch, or on another device, than its profile was recorded on."""

from __future__ import annotations

import torch
from torch import nn

from recollect.errors import ProfileMismatchWarning
from recollect.plans.plan import Plan
from recollect.warning import warn_user


def device_name(device: torch.device) -> str:
    """Return a device's model name, such as "NVIDIA H100 80GB HBM3", or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def warn_if_recorded_elsewhere(model: nn.Module, plan: Plan) -> None:
    """Warn if the plan's profile was recorded with another PyTorch, or on another device than the model's.

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
            "can differ, so that the step, though exact, may need more memory or time than predicted. Record it here and "
            "make a new plan.",
            ProfileMismatchWarning,
        )
