"""Give the profiles of processes that recorded the same step the same times, so that they make the same plan of them."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterator
from dataclasses import replace

from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.ranks.group import Place, Ranks

__all__ = ["with_common_times"]


def with_common_times(profile: Profile, ranks: Ranks, place: Place = Place.START) -> Profile:
    """Return a profile with the median of the times of all processes, where their units run the same ops on as many bytes.

    The median, since each time was measured once in each process, and one that was disturbed meanwhile says nothing about the
    step. The slowest process sets the pace, but of equal devices none is slower than the others in every step.

    Args:
        profile: as this process recorded it.
        ranks: those that recorded it together.
        place: where they are.
    """
    if ranks.is_alone or profile.fake:
        return profile
    own = list(_times(profile))
    found = ranks.gather((_fingerprint(profile), own), place)
    if len({fingerprint for fingerprint, _ in found}) > 1:
        return profile
    return _with_times(profile, (statistics.median(times) for times in zip(*(its for _, its in found), strict=True)))


def _times(profile: Profile) -> Iterator[float]:
    yield from (profile.step_s, profile.gather_latency_s, profile.gather_s_per_byte)
    for graph in profile.graphs:
        yield graph.tape_s
        yield from (seconds for _, seconds in graph.module_tape_s)
        yield from (op.time_s for op in graph.ops)
        yield from (part.gather_s for part in graph.parts)


def _with_times(profile: Profile, times: Iterator[float]) -> Profile:
    """Return a profile with other times, in the order of `_times`."""
    step_s, gather_latency_s, gather_s_per_byte = (next(times) for _ in range(3))
    graphs = tuple(
        replace(
            graph,
            tape_s=next(times),
            module_tape_s=tuple((module, next(times)) for module, _ in graph.module_tape_s),
            ops=tuple(replace(op, time_s=next(times)) for op in graph.ops),
            parts=tuple(replace(part, gather_s=next(times)) for part in graph.parts),
        )
        for graph in profile.graphs
    )
    return replace(
        profile, graphs=graphs, step_s=step_s, gather_latency_s=gather_latency_s, gather_s_per_byte=gather_s_per_byte
    )


def _fingerprint(profile: Profile) -> str:
    """Return a digest of what the times belong to."""
    words = [repr([(call.path, call.graph, call.num_runs) for call in profile.calls])]
    words += [_words(graph) for graph in profile.graphs]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def _words(graph: UnitGraph) -> str:
    ops = [(op.name, op.inputs, op.outputs) for op in graph.ops]
    parts = [(part.value, part.nbytes) for part in graph.parts]
    return repr(([module for module, _ in graph.module_tape_s], [value.nbytes for value in graph.values], ops, parts))
