"""Notes in a profile how fast copies to host memory and back are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from recollect.measuring.host_copies import HostCopies, measure_host_link
from recollect.profile.profile import Profile


def with_host_link(profile: Profile, device: torch.device) -> Profile:
    """Return the profile with the rates of the device's link, which is measured once in a process.

    Raises:
        HardwareError: the device cannot copy, or there is no room to try.
    """
    link = _measured(device)
    return replace(
        profile,
        to_host_bytes_per_s=link.to_host_bytes_per_s,
        from_host_bytes_per_s=link.from_host_bytes_per_s,
        host_latency_s=link.latency_s,
    )


@cache
def _measured(device: torch.device) -> HostCopies:
    return measure_host_link(device)
