"""Runs of repeated layers that feed each other, and which of their outputs to drop.

Layers whose outputs are dropped are computed again together with the layer after them, in one segment, which works in the
bytes of all of them. At a layer's backward there are the outputs kept before it and its segment's working bytes, so early
segments may be long, where little is kept yet, and the last ones must be short: a fixed stride makes the last segment as
long as the first, and its peak is higher than it needs to be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from recollect.profile.profile import Profile

__all__ = [
    "chains",
    "dropped_outputs",
    "first_outputs",
    "folded_outputs",
    "longest_chain",
    "most_folded",
    "outputs_within",
    "single_outputs",
]


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
    return outputs_within(
        profile,
        [
            [profile.calls[index].path for index in chain[start : start + stride]]
            for chain in chains(profile)
            for start in range(0, len(chain), stride)
        ],
    )


def outputs_within(profile: Profile, segments: Iterable[Sequence[str]]) -> frozenset[str]:
    """Return the paths of units whose output is dropped when each segment of layers keeps only its input.

    The output of a segment's last layer is kept, and one that the next layer is not alone to read.

    Args:
        profile: the recorded step.
        segments: paths of layers that follow each other.
    """
    following = {
        profile.calls[here].path: profile.calls[there].path
        for chain in chains(profile)
        for here, there in pairwise(chain)
    }
    return frozenset(here for segment in segments for here, there in pairwise(segment) if following.get(here) == there)


def most_folded(profile: Profile) -> int:
    """Return how many outputs can be dropped at most: all but the last of each chain."""
    return sum(len(chain) - 1 for chain in chains(profile))


def folded_outputs(profile: Profile, working_bytes: Sequence[int], *, num_dropped: int) -> frozenset[str]:
    """Return the paths of units whose output to drop, if it should be so many and layers keep no more than their outputs.

    Segments are made from the first layer on, each as long as a limit on kept outputs and working bytes allows; the least
    limit is taken with which so many outputs can be dropped.

    Args:
        profile: the recorded step.
        working_bytes: for each call, what computing it again works in.
        num_dropped: how many outputs, `most_folded` at most.

    Complexity: about 60 walks over the calls.
    """
    sizes = [
        (
            sum(
                value.nbytes
                for value in profile.graph_of(call).values
                if value.is_output and value.producer is not None
            ),
            w,
        )
        for call, w in zip(profile.calls, working_bytes, strict=True)
    ]
    runs = chains(profile)
    too_small, enough = -1, sum(output_bytes + w for output_bytes, w in sizes)
    while enough - too_small > 1:
        limit = (too_small + enough) // 2
        if len(_folded(runs, sizes, limit, num_dropped)) < num_dropped:
            too_small = limit
        else:
            enough = limit
    return frozenset(profile.calls[call].path for call in _folded(runs, sizes, enough, num_dropped))


def _folded(runs: Sequence[Sequence[int]], sizes: Sequence[tuple[int, int]], limit: int, most: int) -> list[int]:
    """Return the calls whose output is dropped, `most` of them at most, with segments up to a limit of bytes."""
    dropped: list[int] = []
    kept = 0
    for run in runs:
        segment = 0
        for call, following in pairwise(run):
            output_bytes, working_bytes = sizes[call]
            segment += working_bytes
            if len(dropped) < most and kept + segment + sizes[following][1] <= limit:
                dropped.append(call)
            else:
                kept += output_bytes
                segment = 0
        kept += sizes[run[-1]][0]
    return dropped


def first_outputs(profile: Profile, *, longest: int, num_dropped: int) -> frozenset[str]:
    """Return the paths of the first units whose outputs can be dropped, with segments of at most `longest` layers."""
    inner = [
        index for chain in chains(profile) for position, index in enumerate(chain[:-1]) if (position + 1) % longest
    ]
    return frozenset(profile.calls[index].path for index in inner[:num_dropped])


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
