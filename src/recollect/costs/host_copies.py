"""Measure how fast copies between a device and the memory of its host are, both directions at once while nothing computes.

Host memory is pinned, and the copies of each direction run in their own stream. Where the device is the CPU, a mapped file
stands in for the host's memory, and two threads copy.
"""

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from recollect.costs.hardware import HostLink
from recollect.engine.check_plan import device_name
from recollect.errors import HardwareError, ProfileMismatchWarning
from recollect.measuring.host_memory import mapped_file
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.warning import warn_user

_LARGE_BYTES = 64 << 20
_SMALL_BYTES = 4 << 10
_NUM_COPIES = 16
# On the CPU, for large copies; the number of copies that are made in any case.
_CPU_S = 0.25
_FEWEST_COPIES = 3

# A link that reaches a smaller part of the planned rates is worth a warning.
_LEAST_RATE = 2 / 3

# When a copy began and ended, in seconds.
_Span = tuple[float, float]


class Copies(NamedTuple):
    """The copies of one direction."""

    large: list[_Span]
    small: list[_Span]


def measure_host_link(device: torch.device) -> HostLink:
    """Measure copies between a CPU, or an accelerator with streams, and the memory of its host.

    Takes less than a second, and 128 MiB of each memory; on the CPU also of the folder for temporary files.
    """
    return reached(*(_cpu_copies() if device.type == "cpu" else _device_copies(device)))


def reached(out: Copies, back: Copies) -> HostLink:
    """Return the rates of copies that ran in both directions at the same time."""
    return HostLink(
        to_host_bytes_per_s=_LARGE_BYTES / _median_s(out.large, beside=back.large),
        from_host_bytes_per_s=_LARGE_BYTES / _median_s(back.large, beside=out.large),
        latency_s=max(_median_s(out.small, beside=back.small), _median_s(back.small, beside=out.small)),
    )


def _median_s(spans: Sequence[_Span], *, beside: Sequence[_Span]) -> float:
    """Return the median time of the copies that ran while the other direction did, or of all where none did."""
    first, last = beside[0][0], beside[-1][1]
    together = [span for span in spans if first <= span[0] and span[1] <= last]
    return statistics.median(end - begin for begin, end in together or spans)


def _cpu_copies() -> tuple[Copies, Copies]:
    """Copy in two threads; PyTorch releases the GIL while it copies."""
    # Ones, since pages of zeros that nobody has written to are all the same one.
    (out, host_out), (back, host_back) = ((torch.ones(_LARGE_BYTES, dtype=torch.uint8), _mapped()) for _ in range(2))
    with ThreadPoolExecutor(2) as pool:
        both = pool.submit(_copy_for_a_while, out, host_out), pool.submit(_copy_for_a_while, host_back, back)
        to_host, from_host = (one.result() for one in both)
    return to_host, from_host


def _copy_for_a_while(source: torch.Tensor, target: torch.Tensor) -> Copies:
    until = time.perf_counter() + _CPU_S
    copies = Copies([], [])
    while len(copies.large) < _FEWEST_COPIES or time.perf_counter() < until:
        copies.large.append(_timed_copy(source, target))
    while len(copies.small) < _NUM_COPIES:
        copies.small.append(_timed_copy(source[:_SMALL_BYTES], target[:_SMALL_BYTES]))
    return copies


def _timed_copy(source: torch.Tensor, target: torch.Tensor) -> _Span:
    begin = time.perf_counter()
    target.copy_(source)
    return begin, time.perf_counter()


def _mapped() -> torch.Tensor:
    try:
        return mapped_file(_LARGE_BYTES)
    except OSError as problem:
        raise HardwareError(
            f"link to the host: cannot map a temporary file of {_LARGE_BYTES >> 20} MiB ({problem}), expected room for two of "
            "them. Free some, or name a different folder in the environment as TMPDIR."
        ) from None


def _device_copies(device: torch.device) -> tuple[Copies, Copies]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or device.type != accelerator.type:
        raise HardwareError(
            f"link to the host: got device {str(device)!r}, expected 'cpu', or an accelerator with streams that PyTorch finds "
            "here, such as 'cuda'."
        )
    with torch.accelerator.device_index(device.index):
        out, back = (torch.zeros(_LARGE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        host_out, host_back = (torch.zeros(_LARGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        return copies_in_streams(torch, (out, host_out), (host_back, back))


def copies_in_streams(
    module: Any, out: tuple[torch.Tensor, torch.Tensor], back: tuple[torch.Tensor, torch.Tensor]
) -> tuple[Copies, Copies]:
    """Copy from the first tensors to the second, each pair in its own stream; `module` is `torch` or works like it."""
    begin = module.Event(enable_timing=True)
    begin.record()
    streams = [module.Stream() for _ in range(2)]
    for stream in streams:
        stream.wait_event(begin)
    ends: tuple[list[Any], list[Any]] = ([], [])
    # The large ones first: while they run, the host gets ahead, and the small ones need not wait for it.
    for nbytes in [_LARGE_BYTES] * _NUM_COPIES + [_SMALL_BYTES] * _NUM_COPIES:
        for stream, (source, target), of_stream in zip(streams, (out, back), ends, strict=True):
            with stream:
                target[:nbytes].copy_(source[:nbytes], non_blocking=True)
                of_stream.append(module.Event(enable_timing=True))
                of_stream[-1].record()
    for stream in streams:
        stream.synchronize()
    return _between(begin, ends[0]), _between(begin, ends[1])


def _between(begin: Any, ends: Sequence[Any]) -> Copies:
    """Return when the copies ending at these events ran, except the first, which had to wait for the host."""
    spans = list(pairwise(begin.elapsed_time(end) / 1000 for end in ends))
    return Copies(spans[: _NUM_COPIES - 1], spans[_NUM_COPIES - 1 :])


def with_host_link(profile: Profile, device: torch.device) -> Profile:
    """Return the profile with the rates of the device's link, which is measured once in a process."""
    measured: dict[str, Any] = host_link(device).profile_fields()
    return replace(profile, **measured)


@cache
def host_link(device: torch.device) -> HostLink:
    return measure_host_link(device)


def warn_if_link_is_slower(model: nn.Module, plan: Plan) -> None:
    """Warn if a plan offloads, and was recorded on a device like the model's, but over a faster link to the host."""
    device = next((tensor.device for tensor in model.parameters() if tensor.device.type != "meta"), None)
    planned = [rate for rate in (plan.to_host_bytes_per_s, plan.from_host_bytes_per_s) if rate is not None]
    if not plan.offloads or len(planned) < 2 or device is None or device_name(device) != plan.device_name:
        return
    try:
        link = host_link(device)
    except HardwareError:
        return  # If there is no room for the plan's own copies either, they say so.
    found = link.to_host_bytes_per_s, link.from_host_bytes_per_s
    if any(rate < _LEAST_RATE * most for rate, most in zip(found, planned, strict=True)):
        out, back, planned_out, planned_back = (f"{rate / 1e9:.3g}" for rate in (*found, *planned))
        warn_user(
            f"copies reach {out} GB/s to host memory and {back} GB/s back here, and the plan was made for {planned_out} and "
            f"{planned_back} GB/s: gradients and peak are as planned, but steps may wait for copies. Make a new plan from a "
            "profile recorded here with host_link=True, or with a smaller link_share if other copies always run.",
            ProfileMismatchWarning,
        )
