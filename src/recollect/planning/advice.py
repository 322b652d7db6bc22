"""Advise what to change when no plan fits the budget, judging by what takes the memory at the lowest peak."""

from __future__ import annotations

import re

from recollect.byte_format import format_bytes
from recollect.profile.events import ALLOC, FREE, OPTIMIZER, PHASE
from recollect.profile.profile import Profile, kind_text

HOST_ADVICE = 'Or let part of what backward needs go to host memory (host_budget="64GiB", or as much as there is).'
"""For whoever plans without it."""

# A chunked loss pays only if the logits are at least this fraction of the bytes that grow with the batch.
_LARGE_PART = 0.1


def advice(
    profile: Profile, *, budget_bytes: int, least_peak_bytes: int, peak_call: str, is_smallest: bool = False
) -> tuple[str, ...]:
    """Return suggestions that would make the budget feasible, the most promising first.

    Args:
        profile: the recorded step.
        budget_bytes: the budget that no plan fits.
        least_peak_bytes: the lowest peak of any plan found.
        peak_call: what runs at that peak, a unit or something else, as in `Simulation`.
        is_smallest: there is no smaller batch to advise.

    Example:
        >>> from recollect.profile.events import StepLog
        >>> profile = Profile((), (), StepLog(), 1.0, persistent={"parameters": 600, "optimizer_state": 1200})
        >>> print(*advice(profile, budget_bytes=1500, least_peak_bytes=2000, peak_call="head"))
        What lives through the whole step takes 1.8 KiB by itself (parameters 600 B, optimizer state 1.2 KiB), which no \
recompute changes: shard it (FSDP), use an optimizer with less state, or bf16 parameters.
    """
    fixed = {kind: nbytes for kind, nbytes in profile.persistent.items() if nbytes}
    made_bytes = lasting_bytes(profile)
    if made_bytes:
        fixed["gradients"] = fixed.get("gradients", 0) + made_bytes
    fixed_bytes = sum(fixed.values())
    if fixed_bytes >= budget_bytes:
        parts = ", ".join(f"{kind_text(kind)} {format_bytes(nbytes)}" for kind, nbytes in fixed.items())
        return (
            f"What lives through the whole step takes {format_bytes(fixed_bytes)} by itself ({parts}), which no recompute "
            "changes: shard it (FSDP), use an optimizer with less state, or bf16 parameters.",
        )
    if peak_call == "the optimizer step":
        return (
            "The peak is the workspace of the optimizer's step, which no recompute changes: make the optimizer with "
            "foreach=False (one parameter at a time) or fused=True, or use one with less state.",
        )
    found = []
    logits_bytes = _logits_bytes(profile, peak_call)
    if logits_bytes >= _LARGE_PART * (least_peak_bytes - fixed_bytes):
        found.append(
            f"The peak is in the loss and the head, whose output alone takes {format_bytes(logits_bytes)}: compute the loss "
            'in chunks (recollect.fit(..., loss_chunks="auto")).'
        )
    if not is_smallest:
        # What is not there throughout scales with the batch.
        found += _smaller(profile.batch, (budget_bytes - fixed_bytes) / (least_peak_bytes - fixed_bytes))
    return (*found, HOST_ADVICE)


def _smaller(batch: str, fraction: float) -> list[str]:
    """Return the advice to use so much of a batch, if there is one as small; rounded down, to be safe."""
    size = re.search(r"(?:^|\[)(\d+)(?:(?:, | x )(\d+))?", batch)
    if size is None:
        fits = f"about {int(100 * fraction)} % of the recorded one ({batch or 'size unknown'}) fits"
        return [f"Use a smaller micro-batch, with gradient accumulation: {fits}."]
    if num_rows := int(fraction * int(size[1])):
        fits = f"about {num_rows} of the {size[1]} samples of the recorded one ({batch}) fit"
        return [f"Use a smaller micro-batch, with gradient accumulation: {fits}."]
    if num_positions := int(fraction * int(size[2] or 0)):
        return [
            f"Use shorter sequences: about {num_positions} of the {size[2]} positions of the recorded ones ({batch}) fit."
        ]
    return []


def lasting_bytes(profile: Profile) -> int:
    """Return the bytes of the gradients: what forward and backward allocate and leave for the optimizer, at most."""
    alive: dict[int, int] = {}
    most_bytes = 0
    has_optimizer = False
    for event in profile.log.play({ALLOC: alive.__setitem__, FREE: lambda storage: alive.pop(storage, None)}):
        if event == (PHASE, OPTIMIZER):
            has_optimizer = True
            most_bytes = max(most_bytes, sum(alive.values()))
    return most_bytes if has_optimizer else sum(alive.values())


def _logits_bytes(profile: Profile, peak_call: str) -> int:
    """Return the output bytes of the last unit if the peak is in it or in the loss, else 0."""
    if not profile.calls:
        return 0
    last = profile.calls[-1]
    is_there = peak_call == last.path or peak_call not in {call.path for call in profile.calls}
    if last.repeated or not is_there:
        return 0
    return sum(value.nbytes for value in profile.graph_of(last).values if value.is_output)
