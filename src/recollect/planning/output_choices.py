"""Choose which layer outputs to drop in a chain of repeated layers that feed each other.

A layer whose output is dropped is recomputed together with the next one, in a segment of layers that needs the
workspace of all of them. In backward of a layer, memory holds the outputs kept before it and the workspace of its
segment. Early segments can therefore be long, while little is kept, and the last ones must be short. With a fixed
stride the last segment is as long as the first, and the peak is higher than necessary.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from recollect.profile.profile import Profile


def chains(profile: Profile) -> list[list[int]]:
    """Return chains of repeated layers where each output is the input of the next layer.

    Layers are given by the index of their first call in `Profile.calls`. If they run several times, that holds for all of
    their calls, since these share a decision. A chain has only outputs that no other call reads, since a skip connection
    would hold them anyway.
    """
    following = _following(profile)
    result: list[list[int]] = []
    for path, calls in profile.calls_by_path.items():
        if not profile.calls[calls[0]].repeated:
            continue
        if result and following.get(profile.calls[result[-1][-1]].path) == path:
            result[-1].append(calls[0])
        else:
            result.append([calls[0]])
    return result


def _following(profile: Profile) -> dict[str, str]:
    """Return, for each layer, the one that runs right after it every time and is the only reader of its output."""
    calls_of = profile.calls_by_path
    readers: dict[int, set[int]] = {}
    for index, call in enumerate(profile.calls):
        for _, origin, _ in call.origins:
            readers.setdefault(origin, set()).add(index)
    found = {}
    for path, calls in calls_of.items():
        is_chained = all(profile.calls[i].chained and readers.get(i, set()) <= {i + 1} for i in calls)
        if not is_chained or calls[-1] + 1 >= len(profile.calls):
            continue
        others = {profile.calls[i + 1].path for i in calls}
        other = others.pop()
        if not others and len(calls_of[other]) == len(calls) and profile.calls[calls[0] + 1].repeated:
            found[path] = other
    return found


def longest_chain(profile: Profile) -> int:
    return max((len(chain) for chain in chains(profile)), default=0)


def dropped_outputs(profile: Profile, *, stride: int) -> frozenset[str]:
    """Return the paths of units whose output is dropped if only every `stride`-th layer input is kept.

    The last output of a chain is kept, because what follows the chain needs it.
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
    """Return the paths of units whose output is dropped if each segment of layers keeps only its input.

    The last output of a segment is kept, and any output that calls other than the next layer read.
    """
    following = {
        profile.calls[here].path: profile.calls[there].path
        for chain in chains(profile)
        for here, there in pairwise(chain)
    }
    return frozenset(here for segment in segments for here, there in pairwise(segment) if following.get(here) == there)


def inner_outputs(profile: Profile) -> frozenset[str]:
    """Return the paths of units whose output can be dropped within a segment: all but the last of each chain."""
    return frozenset(profile.calls[index].path for chain in chains(profile) for index in chain[:-1])


def folded_outputs(
    profile: Profile, working_bytes: Sequence[int], *, num_dropped: int, num_alive: Mapping[str, int] | None = None
) -> frozenset[str]:
    """Return the paths of `num_dropped` units whose output to drop, assuming that layers keep only outputs.

    Segments are cut from the first layer on, each as long as a limit on kept outputs plus workspace allows; the limit
    is the least one that drops enough outputs.
    """
    outputs_bytes = (
        sum(value.nbytes for _, value in profile.graph_of(call).made if value.is_output)
        * (num_alive or {}).get(call.path, 1)
        for call in profile.calls
    )
    sizes = list(zip(outputs_bytes, working_bytes, strict=True))
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
    """Return at most `most` calls whose output is dropped, with segments within a limit of bytes."""
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
    """Return the paths of the first units whose output can be dropped, in segments of at most `longest` layers."""
    inner = [
        index for chain in chains(profile) for position, index in enumerate(chain[:-1]) if (position + 1) % longest
    ]
    return frozenset(profile.calls[index].path for index in inner[:num_dropped])


def single_outputs(profile: Profile) -> frozenset[str]:
    """Return the paths of units outside segments that can still drop their output: embedding, last layer, final norm.

    Backward reads their output itself, so only the unit's own options price dropping it. A layer that feeds itself or an
    extra layer in some of its calls would lengthen their segments.
    """
    calls_of = profile.calls_by_path
    feeding = {profile.calls[source].path for call in profile.calls if call.repeated for _, source, _ in call.origins}
    inner = inner_outputs(profile)
    return frozenset(
        call.path
        for call in profile.calls
        if call.path not in inner
        and (len(calls_of[call.path]) == 1 or not call.repeated or call.path not in feeding)
        and any(v.is_output and v.saved and not v.must_keep for _, v in profile.graph_of(call).made)
    )


def keeping_outputs(profile: Profile) -> Profile:
    """Return a profile whose plans keep units' outputs, for engines that cannot drop them."""
    graphs = [
        replace(graph, values=tuple(replace(v, must_keep=True) if v.is_output else v for v in graph.values))
        for graph in profile.graphs
    ]
    return replace(profile, graphs=tuple(graphs), calls=tuple(replace(call, chained=False) for call in profile.calls))


def number_between(numbers: Sequence[int], best: int) -> int | None:
    """Return the midpoint of the best number and its farther neighbor, or None if they are adjacent."""
    after = min((n for n in numbers if n > best), default=best)
    before = max((n for n in (0, *numbers) if n < best), default=best)
    other = after if after - best >= best - before else before
    return None if abs(other - best) < 2 else (best + other) // 2
