"""Units and texts shared by all pictures."""

from __future__ import annotations

from dataclasses import replace

from recollect.planning.frontier import Frontier, FrontierPoint
from recollect.profile.profile import Profile

__all__ = ["byte_unit", "classics_of", "describe_profile", "percent", "time_unit_of"]

_GIB = 1 << 30
_MIB = 1 << 20


def byte_unit(largest_bytes: int) -> tuple[int, str]:
    """Return the unit for an axis with this largest value: its size in bytes, and its name.

    Example:
        >>> byte_unit(60 << 30), byte_unit(5 << 20), byte_unit(900)
        ((1073741824, 'GiB'), (1048576, 'MiB'), (1024, 'KiB'))
    """
    if largest_bytes >= 2 * _GIB:
        return _GIB, "GiB"
    return (_MIB, "MiB") if largest_bytes >= 2 * _MIB else (1024, "KiB")


def time_unit_of(profile: Profile) -> tuple[float, str]:
    """Return the unit of a step's time axis: its length in seconds, and its name."""
    return (1.0, "s") if profile.step_s >= 1 else (1e-3, "ms")


def classics_of(frontier: Frontier) -> list[FrontierPoint]:
    """Return the classic schedules that recompute; those with equal peak and slowdown become one."""
    same: dict[tuple[int, float], FrontierPoint] = {}
    for point in frontier.classics:
        key = (point.peak_bytes, point.slowdown)
        if point.name != "keep_all":
            same[key] = replace(same[key], name=f"{same[key].name} = {point.name}") if key in same else point
    return list(same.values())


def describe_profile(profile: Profile) -> str:
    """Describe batch, hardware and PyTorch version in one line."""
    hardware = profile.device_name or profile.device
    parts = [
        f"batch {profile.batch}" if profile.batch else "",
        f"modelled for {hardware}" if profile.fake else hardware,
        f"PyTorch {profile.torch_version}" if profile.torch_version else "",
    ]
    return " · ".join(part for part in parts if part)


def percent(slowdown: float) -> str:
    """Format a slowdown as a percentage.

    Example:
        >>> percent(0.0312), percent(float("inf"))
        ('3.1 %', 'no plan')
    """
    return "no plan" if slowdown == float("inf") else f"{100 * slowdown:.1f} %"
