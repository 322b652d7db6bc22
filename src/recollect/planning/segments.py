"""Runs of repeated layers that feed each other, and which of their outputs a stride drops."""

from __future__ import annotations

from collections import Counter

from recollect.profile.graph import Profile

__all__ = ["chains", "dropped_outputs", "longest_chain", "single_outputs"]


def chains(profile: Profile) -> list[list[int]]:
    """Return runs of calls, as indices in `Profile.calls`, in which each one's output is the next one's input.

    Only repeated layers that are called once: an output that a shared module drops would be dropped in all its calls.
    And only outputs that no other call reads: a skip connection would hold them anyway.
    """
    readers: dict[int, set[int]] = {}
    for index, call in enumerate(profile.calls):
        for _, origin, _ in call.origins:
            readers.setdefault(origin, set()).add(index)
    num_calls = Counter(call.path for call in profile.calls)
    result: list[list[int]] = []
    run: list[int] = []
    for index, call in enumerate(profile.calls):
        if not call.repeated or num_calls[call.path] > 1:
            run = []
            continue
        if not run:
            result.append(run)
        run.append(index)
        if not call.chained or readers.get(index, set()) - {index + 1}:
            run = []
    return result


def longest_chain(profile: Profile) -> int:
    """Return the number of layers in the longest chain; 0 if there is none."""
    return max((len(chain) for chain in chains(profile)), default=0)


def dropped_outputs(profile: Profile, *, stride: int) -> frozenset[str]:
    """Return the paths of units whose output is dropped when only every `stride`-th layer's input is kept.

    The output of a chain's last layer is kept: what comes after the chain needs it.
    """
    return frozenset(
        profile.calls[index].path
        for chain in chains(profile)
        for position, index in enumerate(chain[:-1])
        if (position + 1) % stride
    )


def single_outputs(profile: Profile) -> frozenset[str]:
    """Return the paths of units whose output no stride drops, but that may be dropped: embedding, last layer, final norm.

    They run once, and backward asks for their output itself, so that the unit's own choice says what dropping it costs.
    """
    num_calls = Counter(call.path for call in profile.calls)
    inner = {profile.calls[index].path for chain in chains(profile) for index in chain[:-1]}
    return frozenset(
        call.path
        for call in profile.calls
        if call.path not in inner
        and num_calls[call.path] == 1
        and any(v.is_output and v.saved and v.producer is not None for v in profile.graph_of(call).values)
    )
